"""Where a run's wall time went: cards that validate, that time, that wait for compilers, and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..evaluate.outcome import Outcome
from ..evaluate.worker_process import MEASURING, VALIDATING


@dataclass(frozen=True, kw_only=True)
class WallTime:
    """A run's seconds. Those of the cards (``validating``, ``timing``, ``finals``, ``waiting`` for compilers)
    are summed over ``cards``, those of the ``compilers`` over as many processes."""

    seconds: float
    cards: int
    compilers: int
    validating: float
    timing: float
    finals: float
    waiting: float
    compiling: float

    def shares(self) -> dict[str, float]:
        """Returns the shares of the cards' wall time, and as ``compile`` of the compilers' own.

        ``idle`` is what is left: the start, the search itself, the writing of the winner.
        """
        cards, compilers = self.cards * self.seconds, self.compilers * self.seconds
        spent = {
            "validate": self.validating,
            "time": self.timing,
            "finals": self.finals,
            "wait for compilers": self.waiting,
        }
        # Clocks of several processes: what they read together may exceed the whole by a little.
        shares = {name: min(1.0, seconds / cards) for name, seconds in spent.items()}
        shares["idle"] = max(0.0, 1 - sum(shares.values()))
        return shares | {"compile": min(1.0, self.compiling / compilers)}

    @property
    def busy(self) -> float:
        """The share of the cards' wall time in which they had work."""
        shares = self.shares()
        return shares["validate"] + shares["time"] + shares["finals"]

    def to_dict(self) -> dict[str, Any]:
        return {name: round(share, 4) for name, share in self.shares().items()}


class Stopwatch:
    """Gathers what becomes a `WallTime`; for one thread."""

    def __init__(self, cards: int, compilers: int) -> None:
        self._began = time.monotonic()
        self._cards, self._compilers = cards, compilers
        self._seconds = dict.fromkeys(("validating", "timing", "finals", "waiting", "compiling"), 0.0)

    def trial(self, outcome: Outcome) -> None:
        """Adds the seconds of a trial of this run that has ended."""
        self._seconds["validating"] += outcome.seconds.get(VALIDATING, 0.0)
        self._seconds["timing"] += outcome.seconds.get(MEASURING, 0.0)
        self._seconds["compiling"] += outcome.seconds.get("compile", 0.0)

    @contextmanager
    def finals(self) -> Iterator[None]:
        """Counts the seconds within as the finalists' on a card."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds["finals"] += time.monotonic() - began

    @contextmanager
    def waits(self, free: int) -> Iterator[None]:
        """Counts the seconds within as those of ``free`` cards that have nothing to do before a build is
        ready."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds["waiting"] += free * (time.monotonic() - began)

    def read(self) -> WallTime:
        return WallTime(
            seconds=time.monotonic() - self._began,
            cards=self._cards,
            compilers=self._compilers,
            **self._seconds,
        )
