"""What a person reads: progress of a run, tables and verdicts. JSON never passes through here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ...gen.limits import KIB, PRESETS, DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Value, Variant
from ..cards.cuda import CudaDevice
from ..cards.names import Tool
from ..evaluate.outcome import Measurement, Outcome
from ..shelf.bundle import Pick, kernels_of
from ..shelf.emitting import Emitted
from ..tune.batch import BatchResult
from ..tune.coordinator import Event, FinalsStarted, Notice, SearchGoesOn, SpaceReady, TrialDone, TuneResult
from ..tune.wall_time import WallTime
from .space import SpaceView

#: Without a terminal, a line at least this often, so that a log shows the run is alive.
LINE_SECONDS = 20.0
MIN_TABLE_WIDTH = 80


def microseconds(us: float) -> str:
    """A time in the unit that reads best."""
    if us >= 1e6:
        return f"{us / 1e6:.3f} s"
    return f"{us / 1e3:.3f} ms" if us >= 1e3 else f"{us:.1f} us"


def changed_settings(variant: Variant) -> str:
    """The parameters that are not the family's defaults, as ``--set`` takes them."""
    return differing_settings(variant, type(variant)()) or "defaults"


def differing_settings(variant: Variant, other: Variant) -> str:
    """The parameters in which a variant differs from another of its family."""
    theirs = other.to_dict()
    return " ".join(f"{k}={word(v)}" for k, v in variant.to_dict().items() if v != theirs[k])


def make_room(console: Console) -> None:
    """Tables squeezed below this width would lose words; a narrower terminal wraps their lines instead."""
    console.width = max(console.width, MIN_TABLE_WIDTH)


def word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def figures(measurement: Measurement) -> str:
    kind = "predicted " if measurement.predicted else ""
    return f"{kind}{microseconds(measurement.median_us)}, {measurement.tflops:.2f} TFLOP/s"


class RunView:
    """Shows the events of a tuning run: a live bar on a terminal, a few lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = None
        self._best: Outcome | None = None
        self._families: set[str] = set()
        self._last_line = time.monotonic()

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __call__(self, event: Event) -> None:
        match event:
            case SpaceReady():
                self._space(event)
            case SearchGoesOn():
                self._go_on(event)
            case TrialDone():
                self._trial(event)
            case Notice():
                self._print(event.text)
            case FinalsStarted():
                self._stop()
                measured = [o.measurement for o in event.finalists if o.measurement is not None]
                timed = "" if any(m.predicted for m in measured) else ", then timing them in turns"
                self._print(f"validating the {len(event.finalists)} fastest in full{timed}")

    def begin(self, problem: Problem, number: int, count: int) -> None:
        """Another problem's trials follow."""
        self._stop()
        self._best, self._families = None, set()
        if count > 1:
            self._print(f"-- {problem.name}, {number} of {count}")

    def note(self, text: str) -> None:
        self._print(text)

    def _space(self, event: SpaceReady) -> None:
        self._stop()
        self._families.add(event.family)
        earlier = f", {event.earlier} of them tried by earlier runs" if event.earlier else ""
        how = "; swept whole" if event.sweeps else ""
        self._print(
            f"{event.family}: {event.legal} legal variants of {event.total}{earlier}{how} "
            f"(enumerated in {event.seconds:.1f} s)"
        )
        if event.taught_by:
            self._print(f"{event.family}: starts from the trials of {' and '.join(event.taught_by)}")
        self._start_bar(event.family, event.earlier, event.budget)

    def _go_on(self, event: SearchGoesOn) -> None:
        self._stop()
        more = f"{event.budget - event.done} more trials" if event.budget else "the rest of the time"
        self._print(f"{event.family}: among the fastest so far, gets {more}")
        self._start_bar(event.family, event.done, event.budget)

    def _start_bar(self, family: str, done: int, budget: int | None) -> None:
        if self._console.is_terminal:
            progress = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[best]}"),
                console=self._console,
                transient=True,
            )
            self._task = progress.add_task(
                family, total=budget, completed=done, best="compiling the first variants"
            )
            progress.start()
            self._progress = progress

    def _trial(self, event: TrialDone) -> None:
        improved = event.best is not None and event.best is not self._best
        self._best = event.best
        live = self._progress is not None
        if improved or (not live and time.monotonic() - self._last_line > LINE_SECONDS):
            settings = f" ({self._variant_text(self._best.variant)})" if self._best is not None else ""
            budget = f"/{event.budget}" if event.budget else ""
            self._print(f"trial {event.number}{budget}: {self._best_text()}{settings}")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=event.number, best=self._best_text())

    def _best_text(self) -> str:
        if self._best is None or self._best.measurement is None:
            return "nothing works yet"
        return f"best {figures(self._best.measurement)}"

    def _variant_text(self, variant: Variant) -> str:
        family = f"{variant.family}: " if len(self._families) > 1 else ""
        return family + changed_settings(variant)

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def show_result(console: Console, result: TuneResult) -> None:
    """The winner, the finalists, what failed and where the files are."""
    make_room(console)
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
            console.print(f"wrote {path}", highlight=False, soft_wrap=True, markup=False)
    if result.interrupted:
        console.print("stopped early; the same command goes on from here", highlight=False)


