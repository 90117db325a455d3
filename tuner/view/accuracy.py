"""The error table as it is printed and as a Markdown file shows it, and single findings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..accuracy.survey import Surveyed
from ..accuracy.table import Cell, ErrorTable, error_table
from ..evaluate.adversarial import Finding
from .marked_files import read_marked, write_filled
from .table import Table

#: Columns of figures that stand beside the groups' names within 80 characters.
COLUMNS = 5
#: What marks a group with cases beyond what is promised.
BROKEN = "!"
TITLE = "‖o - ref‖ / ‖ref‖ of a head against float64, the largest of each group of inputs"
#: Begins and ends what is generated in a Markdown file.
BEGIN, END = "<!-- accuracy -->", "<!-- /accuracy -->"
SECTION = re.compile(rf"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)


def accuracy_tables(table: ErrorTable) -> Iterator[Table]:
    """Yields the error table in parts as wide as a terminal."""
    for first in range(0, len(table.columns), COLUMNS):
        columns = table.columns[first : first + COLUMNS]
        cells = [[table.cells.get((group, column)) for column in columns] for group in table.groups]
        broken = any(cell is not None and cell.broken for row in cells for cell in row)
        yield Table(
            TITLE if first == 0 else "",
            ("inputs", *(f"{name} {family}" for name, family in columns)),
            tuple(
                (group, *map(_figure, row))
                for group, row in zip(table.groups, cells, strict=True)
                if any(row)
            ),
            (f"{BROKEN} some of these cases are beyond what the class promises",) if broken else (),
            left=1,
        )


def require_markers(path: Path) -> str:
    """Returns the text of a Markdown file. Raises FlashgenError where it has nothing to fill."""
    return read_marked(path, SECTION, f"{BEGIN}` ... `{END}")


def fill_file(path: Path, surveyed: Sequence[Surveyed]) -> None:
    """Writes the error table and what each class promises between the markers of a Markdown file. Raises as
    `require_markers` does."""
    told = section(surveyed)
    write_filled(path, SECTION.sub(lambda found: f"{found[1]}{told}\n{found[2]}", require_markers(path)))


def section(surveyed: Sequence[Surveyed]) -> str:
    """Returns what stands between the markers."""
    promises = {each.subject.arithmetic: each.promised for each in surveyed}
    table = error_table(surveyed)
    lines = ["| class | promises |", "| :-- | :-- |"]
    order = dict.fromkeys(name for name, _ in table.columns)
    lines += [f"| {name} | {promises[name]} |" for name in order]
    devices = ", ".join(dict.fromkeys(each.subject.device.limits.name for each in surveyed))
    emulated = " (emulated)" if all(each.subject.device.predicted for each in surveyed) else ""
    cases = sum(len(each.findings) for each in surveyed)
    d = surveyed[0].subject.kernel.problem.head_dim
    told = f"{cases} cases on {len(surveyed)} kernels of head dim {d}, on {devices}{emulated}. {TITLE}:"
    return "\n\n".join(["\n".join(lines), told, *(each.markdown() for each in accuracy_tables(table))])


def finding_line(finding: Finding) -> str:
    """Writes what one case showed in a line."""
    return f"{'kept' if finding.kept else 'BROKEN'}: {finding.group}: {finding.words()}"


def surveyed_line(surveyed: Surveyed) -> str:
    """Writes how many cases one kernel keeps its promise on."""
    subject, broken = surveyed.subject, len(surveyed.broken)
    number = len(surveyed.findings)
    if surveyed.failure:
        return f"{subject.name}, {subject.mask} mask, {subject.device.limits.name}: {surveyed.failure}"
    told = f"{broken} of {number} cases beyond what is promised" if broken else f"all {number} cases kept"
    return f"{subject.name}, {subject.mask} mask, {subject.device.limits.name}: {told}"


def _figure(cell: Cell | None) -> str:
    if cell is None:
        return ""
    error = "inf" if math.isinf(cell.head_error) else f"{cell.head_error:.1e}"
    return error + (BROKEN if cell.broken else "")
