"""The loop that spends a family's budget: ask for variants, build them ahead of the cards, evaluate, tell."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from ...gen.render import render
from ...gen.variant import Illegal
from ..build.protocol import Build
from ..cards.lock import GaveUp
from ..errors import BuildError
from ..evaluate.outcome import Outcome, Status
from ..evaluate.reasons import NUMBER
from ..search.ask_tell import Proposal
from .events import InFlight, Notice, TrialDone
from .family_run import FamilyRun
from .finalists import faster
from .workshop import Workshop

#: Builds in flight beyond one per compiler, so that no compiler waits while the card is busy.
BUILDS_AHEAD = 2
#: Builds that wait for each card beside the one on it, so that no card waits while the search thinks.
QUEUED = 2
#: Variants asked for at once, per card: the study is read once for all of them, and meanwhile no card gets a
#: build.
ASKED_AT_ONCE = 2
#: How often a wait looks whether the run was told to stop.
POLL_SECONDS = 0.2


def most_in_flight(compilers: int, cards: int) -> int:
    """Returns how many trials may be under way at a time, built or before or on a card."""
    return compilers + BUILDS_AHEAD + cards * (1 + QUEUED) - 1


class TrialLoop:
    """Spends one family's budget. ``best`` is the fastest outcome of all families so far, if any."""

    def __init__(self, run: FamilyRun, shop: Workshop, best: Outcome | None) -> None:
        self._run, self._shop, self._best = run, shop, best
        self._building: dict[Future[Build | BuildError], Proposal] = {}
        self._running: dict[Future[Outcome], Proposal] = {}
        self._doubts: set[str] = set()
        self._most_running = shop.team.size * (1 + QUEUED)
        self._most_in_flight = most_in_flight(shop.pool.size, shop.team.size)

    def spend(self) -> None:
        """Makes trials until the budget, the time or the space is spent, or the run is stopped.

        On return no trial of the run is left in flight.
        """
        try:
            while not self._ended:
                # Cards come first: asking takes a good part of the time that a trial does.
                self._evaluate()
                self._ask()
                self._shop.report(InFlight(len(self._building), len(self._running)))
                if not self._wait():
                    break
                self._gather()
            self._give_up_waiting()
        finally:
            self._abandon()

    @property
    def _ended(self) -> bool:
        return self._shop.stop.is_set() or self._run.out_of_time

    def _evaluate(self) -> None:
        """Gives builds to the cards, the first asked first."""
        building = self._building
        ready = sorted((f for f in building if f.done()), key=lambda f: building[f].trial.number)
        for future in ready:
            if len(self._running) == self._most_running:
                break
            proposal, built = building[future], future.result()
            del building[future]
            if isinstance(built, BuildError):
                status = Status.COMPILE_FAILED
                self._finish(proposal, Outcome(variant=proposal.variant, status=status, reason=str(built)))
            else:
                # What is recorded for others to search must be timed in full, slow or not.
                beaten_by = None if self._run.times_in_full else self._run.search.best_us
                submitted = self._shop.team.submit(built, self._run.catalogue.problem, beaten_by)
                self._running[submitted] = proposal

    def _ask(self) -> None:
        """Has some more variants built ahead of the cards."""
        catalogue = self._run.catalogue
        for proposal in self._run.search.ask_many(self._room()):
            try:
                kernel = render(proposal.variant, catalogue.problem, catalogue.limits)
            except Illegal as error:
                status = Status.ILLEGAL
                self._finish(proposal, Outcome(variant=proposal.variant, status=status, reason=str(error)))
                continue
            self._building[self._shop.pool.submit(kernel)] = proposal

    def _room(self) -> int:
        """How many more variants may be asked for."""
        if self._ended:
            return 0
        run, in_flight = self._run, len(self._building) + len(self._running)
        # What another coordinator has in flight is as good as done, unless it dies.
        asked = run.num_trials + in_flight + run.search.others.in_flight
        left = self._most_in_flight if run.budget is None else run.budget - asked
        most = 0 if run.search.exhausted else ASKED_AT_ONCE * self._shop.team.size
        return max(0, min(most, self._most_in_flight - in_flight, left))

    def _wait(self) -> bool:
        """Waits until something has happened. False where nothing is in flight that could."""
        building, running, search = self._building, self._running, self._run.search
        if building or running:
            awaited: list[Future[Any]] = [*running, *(building if len(running) < self._most_running else ())]
            with self._shop.watch.waits(max(0, self._shop.team.size - len(running)) if building else 0):
                wait(awaited, 0 if self._room() else POLL_SECONDS, return_when=FIRST_COMPLETED)
            return True
        if search.others.in_flight:
            # They end, or die and leave their variants to this run.
            time.sleep(POLL_SECONDS)
            search.look_at_others()
            return True
        return False

    def _gather(self) -> None:
        """Tells the outcomes that have come from the cards."""
        for future in [f for f in self._running if f.done()]:
            if self._shop.stop.is_set() and isinstance(future.exception(), GaveUp):
                break
            self._finish(self._running.pop(future), future.result())

    def _finish(self, proposal: Proposal, outcome: Outcome) -> None:
        """Tells the study of a trial's outcome, and the user."""
        run, shop = self._run, self._shop
        shop.file.check()
        shop.watch.trial(outcome)
        if not run.search.tell(proposal, outcome):
            return
        run.done.append(outcome)
        busy = outcome.measurement.busy if outcome.measurement is not None else ""
        if busy and (kind := NUMBER.sub("", busy)) not in self._doubts:
            self._doubts.add(kind)
            shop.report(Notice(f"times are doubtful, though repeated: {busy}"))
        self._best = faster(self._best, outcome)
        shop.report(TrialDone(run.num_trials, run.budget, str(proposal.origin), outcome, self._best))

    def _give_up_waiting(self) -> None:
        """Ends what runs on a card; what waits for a card that another tuner holds is given up."""
        for future in [f for f in self._running if not f.cancel()]:
            with contextlib.suppress(GaveUp):
                self._finish(self._running[future], future.result())
                del self._running[future]

    def _abandon(self) -> None:
        """Gives the variants of all trials in flight back."""
        for future, proposal in [*self._building.items(), *self._running.items()]:
            future.cancel()
            with contextlib.suppress(Exception):
                self._run.search.abandon(proposal)
