"""The coordinator of a tuning run: asks for variants, has them built and evaluated, tells, writes the winner.

Builds happen in a pool of compiler processes kept ahead of the worker processes that hold a card each, so
that no card waits. The study may be shared with coordinators on other hosts.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.study import Study

from ...gen.emit.module import emit_cuda, emit_module
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Illegal, Value, Variant
from ..build.compile import CompilePool
from ..build.protocol import Build
from ..cards.device import Device
from ..cards.lock import GaveUp
from ..cards.slug import device_slug
from ..errors import BuildError, FlashgenError, NotServed, UsageError
from ..evaluate.outcome import Outcome, Status, TunedKernel
from ..evaluate.reasons import NUMBER, count_alike, count_reasons, first_line
from ..evaluate.team import Evaluator, Team
from ..evaluate.worker import Worker
from ..predict.catalogue import Catalogue, build_catalogue
from ..predict.cost_model import COST_MODEL
from ..predict.prior import prior_of
from ..search.ask_tell import Proposal, Search
from ..search.sampler_names import SamplerName
from ..search.transfer import informed, neighbours
from ..serving import none_serves, why_not
from ..shelf import library
from ..shelf.winners import TUNED
from ..store.about import About
from ..store.liveness import Pulse
from ..store.makers import Makers, name_of_study
from ..store.presence import StorageFile
from ..store.studies import (
    open_storage,
    open_study,
    outcome_to_dict,
    storage_errors,
    without_password,
)
from ..version import flashgen_version
from .wall_time import Stopwatch, WallTime

#: Trials unless told otherwise: on a card, on an emulated card (where each takes seconds).
DEFAULT_TRIALS, DEFAULT_SIM_TRIALS = 200, 24
#: Candidates re-timed at the end, and the slowdown beyond which one is no candidate.
NUM_FINALISTS, FINALIST_SLACK = 6, 1.15
#: Trials that tell enough of a family to compare it with others by.
STARTUP_TRIALS = 24
#: Of several families each may spend so much of the budget before they are compared; the rest goes to those
#: whose best is at most so much slower than the fastest.
FIRST_ROUND, LEADER_SLACK = 0.5, 1.25
#: Builds in flight beyond one per compiler, so that no compiler waits while the card is busy.
BUILDS_AHEAD = 2
#: Builds that wait for each card beside the one on it, so that no card waits while the search thinks.
QUEUED = 2
#: Variants asked for at once, per card: the study is read once for all of them, and meanwhile no card gets a
#: build.
ASKED_AT_ONCE = 2
#: How often a wait looks whether the run was told to stop.
POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to tune, on what, and for how long (``trials`` counts all of the studies, whoever ran them).

    ``more_devices`` are further cards of ``device``'s kind, which share its studies. Families without a legal
    variant are passed over, unless there is no other."""

    device: Device
    more_devices: tuple[Device, ...] = ()
    problem: Problem
    families: tuple[type[Variant], ...]
    held: Mapping[str, Value] = field(default_factory=dict)
    trials: int | None = None
    minutes: float | None = None
    sampler: SamplerName = SamplerName.GP
    seed: int = 0
    storage: str
    out: Path
    jobs: int = 1


class NoneLegal(NotServed, UsageError):
    """The parameters held allow no variant for the problem."""


@dataclass(frozen=True)
class SpaceReady:
    """A family's space was enumerated; ``earlier`` of its variants were tried by earlier runs."""

    family: str
    legal: int
    total: int
    removed: Mapping[str, int]
    earlier: int
    budget: int | None
    sweeps: bool
    seconds: float
    taught_by: tuple[str, ...] = ()
    """Neighbouring problems whose trials in the storage the search starts from."""


@dataclass(frozen=True)
class SearchGoesOn:
    """A family is among the fastest after the first round and gets more of the budget; ``done`` counts the
    trials of its study so far."""

    family: str
    done: int
    budget: int | None


