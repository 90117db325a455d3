"""What each step of the ladder brings: all steps, the tuned kernels and PyTorch, on the report's cases.

Every kernel is checked against float64 before it is timed. The first steps would take minutes on the longest
cases: there a kernel is first timed at a fraction of the length, and where one launch at full length would
exceed ``limit_s``, its time is scaled from that and marked so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...gen.families.ladder.family import STEPS, steps
from ...gen.families.simt.family import Simt
from ...gen.kernel import Kernel
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Illegal, Variant
from ..build.compile import CompilePool, usable_cores
from ..build.protocol import Build
from ..cards.device import Device
from ..errors import BuildError, FlashgenError
from ..evaluate.measure import median, tflops
from ..evaluate.outcome import Outcome, Status
from ..evaluate.worker import Worker
from ..serving import serving_families
from ..shelf import choice, library
from ..shelf.guess import built_guess
from .ladder_result import CASES, FASTEST, FUSED, SIMT, UNFUSED, LadderResult, Row
from .peers import PeerTime, torch_installed, torch_times

#: A launch expected to take longer is not made.
LIMIT_S = 4.0
#: Lengths up to here are timed at once, longer ones approached by this factor.
SAFE_LENGTH, LENGTH_FACTOR = 512, 4
#: Launches of one kernel in one request: a check at full length, warming up and the repeats.
LAUNCHES_PER_REQUEST = 6
#: A step is shown whatever the compiler made of it.
ANY_SPILL = 2**31


def run_ladder(
    device: Device,
    cases: Sequence[str] = tuple(CASES),
    step_names: Sequence[str] = tuple(STEPS),
    *,
    out: Path = Path("out"),
    with_torch: bool = True,
    limit_s: float = LIMIT_S,
    seed: int = 0,
    jobs: int | None = None,
    on_row: Callable[[Row], None] | None = None,
    stop: threading.Event | None = None,
) -> LadderResult:
    """Builds, checks and times every step on every case, then the fastest known kernel of the steps' own
    arithmetic, the fastest of any family, and PyTorch's attention.

    ``out``: where tuned kernels are looked for. Setting ``stop`` ends the run with the rows so far.

    Raises:
        FlashgenError: the device, its compiler or its memory is not there.
    """
    toolchain = device.toolchain()
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    def stopped() -> bool:
        return stop is not None and stop.is_set()

    with CompilePool(toolchain, jobs) as pool:
        known = library.entries(library.folders(out))
        contenders = [
            c for case in cases for c in _contenders(device, case, step_names, known, jobs or usable_cores())
        ]
        builds = _submit(pool, contenders)
        with Worker(device, seed=seed, deadline_s=60 + LAUNCHES_PER_REQUEST * limit_s) as worker:
            timer = _Timer(worker, device.predicted, limit_s)
            for contender in contenders:
                if stopped():
                    break
                try:
                    add(_row(contender, builds, timer))
                except FlashgenError as error:
                    # Without a device nothing can follow; without memory for one case the others can.
                    if not any(row.median_us for row in rows):
                        raise
                    add(_bare_row(contender, Status.LAUNCH_FAILED, str(error)))
    notes: tuple[str, ...] = ()
    if with_torch and not stopped():
        if device.predicted:
            notes = ("PyTorch runs on a real card only",)
        elif not torch_installed():
            notes = ("PyTorch is not installed: `pip install torch` to compare with it",)
        else:
            for row in _torch_rows(cases, int(device.spec), stopped):
                add(row)
    order = {case: i for i, case in enumerate(cases)}
    return LadderResult(
        device=device.limits.name,
        driver=device.driver,
        toolkit=toolchain.version,
        predicted=device.predicted,
        rows=tuple(sorted(rows, key=lambda row: order[row.case])),
        notes=notes,
        interrupted=stopped(),
    )


# -- our kernels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contender:
    """A kernel to time on a case, or why there is none."""

    case: str
    name: str
    title: str
    variant: Variant
    kernel: Kernel | None
    reason: str = ""
    tuned: bool | None = None


def _contenders(
    device: Device,
    case: str,
    step_names: Sequence[str],
    known: Sequence[library.Entry],
    jobs: int = 1,
) -> Iterator[_Contender]:
    problem = CASES[case]
    chosen = [
        _Choice(name, STEPS[name].title, variant)
        for name, variant in steps(problem.head_dim).items()
        if name in step_names
    ]
    # The steps multiply by float32 multiply-adds alone, and so does what was tuned for that.
    plain = replace(problem, precision="ieee")
    simt = _tuned(SIMT, known, (problem, plain), device.limits, (Simt,), jobs)
    chosen.append(simt)
    families = serving_families(problem, device.limits)
    if families != (Simt,):
        fastest = _tuned(FASTEST, known, (problem,), device.limits, families, jobs)
        chosen += [fastest] if fastest.variant != simt.variant else []
    for name, title, variant, tuned in chosen:
        try:
            kernel, reason = render(variant, problem, device.limits), ""
        except Illegal as error:
            kernel, reason = None, str(error)
        yield _Contender(case, name, title, variant, kernel, reason, tuned)


class _Choice(NamedTuple):
    """A contender's name, title and variant, and whether a search found it."""

    name: str
    title: str
    variant: Variant
    tuned: bool | None = None


