"""Tuned kernels as a person reads them: the list of all, and two side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from ...gen.scoring.words import scoring_words
from ...gen.variant import Value
from ..option_words import word
from ..shelf.library import Entry
from ..shelf.listing import FIGURES, Difference, name_of
from .words import microseconds, settings_words, widen

FIGURE_WORDS = {
    "median_us": "median",
    "tflops": "TFLOP/s",
    "spread": "spread",
    "registers": "registers per thread",
    "spill_bytes": "bytes spilled",
    "smem_bytes": "shared memory, bytes",
    "occupancy": "occupancy",
    "error": "error against float64",
}


#: Columns of a terminal beyond which a kernel's name would be broken in a heading.
NAMES_IN_HEADINGS = 22


def show_kernels(console: Console, entries: Sequence[Entry]) -> None:
    """Prints one line a kernel, under its card, with a column of masks and scores where any is asked for.
    Without files is what a study alone holds."""
    widen(console)
    for slug in dict.fromkeys(entry.slug for entry in entries):
        here = [entry for entry in entries if entry.slug == slug]
        predicted = all(entry.predicted for entry in here)
        kind = " (predicted, not measured)" if predicted else ""
        table = Table(title=escape(f"{slug}: {here[0].kernel.device}{kind}"), title_justify="left")
        table.add_column("kernel", min_width=16, overflow="fold")
        table.add_column("family")
        scored = any(not entry.kernel.problem.scoring.is_plain for entry in here)
        if scored:
            # Names of kernels come first.
            table.add_column("masks, scores", max_width=max(13, console.width - 65), overflow="fold")
        for heading in ("time", "TFLOP/s", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        for entry in here:
            kernel, m = entry.kernel, entry.kernel.measurement
            kind = " (predicted)" if entry.predicted and not predicted else ""
            kept = "" if entry.json_path is not None else " (no files)"
            table.add_row(
                f"{kernel.problem.name}{kept}",
                # In two lines, which leaves the names of kernels more of a narrow terminal.
                kernel.variant.family.replace("-", "-\n"),
                *([escape(scoring_words(kernel.problem.scoring))] if scored else []),
                microseconds(m.median_us),
                f"{m.tflops:.1f}{kind}",
                f"{m.error:.1e}",
            )
        console.print(table)


def show_difference(console: Console, difference: Difference, *, source: bool) -> None:
    """Prints what differs, the figures of both, and the change of the source."""
    widen(console)
    a, b = difference.a, difference.b
    table = Table()
    table.add_column("")
    names = [name_of(a), name_of(b)]
    if max(map(len, names)) > NAMES_IN_HEADINGS:
        for letter, name in zip("AB", names, strict=True):
            console.print(f"{letter}: {name}", markup=False, highlight=False)
        names = ["A", "B"]
    for name in names:
        table.add_column(escape(name), justify="right", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    for name, pair in (difference.problem | difference.made).items():
        table.add_row(name, *map(_cell, pair), "")
    table.add_section()
    for name, pair in difference.parameters.items():
        table.add_row(name, *map(_cell, pair), "")
    if not difference.parameters:
        table.add_row("parameters", "the same", "the same", "")
    table.add_section()
    for name, pair in difference.figures.items():
        table.add_row(FIGURE_WORDS[name], *(_figure(name, each) for each in pair), _ratio(name, *pair))
    console.print(table)
    if a.predicted != b.predicted:
        console.print("one is predicted, the other measured: their times do not compare", highlight=False)
    if len({type(entry.kernel.variant) for entry in (a, b)}) == 1 and not difference.parameters:
        console.print(f"both: {settings_words(a.kernel.variant)}", highlight=False, markup=False)
    if not difference.source:
        console.print("the sources are the same", highlight=False)
    elif source:
        if console.is_terminal:
            console.print(Syntax(difference.source, "diff", background_color="default", word_wrap=True))
        else:
            console.print(difference.source, markup=False, highlight=False, soft_wrap=True, end="")
    else:
        lines = difference.source.splitlines()[2:]
        added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        console.print(f"sources: {added} lines added, {removed} removed", highlight=False)


def _cell(value: Value | None) -> str:
    return "-" if value is None else escape(word(value))


def _figure(name: str, value: float) -> str:
    match name:
        case "median_us":
            return microseconds(value)
        case "tflops":
            return f"{value:.2f}"
        case "spread":
            return f"{100 * value:.1f} %"
        case "occupancy":
            return f"{100 * value:.0f} %"
        case "error":
            return f"{value:.1e}"
        case _:
            return str(value)


def _ratio(name: str, a: float, b: float) -> str:
    """The second over the first; green where it is better by more than a hundredth."""
    if not a or not b or a == b:
        return ""
    less_is_better = FIGURES[name]
    text = f"x {b / a:.3g}"
    if less_is_better is None or abs(b / a - 1) < 0.01:
        return text
    return f"[green]{text}[/green]" if (b < a) == less_is_better else f"[red]{text}[/red]"
