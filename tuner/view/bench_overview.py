"""A benchmark run in one picture: how many times faster than the fastest other, each workload a dot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..bench.figures import BEST, OURS, BenchRun, Row, by_suite, geomean, scaled_of
from .bench import title_of
from .bench_colours import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, INCHES_PER_SUITE, MARGIN_INCHES = 9.0, 0.46, 1.4
#: How far apart the dots of one suite lie across the line, so that equal ones show, and where the lines of
#: those timed on another day lie below.
SPREAD, BELOW, NEXT_BELOW = 0.09, 0.22, 0.13
#: The highest of what is drawn up to which all ticks have room.
DENSE_UP_TO = 15
COLOUR, OTHER_COLOUR = COLOURS[OURS], "#555555"
#: Those of contenders timed on another day, one after the other.
MARKERS = "os^D"


def overview(run: BenchRun) -> Figure:
    """Draws a line of dots for each suite: a workload's time by the fastest contender timed beside ours, over
    ours. Contenders that were timed on another day, and scaled, have rings of their own below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, NullLocator

    suites = list(by_suite(run.rows).items())
    figure = Figure(
        figsize=(WIDTH_INCHES, MARGIN_INCHES + INCHES_PER_SUITE * len(suites)), layout="constrained"
    )
    axis = figure.subplots()
    for place, (_, rows) in enumerate(suites):
        best = ratios(rows, BEST)
        _dots(axis, place, best, label="than the fastest timed beside it" if not place else "")
        if mean := geomean(best):
            axis.plot([mean, mean], [place - 0.3, place + 0.14], color=COLOUR, linewidth=2.5, zorder=2)
            axis.annotate(
                f"{mean:.2f}",
                (mean, place - 0.3),
                xytext=(0, 1),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8,
            )
    for number, name in enumerate(scaled_of(run.rows)):
        for place, (_, rows) in enumerate(suites):
            y, marker = place + BELOW + NEXT_BELOW * number, MARKERS[number % len(MARKERS)]
            label = f"than {name}, of another day, scaled"
            _dots(axis, y, ratios(_with_scaled(rows, name), name), marker=marker, label=label)
    axis.axvline(1.0, color=OTHER_COLOUR, linewidth=0.8)
    axis.set_xscale("log")
    highest = max((r for _, rows in suites for r in ratios(rows, BEST)), default=2.0)
    dense = (1.25, 6) if highest < DENSE_UP_TO else ()
    ticks = sorted(
        x for x in (0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 8, 10, 15, 20, 30, *dense) if x <= highest * 1.1
    )
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.set_xlim(min(0.93, *ratios(run.rows, BEST), *_of_scaled(run)) * 0.98, highest * 1.1)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(suites)), [title_of(name) for name, _ in suites])
    axis.set_ylim(len(suites) - 0.45, -0.65)
    axis.set_xlabel("times faster (each dot a workload, the bar a suite's geometric mean)", fontsize=9)
    axis.set_title(f"{OURS} on {run.device}", fontsize=10)
    axis.grid(axis="x", linewidth=0.5, alpha=0.4)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(reversed(labels), reversed(handles), strict=True))
    figure.legend(
        [unique[label] for label in dict.fromkeys(labels)],
        list(dict.fromkeys(labels)),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    return figure


def ratios(rows: Sequence[Row], name: str) -> list[float]:
    """Returns how many times faster ours is than a contender, or than `BEST`, where both were timed."""
    return [ratio for row in rows if (ratio := row.ratio(name)) is not None]


def _of_scaled(run: BenchRun) -> list[float]:
    return [ratio for name in scaled_of(run.rows) for ratio in ratios(_with_scaled(run.rows, name), name)]


def _with_scaled(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows that have a contender's time of another day: others may have timed it themselves."""
    return [row for row in rows if name in row.scaled_ms]


def _dots(axis: Axes, y: float, values: Sequence[float], *, label: str, marker: str = "") -> None:
    """Dots around a line, or rings of that marker on it."""
    filled = not marker
    if values:
        axis.scatter(
            sorted(values),
            [y + SPREAD * (i % 3 - 1) * filled for i in range(len(values))],
            s=26 if filled else 12,
            marker=marker or "o",
            facecolors=COLOUR if filled else "none",
            edgecolors=COLOUR if filled else OTHER_COLOUR,
            linewidths=0.8,
            alpha=0.75,
            label=label,
            zorder=3,
        )
