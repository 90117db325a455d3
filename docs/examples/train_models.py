"""Train a GPT-2 and a ViT of random weights, their attention by flashgen both ways and by PyTorch.

    python docs/examples/train_models.py [FOLDER] [--models gpt2,vit] [--steps 200] [--dtype bf16]
    python docs/examples/train_models.py [FOLDER] --device sim:gtx-1080 --steps 3 --size tiny

Weights, data and their order are the same; only who computes attention and its gradients differs. Both loss
curves and the time of a step are written to FOLDER as JSON and drawn; the program fails where curves part.
Needs PyTorch, transformers and matplotlib, and a CUDA card; on an emulated card the very kernels
run without one, slowly, and no time is told.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.cards.names import limits_named
from flashgen.tuner.serving import serving_families
from flashgen.tuner.shelf.guess import best_guess

#: What attention is called by transformers, to whom "flash" in a name means another library's.
OURS, TORCHS = "tuned", "sdpa"
LEARNING_RATE, LETTERS, TOPICS, TEXTURES, PATCH = 3e-4, 64, 16, 10, 4
#: How far both curves may lie apart where training ends, of how far the loss has come down; and at first.
APART, APART_AT_FIRST = 0.05, 0.01


@dataclass(frozen=True)
class Shape:
    """Layers, heads of 64 columns, the batch, and tokens of a text or pixels of an image's side."""

    layers: int
    heads: int
    batch: int
    tokens: int
    pixels: int

    @property
    def width(self) -> int:
        return 64 * self.heads


SIZES = {
    "tiny": Shape(layers=2, heads=2, batch=4, tokens=48, pixels=16),
    "small": Shape(layers=6, heads=6, batch=16, tokens=512, pixels=64),
    # As many weights as GPT-2 medium has beside its letters.
    "medium": Shape(layers=24, heads=16, batch=8, tokens=1024, pixels=128),
}


@dataclass
class Curve:
    """What training told: the loss of each step, and how long one took."""

    losses: list[float] = field(default_factory=list)
    step_ms: float | None = None


# ---- models and what they learn

#: A model, and what draws a batch of what it learns.
Learner = tuple[Any, Callable[[], dict[str, Any]]]


