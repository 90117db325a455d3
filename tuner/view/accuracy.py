"""The error table as it is printed or written, and single findings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..accuracy.survey import Surveyed
from ..accuracy.table import Cell, ErrorTable
from ..evaluate.adversarial import Finding
from .table import Table

#: Columns of figures that stand beside the groups' names within 80 characters.
COLUMNS = 6
#: What marks a group with cases beyond what is promised.
BROKEN = "!"


def accuracy_tables(table: ErrorTable, title: str) -> Iterator[Table]:
    """Yields the error table in parts as wide as a terminal."""
    broken = any(cell.broken for cell in table.cells.values())
    for first in range(0, len(table.columns), COLUMNS):
        columns = table.columns[first : first + COLUMNS]
        last = first + COLUMNS >= len(table.columns)
        yield Table(
            title if first == 0 else "",
            ("inputs", *(f"{name}\n{family}" for name, family in columns)),
            tuple(
                (group, *(_figure(table.cells.get((group, column))) for column in columns))
                for group in table.groups
            ),
            (f"{BROKEN} some case is beyond what the class promises",) if broken and last else (),
            left=1,
        )


def finding_line(finding: Finding) -> str:
    """Writes what one case showed in a line."""
    kept = "kept  " if finding.kept else "BROKEN"
    if math.isinf(finding.error):
        return f"{kept} {finding.group}: {finding.case}: {finding.where}"
    return (
        f"{kept} {finding.group}: {finding.case}: {finding.where} is {finding.error:.1e}, "
        f"{finding.bound:.1e} allowed"
    )


def surveyed_line(surveyed: Surveyed) -> str:
    """Writes how many cases one kernel keeps its promise on."""
    subject, broken = surveyed.subject, len(surveyed.broken)
    told = f"{broken} of {len(surveyed.findings)} cases beyond what is promised" if broken else "all kept"
    return f"{subject.name}, {subject.mask} mask, {subject.device.limits.name}: {told}"


def _figure(cell: Cell | None) -> str:
    if cell is None:
        return ""
    error = "inf" if math.isinf(cell.head_error) else f"{cell.head_error:.1e}"
    return error + (BROKEN if cell.broken else "")
