"""What calls ask for while somebody notes it: problems, how often, and what each costs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...gen.problem import Problem
from .bound import noting, workshop_of
from .card import Card


@dataclass(frozen=True)
class Note:
    """A problem that was called for on a card, how often, and the time of all calls by prediction."""

    problem: Problem
    card: Card
    calls: int
    cost_us: float
    exact: bool
    """Whether a kernel was tuned for just that."""


@dataclass
class Notes:
    """What was called for; `print` lists it."""

    calls: Counter[tuple[Problem, Card]] = field(default_factory=Counter)
    tuned: list[Any] = field(default_factory=list)
    """What was tuned of it."""

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Takes notes of all calls while the context is open."""

        def note(problem: Problem, card: Card) -> None:
            self.calls[problem, card] += 1

        with noting(note):
            yield

    def all(self) -> list[Note]:
        """Returns what was called for, the costliest first."""
        found = []
        for (problem, card), calls in self.calls.items():
            best = workshop_of(card).ranked(problem)[0]
            found.append(Note(problem, card, calls, calls * best.predicted_us, best.exact))
        return sorted(found, key=lambda each: -each.cost_us)

    def costliest(self, most: int) -> list[Note]:
        """Returns the costliest of what no kernel was tuned for."""
        return [each for each in self.all() if not each.exact][:most]

    def __str__(self) -> str:
        lines = [
            f"{each.calls} x {each.problem.name} on {each.card.limits.name}, {each.cost_us:.0f} us predicted"
            + (", tuned for just that" if each.exact else "")
            for each in self.all()
        ]
        return "\n".join(lines) or "nothing was called"
