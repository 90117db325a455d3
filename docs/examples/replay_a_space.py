"""Search a space again that was timed whole on an H200, and see how soon each sampler finds how much of it.

    python docs/examples/replay_a_space.py [FOLDER]

Writes `space.png`, the times of all variants with what the cost model says of each, and `replay.png`, the
searches. `flashgen replay tests/data/*.jsonl.xz` does the latter at length.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from flashgen.tuner.exchange.recorded_spaces import RecordedSpace, read
from flashgen.tuner.exchange.replay import ReplayOptions, replay
from flashgen.tuner.predict.prior import prior_of
from flashgen.tuner.predict.rank_correlation import spearman
from flashgen.tuner.view.replay import plot
from matplotlib.figure import Figure

RECORDED = Path(__file__).parents[2] / "tests" / "data" / "simt_f32_d64.jsonl.xz"
SAMPLERS, SEEDS, EVALUATIONS = ("gp", "tpe", "random"), 4, 40


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    space = read(RECORDED)
    draw(space, folder / "space.png")
    options = ReplayOptions(methods=SAMPLERS, seeds=SEEDS, evaluations=EVALUATIONS)
    replays = replay([(RECORDED.name, space)], options)
    plot(folder / "replay.png", replays)
    for curves in replays[0].curves:
        print(f"{curves.method}: {curves.mean[-1]:.1%} of the optimum after {EVALUATIONS} evaluations")
    print(f"look at {folder / 'space.png'} and {folder / 'replay.png'}")


def draw(space: RecordedSpace, path: Path) -> None:
    """Draws what was measured of each variant over what the cost model predicts."""
    prior = prior_of(space.problem, space.limits)
    timed = [(entry.median_us, prior(entry.variant)) for entry in space.entries if entry.median_us]
    measured, predicted = np.array(timed).T / 1e3
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axis = figure.subplots()
    axis.scatter(predicted, measured, s=5, alpha=0.5, color="#0072b2")
    best = measured.argmin()
    axis.scatter(predicted[best], measured[best], s=60, marker="*", color="#d55e00", label="the fastest")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("predicted by the cost model, ms")
    axis.set_ylabel("measured on an NVIDIA H200, ms")
    rho = spearman(predicted, measured)
    told = f"{space.problem.name}, {space.family.family}: {len(timed)} variants"
    axis.set_title(f"{told}, rank correlation {rho:.2f}")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
