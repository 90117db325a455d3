"""The findings of a survey as figures of a table: the worst of each group, by class and family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..evaluate.adversarial import Finding
from .subjects import order_of
from .survey import Surveyed


@dataclass(frozen=True)
class Cell:
    """The worst of a group of cases: ‖o - ref‖ / ‖ref‖ of a head, and how many break the promise."""

    head_error: float
    broken: int
    cases: int


@dataclass(frozen=True)
class ErrorTable:
    """``cells[group][column]``; columns are class and family. A group that a type has no cases of lacks."""

    columns: tuple[tuple[str, str], ...]
    groups: tuple[str, ...]
    cells: dict[tuple[str, tuple[str, str]], Cell]


def error_table(surveyed: Sequence[Surveyed]) -> ErrorTable:
    """Returns the worst of each group of cases over both masks."""
    findings: dict[tuple[str, tuple[str, str]], list[Finding]] = {}
    groups: dict[str, None] = {}
    for each in surveyed:
        column = (each.subject.arithmetic, each.subject.family)
        for finding in each.findings:
            groups.setdefault(finding.group)
            findings.setdefault((finding.group, column), []).append(finding)
    columns = dict.fromkeys(column for _, column in findings)
    order = order_of({name for name, _ in columns})
    return ErrorTable(
        tuple(sorted(columns, key=lambda column: (order.index(column[0]), column[1]))),
        tuple(groups),
        {key: _cell(found) for key, found in findings.items()},
    )


def _cell(findings: Iterable[Finding]) -> Cell:
    found = list(findings)
    return Cell(max(finding.head_error for finding in found), sum(not f.kept for f in found), len(found))
