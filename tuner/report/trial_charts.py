"""Charts of all families' trials: in order, by what they take of the card, and beside the prediction."""

from __future__ import annotations

from ...gen.limits import KIB
from .charts.chart import Chart, wide_and_narrow
from .charts.points import MOST_MARKS, Mark, history, scatter
from .charts.svg import HALF
from .charts.units import Unit
from .content import MOST_PREDICTED, Report, Trial


def history_chart(report: Report, unit: Unit, order: dict[str, int]) -> Chart:
    """Draws every trial's time in the order in which they ended; ``order`` numbers the families."""
    marks = [_mark(t, t.number, report, unit, order) for t in report.timed]
    failed = [t.number for t in report.failed]
    best = min(m.y for m in marks)
    alt = (
        f"Time of each of {len(report.trials)} trials in order, on a logarithmic axis. The best, "
        f"{unit.words(best)}, was found at trial {min(m.x for m in marks if m.y == best):.0f}; "
        f"{len(failed)} failed."
    )
    count = len(report.trials)
    drawing = wide_and_narrow(lambda width: history(marks, failed, count, unit, alt, width))
    key = (*_family_key(report), ("chosen", "winner"), ("best-line", "best so far"))
    note = "Every trial in the order in which it ended; the scale is logarithmic."
    note += drawn_of(len(marks), MOST_MARKS, ", beside every one that was the best so far")
    return Chart("Best so far", note, *drawing, key=key)


def drawn_of(count: int, most: int, beside: str = "") -> str:
    """Says how many of so many trials a chart draws at most; nothing where it draws all."""
    return f" Of {count:,} trials {most:,} are drawn, evenly chosen{beside}." if count > most else ""


def new_bests(report: Report) -> tuple[Trial, ...]:
    """Returns the trials that were faster than all before them, in order."""
    found: list[Trial] = []
    best = float("inf")
    for trial in report.timed:
        assert trial.median_us is not None
        if trial.median_us < best:
            best = trial.median_us
            found.append(trial)
    return tuple(found)


def _family_key(report: Report) -> tuple[tuple[str, str], ...]:
    return tuple((f"s{i % 4}", part.name) for i, part in enumerate(report.families) if part.timed)


def _mark(trial: Trial, x: float, report: Report, unit: Unit, order: dict[str, int]) -> Mark:
    us = trial.median_us
    assert us is not None
    chosen = report.winner is not None and trial.number == report.winner.number
    label = f"trial {trial.number}, {trial.variant.family}: {unit.words(us)}"
    return Mark(x, us, order[trial.variant.family], label, chosen)


def resource_charts(report: Report, unit: Unit, order: dict[str, int]) -> tuple[Chart, ...]:
    """Draws times against shared memory and against registers."""
    limits = report.limits
    smem, registers = [], []
    for trial in report.timed:
        measured = trial.outcome.measurement
        assert measured is not None
        smem.append(_mark(trial, measured.smem_bytes / KIB, report, unit, order))
        registers.append(_mark(trial, measured.registers, report, unit, order))
    reserved = limits.smem_reserved_per_block
    fences = [(limits.smem_per_block / KIB, "limit")]
    most = max(m.x for m in smem)
    for blocks in (2, 3, 4):
        at = (limits.smem_per_sm / blocks - reserved) / KIB
        if at < most * 1.3 and at < 0.9 * fences[-1][0]:
            fences.append((at, f"{blocks} fit"))
    if fences[0][0] > 2 * most:
        del fences[0]
    alt = "Time against {}: {} trials, from {:g} to {:g}."
    key = (*_family_key(report), ("chosen", "winner"))
    x_words = "{:g}".format
    return (
        Chart(
            "Shared memory",
            f"Upright lines: how many blocks' shared memory fits an SM, and what a block may have "
            f"({limits.smem_per_block / KIB:g} KiB)." + drawn_of(len(smem), MOST_MARKS),
            *wide_and_narrow(
                lambda width: scatter(
                    smem,
                    alt.format("shared memory per block", len(smem), min(m.x for m in smem), most),
                    width,
                    x_name="shared memory per block, KiB",
                    y_name=f"time, {unit.name}",
                    x_words=x_words,
                    y_words=unit.tick,
                    fences=fences,
                ),
                HALF,
            ),
            key=key,
        ),
        Chart(
            "Registers",
            "As compiled; kernels that share registers out among warpgroups show what a launch gives each "
            f"thread. At most {limits.max_registers_per_thread}." + drawn_of(len(registers), MOST_MARKS),
            *wide_and_narrow(
                lambda width: scatter(
                    registers,
                    alt.format(
                        "registers per thread",
                        len(registers),
                        min(m.x for m in registers),
                        max(m.x for m in registers),
                    ),
                    width,
                    x_name="registers per thread",
                    y_name=f"time, {unit.name}",
                    x_words=x_words,
                    y_words=unit.tick,
                    fences=[(limits.max_registers_per_thread, "limit")],
                ),
                HALF,
            ),
            key=key,
        ),
    )


def model_chart(report: Report, unit: Unit, order: dict[str, int]) -> Chart | None:
    """Draws measured against predicted times; None for predictions alone, or too few trials."""
    if report.predicted:
        return None
    marks = [
        _mark(t, t.prediction.median_us, report, unit, order)
        for t in report.timed
        if t.prediction is not None
    ]
    if len(marks) < 3:
        return None
    rhos = "; ".join(f"{p.name} {p.rho:.2f}" for p in report.families if p.rho is not None)
    alt = f"Measured against predicted time of {len(marks)} trials. Spearman's rho: {rhos or 'none'}."
    drawing = wide_and_narrow(
        lambda width: scatter(
            marks,
            alt,
            width,
            x_name=f"predicted, {unit.name}",
            y_name=f"measured, {unit.name}",
            x_words=unit.tick,
            y_words=unit.tick,
            square=True,
        ),
        HALF,
    )
    note = "On the dashed line both agree; above it the card was slower than predicted."
    if any(len(part.timed) > MOST_PREDICTED for part in report.families):
        note += f" Of a family's trials {MOST_PREDICTED:,} were predicted, evenly chosen by their times."
    note += drawn_of(len(marks), MOST_MARKS)
    key = (*_family_key(report), ("chosen", "winner"))
    return Chart("Predicted and measured", note, *drawing, key=key)