def show_batch(console: Console, batch: BatchResult) -> None:
    """The winner of each problem, a line each, and what was left out."""
    make_room(console)
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


def settings_words(variant: Variant) -> str:
    return " ".join(f"{k}={word(v)}" for k, v in variant.to_dict().items())


def trial_words(result: TuneResult) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in result.counts.items())
    earlier = f" and {result.trials_earlier} of earlier runs" if result.trials_earlier else ""
    if result.trials_elsewhere:
        earlier += f" and {result.trials_elsewhere} of other coordinators meanwhile"
    return f"{result.trials_run} in {result.seconds:.0f} s{earlier}: {counts}"


def wall_time_words(spent: WallTime) -> str:
    """What the cards did with the run's wall time, and the compilers beside them."""
    percent = {name: f"{100 * share:.0f} %" for name, share in spent.shares().items()}
    cards = "the card" if spent.cards == 1 else "the cards"
    return (
        f"{cards} busy {100 * spent.busy:.0f} %: validating {percent['validate']}, timing {percent['time']}, "
        f"finalists {percent['finals']}; waiting for compilers {percent['wait for compilers']}, "
        f"idle {percent['idle']}; compilers busy {percent['compile']}"
    )


def finalists_table(finalists: Sequence[Outcome]) -> Table:
    predicted = any(o.measurement is not None and o.measurement.predicted for o in finalists)
    table = Table(title=f"finalists, validated in full{'' if predicted else ' and timed in turns'}")
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
    table = Table(title="failures by reason")
    table.add_column("trials", justify="right")
    table.add_column("reason", overflow="fold")
    for reason, count in list(reasons.items())[:most]:
        table.add_row(str(count), escape(reason))
    if len(reasons) > most:
        table.add_row(str(sum(list(reasons.values())[most:])), "other reasons")
    return table


def problem_words(problem: Problem) -> str:
    mask = "causal" if problem.causal else "no mask"
    heads = str(problem.num_q_heads)
    if problem.num_kv_heads != problem.num_q_heads:
        heads += f" (kv {problem.num_kv_heads})"
    lengths = f"seqlen {problem.seqlen_q}"
    if problem.seqlen_k != problem.seqlen_q:
        lengths = f"seqlen_q {problem.seqlen_q}, seqlen_k {problem.seqlen_k}"
    precision = "" if problem.precision == "auto" else f" ({problem.precision})"
    values = "" if problem.head_dim_v == problem.head_dim else f", dv {problem.head_dim_v}"
    return (
        f"{problem.dtype}{precision}, batch {problem.batch}, heads {heads}, {lengths}, "
        f"d {problem.head_dim}{values}, {mask}"
    )


