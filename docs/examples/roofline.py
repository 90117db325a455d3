"""Draw the shipped kernels under an H200's roofline: what was measured of each, and what the model predicts.

    python docs/examples/roofline.py [FOLDER]

Writes `roofline.png`. Intensity counts q, k and v read once and o written once, which decoding is bound by;
the ceilings are those that `flashgen bench` measured on the card.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from flashgen.gen.limits import PRESETS
from flashgen.tuner.bench import figures
from flashgen.tuner.predict.cost_model import predict
from flashgen.tuner.shelf import library
from matplotlib.figure import Figure

OUT = Path(__file__).parents[2] / "out"
CARD = PRESETS["h200"]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ceilings = figures.read(OUT / "bench_nvidia_h200.json").ceilings
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axis = figure.subplots()
    intensities = np.geomspace(1, 2e4, 200)
    bandwidth, products = ceilings.rates["copy"], ceilings.rates["wgmma_bf16"]
    axis.plot(intensities, np.minimum(bandwidth * intensities, products) / 1e12, color="#555555", linewidth=1)
    kernels = [library.read(path).kernel for path in sorted((OUT / "nvidia_h200").glob("*.json"))]
    worst = 0.0
    for kernel in kernels:
        problem, us = kernel.problem, kernel.measurement.median_us
        predicted_us = predict(kernel.variant, problem, CARD).median_us
        worst = max(worst, abs(np.log2(predicted_us / us)))
        x, work = problem.flops / problem.min_bytes, problem.flops / 1e6
        colour = "#0072b2" if problem.dtype == "f32" else "#d55e00"
        axis.plot([x, x], [work / us, work / predicted_us], color=colour, linewidth=0.8, alpha=0.6)
        axis.scatter(x, work / us, s=18, color=colour, zorder=3)
        axis.scatter(x, work / predicted_us, s=18, facecolors="none", edgecolors=colour, zorder=3)
    for words, x, y in (("16-bit products", 2e4, products), ("bytes copied", 2.2, 1.3 * 2.2 * bandwidth)):
        axis.annotate(words, (x, 1.05 * y / 1e12), ha="right", fontsize=8, color="#555555")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOPs per byte that must be moved")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{len(kernels)} kernels of an H200: dots measured, rings predicted, blue float32")
    axis.grid(which="both", linewidth=0.4, alpha=0.3)
    figure.savefig(folder / "roofline.png", dpi=110)
    print(f"{len(kernels)} kernels; the prediction farthest off is off by a factor of {2**worst:.1f}")
    print(f"look at {folder / 'roofline.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