@dataclass(frozen=True)
class TrialDone:
    """One trial ended. ``number`` counts the family's trials, ``best`` is the fastest of all so far."""

    number: int
    budget: int | None
    origin: str
    outcome: Outcome
    best: Outcome | None


@dataclass(frozen=True)
class FinalsStarted:
    """The fastest are timed once more, in turns."""

    finalists: tuple[Outcome, ...]


@dataclass(frozen=True)
class Notice:
    """Something the user should know while the run goes on."""

    text: str


Event = SpaceReady | SearchGoesOn | TrialDone | FinalsStarted | Notice
Report = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """A finished run. ``counts`` are of all trials of the studies, by status; ``reasons`` of the failures."""

    kernel: TunedKernel
    slug: str
    paths: library.Paths
    kept_faster: Path | None
    """The library's kernel, where what was found with parameters held or families left out is slower."""
    counts: Mapping[str, int]
    reasons: Mapping[str, int]
    finalists: tuple[Outcome, ...]
    trials_run: int
    trials_earlier: int
    interrupted: bool
    seconds: float
    wall_time: WallTime
    storage: str
    studies: tuple[str, ...]
    trials_elsewhere: int = 0
    """Of other coordinators that shared the studies meanwhile."""
    doubtful: Mapping[str, int] = field(default_factory=dict)
    """How many trials' times something spoke against, though they were repeated, by what it was."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **library.to_record(self.kernel),
            "files": None if self.kept_faster else {k: str(v) for k, v in vars(self.paths).items()},
            "kept_faster": str(self.kept_faster) if self.kept_faster else None,
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            "doubtful": dict(self.doubtful),
            "finalists": [outcome_to_dict(o) for o in self.finalists],
            "trials_run": self.trials_run,
            "trials_earlier": self.trials_earlier,
            "trials_elsewhere": self.trials_elsewhere,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
            "wall_time": self.wall_time.to_dict(),
            "storage": self.storage,
            "studies": list(self.studies),
        }


@dataclass
class _FamilyRun:
    """One family's part of the run."""

    family: type[Variant]
    catalogue: Catalogue
    study: Study
    search: Search
    budget: int | None
    deadline: float | None
    done: list[Outcome] = field(default_factory=list)

    @property
    def all_outcomes(self) -> list[Outcome]:
        return self.search.earlier + self.search.others.outcomes + self.done

    @property
    def best_us(self) -> float:
        return self.search.best_us or float("inf")


