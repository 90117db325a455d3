"""Time a decode step of a Llama-shaped model in one CUDA graph, its attention by flashgen and by PyTorch.

    python docs/examples/decode_step.py [--json] [--layers 32] [--batch 32] [--keys 512-8192]

Needs a CUDA card and PyTorch. Weights are random, sequences have lengths of their own. Keys lie in
pages of 16 for flashgen, and as each of PyTorch's ways likes them best: in one array with a mask, one behind
the other, or for FlexAttention by blocks. All else of the step is the same. What all say of the next tokens
is compared, and the step without any attention is timed too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flashgen.gen.lengths import draw_lengths

PAGE_SIZE, REPLAYS, WARM_UP = 16, 30, 3
#: How far logits may lie apart, of the largest: attention in bfloat16, 32 layers deep.
AGREEMENT = 0.05


@dataclass(frozen=True)
class Shape:
    """Llama 3 of 8 billion weights, unless it is told otherwise."""

    layers: int = 32
    batch: int = 32
    keys: str = "512-8192"
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    letters: int = 128256

    @property
    def longest(self) -> int:
        return int(self.keys.rpartition("-")[2])

    @property
    def lengths(self) -> tuple[int, ...]:
        """The keys of each sequence, the new one among them."""
        return draw_lengths(f"uniform:{self.keys}", self.batch, self.longest, self.longest).k


#: Writes the new keys and values of a layer, and computes its attention: of (layer, q, k, v), each
#: (batch, heads, head_dim), o alike.
Attend = Callable[[int, Any, Any, Any], Any]


class Model:
    """The weights, and a step of all sequences by one token each."""

    def __init__(self, torch: Any, shape: Shape, device: str) -> None:
        self.torch, self.shape = torch, shape
        options = {"device": device, "dtype": torch.bfloat16}

        def matrix(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, **options) / rows**0.5

        columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.letters = torch.randn(shape.letters, shape.width, **options)
        self.head = matrix(shape.width, shape.letters)
        self.layers = [
            (
                matrix(shape.width, columns),
                matrix(shape.heads * shape.head_dim, shape.width),
                matrix(shape.width, 2 * shape.hidden),
                matrix(shape.hidden, shape.width),
            )
            for _ in range(shape.layers)
        ]
        self.tokens = torch.randint(0, shape.letters, (shape.batch,), device=device)
        half = shape.head_dim // 2
        places = torch.tensor(shape.lengths, device=device) - 1
        angles = places[:, None] * 5e5 ** (-torch.arange(half, device=device) / half)
        self.cos, self.sin = (x.to(torch.bfloat16)[:, None] for x in (angles.cos(), angles.sin()))

    def step(self, attend: Attend) -> Any:
        """Returns what each sequence's last token says of the next: (batch, letters)."""
        torch, shape = self.torch, self.shape
        functional = torch.nn.functional
        x = self.letters[self.tokens]
        split = [shape.heads, shape.kv_heads, shape.kv_heads]
        for number, (into, out_of, up, down) in enumerate(self.layers):
            y = functional.rms_norm(x, (shape.width,))
            q, k, v = (y @ into).view(shape.batch, -1, shape.head_dim).split(split, dim=1)
            o = attend(number, self.rotated(q), self.rotated(k), v)
            x = x + o.reshape(shape.batch, -1) @ out_of
            gate, inner = (functional.rms_norm(x, (shape.width,)) @ up).chunk(2, dim=1)
            x = x + (functional.silu(gate) * inner) @ down
        return functional.rms_norm(x, (shape.width,)) @ self.head

    def rotated(self, x: Any) -> Any:
        a, b = x.chunk(2, dim=2)
        return self.torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=2)


