"""Evaluators at work side by side: a worker process per card, each served by a thread of the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Protocol

from ...gen.problem import Problem
from ..build.protocol import Build
from ..cards.lock import GaveUp
from .outcome import Outcome


class Evaluator(Protocol):
    """What tests and times builds on one card; its worker process may die and be replaced."""

    def start(self) -> None:
        """Opens the card, so that the first build need not wait for that. Raises nothing."""
        ...

    def evaluate(self, build: Build, problem: Problem, *, best_us: float | None = None) -> Outcome:
        """Validates and times one build."""
        ...

    def finals(
        self,
        builds: list[Build],
        problem: Problem,
        errors: list[float],
        quiet: AbstractContextManager[None],
    ) -> list[Outcome]:
        """Times builds in turns, inside ``quiet``, and validates the fastest in full; one outcome each, with
        the errors of their trials but for the fastest's."""
        ...

    def kill(self) -> None:
        """Makes what another thread has under way fail at once."""
        ...

    def close(self) -> None: ...


class Team:
    """Evaluates as many builds at a time as it has evaluators; further ones wait, until ``stop`` is set.

    The cards are opened at once, while there is nothing to evaluate yet. Leave the ``with`` block to end all.
    """

    def __init__(self, evaluators: Sequence[Evaluator], stop: threading.Event | None = None) -> None:
        self.size = len(evaluators)
        self._stop = stop or threading.Event()
        self._evaluators = list(evaluators)
        self._free: SimpleQueue[Evaluator] = SimpleQueue()
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="card")
        self._opening = [self._threads.submit(self._open, each) for each in evaluators]

    def submit(self, build: Build, problem: Problem, best_us: float | None) -> Future[Outcome]:
        """Returns the outcome on whichever card is free first.

        The future raises GaveUp where the run was stopped before a card was free.
        """
        return self._threads.submit(self._evaluate, build, problem, best_us)

    def finals(
        self,
        builds: list[Build],
        problem: Problem,
        errors: list[float],
        quiet: AbstractContextManager[None],
    ) -> list[Outcome]:
        """Times the finalists in turns, all on one card: two of a kind differ by more than finalists do.

        What would disturb that is kept from it by ``quiet``.
        """
        self._opening[0].result()
        return self._threads.submit(self._evaluators[0].finals, builds, problem, errors, quiet).result()

    def _open(self, evaluator: Evaluator) -> None:
        try:
            evaluator.start()
        finally:
            self._free.put(evaluator)

    def _evaluate(self, build: Build, problem: Problem, best_us: float | None) -> Outcome:
        if self._stop.is_set():
            raise GaveUp("the run ended before a card was free")
        evaluator = self._free.get()
        try:
            return evaluator.evaluate(build, problem, best_us=best_us)
        finally:
            self._free.put(evaluator)

    def close(self) -> None:
        # A card may be busy for minutes with what nobody waits for any more.
        for each in self._evaluators:
            each.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for each in self._evaluators:
            each.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
