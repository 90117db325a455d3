"""The coordinator of a tuning run: asks for variants, has them built and evaluated, tells, keeps the winner.

Builds happen in a pool of compiler processes kept ahead of the worker processes that hold a card each, so
that no card waits. The study may be shared with coordinators on other hosts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from ..build.compile import CompilePool
from ..errors import NotServed
from ..evaluate.outcome import Outcome
from ..evaluate.reasons import count_alike, count_reasons
from ..shelf import library
from ..store.places import without_password
from ..store.studies import storage_errors
from .events import Doing, FinalsStarted, Notice, Report, SearchGoesOn
from .family_run import FamilyRun, open_family_run
from .finalists import candidates_of, faster, time_again, winner_of
from .options import TuneOptions
from .plan import first_share, second_round
from .result import TuneResult
from .spaces import Space, legal_spaces
from .standing import note_finals, standing_winner
from .trial_loop import TrialLoop
from .winner import keep
from .workshop import MakeEvaluator, Premises, Workshop, premises, workshop


def tune(
    options: TuneOptions,
    *,
    report: Report = lambda event: None,
    stop: threading.Event | None = None,
    make_evaluator: MakeEvaluator | None = None,
) -> TuneResult:
    """Tunes the problem and writes the winner to the out folder.

    Setting ``stop`` ends the run with the best so far. Every finished trial is in the study at once, so
    whatever ends the run, the same options resume it.

    Raises:
        NotServed: no variant is legal, or none works.
        FlashgenError: a tool or folder is missing; nothing finished is lost.
    """
    started = time.monotonic()
    report(Doing("looking for compilers and the trials of earlier runs"))
    with (
        CompilePool(options.device.toolchain(), options.jobs) as pool,
        premises(options, report, stop or threading.Event(), make_evaluator, pool) as place,
    ):
        return tune_at(place, options, report=report, started=started)


def tune_at(
    place: Premises, options: TuneOptions, *, report: Report, started: float, foreseen: Sequence[Space] = ()
) -> TuneResult:
    """Tunes the problem as `tune` does, where other runs were before it and will be after it.

    ``started`` is when the run began, by the monotonic clock. ``foreseen`` are the legal spaces of the
    families that compete, where they were enumerated ahead.

    Raises:
        NotServed, FlashgenError: as `tune`.
    """
    stop = place.stop
    runs: list[FamilyRun] = []
    with workshop(place, report) as shop:
        with storage_errors(options.storage):
            for run in _rounds(options, shop, runs, started, foreseen):
                TrialLoop(run, shop, _fastest(runs)).spend()
        everything = [outcome for run in runs for outcome in run.all_outcomes]
        candidates = candidates_of(everything)
        if not candidates:
            raise NotServed(_nothing_works(everything, options.limits.name, stop.is_set()))
        finalists: list[Outcome] = []
        standing = standing_winner(runs, options)
        if standing is not None:
            report(Notice("nothing was tried since the finals, so their winner stands"))
        elif not stop.is_set():
            report(FinalsStarted(tuple(candidates)))
            finalists = time_again(candidates, options.problem, options.limits, shop)
        interrupted = stop.is_set()
    winner = standing.outcome if standing is not None else winner_of(finalists, candidates)
    winning_study = next(run.search.study for run in runs if run.family is type(winner.variant))
    report(Doing("writing the fastest"))
    kept = keep(options, winner, shop.toolkit, winning_study, standing.tuned_at if standing else None)
    if finalists and not interrupted:
        with storage_errors(options.storage):
            note_finals(runs, options, winning_study)
    return TuneResult(
        kernel=kept.kernel,
        slug=kept.slug,
        paths=kept.paths,
        kept_faster=kept.faster,
        counts=dict(Counter(str(o.status) for o in everything)),
        reasons=count_reasons(o for o in everything if o.measurement is None),
        finalists=tuple(finalists),
        trials_run=sum(len(run.done) for run in runs),
        trials_earlier=sum(len(run.search.earlier) for run in runs),
        doubtful=count_alike(o.measurement.busy for o in everything if o.measurement and o.measurement.busy),
        trials_elsewhere=sum(len(run.search.others.outcomes) for run in runs),
        interrupted=interrupted,
        seconds=time.monotonic() - started,
        wall_time=shop.watch.read(),
        storage=without_password(options.storage),
        studies=tuple(run.search.study.study_name for run in runs),
    )


def _rounds(
    options: TuneOptions,
    shop: Workshop,
    runs: list[FamilyRun],
    started: float,
    foreseen: Sequence[Space],
) -> Iterator[FamilyRun]:
    """Yields each family in turn with its share of the budget, then the fastest with what is left.

    ``runs`` fills with the families that were begun.
    """
    spaces = foreseen or legal_spaces(options, shop.report)
    share = first_share(options, len(spaces))
    known = library.entries(library.folders(options.out))
    for space in spaces:
        if shop.stop.is_set():
            return
        runs.append(open_family_run(options, space, share, shop, known))
        yield runs[-1]
    for run in second_round(runs, options, started):
        shop.report(SearchGoesOn(run.family.family, run.num_trials, run.budget))
        if shop.stop.is_set():
            return
        yield run


def _fastest(runs: Sequence[FamilyRun]) -> Outcome | None:
    best: Outcome | None = None
    for run in runs:
        for outcome in run.all_outcomes:
            best = faster(best, outcome)
    return best


def _nothing_works(everything: Sequence[Outcome], card: str, interrupted: bool) -> str:
    if not everything:
        why = "interrupted" if interrupted else "the budget ended"
        return f"{why} before the first trial ended; repeat the command to go on"
    counts = list(count_reasons(everything).items())[:3]
    told = "; ".join(f"{count} x {reason}" for reason, count in counts)
    return f"none of {len(everything)} variants tried works on {card} ({told})"