class Keys:
    """The keys and values of all layers in the forms that ways to attend take them in; the same in all."""

    def __init__(self, torch: Any, shape: Shape, device: str) -> None:
        self.torch, self.shape, self.device = torch, shape, device
        self.lengths = torch.tensor(shape.lengths, device=device, dtype=torch.int32)
        self.rows = torch.arange(shape.batch, device=device)
        self.last = self.lengths.long() - 1

    def drawn(self, layer: int, which: int) -> Any:
        """(batch, longest, kv_heads, head_dim) of one layer, the same each time."""
        shape, torch = self.shape, self.torch
        torch.manual_seed(2 * layer + which)
        size = (shape.batch, shape.longest, shape.kv_heads, shape.head_dim)
        return torch.randn(*size, device=self.device, dtype=torch.bfloat16)

    def each(self, form: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
        """Keys and values of each layer in some form."""
        return [(form(self.drawn(n, 0)), form(self.drawn(n, 1))) for n in range(self.shape.layers)]

    # -- flashgen: in pages, in an order that follows no rule

    def paged(self, module: Any) -> Attend:
        torch, shape = self.torch, self.shape
        pages = -(-shape.longest // PAGE_SIZE)
        torch.manual_seed(1)
        order = torch.randperm(shape.batch * pages, device=self.device)
        table = order.view(shape.batch, pages).to(torch.int32)

        def in_pages(x: Any) -> Any:
            room = x.new_zeros(shape.batch, pages * PAGE_SIZE, *x.shape[2:])
            room[:, : shape.longest] = x
            cache = torch.empty_like(room).view(-1, PAGE_SIZE, *x.shape[2:])
            cache[order] = room.view(-1, PAGE_SIZE, *x.shape[2:])
            return cache

        caches = self.each(in_pages)
        page, slot = order.view(shape.batch, pages)[self.rows, self.last // PAGE_SIZE], self.last % PAGE_SIZE

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            keys, values = caches[layer]
            keys[page, slot], values[page, slot] = k, v
            return module.attention_paged(
                q[:, :, None], keys, values, table, self.lengths, max_seqlen_k=shape.longest
            )[:, :, 0]

        return attend

    # -- PyTorch: in one array, what is behind a sequence's end masked

    def masked(self, backend: str) -> Attend:
        from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

        torch, shape = self.torch, self.shape
        caches = self.each(lambda x: x.transpose(1, 2).contiguous())
        seen = torch.arange(shape.longest, device=self.device) < self.lengths[:, None]
        mask = torch.zeros(seen.shape, device=self.device, dtype=torch.bfloat16)
        mask = mask.masked_fill_(~seen, float("-inf"))[:, None, None]
        function, forced = torch.nn.functional.scaled_dot_product_attention, getattr(SDPBackend, backend)
        # Where a backend takes no grouped heads, those of queries are rows that share keys.
        group = shape.heads // shape.kv_heads

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            keys, values = caches[layer]
            keys[self.rows, :, self.last], values[self.rows, :, self.last] = k, v
            grouped = q.view(shape.batch, shape.kv_heads, group, shape.head_dim)
            with sdpa_kernel(forced):
                return function(grouped, keys, values, attn_mask=mask.expand(-1, 1, group, -1))

        return attend

    # -- PyTorch: one sequence behind the other

    def packed(self) -> Attend:
        import inspect

        from torch.nn.attention.varlen import varlen_attn  # pyright: ignore[reportMissingImports]

        torch, shape = self.torch, self.shape
        caches = self.each(lambda x: torch.cat([x[i, :n] for i, n in enumerate(shape.lengths)]))
        ends = self.lengths.cumsum(0, dtype=torch.int32)
        starts_k = torch.nn.functional.pad(ends, (1, 0))
        starts_q = torch.arange(shape.batch + 1, device=self.device, dtype=torch.int32)
        grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
        options = {"enable_gqa": True} if grouped else {}

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            keys, values = caches[layer]
            keys[ends.long() - 1], values[ends.long() - 1] = k, v
            return varlen_attn(q, keys, values, starts_q, starts_k, 1, shape.longest, **options)

        return attend

    # -- PyTorch: FlexAttention, by blocks of keys that a sequence has

    def by_blocks(self) -> Attend:
        from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
            create_block_mask,
            flex_attention,
        )

        torch, shape = self.torch, self.shape
        caches = self.each(lambda x: x.transpose(1, 2).contiguous())
        lengths = self.lengths
        mask = create_block_mask(
            lambda b, h, q, k: k < lengths[b], shape.batch, None, 1, shape.longest, device=self.device
        )
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            keys, values = caches[layer]
            keys[self.rows, :, self.last], values[self.rows, :, self.last] = k, v
            return compiled(q[:, :, None], keys, values, block_mask=mask, enable_gqa=True)[:, :, 0]

        return attend


@dataclass(frozen=True)
class Timed:
    """A way to attend: the milliseconds of a step, how far its logits lie from flashgen's of the largest, or
    why it was not timed."""

    ms: float | None = None
    apart: float | None = None
    reason: str = ""


def measure(torch: Any, model: Model, ways: dict[str, Callable[[], Attend]]) -> dict[str, Timed]:
    """Captures a step by each way in a graph of its own, one after the other, and times its replays."""
    found: dict[str, Timed] = {}
    first = None
    for name, make in ways.items():
        try:
            attend = make()
            logits, ms = replayed(torch, lambda attend=attend: model.step(attend))
        except Exception as error:  # whatever a library raises is a reason
            found[name] = Timed(reason=str(error).strip().splitlines()[0] if str(error) else repr(error))
        else:
            first = logits if first is None else first
            apart = float((logits - first).abs().max() / first.abs().max())
            agrees = apart <= AGREEMENT or name == NO_ATTENTION
            reason = "" if agrees else f"computes something else: {apart:.2g} apart"
            found[name] = Timed(ms if agrees else None, apart, reason)
        attend = None
        torch.cuda.empty_cache()
    return found


def replayed(torch: Any, step: Callable[[], Any]) -> tuple[Any, float]:
    """Returns what a step's graph computes, and the median milliseconds of its replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    times = []
    for _ in range(WARM_UP + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return logits.float(), median(times[WARM_UP:])


OURS, NO_ATTENTION = "flashgen", "no attention"


def emitted(shape: Shape, path: Path) -> None:
    """Writes the best kernel that is known for such steps, else a guess of one."""
    from flashgen.tuner.cli import app

    heads = ("--heads", str(shape.heads), "--kv-heads", str(shape.kv_heads))
    lengths = ("--batch", str(shape.batch), "--seqlen-q", "1", "--seqlen-k", str(shape.longest))
    kind = ("--dtype", "bf16", "--d", str(shape.head_dim), "--page-size", str(PAGE_SIZE))
    with contextlib.redirect_stdout(sys.stderr):
        app(["emit", str(path), "--device", "0", *kind, *heads, *lengths], standalone_mode=False)


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("decode_step_kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.add_argument("--module", type=Path, help="an emitted module of keys in pages of 16")
    for name in ("layers", "batch", "width", "hidden", "heads", "kv_heads", "head_dim", "letters"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Shape, name))
    parser.add_argument("--keys", default=Shape.keys, help="LOW-HIGH, the lengths of sequences")
    words = vars(parser.parse_args())
    as_json, path = words.pop("json"), words.pop("module")
    shape = Shape(**words)
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        sys.exit("PyTorch is not installed, which the step is computed by: `pip install torch`")
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA card that PyTorch finds; its times are what this is about")
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder, torch.no_grad():
        if path is None:
            path = Path(folder) / "best.py"
            emitted(shape, path)
        torch.manual_seed(0)
        model, keys = Model(torch, shape, "cuda"), Keys(torch, shape, "cuda")
        ways: dict[str, Callable[[], Attend]] = {
            OURS: lambda: keys.paged(loaded(path)),
            "mask, mem-eff": lambda: keys.masked("EFFICIENT_ATTENTION"),
            "mask, cudnn": lambda: keys.masked("CUDNN_ATTENTION"),
            "packed": keys.packed,
            "flex": keys.by_blocks,
            NO_ATTENTION: lambda: lambda layer, q, k, v: q,
        }
        found = measure(torch, model, ways)
    tell(shape, torch.cuda.get_device_name(), torch.__version__, found, as_json=as_json)


def tell(shape: Shape, card: str, version: str, found: dict[str, Timed], *, as_json: bool) -> None:
    """Prints what was found: a line for each way, how many times faster the first is than PyTorch's best."""
    others = [each.ms for name, each in found.items() if each.ms and name not in (OURS, NO_ATTENTION)]
    ours = found[OURS].ms
    faster = min(others) / ours if others and ours else None
    if as_json:
        told = {name: asdict(each) for name, each in found.items()}
        about = {"card": card, "torch": version, "shape": asdict(shape), "keys": sum(shape.lengths)}
        print(json.dumps({**about, "ways": told, "over_best": faster}, indent=1))
        return
    print(f"{card}, PyTorch {version}: {shape.layers} layers, {shape.batch} sequences of {shape.keys} keys")
    for name, each in found.items():
        print(f"{name:>14}  " + (each.reason if each.ms is None else f"{each.ms:8.3f} ms a step"))
    if faster:
        print(f"{faster:.2f} times as fast as PyTorch's best")


if __name__ == "__main__":
    main()
