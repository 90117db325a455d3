"""What a tuning run found: each problem's winner, the finalists, the failures and where the files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..evaluate.outcome import Outcome
from ..tune.batch import BatchResult
from ..tune.coordinator import TuneResult
from ..tune.wall_time import WallTime
from .words import changed_settings, microseconds, settings_words, widen


def show_result(console: Console, result: TuneResult) -> None:
    """Prints a run's winner, its finalists, what failed and where the files are."""
    widen(console)
    kernel, m = result.kernel, result.kernel.measurement
    kind = "predicted, not measured" if m.predicted else "measured"
    table = Table(title=f"{kernel.problem.name} on {escape(kernel.device)} ({kind})", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("variant", f"{kernel.variant.family}: {settings_words(kernel.variant)}")
    table.add_row("predicted time" if m.predicted else "median", microseconds(m.median_us))
    if not m.predicted:
        table.add_row("spread", f"{100 * m.spread:.1f} % between quartiles, {len(m.times_us)} times")
    table.add_row("speed", f"{m.tflops:.2f} TFLOP/s{' (predicted)' if m.predicted else ''}")
    table.add_row(
        "registers",
        f"{m.registers} per thread" + (f", {m.spill_bytes} bytes spilled" if m.spill_bytes else ""),
    )
    table.add_row("shared memory", f"{m.smem_bytes} bytes per block")
    table.add_row("occupancy", f"{100 * m.occupancy:.0f} %")
    table.add_row("error", f"{m.error:.1e} against float64")
    if m.busy:
        table.add_row("doubtful", escape(m.busy), style="yellow")
    table.add_row("trials", trial_words(result))
    for doubt, count in result.doubtful.items():
        table.add_row("doubtful", escape(f"times of {count} trials: {doubt}"), style="yellow")
    table.add_row("wall time", wall_time_words(result.wall_time))
    table.add_row("trials kept in", result.storage)
    console.print(table)
    if len(result.finalists) > 1:
        console.print(finalists_table(result.finalists))
    if result.reasons:
        console.print(reasons_table(result.reasons))
    if result.kept_faster is not None:
        console.print(
            f"nothing faster was found than {result.kept_faster}, which stays as it is",
            highlight=False,
            soft_wrap=True,
        )
    else:
        for path in (result.paths.cu, result.paths.py, result.paths.json):
            if not path.exists():
                continue
            console.print(f"wrote {path}", highlight=False, soft_wrap=True, markup=False)
    if result.interrupted:
        console.print("stopped early; the same command goes on from here", highlight=False)


def show_batch(console: Console, batch: BatchResult) -> None:
    """Prints the winner of each problem, a line each, and what was left out."""
    widen(console)
    if batch.results:
        first = batch.results[0].kernel
        predicted = first.measurement.predicted
        kind = "predicted, not measured" if predicted else "measured"
        table = Table(title=f"{escape(first.device)} ({kind})", title_justify="left")
        for heading in ("kernel", "family"):
            table.add_column(heading, overflow="fold")
        for heading in ("time", "TFLOP/s", "error", "trials"):
            table.add_column(heading, justify="right", no_wrap=True)
        for result in batch.results:
            m = result.kernel.measurement
            table.add_row(
                result.kernel.problem.name,
                result.kernel.variant.family,
                microseconds(m.median_us),
                f"{m.tflops:.2f}",
                f"{m.error:.1e}",
                str(sum(result.counts.values())),
                style="yellow" if m.busy else None,
            )
        console.print(table)
        kept = sum(result.kept_faster is not None for result in batch.results)
        told = f"wrote {len(batch.results) - kept} kernels to {batch.results[0].paths.py.parent}"
        if kept:
            told += f"; {kept} that were known are faster and stay as they are"
        console.print(told, highlight=False, soft_wrap=True, markup=False)
    if batch.module is not None:
        told = f"wrote {batch.module}, a module of them all"
        console.print(told, highlight=False, soft_wrap=True, markup=False)
    for name, reason in batch.failed.items():
        text = f"not tuned: {name}: {reason}"
        console.print(text, style="red", highlight=False, soft_wrap=True, markup=False)
    if batch.interrupted:
        console.print("stopped early; the same command goes on from here", highlight=False)


def trial_words(result: TuneResult) -> str:
    """Writes how many trials a run made, of which status, and how many others made."""
    counts = ", ".join(f"{count} {status}" for status, count in result.counts.items())
    earlier = f" and {result.trials_earlier} of earlier runs" if result.trials_earlier else ""
    if result.trials_elsewhere:
        earlier += f" and {result.trials_elsewhere} of other coordinators meanwhile"
    return f"{result.trials_run} in {result.seconds:.0f} s{earlier}: {counts}"


def wall_time_words(spent: WallTime) -> str:
    """Writes what the cards did with the run's wall time, and the compilers beside them."""
    percent = {name: f"{100 * share:.0f} %" for name, share in spent.shares().items()}
    cards = "the card" if spent.cards == 1 else "the cards"
    return (
        f"{cards} busy {100 * spent.busy:.0f} %: validating {percent['validate']}, timing {percent['time']}, "
        f"finalists {percent['finals']}; waiting for compilers {percent['wait for compilers']}, "
        f"idle {percent['idle']}; compilers busy {percent['compile']}"
    )


def finalists_table(finalists: Sequence[Outcome]) -> Table:
    """Lists the finalists, fastest first, with their figures or why they failed."""
    predicted = any(o.measurement is not None and o.measurement.predicted for o in finalists)
    table = Table(title=f"finalists{'' if predicted else ', timed in turns'}; the first validated in full")
    for heading in ("predicted" if predicted else "median", "spread", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("variant", overflow="fold")
    ordered = sorted(finalists, key=lambda o: o.measurement.median_us if o.measurement else float("inf"))
    several = len({type(outcome.variant) for outcome in finalists}) > 1
    for outcome in ordered:
        m = outcome.measurement
        settings = changed_settings(outcome.variant)
        if several:
            settings = f"{outcome.variant.family}: {settings}"
        if m is None:
            table.add_row("-", "-", "-", f"{settings}: {outcome.status}, {outcome.reason}")
        else:
            spread = "-" if m.predicted else f"{100 * m.spread:.1f} %"
            table.add_row(microseconds(m.median_us), spread, f"{m.error:.1e}", settings)
    return table


def reasons_table(reasons: Mapping[str, int], *, most: int = 8) -> Table:
    """Lists why trials failed, the most frequent reasons first."""
    table = Table(title="failures by reason")
    table.add_column("trials", justify="right")
    table.add_column("reason", overflow="fold")
    for reason, count in list(reasons.items())[:most]:
        table.add_row(str(count), escape(reason))
    if len(reasons) > most:
        table.add_row(str(sum(list(reasons.values())[most:])), "other reasons")
    return table
