"""How several families share a run's trials and minutes: a first round for each, the rest for the fastest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from .family_run import FamilyRun
from .options import TuneOptions

#: Trials that tell enough of a family to compare it with others by.
STARTUP_TRIALS = 24
#: Of several families each may spend so much of the budget before they are compared; the rest goes to those
#: whose best is at most so much slower than the fastest.
FIRST_ROUND, LEADER_SLACK = 0.5, 1.25


def first_share(options: TuneOptions, families: int) -> tuple[int | None, float | None]:
    """Returns the trials and minutes that each of so many families gets before any is given more.

    Either is None where the run has no such bound.
    """
    trials, minutes = options.trials, options.minutes
    if families == 1:
        return trials, minutes
    if trials is not None:
        # Enough to compare the families by, or an equal share of few.
        enough = min(STARTUP_TRIALS, trials // families)
        trials = max(1, enough, int(FIRST_ROUND * trials / families))
    return trials, None if minutes is None else FIRST_ROUND * minutes / families


def second_round(runs: Sequence[FamilyRun], options: TuneOptions, started: float) -> Iterator[FamilyRun]:
    """Yields the families that share what the first round left of the budget, each with its share granted.

    There is none where one that has been tried whole is far ahead of the others. ``started`` is when the run
    began, by the monotonic clock.
    """
    waiting = [run for run in runs if not run.search.exhausted]
    if len(runs) < 2 or not waiting:
        return
    fastest_us = min(run.best_us for run in runs)
    leaders = [run for run in waiting if run.best_us <= LEADER_SLACK * fastest_us]
    for index, run in enumerate(leaders):
        shares = len(leaders) - index
        if options.trials is not None:
            left = options.trials - sum(each.num_trials for each in runs)
            if left // shares <= 0:
                continue
            run.budget = run.num_trials + left // shares
        if options.minutes is not None:
            now = time.monotonic()
            run.deadline = now + (started + 60 * options.minutes - now) / shares
        yield run
