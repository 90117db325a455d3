"""The ladder as a person reads it: a table for each case."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from ..bench.ladder_result import CASES, FASTEST, SIMT, LadderResult, Row

#: What tables say of flashgen's own kernels beside the steps.
OURS = {SIMT: "the best by multiply-adds", FASTEST: "the best of all families"}


def ladder_tables(result: LadderResult) -> Iterator[Table]:
    """Returns one table per case. The result's notes are left to the caller."""
    for case in result.cases:
        yield _table(result, case)


def row_line(row: Row) -> str:
    """Returns a row in one line, for progress."""
    if row.median_us is None:
        return f"{row.case} {row.label}: {row.status}: {row.reason}"
    return f"{row.case} {row.label}: {_milliseconds(row)} ms"


def _table(result: LadderResult, case: str) -> Table:
    problem = CASES[case]
    kind = "predicted, not measured" if result.predicted else "measured"
    table = Table(
        title=f"{case}: batch {problem.batch}, seqlen {problem.seqlen_q}, head dim {problem.head_dim}, "
        f"f32 on {escape(result.device)} ({kind})"
    )
    table.add_column("step", no_wrap=True)
    table.add_column("what", overflow="fold")
    rows = result.rows_of(case)
    first = next((row.name for row in rows if row.is_step and row.median_us), "the first")
    for heading in ("ms", "TFLOP/s", f"x {first}", "x last", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    seen_other = False
    for row in rows:
        if not row.is_step and not seen_other:
            table.add_section()
            seen_other = True
        table.add_row(*_cells(result, row))
    remarks = [escape(row.title) for row in rows if row.tuned is not None]
    scaled = [row for row in rows if row.scaled_from is not None]
    if scaled:
        remarks.append(f"~ scaled from seqlen {scaled[0].scaled_from}: one launch would take too long")
    table.caption = "\n".join(remarks)
    return table


def _cells(result: LadderResult, row: Row) -> list[str]:
    if row.median_us is None:
        return [row.label, escape(f"{row.title}: {row.status}: {row.reason}"), "-", "", "", "", ""]
    over_first, over_previous = result.speedups(row)
    error = row.measurement.error if row.measurement is not None else None
    return [
        row.label,
        # Where a tuned kernel comes from takes a sentence: it stands below the table.
        escape(row.title if row.tuned is None else OURS[row.name] + ("" if row.tuned else ", untuned")),
        _milliseconds(row),
        f"{row.tflops:.2f}",
        f"{over_first:.2f}x" if over_first is not None else "",
        f"{over_previous:.2f}x" if over_previous is not None else "",
        f"{error:.1e}" if error is not None else "",
    ]


def _milliseconds(row: Row) -> str:
    assert row.median_us is not None
    ms = row.median_us / 1000
    digits = 1 if ms >= 100 else 2 if ms >= 10 else 3
    return f"{'~' if row.scaled_from is not None else ''}{ms:.{digits}f}"