def show_space(console: Console, view: SpaceView) -> None:
    """What each rule removed, the survivors and, for held parameters, the verdict."""
    make_room(console)
    catalogue = view.catalogue
    limits, problem = catalogue.limits, catalogue.problem
    console.print(
        f"{catalogue.family.family}, {problem_words(problem)}, {limits.name} ({limits.sm})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    rules = Table()
    rules.add_column("rule")
    rules.add_column("variants", justify="right")
    rules.add_row("all combinations", f"{catalogue.total:,}")
    for name, count in sorted(catalogue.removed.items(), key=lambda each: -each[1]):
        rules.add_row(f"removed by {name}", f"{count:,}")
    rules.add_row("legal", f"{len(catalogue):,}", style="bold")
    console.print(rules)
    if catalogue.waived:
        text = f"waived, since nothing else would be left: the advice on {', '.join(catalogue.waived)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if view.survivors:
        show_survivors(console, view)
    if view.verdict is not None:
        show_verdict(console, view)


def show_survivors(console: Console, view: SpaceView) -> None:
    """The fastest predicted in full, the next ones by what differs from it."""
    first, total = view.survivors[0].variant, len(view.catalogue)
    among = "" if view.looked_at == total else f" of {view.looked_at:,} looked at"
    table = Table()
    for heading in ("predicted", "smem", "regs", "blocks"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("variant, as it differs from the first", overflow="fold")
    for survivor in view.survivors:
        table.add_row(
            microseconds(survivor.predicted_us or 0.0),
            str(survivor.smem_bytes),
            f"~{survivor.registers}",
            str(survivor.blocks_per_sm),
            differing_settings(survivor.variant, first) or settings_words(first),
        )
    console.print(
        f"the {len(view.survivors)} fastest predicted{among} (smem in bytes per block, registers estimated "
        "per thread, blocks per SM)",
        highlight=False,
    )
    console.print(table)


def show_verdict(console: Console, view: SpaceView) -> None:
    verdict, limits = view.verdict, view.catalogue.limits
    assert verdict is not None
    lines = [f"{verdict.variant.family}: {settings_words(verdict.variant)}"]
    if verdict.completed:
        lines.append(f"(not given, so at their defaults: {', '.join(verdict.completed)})")
    if verdict.use is None:
        lines.append(f"illegal: {verdict.rule}: {verdict.reason}")
    else:
        use = verdict.use
        lines += [
            f"legal, but left out of the search: {verdict.advice}" if verdict.advice else "legal:",
            f"  shared memory: needs {use.smem_bytes} bytes, {limits.sm} allows {limits.smem_per_block}",
            f"  registers: about {use.registers} per thread, {limits.max_registers_per_thread} allowed",
            f"  threads: {use.threads} per block, {limits.max_threads_per_block} allowed",
            f"  occupancy: {use.blocks_per_sm} blocks per SM, {100 * use.occupancy:.0f} % of its threads",
            f"  predicted: {microseconds(use.predicted_us or 0.0)}",
        ]
    if verdict.nearest is not None:
        lines.append(
            f"{len(view.catalogue):,} variants with the held parameters are legal; the nearest has "
            f"{differing_settings(verdict.nearest, verdict.variant)}"
        )
    elif not verdict.legal and verdict.completed:
        lines.append("no variant with the held parameters is legal; hold fewer or others")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_emitted(console: Console, target: Path, emitted: Emitted, beside: Sequence[Path] = ()) -> None:
    lines = [f"wrote {target}: {emitted.how}", f"{emitted.variant.family}: {settings_words(emitted.variant)}"]
    if beside:
        lines.insert(1, f"and beside it {', '.join(path.name for path in beside)}")
    if emitted.measurement is not None:
        lines.append(figures(Measurement.from_dict(dict(emitted.measurement))))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_bundle(console: Console, target: Path, picks: Sequence[Pick], num_bytes: int) -> None:
    """What a module of several kernels holds, and where the nearest stands for what was asked."""
    count = len(kernels_of(picks))
    lines = [f"wrote {target}: {count} kernels, {num_bytes / 2**20:.1f} MiB"]
    exact = sum(pick.match.exact for pick in picks)
    if picks[0].asked is not None:
        lines[0] += f"; {exact} of {len(picks)} problems were tuned for just this"
    lines += [f"{pick.asked.name}: {pick.match.how}" for pick in picks if pick.asked and not pick.match.exact]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_devices(console: Console, cards: Sequence[CudaDevice], trouble: str, tools: Sequence[Tool]) -> None:
    """Cards, presets and tools."""
    make_room(console)
    if cards:
        console.print(cards_table("cards", {card.spec: card.limits for card in cards}))
        console.print(f"driver {cards[0].driver}", highlight=False)
    else:
        console.print(f"no card: {trouble}", markup=False, highlight=False, soft_wrap=True)
    console.print(cards_table("presets (--device sim:NAME emulates one)", PRESETS))
    table = Table(title="tools")
    table.add_column("tool")
    table.add_column("found, or how to get it", overflow="fold")
    table.add_column("needed for", overflow="fold")
    for tool in tools:
        text = escape(tool.found) if tool.found else f"[red]missing[/red]: {escape(tool.missing)}"
        table.add_row(tool.name, text, escape(tool.needed_for))
    console.print(table)


def cards_table(title: str, cards: Mapping[str, DeviceLimits]) -> Table:
    table = Table(title=title)
    table.add_column("device", no_wrap=True)
    table.add_column("card")
    for heading in ("sm", "SMs", "KiB/block", "MHz", "GB/s", "fp32 TFLOP/s"):
        table.add_column(heading, justify="right")
    for spec, card in cards.items():
        table.add_row(
            spec,
            escape(card.name),
            str(card.arch),
            str(card.num_sms),
            f"{card.smem_per_block / KIB:g}",
            str(card.clock_mhz),
            str(card.dram_gbps),
            f"{card.fp32_tflops:.1f}",
        )
    return table
