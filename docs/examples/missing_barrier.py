"""Take a barrier out of a kernel and watch the emulated card find it.

    python docs/examples/missing_barrier.py [FOLDER]

Writes `missing_barrier.png`: the error of each row, of the kernel as it is and without one `__syncthreads()`.
On a GPU such a mistake may show once in a thousand launches. The emulated card lets the threads of a block
run in a random order between barriers, so that it shows at once.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from flashgen.gen.families import family_named
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import reference
from matplotlib.figure import Figure

CARD = SimDevice("gtx-1080", PRESETS["gtx-1080"])
PROBLEM = Problem(head_dim=32)
ROWS, KEYS = 150, 200


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    variant = family_named("ladder")(br=64, bc=16)
    kernel = render(variant, PROBLEM, CARD.limits)
    barrier = "__syncthreads();"
    before, _, after = kernel.source.rpartition(barrier)
    broken = replace(kernel, source=before + after)
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axis = figure.subplots()
    for label, each, colour in (
        ("as emitted", kernel, "#0072b2"),
        ("without its last barrier", broken, "#d55e00"),
    ):
        errors = error_by_row(each)
        axis.plot(errors, ".", color=colour, label=f"{label}: {np.nanmax(errors):.1e} at most")
        print(f"{label}: {np.nanmax(errors):.1e} at most, {int(np.isnan(errors).sum())} rows are NaN")
    axis.axhline(PROBLEM.tolerance, color="#555555", linestyle="--", label="bound per head")
    axis.set_yscale("log")
    axis.set_xlabel("query row")
    axis.set_ylabel("relative error against float64")
    axis.set_title("one __syncthreads() less, on the emulated card")
    axis.legend(frameon=False)
    figure.savefig(folder / "missing_barrier.png", dpi=110)
    print(f"look at {folder / 'missing_barrier.png'}")


def error_by_row(kernel: Kernel) -> np.ndarray:
    shapes = ((1, 1, ROWS, PROBLEM.head_dim), (1, 1, KEYS, PROBLEM.head_dim))
    scale = PROBLEM.head_dim**-0.5
    q, k, v = reference.random_inputs("normal", *shapes, scale=scale, rng=np.random.default_rng(0))
    o, _ = CARD.open().attend(CARD.toolchain().build(kernel), q, k, v, scale=scale)
    exact = reference.attention(q, k, v, scale=scale).o
    return (np.linalg.norm(o - exact, axis=-1) / np.linalg.norm(exact, axis=-1))[0, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