def tune(
    options: TuneOptions,
    *,
    report: Report = lambda event: None,
    stop: threading.Event | None = None,
    make_evaluator: Callable[[Device], Evaluator] | None = None,
) -> TuneResult:
    """Tunes the problem and writes the winner to the out folder.

    Setting ``stop`` ends the run with the best so far. Every finished trial is in the study at once, so
    whatever ends the run, the same options resume it.

    Raises:
        NotServed: no variant is legal, or none works.
        FlashgenError: a tool or folder is missing; nothing finished is lost.
    """
    started = time.monotonic()
    stop = stop or threading.Event()
    device = options.device
    library.check_writable(options.out)
    storage = open_storage(options.storage)
    file = StorageFile(options.storage)
    toolchain = device.toolchain()
    runs: list[_FamilyRun] = []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(CompilePool(toolchain, options.jobs))
        watch = Stopwatch(1 + len(options.more_devices), pool.size)

        def notify(text: str) -> None:
            report(Notice(text))

        make = make_evaluator or (lambda each: Worker(each, seed=options.seed, notify=notify, stop=stop))
        team = stack.enter_context(Team([make(each) for each in (device, *options.more_devices)], stop))
        pulse = Pulse()
        stack.callback(pulse.close)
        spaces = _legal_spaces(options)
        for space in spaces:
            if stop.is_set():
                break
            run = _prepare(options, space, storage, toolchain.version, report, len(spaces), pulse)
            runs.append(run)
            with storage_errors(options.storage):
                _search(run, options, pool, team, file, report, stop, watch, _best_of(runs))
        for run in _second_round(runs, options, started, report):
            if stop.is_set():
                break
            with storage_errors(options.storage):
                _search(run, options, pool, team, file, report, stop, watch, _best_of(runs))
        interrupted = stop.is_set()
        everything = [o for run in runs for o in run.all_outcomes]
        candidates = _candidates(everything)
        if not candidates:
            raise NotServed(_nothing_works(options, runs, interrupted))
        finalists: list[Outcome] = []
        if not interrupted:
            report(FinalsStarted(tuple(candidates)))
            with watch.finals():
                finalists = _finals(options, pool, team, candidates, stop)
            interrupted = stop.is_set()
    winner = _winner(finalists, candidates)
    rendered = render(winner.variant, options.problem, device.limits)
    kernel = _tuned(options, winner, rendered.source, toolchain.version)
    slug = device_slug(device)
    winning_run = next(run for run in runs if run.family is type(winner.variant))
    kept = _faster_in_library(options, slug, kernel)
    paths = library.Paths.of(options.out, slug, kernel.problem.name)
    # Kept with the trials and as files: whichever place fails, the other has the winner, and `emit` finds it.
    with contextlib.ExitStack() as stack:
        if kept is None:
            figures = library.figures(kernel)
            stack.callback(
                library.write,
                options.out,
                slug,
                kernel,
                cuda=emit_cuda(rendered, device=kernel.device, measurement=figures),
                module=emit_module(rendered, device=kernel.device, measurement=figures),
            )
        with storage_errors(options.storage):
            winning_run.study.set_user_attr(TUNED, library.to_record(kernel))
    failures = [o for o in everything if o.measurement is None]
    return TuneResult(
        kernel=kernel,
        slug=slug,
        paths=paths,
        kept_faster=kept,
        counts=dict(Counter(str(o.status) for o in everything)),
        reasons=count_reasons(failures),
        finalists=tuple(finalists),
        trials_run=sum(len(run.done) for run in runs),
        trials_earlier=sum(len(run.search.earlier) for run in runs),
        doubtful=count_alike(o.measurement.busy for o in everything if o.measurement and o.measurement.busy),
        trials_elsewhere=sum(len(run.search.others.outcomes) for run in runs),
        interrupted=interrupted,
        seconds=time.monotonic() - started,
        wall_time=watch.read(),
        storage=without_password(options.storage),
        studies=tuple(run.study.study_name for run in runs),
    )


@dataclass(frozen=True)
class _Space:
    """A family's legal variants, and how long it took to find them."""

    catalogue: Catalogue
    seconds: float


def _legal_spaces(options: TuneOptions) -> list[_Space]:
    """The families with a legal variant. Raises NotServed, naming the reasons, where there is none."""
    problem, limits = options.problem, options.device.limits
    spaces = []
    for family in options.families:
        started = time.monotonic()
        catalogue = build_catalogue(family, problem, limits, options.held)
        spaces.append(_Space(catalogue, time.monotonic() - started))
    legal = [space for space in spaces if len(space.catalogue)]
    if legal:
        return legal
    if len(spaces) == 1:
        raise _nothing_legal(spaces[0].catalogue, options.held)
    catalogues = [space.catalogue for space in spaces]
    raise none_serves(problem, limits, {each.family.family: _why_empty(each) for each in catalogues})


