"""A benchmark run as plots, PNG and SVG: bars by suite, all in one, the roofline. By matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.contenders import LADDER
from ..bench.figures import BEST, OURS, BenchRun, Row, by_suite, contenders_of
from .bench import LAST_STEP, title_of
from .bench_overview import overview

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
#: Colours that people tell apart whatever their eyes (Okabe and Ito), flashgen's the warm one.
COLOURS = {
    OURS: "#d55e00",
    "flash": "#0072b2",
    "cudnn": "#56b4e9",
    "mem-eff": "#009e73",
    "math": "#999999",
    "flex": "#cc79a7",
    "fa3": "#f0c000",
    "xformers": "#8c6d31",
    "cupy": "#555555",
    LAST_STEP: "#333333",
}
OTHER_COLOUR = "#bbbbbb"
MARKERS = {"report": "s", "gpt2": "D", "fp32": "o", "llm": "o", "odd": "^", "decode": "v", "shapes": "P"}
INCHES_PER_GROUP, LEAST_INCHES, PANEL_INCHES = 0.75, 5.0, 2.9
GRID_COLUMNS = 2


@dataclass(frozen=True)
class Panel:
    """Bars of one plot: a value by contender for each group."""

    title: str
    groups: tuple[tuple[str, dict[str, float]], ...]


def write_plots(folder: Path, run: BenchRun) -> list[Path]:
    """Writes all plots of a run as PNG and SVG and returns their paths. The same run gives the same files."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    figures = {name: bars(name, rows, run) for name, rows in by_suite(run.rows).items() if _timed(rows)}
    if any(row.ratio(BEST) for row in run.rows):
        figures["overview"] = overview(run)
    if _timed(run.rows) and run.ceilings.rates.get("copy"):
        figures["roofline"] = roofline(run)
    paths = []
    for name, figure in figures.items():
        for suffix in SUFFIXES:
            path = folder / f"{name}{suffix}"
            metadata: dict[str, Any] = {"Date": None} if suffix == ".svg" else {"Software": None}
            with matplotlib.rc_context({"svg.hashsalt": "flashgen"}):
                figure.savefig(path, dpi=120, metadata=metadata)
            paths.append(path)
    return paths


def _timed(rows: Sequence[Row]) -> bool:
    return any(row.ours for row in rows)


# -- bars ----------------------------------------------------------------------------------------------------


def panels_of(suite: str, rows: Sequence[Row]) -> tuple[str, list[Panel]]:
    """Returns the unit, and what is drawn in it: `llm` by head dim and mask over lengths, others in one
    panel.

    Decoding is bound by what it reads, so that bytes say more of it than operations.
    """
    unit = "GB/s" if suite == "decode" else "TFLOP/s"

    def values(row: Row) -> dict[str, float]:
        work = row.problem.min_bytes * 1e-6 if suite == "decode" else row.problem.flops * 1e-9
        shown = [n for n in row.cells if not n.startswith(LADDER) or n == LAST_STEP]
        return {name: work / ms for name in shown if (ms := row.ms(name))}

    if suite != "llm":
        return unit, [Panel("", tuple((row.name, values(row)) for row in rows))]

    def key(row: Row) -> tuple[int, bool]:
        return row.problem.head_dim, row.problem.causal

    panels = []
    for (head_dim, causal), members in groupby(sorted(rows, key=key), key):
        groups = tuple((str(row.problem.seqlen_q), values(row)) for row in members)
        panels.append(Panel(f"head dim {head_dim}{', causal' if causal else ''}", groups))
    return unit, panels


def bars(suite: str, rows: Sequence[Row], run: BenchRun) -> Figure:
    """Draws the speed of all contenders on the workloads of one suite."""
    from matplotlib.figure import Figure

    unit, panels = panels_of(suite, rows)
    names = [n for n in contenders_of(rows) if any(n in values for p in panels for _, values in p.groups)]
    columns = min(GRID_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    widest = max(len(panel.groups) for panel in panels)
    width = max(LEAST_INCHES, INCHES_PER_GROUP * widest) * columns
    figure = Figure(figsize=(width, 1.2 + PANEL_INCHES * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for place, axis in enumerate(axes.flat):
        if place < len(panels):
            _panel(axis, panels[place], names)
            axis.set_ylabel(unit if place % columns == 0 else "")
        else:
            axis.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.suptitle(f"{title_of(suite)} ({run.device})")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8), frameon=False)
    return figure


def _panel(axis: Axes, panel: Panel, names: Sequence[str]) -> None:
    width = 0.84 / max(len(names), 1)
    for i, name in enumerate(names):
        places = [group - 0.42 + (i + 0.5) * width for group in range(len(panel.groups))]
        heights = [values.get(name, 0.0) for _, values in panel.groups]
        axis.bar(places, heights, width, label=name, color=COLOURS.get(name, OTHER_COLOUR))
    labels = [label for label, _ in panel.groups]
    crowded = max(map(len, labels)) > 8
    axis.set_xticks(
        range(len(labels)), labels, rotation=35 if crowded else 0, ha="right" if crowded else "center"
    )
    axis.set_title(panel.title)
    axis.grid(axis="y", linewidth=0.5, alpha=0.4)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


# -- the roofline --------------------------------------------------------------------------------------------


def roofline(run: BenchRun) -> Figure:
    """Draws FLOP/s over FLOPs per byte that cannot be saved, under the ceilings measured in the same run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axis = figure.subplots()
    groups = {name: [row for row in rows if row.ours] for name, rows in by_suite(run.rows).items()}
    rows = [row for members in groups.values() for row in members]
    intensities = [row.problem.flops / row.problem.min_bytes for row in rows]
    low, high = min(intensities) / 2, max(intensities) * 2
    bandwidth = run.ceilings.rates["copy"]
    for label, flops, style in _ceiling_lines(rows, run):
        ridge = flops / bandwidth
        xs = [low, ridge, high] if low < ridge < high else [low, high]
        ys = [min(flops, bandwidth * x) / 1e12 for x in xs]
        axis.plot(xs, ys, color="#555555", linewidth=1, linestyle=style)
        # Lines lie close to each other: dashed ones have their words below.
        above = style == "-"
        axis.annotate(
            label,
            (high, ys[-1]),
            xytext=(-4, 3 if above else -3),
            textcoords="offset points",
            ha="right",
            va="bottom" if above else "top",
            fontsize=8,
            color="#555555",
        )
    for name, members in groups.items():
        by_dtype = {"f32": [r for r in members if r.problem.dtype == "f32"]}
        by_dtype["16 bits"] = [r for r in members if r.problem.dtype != "f32"]
        for dtype, points in by_dtype.items():
            if points:
                _points(axis, points, f"{name}, {dtype}", MARKERS.get(name, "o"), filled=dtype != "f32")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel("FLOPs per byte (q, k, v read once, o written once)")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"roofline ({run.device})")
    axis.grid(which="both", linewidth=0.4, alpha=0.35)
    axis.legend(loc="lower right", frameon=False, fontsize=8)
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
            kind = row.problem.dtype if row.problem.precision == "auto" else row.problem.precision
            found.setdefault(f"products, {'16 bits' if kind in ('f16', 'bf16') else kind}", (flops, "-"))
    rate = run.ceilings.rates.get("ex2")
    halves: Mapping[int, Row] = {r.problem.head_dim: r for r in rows if r.problem.dtype != "f32"}
    if rate:
        for head_dim in sorted(set(halves) & {64, 128}):
            found[f"exponentials, head dim {head_dim}"] = (rate * 4 * head_dim, "--")
    return [(label, flops, style) for label, (flops, style) in found.items()]
