"""Tune a small problem on an emulated card, emit the winner, run it, and look at its error row by row.

    python docs/examples/tune_emit_call.py [FOLDER]

Writes `best.cu`, `best.py` and `error_by_row.png` to the folder. Needs no GPU: the kernel that is emitted is
compiled by g++ against an emulation of CUDA and run for real. Only its times are predictions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.render import render
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.cli import app
from flashgen.tuner.evaluate import reference
from flashgen.tuner.shelf import library
from matplotlib.figure import Figure

CARD = "a10"
ROWS, KEYS = 300, 517  # lengths that no tile divides


def main(folder: Path) -> None:
    # The same lines as on the command line: flashgen tune --device sim:a10 ...
    problem = ["--dtype", "f16", "--d", "40", "--batch", "2", "--heads", "4", "--seqlen", "512"]
    out = ["--out", str(folder / "out")]
    held = ["--family", "mma", "--set", "bc=64", "--set", "rows_per_warp=16", "--set", "layout=padded"]
    flashgen("tune", "--device", f"sim:{CARD}", *problem, *held, "--trials", "2", *out)
    for name in ("best.cu", "best.py"):
        flashgen("emit", str(folder / name), "--device", f"sim:{CARD}", *problem, *out)

    # What was tuned is a record of a problem and a variant; from these the kernel is rendered again.
    (record,) = (folder / "out").glob("sim_*/*.json")
    tuned = library.read(record).kernel
    kernel = render(tuned.variant, tuned.problem, PRESETS[CARD])
    rows, errors = error_by_row(kernel)
    draw(rows, errors, kernel, folder / "error_by_row.png")
    print(f"largest error of a row {errors.max():.1e}; look at {folder / 'error_by_row.png'}")


def flashgen(*words: str) -> None:
    print("$ flashgen", *words)
    app([*words], standalone_mode=False)


def error_by_row(kernel: Kernel) -> tuple[np.ndarray, np.ndarray]:
    """Runs a kernel on the emulated card; returns its query rows and each one's relative error."""
    problem, random = kernel.problem, np.random.default_rng(0)
    shapes = ((1, 4, ROWS, problem.head_dim), (1, 2, KEYS, problem.head_dim))
    scale = problem.head_dim**-0.5
    q, k, v = reference.random_inputs("normal", *shapes, scale=scale, rng=random, dtype=problem.dtype)
    card = SimDevice(CARD, PRESETS[CARD])
    o, _ = card.open().attend(card.toolchain().build(kernel), q, k, v, scale=scale)
    exact = reference.attention(q, k, v, scale=scale, scores=problem.scores).o
    errors = np.linalg.norm(o - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return np.tile(np.arange(ROWS), errors.shape[1]), errors[0].ravel()


def draw(rows: np.ndarray, errors: np.ndarray, kernel: Kernel, path: Path) -> None:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.scatter(rows, errors, s=6, color="#d55e00", alpha=0.5, label="a row of a head")
    axis.axhline(kernel.problem.tolerance, color="#555555", linestyle="--", label="bound per head")
    axis.set_yscale("log")
    axis.set_xlabel("query row")
    axis.set_ylabel("‖o - ref‖ / ‖ref‖ against float64")
    axis.set_title(f"{kernel.problem.name}, {kernel.variant.family}, emulated {CARD}: {KEYS} keys")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