def _second_round(
    runs: Sequence[_FamilyRun], options: TuneOptions, started: float, report: Report
) -> Iterator[_FamilyRun]:
    """The families that share what the first round left of the budget, each with its share of it: none where
    one that has been tried whole is far ahead of the others."""
    waiting = [run for run in runs if not run.search.exhausted]
    if len(runs) < 2 or not waiting:
        return
    fastest_us = min(run.best_us for run in runs)
    leaders = [run for run in waiting if run.best_us <= LEADER_SLACK * fastest_us]
    for index, run in enumerate(leaders):
        shares = len(leaders) - index
        done = len(run.all_outcomes)
        if options.trials is not None:
            left = options.trials - sum(len(each.all_outcomes) for each in runs)
            run.budget = done + left // shares
            if run.budget <= done:
                continue
        if options.minutes is not None:
            now = time.monotonic()
            run.deadline = now + (started + 60 * options.minutes - now) / shares
        report(SearchGoesOn(run.family.family, done, run.budget))
        yield run


def _first_share(budget: float, families: int) -> float:
    """What each family gets of trials or minutes before any is given more."""
    return budget if families == 1 else FIRST_ROUND * budget / families


def _prepare(
    options: TuneOptions,
    space: _Space,
    storage: Any,
    toolkit: str,
    report: Report,
    families: int,
    pulse: Pulse,
) -> _FamilyRun:
    """Opens the family's study."""
    started = time.monotonic()
    device, problem = options.device, options.problem
    catalogue = space.catalogue
    family = catalogue.family
    slug = device_slug(device)
    makers = Makers.of(family, toolkit, COST_MODEL if device.predicted else None)
    about = About(
        problem=problem,
        limits=device.limits,
        family=family,
        predicted=device.predicted,
        driver=device.driver,
        toolkit=toolkit,
        flashgen=flashgen_version(),
        seed=options.seed,
        mark=makers.mark,
        identity=makers.identities[0],
        cost_model=makers.cost_model,
    )
    with storage_errors(options.storage):
        name = name_of_study(storage, slug, problem, family, makers)
    study = open_study(storage, options.storage, name, about.attributes())
    with storage_errors(options.storage):
        lessons = neighbours(storage, slug, problem, makers, family)
    prior = informed(prior_of(problem, device.limits), catalogue, lessons, device.limits)
    known = library.nearest_variants(
        library.entries(library.folders(options.out)), problem, device.limits, family
    )
    trials = options.trials
    if trials is not None and families > 1:
        # Enough to compare the families by, or an equal share of few.
        enough = min(STARTUP_TRIALS, trials // families)
        trials = max(1, enough, int(_first_share(trials, families)))
    search = Search(
        catalogue,
        study,
        budget=trials,
        seed=options.seed,
        known=known,
        prior=prior,
        pulse=pulse,
        sampler=options.sampler,
    )
    deadline = None
    if options.minutes is not None:
        deadline = time.monotonic() + 60 * _first_share(options.minutes, families)
    run = _FamilyRun(family, catalogue, study, search, trials, deadline)
    report(
        SpaceReady(
            family.family,
            len(catalogue),
            catalogue.total,
            catalogue.removed,
            len(search.earlier),
            trials,
            search.sweeps,
            space.seconds + time.monotonic() - started,
            tuple(lesson.problem.name for lesson in lessons),
        )
    )
    return run


def _nothing_legal(catalogue: Catalogue, held: Mapping[str, Value]) -> NotServed:
    problem, limits = catalogue.problem, catalogue.limits
    what = f"no variant of {catalogue.family.family!r}"
    where = f"is legal for {problem.name} on {limits.name}"
    why = _why_empty(catalogue)
    if not held or why_not(catalogue.family, problem, limits):
        return NotServed(f"{what} {where} ({why}); `flashgen space` shows more")
    settings = " ".join(f"{name}={value}" for name, value in held.items())
    example = ""
    try:
        catalogue.family(**held).check(problem, limits)
    except Illegal as error:
        example = f"; with defaults elsewhere: {error}"
    return NoneLegal(f"{what} with {settings} {where} ({why}{example}); hold fewer or others")


def _why_empty(catalogue: Catalogue) -> str:
    """Why a family has no legal variant: it computes something else, or rules left none."""
    counts = ", ".join(f"{name} {count}" for name, count in catalogue.removed.items())
    return why_not(catalogue.family, catalogue.problem, catalogue.limits) or f"removed by rule: {counts}"


def _search(
    run: _FamilyRun,
    options: TuneOptions,
    pool: CompilePool,
    team: Team,
    file: StorageFile,
    report: Report,
    stop: threading.Event,
    watch: Stopwatch,
    best: Outcome | None,
) -> None:
    """Spends the family's budget. On return no trial of the run is left in flight."""
    search = run.search
    building: dict[Future[Build | BuildError], Proposal] = {}
    running: dict[Future[Outcome], Proposal] = {}
    doubts: set[str] = set()
    most_running = team.size * (1 + QUEUED)
    most_in_flight = pool.size + BUILDS_AHEAD + most_running - 1

    def finish(proposal: Proposal, outcome: Outcome) -> None:
        nonlocal best
        file.check()
        watch.trial(outcome)
        if not search.tell(proposal, outcome):
            return
        run.done.append(outcome)
        busy = outcome.measurement.busy if outcome.measurement is not None else ""
        if busy and (kind := NUMBER.sub("", busy)) not in doubts:
            doubts.add(kind)
            report(Notice(f"times are doubtful, though repeated: {busy}"))
        best = _faster(best, outcome)
        report(TrialDone(len(run.all_outcomes), run.budget, str(proposal.origin), outcome, best))

    def out_of_time() -> bool:
        return run.deadline is not None and time.monotonic() >= run.deadline

    def room() -> int:
        """How many more variants may be asked for."""
        if stop.is_set() or out_of_time():
            return 0
        in_flight = len(building) + len(running)
        # What another coordinator has in flight is as good as done, unless it dies.
        asked = len(run.all_outcomes) + in_flight + search.others.in_flight
        left = most_in_flight if run.budget is None else run.budget - asked
        most = 0 if search.exhausted else ASKED_AT_ONCE * team.size
        return max(0, min(most, most_in_flight - in_flight, left))

    def ask() -> None:
        """Has some more variants built ahead of the cards."""
        for proposal in search.ask_many(room()):
            try:
                kernel = render(proposal.variant, options.problem, options.device.limits)
            except Illegal as error:
                finish(proposal, Outcome(variant=proposal.variant, status=Status.ILLEGAL, reason=str(error)))
                continue
            building[pool.submit(kernel)] = proposal

    def evaluate() -> None:
        """Gives builds to the cards, the first asked first."""
        ready = sorted((f for f in building if f.done()), key=lambda f: building[f].trial.number)
        for future in ready:
            if len(running) == most_running:
                break
            proposal, built = building[future], future.result()
            del building[future]
            if isinstance(built, BuildError):
                failed = Outcome(variant=proposal.variant, status=Status.COMPILE_FAILED, reason=str(built))
                finish(proposal, failed)
            else:
                # What is recorded for others to search must be timed in full, slow or not.
                beaten_by = None if options.sampler is SamplerName.EXHAUSTIVE else search.best_us
                running[team.submit(built, options.problem, beaten_by)] = proposal

    try:
        while not (stop.is_set() or out_of_time()):
            # Cards come first: asking takes a good part of the time that a trial does.
            evaluate()
            ask()
            if building or running:
                awaited: list[Future[Any]] = [*running, *(building if len(running) < most_running else ())]
                with watch.waits(max(0, team.size - len(running)) if building else 0):
                    wait(awaited, 0 if room() else POLL_SECONDS, return_when=FIRST_COMPLETED)
            elif search.others.in_flight:
                # They end, or die and leave their variants to this run.
                time.sleep(POLL_SECONDS)
                search.look_at_others()
            else:
                break
            for future in [f for f in running if f.done()]:
                if stop.is_set() and isinstance(future.exception(), GaveUp):
                    break
                finish(running.pop(future), future.result())
        for future in [f for f in running if not f.cancel()]:
            # Those that wait for a card that another tuner holds are given up.
            with contextlib.suppress(GaveUp):
                finish(running[future], future.result())
                del running[future]
    finally:
        for future, proposal in [*building.items(), *running.items()]:
            future.cancel()
            with contextlib.suppress(Exception):
                search.abandon(proposal)


def _finals(
    options: TuneOptions,
    pool: CompilePool,
    team: Team,
    candidates: Sequence[Outcome],
    stop: threading.Event,
) -> list[Outcome]:
    """The candidates validated in full and timed in turns. Their builds come from the cache."""
    kernels = [render(c.variant, options.problem, options.device.limits) for c in candidates]
    futures = [pool.submit(kernel) for kernel in kernels]
    while not all(future.done() for future in futures):
        if stop.is_set():
            return []
        wait(futures, timeout=POLL_SECONDS)
    builds = [build for future in futures if isinstance(build := future.result(), Build)]
    return team.finals(builds, options.problem)


def _candidates(everything: Sequence[Outcome]) -> list[Outcome]:
    """The fastest few trials, fastest first."""
    fine = [o for o in everything if o.status is Status.OK and o.measurement is not None]
    fine.sort(key=_median_us)
    return [o for o in fine[:NUM_FINALISTS] if _median_us(o) <= FINALIST_SLACK * _median_us(fine[0])]


def _winner(finalists: Sequence[Outcome], candidates: Sequence[Outcome]) -> Outcome:
    """The fastest finalist; the fastest candidate where the run ended before they were timed."""
    fine = [o for o in finalists if o.status is Status.OK and o.measurement is not None]
    if finalists and not fine:
        reasons = "; ".join(f"{o.variant.name}: {o.status}, {first_line(o.reason)}" for o in finalists)
        raise FlashgenError(f"every finalist failed the last, full validation ({reasons})")
    return min(fine or candidates, key=_median_us)


def _median_us(outcome: Outcome) -> float:
    return outcome.measurement.median_us if outcome.measurement else float("inf")


def _faster(best: Outcome | None, other: Outcome) -> Outcome | None:
    if other.status is not Status.OK:
        return best
    return other if best is None or _median_us(other) < _median_us(best) else best


def _best_of(runs: Sequence[_FamilyRun]) -> Outcome | None:
    best: Outcome | None = None
    for run in runs:
        for outcome in run.all_outcomes:
            best = _faster(best, outcome)
    return best


def _tuned(options: TuneOptions, winner: Outcome, source: str, toolkit: str) -> TunedKernel:
    assert winner.measurement is not None
    return TunedKernel(
        problem=options.problem,
        variant=winner.variant,
        source=source,
        measurement=winner.measurement,
        device=options.device.limits.name,
        arch=options.device.limits.arch,
        driver=options.device.driver,
        toolkit=toolkit,
        flashgen=flashgen_version(),
        seed=options.seed,
        tuned_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _faster_in_library(options: TuneOptions, slug: str, kernel: TunedKernel) -> Path | None:
    """With parameters held or families left out, a winner must not replace a faster kernel found without."""
    path = library.Paths.of(options.out, slug, kernel.problem.name).json
    if not path.exists():
        return None
    with contextlib.suppress(FlashgenError):
        known = library.read(path).kernel
        narrowed = bool(options.held) or type(known.variant) not in options.families
        if narrowed and known.measurement.median_us < kernel.measurement.median_us:
            return path
    return None


def _nothing_works(options: TuneOptions, runs: Sequence[_FamilyRun], interrupted: bool) -> str:
    everything = [o for run in runs for o in run.all_outcomes]
    if not everything:
        why = "interrupted" if interrupted else "the budget ended"
        return f"{why} before the first trial ended; repeat the command to go on"
    counts = list(count_reasons(everything).items())[:3]
    told = "; ".join(f"{count} x {reason}" for reason, count in counts)
    return f"none of {len(everything)} variants tried works on {options.device.limits.name} ({told})"
