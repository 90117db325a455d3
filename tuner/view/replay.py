"""What a person sees of replayed searches: a table per space, one over all, and a plot."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ..errors import FlashgenError
from ..exchange.replay_curves import GOAL, HIGH, LOW, MARKS, Replayed
from ..files import write_bytes
from ..search.sampler_names import SamplerName
from .drawing import require_matplotlib
from .words import microseconds, problem_words, widen

#: The method that is compared with the others.
OURS = str(SamplerName.GP)
PANELS_PER_ROW = 3
PANEL_INCHES = (5.2, 3.6)
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@contextlib.contextmanager
def replay_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar on a terminal, nothing elsewhere; yields what is told how many runs are done, of how
    many."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def show_replays(console: Console, replays: Sequence[Replayed]) -> None:
    widen(console)
    for replayed in replays:
        console.print(_table(replayed))
        for line in notes(replayed):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(replays) > 1:
        console.print(_overall(replays))


def notes(replayed: Replayed) -> list[str]:
    """Returns, in sentences, what follows from the table of a replayed space."""
    space = replayed.space
    timed = sum(e.median_us is not None for e in space.entries)
    count = f"{timed} of {len(space.entries)} variants work, the best takes {microseconds(space.best_us)}"
    if space.predicted:
        lines = [
            f"{count}; these times are the cost model's own: there is none to hold it to, and samplers that "
            "hear it know them beforehand"
        ]
    else:
        rho = "-" if replayed.rho is None else f"{replayed.rho:.2f}"
        lines = [
            f"{count}; rank correlation of the cost model's times with the recorded ones (Spearman's rho): "
            f"{rho}"
        ]
    if space.unknown:
        family = space.family.family
        lines.append(f"{space.unknown} recorded variants are left out: {family} has no such any more")
    if any(c.method == OURS for c in replayed.curves):
        own = next(c for c in replayed.curves if c.method == OURS)
        reached = np.flatnonzero(own.mean >= GOAL)
        when = f"after {reached[0] + 1} evaluations" if len(reached) else "not"
        lines.append(f"{OURS}: {100 * GOAL:.0f} % in the mean {when}, {replayed.allowed} allowed")
        ahead = [
            f"{who} at {mark} ({100 * theirs:.1f} against {100 * mine:.1f} %)"
            for mark, who, theirs, mine in replayed.ahead_of(OURS)
        ]
        if len(replayed.curves) > 1:
            lines.append(f"ahead of {OURS}: {', '.join(ahead) or 'none'}")
    return lines


def _table(replayed: Replayed) -> Table:
    space = replayed.space
    title = f"{space.family.family}, {problem_words(space.problem)}, {space.limits.name}"
    if space.predicted:
        title += " (predicted times)"
    starts = len(replayed.curves[0].shares)
    table = _empty_table(f"{escape(title)}: % of the optimum, {starts} starts")
    for curves in replayed.curves:
        until = curves.until()
        table.add_row(
            curves.method,
            *(_percent(curves.at(mark)) for mark in MARKS),
            _count(float(np.median(until))),
            _count(float(np.percentile(until, HIGH, method="higher"))),
        )
    return table


def _overall(replays: Sequence[Replayed]) -> Table:
    table = _empty_table(f"mean over {len(replays)} spaces")
    for index, curves in enumerate(replays[0].curves):
        same = [replayed.curves[index] for replayed in replays]
        cells = []
        for mark in MARKS:
            # A space that ends before has been searched whole, or as far as the others.
            shares = [float(each.mean[min(mark, len(each.mean)) - 1]) for each in same]
            cells.append(_percent(float(np.mean(shares))))
        until = np.concatenate([each.until() for each in same])
        table.add_row(
            curves.method,
            *cells,
            _count(float(np.median(until))),
            _count(float(np.percentile(until, HIGH, method="higher"))),
        )
    return table


def _empty_table(title: str) -> Table:
    caption = f"after so many evaluations; evaluations to {100 * GOAL:.0f} %: median, {HIGH} % of the starts"
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("sampler", no_wrap=True)
    for mark in MARKS:
        table.add_column(str(mark), justify="right", no_wrap=True)
    table.add_column(f"to {100 * GOAL:.0f} %", justify="right", no_wrap=True)
    table.add_column(f"{HIGH} %", justify="right", no_wrap=True)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _count(evaluations: float) -> str:
    return f"{evaluations:.0f}" if np.isfinite(evaluations) else "-"


def check_plot(path: Path) -> None:
    """Raises FlashgenError, before anything is replayed, where no plot can be drawn to the file."""
    require_matplotlib()
    if path.suffix not in PLOT_SUFFIXES:
        raise FlashgenError(
            f"{path} ends in {path.suffix or 'nothing'}, a plot in {', '.join(PLOT_SUFFIXES)}; name it "
            f"{path.with_suffix('.png').name}"
        )


def plot(path: Path, replays: Sequence[Replayed]) -> None:
    """Writes the curves, a panel per space: the mean over the starts, and the band that most of them keep."""
    # Slow to import, and drawn without a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(PANELS_PER_ROW, len(replays))
    rows = -(-len(replays) // columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for panel in panels[len(replays) :]:
        panel.set_visible(False)
    for panel, replayed in zip(panels, replays, strict=False):
        lowest = 1.0
        for number, curves in enumerate(replayed.curves):
            x = np.arange(1, curves.shares.shape[1] + 1)
            ours = curves.method.startswith(OURS)
            line = {"color": f"C{number}", "linewidth": 2.0 if ours else 1.2}
            panel.plot(x, 100 * curves.mean, label=curves.method, zorder=3 if ours else 2, **line)
            low, high = 100 * curves.quantile(LOW), 100 * curves.quantile(HIGH)
            panel.fill_between(x, low, high, color=line["color"], alpha=0.10, linewidth=0)
            lowest = min(lowest, float(curves.mean[min(4, len(x) - 1)]))
        panel.axhline(100 * GOAL, color="grey", linewidth=0.8, linestyle="--")
        panel.set_ylim(max(0.0, 100 * lowest - 5), 100.5)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        space = replayed.space
        panel.set_title(
            f"{space.problem.name}, {space.family.family}, {len(space.entries)} variants", fontsize=9
        )
        panel.set_xlabel("evaluations")
        panel.set_ylabel("share of the optimum, %")
    panels[0].legend(fontsize=7, loc="lower right")
    try:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=120, format=path.suffix.removeprefix("."))
        write_bytes(path, drawn.getvalue())
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written: {error.strerror or error}; free some space or name another file"
        ) from error
