"""The roofline of a benchmark run: FLOP/s over FLOPs per byte, under the ceilings of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import TYPE_CHECKING, Any

from ..bench.figures import OURS, BenchRun, Row, by_suite
from .bench_colours import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {
    "report": "s",
    "gpt2": "D",
    "fp32": "o",
    "llm": "o",
    "eight": "d",
    "odd": "^",
    "decode": "v",
    "masks": "X",
    "varlen": "p",
    "few": "<",
    "paged": ">",
    "mla": "h",
    "backward": "*",
    "shapes": "P",
}
#: How many bits the numbers have that are multiplied, where not those of float32.
BITS = {"f16": "16 bits", "bf16": "16 bits", "e4m3": "8 bits"}
INCHES = (10.0, 5.8)
#: What the ceilings' words are written in, and how far apart their lines stand, of the axis's height.
GREY, WORDS_SIZE, LINE_PITCH = "#555555", 8, 0.042


def roofline(run: BenchRun) -> Figure:
    """Draws the speed of every workload that flashgen was timed on. The ceilings' words stand beside the
    drawing, each near the end of its line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axis = figure.subplots()
    groups = {name: [row for row in rows if row.ours] for name, rows in by_suite(run.rows).items()}
    rows = [row for members in groups.values() for row in members]
    intensities = [row.problem.flops / row.problem.min_bytes for row in rows]
    low, high = min(intensities) / 2, max(intensities) * 2
    bandwidth = run.ceilings.rates["copy"]
    lines = _ceiling_lines(rows, run)
    for _, flops, style in lines:
        ridge = flops / bandwidth
        xs = [low, ridge, high] if low < ridge < high else [low, high]
        ys = [min(flops, bandwidth * x) / 1e12 for x in xs]
        axis.plot(xs, ys, color=GREY, linewidth=1, linestyle=style)
    for name, members in groups.items():
        for bits in dict.fromkeys(("f32", *BITS.values())):
            points = [row for row in members if BITS.get(row.problem.dtype, "f32") == bits]
            if points:
                _points(axis, points, f"{name}, {bits}", MARKERS.get(name, "o"), filled=bits != "f32")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel("FLOPs per byte (q, k, v read once, o written once)")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"roofline ({run.device})")
    axis.grid(which="both", linewidth=0.4, alpha=0.35)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower right", frameon=False, fontsize=WORDS_SIZE)
    _write_beside(axis, [(words, min(flops, bandwidth * high) / 1e12) for words, flops, _ in lines])
    slope, ridge = bandwidth / 1e12, min((flops for _, flops, _ in lines), default=1e12 * high) / bandwidth
    _write_along(axis, f"device memory, {slope:.2f} TB/s", slope, low, min(max(ridge, low), high))
    return figure


def _points(axis: Axes, rows: Sequence[Row], label: str, marker: str, *, filled: bool) -> None:
    axis.scatter(
        [row.problem.flops / row.problem.min_bytes for row in rows],
        [row.tflops or 0.0 for row in rows],
        s=34,
        marker=marker,
        facecolors=COLOURS[OURS] if filled else "none",
        edgecolors=COLOURS[OURS],
        label=label,
        zorder=3,
    )


def _ceiling_lines(rows: Sequence[Row], run: BenchRun) -> list[tuple[str, float, Any]]:
    """(words, FLOP/s, line style): the arithmetic of each kind of problem there is, and exponentials by head
    dim: so many FLOPs go with each."""
    found: dict[str, tuple[float, Any]] = {}
    for row in rows:
        flops = run.ceilings.flops(row.problem)
        if flops:
            kind = "f32" if row.problem.precision == "auto" else row.problem.precision
            found.setdefault(f"products, {BITS.get(row.problem.dtype, kind)}", (flops, "-"))
    rate = run.ceilings.rates.get("ex2")
    halves: Mapping[int, Row] = {
        r.problem.head_dim: r for r in rows if BITS.get(r.problem.dtype) == "16 bits"
    }
    if rate:
        for head_dim in sorted(set(halves) & {64, 128}):
            found[f"exponentials, head dim {head_dim}"] = (rate * 4 * head_dim, "--")
    return [(label, flops, style) for label, (flops, style) in found.items()]


def _write_beside(axis: Axes, ends: Sequence[tuple[str, float]]) -> None:
    """Writes words right of the axis at the heights of their lines' ends, as far apart as they must be."""
    bottom, top = map(log10, axis.get_ylim())
    places = spread([(log10(y) - bottom) / (top - bottom) for _, y in ends], LINE_PITCH)
    for (words, y), place in zip(ends, places, strict=True):
        axis.annotate(
            words,
            (1.0, (log10(y) - bottom) / (top - bottom)),
            xytext=(1.025, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=WORDS_SIZE,
            color=GREY,
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
        )


def _write_along(axis: Axes, words: str, slope: float, low: float, high: float) -> None:
    """Writes words left of the middle of the line from ``low`` to ``high`` whose values are ``slope`` times
    what is below it."""
    middle = (low * high) ** 0.5
    axis.annotate(
        words,
        (middle, slope * middle),
        xytext=(-6, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=WORDS_SIZE,
        color=GREY,
    )


def spread(places: Sequence[float], pitch: float) -> list[float]:
    """Moves places apart until neighbours are ``pitch`` from each other, in their order and about the middle
    of those that would touch."""
    order = sorted(range(len(places)), key=places.__getitem__)
    groups: list[list[int]] = []
    for i in order:
        groups.append([i])
        while (
            len(groups) > 1 and _first(groups[-1], places, pitch) - _last(groups[-2], places, pitch) < pitch
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    found = list(places)
    for group in groups:
        start = _first(group, places, pitch)
        for k, i in enumerate(group):
            found[i] = start + k * pitch
    return found


def _first(group: Sequence[int], places: Sequence[float], pitch: float) -> float:
    return sum(places[i] for i in group) / len(group) - pitch * (len(group) - 1) / 2


def _last(group: Sequence[int], places: Sequence[float], pitch: float) -> float:
    return _first(group, places, pitch) + pitch * (len(group) - 1)
