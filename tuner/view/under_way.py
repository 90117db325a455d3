"""Studies as they stand, as a table that a terminal shows anew."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from ..store.under_way import StudyUnderWay
from .words import microseconds


def under_way_table(where: str, studies: Sequence[StudyUnderWay], now: datetime.datetime) -> Table:
    """Lists studies: trials, the best, what failed, runs at work, and how long ago the last trial ended."""
    table = Table(title=f"studies in {escape(where)} at {now:%H:%M:%S}")
    table.add_column("study", overflow="fold")
    for heading in ("trials", "best", "of trial"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("failed", overflow="fold")
    table.add_column("at work", justify="right", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    for each in studies:
        table.add_row(
            # What ends the name tells versions apart, which people do not.
            escape(each.study.rpartition("/")[0] or each.study),
            str(each.ended),
            "" if each.best_us is None else microseconds(each.best_us),
            "" if each.best_trial is None else str(each.best_trial),
            escape(", ".join(f"{count} {status}" for status, count in each.failed.items())),
            f"[green]{each.workers} ({each.in_flight})[/green]" if each.workers else "",
            "" if each.last_at is None else _ago(now - each.last_at),
        )
    return table


def _ago(passed: datetime.timedelta) -> str:
    seconds = max(0, int(passed.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