def gpt2(torch: Any, transformers: Any, shape: Shape, device: str) -> Learner:
    """A model of letters, and batches of texts of some topic each, whose letters it favours: what comes next
    is told by all that came before, which attention has to gather."""
    configuration = transformers.GPT2Config(
        n_layer=shape.layers, n_head=shape.heads, n_embd=shape.width, n_positions=shape.tokens,
        vocab_size=LETTERS, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM",
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    favoured = (2.0 * torch.randn(TOPICS, LETTERS, generator=draw)).softmax(1)

    def batch() -> dict[str, Any]:
        topics = torch.randint(0, TOPICS, (shape.batch,), generator=draw)
        text = torch.multinomial(favoured[topics], shape.tokens, replacement=True, generator=draw).to(device)
        return {"input_ids": text, "labels": text}

    return transformers.GPT2LMHeadModel(configuration), batch


def vit(torch: Any, transformers: Any, shape: Shape, device: str) -> Learner:
    """A model of images, and batches of ten textures under noise. It has a row more than there are patches,
    which no tile divides."""
    configuration = transformers.ViTConfig(
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, hidden_size=shape.width,
        intermediate_size=4 * shape.width, image_size=shape.pixels, patch_size=PATCH, num_labels=TEXTURES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    repeats = 1, 1, shape.pixels // PATCH, shape.pixels // PATCH
    textures = torch.randn(TEXTURES, 3, PATCH, PATCH, generator=draw).repeat(repeats)

    def batch() -> dict[str, Any]:
        labels = torch.randint(0, TEXTURES, (shape.batch,), generator=draw)
        noise = torch.randn(shape.batch, *textures.shape[1:], generator=draw)
        return {"pixel_values": (0.2 * textures[labels] + noise).to(device), "labels": labels.to(device)}

    return transformers.ViTForImageClassification(configuration), batch


MODELS: dict[str, Callable[..., Learner]] = {"gpt2": gpt2, "vit": vit}


def problem_of(model: str, shape: Shape, dtype: str) -> Problem:
    """What a model asks of attention."""
    rows = shape.tokens if model == "gpt2" else (shape.pixels // PATCH) ** 2 + 1
    return Problem(
        dtype=dtype, head_dim=64, batch=shape.batch, num_q_heads=shape.heads, num_kv_heads=shape.heads,
        seqlen_q=rows, seqlen_k=rows,
        causal=model == "gpt2",
    )  # fmt: skip


def kernels_of(problem: Problem, limits: DeviceLimits) -> tuple[Kernel, Kernel]:
    """The best that the cost model knows, forwards and backwards."""
    found = []
    for backward in (False, True):
        asked = replace(problem, backward=backward)
        variant = best_guess(serving_families(asked, limits), asked, limits)
        found.append(render(variant, asked, limits))
    return found[0], found[1]


# ---- who attends


def register_on_card(kernels: tuple[Kernel, Kernel], limits: DeviceLimits, folder: Path) -> None:
    """Has models of transformers attend by an emitted module of both kernels."""
    path = folder / f"{kernels[0].problem.stem}.py"
    made = [Made(kernel, limits.name) for kernel in kernels]
    path.write_text(emit_many(made, name=path.stem, command=[each.problem.name for each in kernels]))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register_transformers(OURS)


def register_emulated(torch: Any, transformers: Any, kernels: tuple[Kernel, Kernel], card: SimDevice) -> None:
    """Has models of transformers attend by both kernels on an emulated card."""
    runner, toolchain = card.open(), card.toolchain()
    forward, backward = (toolchain.build(kernel) for kernel in kernels)

    class Emulated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
            arrays = [np.ascontiguousarray(x.detach().numpy()) for x in (q, k, v)]
            o, lse = runner.attend(forward, *arrays, scale=scale, want_lse=True)
            ctx.arrays, ctx.scale = {**dict(zip("qkv", arrays, strict=True)), "o": o, "lse": lse}, scale
            return torch.from_numpy(o)

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            given = {**ctx.arrays, "dout": np.ascontiguousarray(dout.numpy())}
            grads = runner.differentiate(backward, given, scale=ctx.scale)
            return (*(torch.from_numpy(grads[name]) for name in ("dq", "dk", "dv")), None)

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **others: Any) -> Any:
        assert mask is None
        scale = q.shape[3] ** -0.5 if scaling is None else scaling
        return Emulated.apply(q, k, v, scale).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register(OURS, attend)
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionMaskInterface.register(OURS, masks.sdpa_mask)


# ---- training


def train(
    torch: Any,
    transformers: Any,
    name: str,
    shape: Shape,
    dtype: str,
    ways: Sequence[str],
    steps: int,
    device: str,
) -> dict[str, Curve]:
    """Trains a model from the same start on the same data in each way, a step of each in turns: what else a
    machine does falls upon all."""
    models, optimizers = {}, {}
    for way in ways:
        torch.manual_seed(0)
        model, batch = MODELS[name](torch, transformers, shape, device)
        models[way] = model.to(device).train()
        models[way].set_attn_implementation(way)
        optimizers[way] = torch.optim.AdamW(models[way].parameters(), lr=LEARNING_RATE)
    curves, times = {way: Curve() for way in ways}, {way: [] for way in ways}
    lower = torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16")
    for step in range(steps):
        inputs = batch()
        for way in ways if step % 2 else reversed(ways):
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            with lower:
                loss = models[way](**inputs).loss
            loss.backward()
            optimizers[way].step()
            optimizers[way].zero_grad()
            curves[way].losses.append(float(loss.detach()))  # which waits
            times[way].append(1000 * (time.perf_counter() - started))
    for way, curve in curves.items():
        curve.step_ms = median(times[way][steps // 2 :]) if device == "cuda" else None
    return curves


def part(ours: Curve, theirs: Curve) -> str | None:
    """Says where two curves part; None: they lie on each other."""
    first, (a, b) = theirs.losses[0], (ours.losses, theirs.losses)
    if abs(a[0] - first) > APART_AT_FIRST * first:
        return (
            f"the first losses are {a[0]:.4f} and {first:.4f}, at most {APART_AT_FIRST:.0%} apart are allowed"
        )
    last = max(1, len(b) // 10)
    ends = mean(a[-last:]), mean(b[-last:])
    allowed = max(APART * abs(first - ends[1]), APART_AT_FIRST * first)
    if not abs(ends[0] - ends[1]) <= allowed:
        return f"the last losses are {ends[0]:.4f} and {ends[1]:.4f}, at most {allowed:.4f} apart are allowed"
    return None


def draw(curves: dict[str, dict[str, Curve]], title: str, path: Path) -> None:
    """Draws each model's curves over each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(curves), 3.6), layout="constrained")
    drawn = figure.subplots(1, len(curves), squeeze=False)[0]
    styles = ("#9ecae1", 5.0), ("#08306b", 1.2)
    for axes, (name, ways) in zip(drawn, curves.items(), strict=True):
        for (way, curve), (color, width) in zip(ways.items(), styles, strict=True):
            timed = "" if curve.step_ms is None else f", {curve.step_ms:.1f} ms a step"
            axes.plot(curve.losses, color=color, linewidth=width, label=f"{way}{timed}")
        axes.set(title=name, xlabel="step", ylabel="loss")
        axes.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default=None)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--device", default="0", help="a CUDA card's number, or sim:gtx-1080")
    words = parser.parse_args()
    try:
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    except ImportError as error:
        sys.exit(f"{error.name} is not installed, which models are made of: `pip install torch transformers`")
    emulated = words.device.startswith("sim:")
    if not emulated and not torch.cuda.is_available():
        sys.exit("there is no CUDA card that PyTorch finds; name an emulated one: --device sim:gtx-1080")
    dtype, shape = words.dtype or ("f32" if emulated else "bf16"), SIZES[words.size]
    limits, device = limits_named(words.device), "cpu" if emulated else "cuda"
    if emulated and dtype != "f32":
        sys.exit("on an emulated card numpy holds what kernels take, which knows no bf16: leave --dtype out")
    words.folder.mkdir(parents=True, exist_ok=True)
    curves: dict[str, dict[str, Curve]] = {}
    for name in words.models.split(","):
        kernels = kernels_of(problem_of(name, shape, dtype), limits)
        if emulated:
            register_emulated(torch, transformers, kernels, SimDevice(limits.name, limits))
        else:
            register_on_card(kernels, limits, words.folder)
        ways = TORCHS, OURS
        curves[name] = train(torch, transformers, name, shape, dtype, ways, words.steps, device)
        for way, curve in curves[name].items():
            timed = "" if curve.step_ms is None else f", {curve.step_ms:.2f} ms a step"
            print(f"{name}, {way}: loss {curve.losses[0]:.4f} to {curve.losses[-1]:.4f}{timed}")
    stem = f"train_{words.size}_{dtype}"
    card = limits.name if emulated else torch.cuda.get_device_name()
    content = {
        "card": card, "emulated": emulated, "dtype": dtype, "shape": asdict(shape),
        "curves": {name: {way: asdict(each) for way, each in ways.items()} for name, ways in curves.items()},
    }  # fmt: skip
    (words.folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(curves, f"{dtype}, {card}{' (emulated)' if emulated else ''}", words.folder / f"{stem}.svg")
    print(f"wrote {words.folder / stem}.json and .svg")
    apart = {name: part(ways[OURS], ways[TORCHS]) for name, ways in curves.items()}
    if any(apart.values()):
        sys.exit("; ".join(f"{name}: {why}" for name, why in apart.items() if why))


if __name__ == "__main__":
    main()
