"""Generate text with a small random Llama-shaped model and a paged cache, and with PyTorch's or numpy's
attention on whole keys beside it.

    python docs/examples/generate_text.py [FOLDER] [DEVICE]

Writes `text.txt` and `cache.png` to the folder. DEVICE is `sim:h200`, an emulated card, unless it is told;
`0` is the first CUDA card, where attention is the emitted module's. All else of the model is numpy's. Weights
are random, so the text means nothing; that both ways write the same is what there is to see.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.device import Device
from flashgen.tuner.cards.names import resolve
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

LETTERS = "abcdefghijklmnopqrstuvwxyz .,'\n"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN = 2, 4, 2, 16, 64, 128
PROMPTS = ("once upon a time there was", "once upon a time in the west", "it was")
NEW_TOKENS, PAGE_SIZE, NUM_PAGES = 16, 8, 24
#: float32, that the last letter of two ways is the same; sequences of any lengths, packed, keys in pages.
PROBLEM = Problem(
    batch=len(PROMPTS),
    num_q_heads=HEADS,
    num_kv_heads=KV_HEADS,
    seqlen_q=64,
    seqlen_k=64,
    head_dim=HEAD_DIM,
    causal=True,
    varlen="uniform:1-64",
    page_size=PAGE_SIZE,
)
VARIANT = Simt(br=16, bc=16, threads_per_block=64, min_blocks=1)

#: Attention of packed rows, given the layer, q, k and v of the new rows and how many each sequence has.
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray, Sequence[int]], np.ndarray]


def main(folder: Path, device: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    card = resolve(device)
    model, cache = Model.drawn(np.random.default_rng(7)), Cache.of(PROMPTS)
    kernel = render(VARIANT, PROBLEM, card.limits)
    paged = generate(model, PagedAttention(cache, run_on(card, kernel, folder)))
    whole = generate(model, WholeAttention(len(PROMPTS)))

    texts = ["".join(LETTERS[token] for token in tokens) for tokens in paged.tokens]
    (folder / "text.txt").write_text(
        "\n---\n".join(map(str.__add__, PROMPTS, texts)) + "\n", encoding="utf-8"
    )
    differences = [float(np.abs(a - b).max()) for a, b in zip(paged.logits, whole.logits, strict=True)]
    draw(cache, differences, folder / "cache.png")
    same = "the same" if paged.tokens == whole.tokens else "OTHER"
    print(f"{NEW_TOKENS} new letters each on {card.limits.name}: {same} as by {WholeAttention.by}")
    print(f"largest difference of a logit {max(differences):.1e}; look at {folder / 'cache.png'}")


# -- the model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A transformer as Llama has it: normed, rotated, grouped heads, gated. Weights by name, float32."""

    letters: np.ndarray
    head: np.ndarray
    layers: tuple[dict[str, np.ndarray], ...]

    @classmethod
    def drawn(cls, random: np.random.Generator) -> Model:
        def matrix(rows: int, columns: int) -> np.ndarray:
            return (random.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)

        shapes = {
            "q": (WIDTH, HEADS * HEAD_DIM),
            "k": (WIDTH, KV_HEADS * HEAD_DIM),
            "v": (WIDTH, KV_HEADS * HEAD_DIM),
            "o": (HEADS * HEAD_DIM, WIDTH),
            "gate": (WIDTH, HIDDEN),
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
        }
        layers = tuple({name: matrix(*shape) for name, shape in shapes.items()} for _ in range(LAYERS))
        return cls(matrix(WIDTH, len(LETTERS)).T, matrix(WIDTH, len(LETTERS)), layers)

    def logits(
        self, tokens: np.ndarray, places: np.ndarray, rows: Sequence[int], attend: Attend
    ) -> np.ndarray:
        """Returns what each token says of the next: (tokens, letters). Those of all sequences stand one
        behind the other, ``rows`` of each, at their ``places``."""
        x = self.letters[tokens]
        for number, layer in enumerate(self.layers):
            y = normed(x)
            q, k, v = ((y @ layer[name]).reshape(len(tokens), -1, HEAD_DIM) for name in "qkv")
            o = attend(number, rotated(q, places), rotated(k, places), v, rows)
            x = x + o.reshape(len(tokens), -1) @ layer["o"]
            y = normed(x)
            gate = y @ layer["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"])) @ layer["down"]
        return normed(x) @ self.head


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5)


