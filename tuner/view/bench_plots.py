"""A benchmark run as plots, PNG and SVG: bars by suite, all in one, the roofline. By matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...gen.problem import Problem
from ..bench.contenders import LADDER
from ..bench.figures import (
    BEST,
    OURS_SAME_BITS,
    SAME_BITS,
    BenchRun,
    Row,
    by_suite,
    contenders_of,
    key_bytes,
    scaled_of,
)
from ..errors import FlashgenError
from ..files import write_bytes
from .bench import LAST_STEP, counts_keys, title_of
from .bench_colours import COLOURS, OTHER_COLOUR
from .bench_overview import overview
from .bench_roofline import roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
INCHES_PER_GROUP, LEAST_INCHES, PANEL_INCHES = 0.75, 5.0, 2.9
#: What one name of the key takes.
INCHES_PER_NAME = 1.3
GRID_COLUMNS = 2
#: After the name of a contender that another run timed.
SCALED = ", scaled"
SCALED_NOTE = "scaled: another run's times, by those here over those there of a contender of both"


@dataclass(frozen=True)
class Panel:
    """Bars of one plot: a value by contender for each group. ``across`` says what groups differ in."""

    title: str
    across: str
    groups: tuple[tuple[str, dict[str, float]], ...]


def write_plots(folder: Path, run: BenchRun) -> list[Path]:
    """Writes all plots of a run as PNG and SVG and returns their paths. The same run gives the same files."""
    import matplotlib

    figures = {name: bars(name, rows, run) for name, rows in by_suite(run.rows).items() if _timed(rows)}
    if any(row.ratio(BEST) for row in run.rows):
        figures["overview"] = overview(run)
    if _timed(run.rows) and run.ceilings.rates.get("copy"):
        figures["roofline"] = roofline(run)
    paths = []
    for name, figure in figures.items():
        for suffix in SUFFIXES:
            path = folder / f"{name}{suffix}"
            drawn = io.BytesIO()
            metadata: dict[str, Any] = {"Date": None} if suffix == ".svg" else {"Software": None}
            with matplotlib.rc_context({"svg.hashsalt": "flashgen"}):
                figure.savefig(drawn, dpi=120, format=suffix.removeprefix("."), metadata=metadata)
            try:
                write_bytes(path, drawn.getvalue())
            except OSError as error:
                raise FlashgenError(
                    f"{path} cannot be written: {error.strerror or error}; free some space or name another "
                    "folder with --plots"
                ) from error
            paths.append(path)
    return paths


def _timed(rows: Sequence[Row]) -> bool:
    return any(row.ours for row in rows)


# -- bars ----------------------------------------------------------------------------------------------------


def panels_of(suite: str, rows: Sequence[Row]) -> tuple[str, list[Panel]]:
    """Returns the unit, and what is drawn in it: `llm` and `eight` by head dim and mask over lengths, `masks`
    by what is asked for, gradients by head dim or what else is special of them, others in one panel.
    Contenders that another run timed stand there by their scaled times, as in the tables.
    """
    unit, work_of = _speed_of(suite)

    def values(row: Row) -> dict[str, float]:
        work = work_of(row)
        shown = [n for n in row.cells if not n.startswith(LADDER) or n == LAST_STEP]
        here = {name: work / ms for name in shown if (ms := row.ms(name))}
        if row.deterministic and row.ours and any(name.endswith(SAME_BITS) for name in here):
            here[OURS_SAME_BITS] = work / row.ours
        return here | {name + SCALED: work / ms for name, ms in row.scaled_ms.items()}

    kinds: dict[str, list[Row]] = {}
    if suite == "masks":
        for row in rows:
            kinds.setdefault(_kind(row.problem), []).append(row)
        return unit, [
            Panel(title, "workload", tuple((row.name, values(row)) for row in members))
            for title, members in kinds.items()
        ]
    if suite == "backward":
        for row in rows:
            kinds.setdefault(_kind_of_gradients(row.problem), []).append(row)
        return unit, [
            Panel(title, "workload", tuple((_short(row.name), values(row)) for row in members))
            for title, members in kinds.items()
        ]
    if suite == "paged":
        sizes = sorted({row.problem.page_size for row in rows})
        return unit, [
            Panel(
                f"pages of {size} keys",
                "workload",
                tuple(
                    (row.name.removesuffix(f"-page{size}"), values(row))
                    for row in rows
                    if row.problem.page_size == size
                ),
            )
            for size in sizes
        ]
    if suite not in ("llm", "eight"):
        return unit, [Panel("", "workload", tuple((row.name, values(row)) for row in rows))]

    def key(row: Row) -> tuple[int, bool]:
        return row.problem.head_dim, row.problem.causal

    panels = []
    for (head_dim, causal), members in groupby(sorted(rows, key=key), key):
        groups = tuple((str(row.problem.seqlen_q), values(row)) for row in members)
        title = f"head dim {head_dim}{', causal' if causal else ''}"
        panels.append(Panel(title, "sequence length", groups))
    return unit, panels


def _speed_of(suite: str) -> tuple[str, Callable[[Row], float]]:
    """The unit of a suite's speed, and how many of it a row is times milliseconds. Decoding is bound by what
    it reads, so that bytes say more of it than operations."""
    if counts_keys(suite):
        return "TB/s of keys and values", lambda row: key_bytes(row.problem) * 1e-9
    if suite == "decode":
        return "GB/s", lambda row: row.problem.min_bytes * 1e-6
    return "TFLOP/s", lambda row: row.problem.flops * 1e-9


def _kind(problem: Problem) -> str:
    """What is asked for beside a causal mask."""
    if problem.scores.change is not None or problem.scores.sinks:
        return "changes of scores"
    return "windows" if problem.scoring.window is not None else "other masks, and none"


#: Head dims whose gradients are timed at several lengths.
USUAL_HEAD_DIMS = (64, 128, 256)


def _kind_of_gradients(problem: Problem) -> str:
    if problem.dtype == "f32":
        return "float32"
    if not problem.scoring.is_plain:
        return "masks and changes of scores"
    return f"head dim {problem.head_dim}" if problem.head_dim in USUAL_HEAD_DIMS else "other head dims"


def _short(name: str) -> str:
    """A workload's name without what its panel says."""
    return re.sub(r"^backward-(.*?)(?:bf16|f32)-", r"\1", name)