def _tuned(
    name: str,
    known: Sequence[library.Entry],
    problems: Sequence[Problem],
    limits: DeviceLimits,
    families: Sequence[type[Variant]],
    jobs: int,
) -> _Choice:
    """The best known variant of the families for one of the problems, and what it was tuned for; what the
    cost model guesses for the first where none is known."""
    theirs = [entry for entry in known if type(entry.kernel.variant) in families]
    matches = [match for problem in problems if (match := choice.find(theirs, problem, limits)) is not None]
    if matches:
        match = min(matches, key=lambda match: not match.exact)
        variant = match.entry.kernel.variant
        return _Choice(name, f"{variant.family}, tuned: {match.how}", variant, True)
    guess = built_guess(families, problems[0], limits, jobs=jobs)
    title = (
        f"{guess.variant.family}, untuned, as the cost model guesses ({guess.how}): `flashgen tune` finds "
    )
    return _Choice(name, title + "a faster one", guess.variant, False)


def _submit(pool: CompilePool, contenders: Sequence[_Contender]) -> dict[str, Future[Build | BuildError]]:
    """The builds under way by kernel digest: cases of one head dim share the steps' kernels."""
    kernels = {c.kernel.digest: c.kernel for c in contenders if c.kernel is not None}
    return {digest: pool.submit(kernel) for digest, kernel in kernels.items()}


def _bare_row(contender: _Contender, status: Status, reason: str) -> Row:
    return Row(
        case=contender.case,
        name=contender.name,
        title=contender.title,
        status=status,
        reason=reason,
        tuned=contender.tuned,
        variant=contender.variant,
    )


def _row(contender: _Contender, builds: Mapping[str, Future[Build | BuildError]], timer: _Timer) -> Row:
    """The contender checked and timed; what is wrong with its kernel is a row too."""
    if contender.kernel is None:
        return _bare_row(contender, Status.ILLEGAL, contender.reason)
    build = builds[contender.kernel.digest].result()
    if isinstance(build, BuildError):
        return _bare_row(contender, Status.COMPILE_FAILED, str(build))
    problem = CASES[contender.case]
    outcome, length = timer.time(build, problem)
    row = _bare_row(contender, outcome.status, outcome.reason)
    if outcome.measurement is None:
        return row
    scaled = length != problem.seqlen_q
    return replace(
        row,
        measurement=outcome.measurement,
        median_us=outcome.measurement.median_us * (problem.seqlen_q / length) ** 2,
        scaled_from=length if scaled else None,
    )


class _Timer:
    """Checks and times builds, none for longer than a launch may take."""

    def __init__(self, worker: Worker, predicted: bool, limit_s: float) -> None:
        self._worker = worker
        self._predicted = predicted
        self._limit_us = 1e6 * limit_s
        self._checked: dict[str, Outcome] = {}

    def time(self, build: Build, problem: Problem) -> tuple[Outcome, int]:
        """Times a kernel; returns the outcome and the length it is for: the problem's own, or the longest
        that stays in the limit."""
        lengths = [problem.seqlen_q]
        while not self._predicted and lengths[0] > SAFE_LENGTH:
            lengths.insert(0, max(SAFE_LENGTH, lengths[0] // LENGTH_FACTOR))
        for length, following in zip(lengths, [*lengths[1:], None], strict=True):
            outcome = self._evaluate(build, replace(problem, seqlen_q=length, seqlen_k=length))
            if outcome.measurement is None or following is None:
                return outcome, length
            if outcome.measurement.median_us * (following / length) ** 2 > self._limit_us:
                return outcome, length
        raise AssertionError("no length")

    def _evaluate(self, build: Build, problem: Problem) -> Outcome:
        """On a card every shape is checked; emulated, where checking is slow, a kernel is checked once."""
        known = self._checked.get(build.kernel.digest)
        if not self._predicted or known is None or known.measurement is None:
            outcome = self._worker.evaluate(build, problem, max_spill_bytes=ANY_SPILL)
            self._checked[build.kernel.digest] = outcome
            return outcome
        timing = self._worker.measure_interleaved([build], problem, rounds=1)[0]
        median_us = median(timing.times_us)
        measurement = replace(
            known.measurement,
            times_us=timing.times_us,
            median_us=median_us,
            tflops=tflops(problem, median_us),
        )
        return replace(known, measurement=measurement)


# -- PyTorch -------------------------------------------------------------------------------------------------


def _torch_rows(cases: Sequence[str], ordinal: int, stopped: Callable[[], bool]) -> Iterator[Row]:
    """PyTorch's fastest fused backend and its unfused attention on each case."""
    times: dict[str, list[PeerTime]] = {case: [] for case in cases}
    for entry in torch_times([CASES[case] for case in cases], ordinal):
        times[cases[entry.problem]].append(entry)
        if stopped():
            break
    for case in cases:
        for name, fused in ((FUSED, True), (UNFUSED, False)):
            found = [entry for entry in times[case] if entry.fused is fused]
            ran = [entry for entry in found if entry.median_us is not None]
            if ran:
                best = min(ran, key=lambda entry: entry.median_us or 0.0)
                yield Row(
                    case=case,
                    name=name,
                    title=f"PyTorch {name} ({best.backend})",
                    status=Status.OK,
                    median_us=best.median_us,
                )
            elif found:
                yield Row(
                    case=case,
                    name=name,
                    title=f"PyTorch {name}",
                    status=Status.LAUNCH_FAILED,
                    reason="; ".join(f"{entry.backend}: {entry.reason}" for entry in found),
                )
