"""Take an emitted kernel apart: its parts by line, and a picture of its walk over the tiles of keys.

    python docs/examples/walk_through_a_kernel.py [FOLDER]

Writes `kernel.cu`, the kernel as `flashgen emit` would write it, and `walk.png`: which tiles of keys each
block leaves out, takes whole, or masks, under a causal mask with more keys than rows.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

PROBLEM = Problem(dtype="bf16", head_dim=64, causal=True, batch=1, seqlen_q=640, seqlen_k=1024)
VARIANT = Mma(br=64, rows_per_warp=16, bc=64, layout="swizzled", stages=2, q_in_registers=False)
#: How each part of the file begins, in their order, and what it is for.
PARTS = {
    r"// attention_": "header: the problem, each parameter with its meaning, how to build it",
    r"struct AttentionArgs": "the arguments: pointers, strides, lengths, scale",
    r"constexpr bool kCausal": "constants: every number once",
    r"struct SharedStorage": "what lies in shared memory",
    r"static_assert\(sizeof\(SharedStorage": "device functions: copies, products, softmax, masks",
    r'extern "C" __global__': "the kernel: its walk over the keys, and the epilogue",
    r"#ifndef __CUDACC_RTC__": "the host launcher, plain C",
}
LEFT_OUT, MASKED, WHOLE = range(3)


def main(folder: Path) -> None:
    kernel = render(VARIANT, PROBLEM, PRESETS["a100"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.cu").write_text(kernel.source)
    lines = kernel.source.splitlines()
    starts = [next(i for i, line in enumerate(lines) if re.match(begin, line)) for begin in PARTS]
    for start, end, what in zip(starts, [*starts[1:], len(lines)], PARTS.values(), strict=True):
        print(f"lines {start + 1:4d} to {end:4d}: {what}")
    launch = kernel.launch
    print(f"{launch.threads} threads and {launch.smem_bytes} bytes of shared memory a block")
    draw(tiles(), folder / "walk.png")
    print(f"look at {folder / 'kernel.cu'} and {folder / 'walk.png'}")


def tiles() -> np.ndarray:
    """Tells of each tile of rows (down) and of keys (across) what its block does with it.

    What a row sees is one value of the problem, which kernels, cost model and reference all take.
    """
    rows, keys = PROBLEM.seqlen_q, PROBLEM.seqlen_k
    begins, ends = PROBLEM.scores.interval(np.arange(rows), rows, keys)
    kinds = np.full((-(-rows // VARIANT.br), -(-keys // VARIANT.bc)), LEFT_OUT)
    for i, j in np.ndindex(kinds.shape):
        block = slice(i * VARIANT.br, (i + 1) * VARIANT.br)
        first, last = j * VARIANT.bc, min((j + 1) * VARIANT.bc, keys)
        seen = np.clip(np.minimum(ends[block], last) - np.maximum(begins[block], first), 0, None)
        if seen.any():
            kinds[i, j] = WHOLE if (seen == last - first).all() else MASKED
    return kinds


def draw(kinds: np.ndarray, path: Path) -> None:
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axis = figure.subplots()
    axis.pcolormesh(kinds, cmap=ListedColormap(["#eeeeee", "#f0a060", "#0072b2"]), edgecolors="white", vmax=2)
    axis.invert_yaxis()
    axis.set_aspect("equal")
    axis.set_xlabel(f"tiles of {VARIANT.bc} keys")
    axis.set_ylabel(f"tiles of {VARIANT.br} query rows, a block each")
    share = (kinds != LEFT_OUT).mean()
    axis.set_title(f"blue: whole, orange: masked, grey: left out ({share:.0%} of the tiles are computed)")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