def bars(suite: str, rows: Sequence[Row], run: BenchRun) -> Figure:
    """Draws the speed of all contenders on the workloads of one suite."""
    from matplotlib.figure import Figure

    unit, panels = panels_of(suite, rows)
    known = [
        *dict.fromkeys((*contenders_of(rows), OURS_SAME_BITS)),
        *(name + SCALED for name in scaled_of(rows)),
    ]
    names = [n for n in known if any(n in values for p in panels for _, values in p.groups)]
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
            # The panels of a column share what the last of them says.
            axis.set_xlabel(panels[place].across if place + columns >= len(panels) else "")
        else:
            axis.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.suptitle(f"{title_of(suite)} ({run.device})")
    per_line = max(1, int(width / INCHES_PER_NAME))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), per_line),
        frameon=False,
        title=SCALED_NOTE if any(name.endswith(SCALED) for name in names) else None,
        title_fontsize="small",
    )
    return figure


def _panel(axis: Axes, panel: Panel, names: Sequence[str]) -> None:
    width = 0.84 / max(len(names), 1)
    for i, name in enumerate(names):
        places = [group - 0.42 + (i + 0.5) * width for group in range(len(panel.groups))]
        heights = [values.get(name, 0.0) for _, values in panel.groups]
        colour = COLOURS.get(name.removesuffix(SCALED), OTHER_COLOUR)
        # Hatched: not timed beside the others.
        hatch = {"hatch": "////", "edgecolor": "white", "linewidth": 0} if name.endswith(SCALED) else {}
        axis.bar(places, heights, width, label=name, color=colour, **hatch)
    labels = [label for label, _ in panel.groups]
    crowded = max(map(len, labels)) > 8
    axis.set_xticks(
        range(len(labels)), labels, rotation=35 if crowded else 0, ha="right" if crowded else "center"
    )
    axis.set_title(panel.title)
    axis.grid(axis="y", linewidth=0.5, alpha=0.4)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