def rotated(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Rotary embedding, the halves of a head's columns being pairs."""
    half = HEAD_DIM // 2
    angles = places[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@dataclass
class Generated:
    """The new tokens of each sequence, and the logits of each step."""

    tokens: list[list[int]]
    logits: list[np.ndarray] = field(default_factory=list)


def generate(model: Model, attend: Attend) -> Generated:
    """Reads all prompts at once, then writes a token of each sequence at a time, the likeliest."""
    found = Generated([[] for _ in PROMPTS])
    new = [[LETTERS.index(letter) for letter in prompt] for prompt in PROMPTS]
    lengths = np.zeros(len(PROMPTS), int)
    for _ in range(NEW_TOKENS):
        rows = [len(tokens) for tokens in new]
        places = np.concatenate([have + np.arange(n) for have, n in zip(lengths, rows, strict=True)])
        logits = model.logits(np.concatenate(new), places, rows, attend)[np.cumsum(rows) - 1]
        lengths += rows
        new = [[int(token)] for token in logits.argmax(axis=1)]
        found.logits.append(logits)
        for tokens, (token,) in zip(found.tokens, new, strict=True):
            tokens.append(token)
    return found


# -- attention beside a cache of pages -----------------------------------------------------------------------


@dataclass
class Cache:
    """Pages of keys and of values for each layer, and which of them each sequence has. The whole pages of a
    prompt's beginning that another has too are shared."""

    keys: np.ndarray
    values: np.ndarray
    table: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, prompts: Sequence[str]) -> Cache:
        shape = (LAYERS, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        free = list(np.random.default_rng(1).permutation(NUM_PAGES))
        table = np.zeros((len(prompts), 64 // PAGE_SIZE), np.int32)
        known: dict[str, int] = {}
        for row, prompt in zip(table, prompts, strict=True):
            for nth in range(-(-(len(prompt) + NEW_TOKENS) // PAGE_SIZE)):
                begin = prompt[: (nth + 1) * PAGE_SIZE]
                whole = len(begin) == (nth + 1) * PAGE_SIZE
                row[nth] = known[begin] if whole and begin in known else free.pop()
                if whole:
                    known[begin] = int(row[nth])
        lengths = np.zeros(len(prompts), np.int32)
        return cls(np.zeros(shape, np.float32), np.zeros(shape, np.float32), table, lengths)

    def append(self, layer: int, k: np.ndarray, v: np.ndarray, rows: Sequence[int]) -> None:
        """Writes new rows of all sequences behind those that they have; the last layer counts them."""
        begins = np.concatenate([[0], np.cumsum(rows)])
        for row, have, begin, count in zip(self.table, self.lengths, begins[:-1], rows, strict=True):
            places = have + np.arange(count)
            pages, slots = row[places // PAGE_SIZE], places % PAGE_SIZE
            self.keys[layer, pages, slots] = k[begin : begin + count]
            self.values[layer, pages, slots] = v[begin : begin + count]
        if layer == LAYERS - 1:
            self.lengths += np.array(rows, np.int32)


@dataclass
class PagedAttention:
    """Attention of new rows beside a cache, by a kernel of flashgen's."""

    cache: Cache
    run: Callable[..., np.ndarray]

    def __call__(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: Sequence[int]
    ) -> np.ndarray:
        used = self.cache.lengths + np.array(rows, np.int32)
        self.cache.append(layer, k, v, rows)
        starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        return self.run(
            q, self.cache.keys[layer], self.cache.values[layer], self.cache.table, used, starts, max(rows)
        )


def run_on(card: Device, kernel: Kernel, folder: Path) -> Callable[..., np.ndarray]:
    """Returns a call of the kernel: of its emitted module on a real card, else on the emulated one."""
    if not card.predicted:
        path = folder / "paged.py"
        path.write_text(emit_module(kernel, device=card.limits.name, name="paged"), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("paged", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return lambda q, k, v, table, used, starts, longest: module.attention_paged(
            q, k, v, table, used, cu_seqlens_q=starts, max_seqlen_q=longest, max_seqlen_k=int(used.max())
        )
    runner, build = card.open(), card.toolchain().build(kernel)

    def run(
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        table: np.ndarray,
        used: np.ndarray,
        starts: np.ndarray,
        longest: int,
    ) -> np.ndarray:
        # The card's runner has heads before rows, and all rows in one batch.
        by_heads = [x.swapaxes(1, 2) for x in (q[None], k, v)]
        values = {"page_table": table, "seqused_k": used, "cu_seqlens_q": starts}
        o, _ = runner.attend(build, *by_heads, scale=HEAD_DIM**-0.5, values=values)
        return o[0].swapaxes(0, 1)

    return run


# -- the same on whole keys ----------------------------------------------------------------------------------


class WholeAttention:
    """Attention of each sequence by itself on all of its keys: PyTorch's where it is installed."""

    by = "PyTorch" if importlib.util.find_spec("torch") else "numpy in double precision"

    def __init__(self, batch: int) -> None:
        self.kept: dict[tuple[int, int], list[np.ndarray]] = {}
        self.batch = batch

    def __call__(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: Sequence[int]
    ) -> np.ndarray:
        ends, outputs = np.cumsum(rows), []
        for number, (end, count) in enumerate(zip(ends, rows, strict=True)):
            part, new = slice(end - count, end), (k[end - count : end], v[end - count : end])
            kept = self.kept.setdefault((layer, number), [x[:0] for x in new])
            kept[:] = [np.concatenate(pair) for pair in zip(kept, new, strict=True)]
            outputs.append(attention(q[part], *kept))
        return np.concatenate(outputs)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of the last rows of a sequence, arrays (rows, heads, head_dim)."""
    seen = np.arange(len(k)) <= np.arange(len(q))[:, None] + len(k) - len(q)
    if importlib.util.find_spec("torch"):
        return by_torch(q, k, v, seen)
    q, k, v = (x.swapaxes(0, 1).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=0) for x in (k, v))
    scores = np.where(seen, q @ k.swapaxes(1, 2) * HEAD_DIM**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return (weights / weights.sum(axis=2, keepdims=True) @ v).swapaxes(0, 1).astype(np.float32)


def by_torch(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]

    by_heads: list[Any] = [torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v)]
    function = torch.nn.functional.scaled_dot_product_attention
    o = function(*by_heads, attn_mask=torch.from_numpy(seen), enable_gqa=True)
    return o[0].transpose(0, 1).numpy()


# -- what there is to see ------------------------------------------------------------------------------------


def draw(cache: Cache, differences: Sequence[float], path: Path) -> None:
    """Draws which sequence wrote which row of the cache, and how far both ways' logits lie apart."""
    owners = np.zeros((NUM_PAGES, PAGE_SIZE))
    for number, (row, length) in enumerate(zip(cache.table, cache.lengths, strict=True), 1):
        places = np.arange(length)
        rows = row[places // PAGE_SIZE], places % PAGE_SIZE
        owners[rows] = np.where(owners[rows] > 0, len(PROMPTS) + 1, number)
    colours = {
        "free": "#e8e8e8",
        "first": "#d55e00",
        "second": "#0072b2",
        "third": "#009e73",
        "shared": "#333333",
    }
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    pages, steps = figure.subplots(1, 2)
    pages.imshow(owners.T, cmap=ListedColormap(list(colours.values())), vmin=0, vmax=4, aspect="auto")
    pages.set_xlabel("page")
    pages.set_ylabel("row of a page")
    pages.set_title("whose keys lie where")
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False)
    steps.semilogy(
        range(1, len(differences) + 1), np.maximum(differences, 1e-12), marker="o", color="#d55e00"
    )
    steps.set_ylim(1e-8, 1e-4)
    steps.set_xlabel("step")
    steps.set_title("largest difference of a logit")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), sys.argv[2] if len(sys.argv) > 2 else "sim:h200")
