"""What replayed searches found: the share of the optimum after each evaluation, by method and space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .recorded_spaces import RecordedSpace

#: Evaluations at which methods are compared, and the share that is as good as the optimum.
MARKS, GOAL = (10, 25, 50, 100, 200), 0.97
#: The goal is to be reached within so many evaluations or so much of the space, whichever is more.
ALLOWED, ALLOWED_SHARE = 100, 0.05
#: The compared marks at which nobody should be ahead.
RACES = (50, 100, 200)
#: The percentiles between which most starts lie.
LOW, HIGH = 10, 90


@dataclass(frozen=True)
class Curves:
    """The shares of the optimum that one method found on one space, shape (seeds, evaluations)."""

    method: str
    shares: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return self.shares.mean(axis=0)

    def quantile(self, percent: float) -> np.ndarray:
        return np.percentile(self.shares, percent, axis=0)

    def at(self, evaluations: int) -> float | None:
        """Returns the mean share after so many evaluations; None where the space has fewer variants."""
        return float(self.mean[evaluations - 1]) if evaluations <= self.shares.shape[1] else None

    def until(self, goal: float = GOAL) -> np.ndarray:
        """Returns the evaluations until each seed reached the goal, infinite where it did not."""
        reached = self.shares >= goal
        return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, np.inf)


@dataclass(frozen=True)
class Replayed:
    """The curves of all methods on one space. ``rho`` is Spearman's of measured and predicted times, None
    where nothing was measured."""

    name: str
    space: RecordedSpace
    rho: float | None
    curves: tuple[Curves, ...]

    @property
    def allowed(self) -> int:
        """The evaluations within which the goal is to be reached."""
        return max(ALLOWED, round(ALLOWED_SHARE * len(self.space.entries)))

    def ahead_of(self, method: str) -> list[tuple[int, str, float, float]]:
        """Returns where another method is ahead in the mean, by as much as is printed.

        Each entry has the evaluations, the other method, its share and this one's.
        """
        own = next(c for c in self.curves if c.method == method)
        found = []
        for mark in RACES:
            for other in self.curves:
                mine, theirs = own.at(mark), other.at(mark)
                if mine is not None and theirs is not None and round(theirs, 3) > round(mine, 3):
                    found.append((mark, other.method, theirs, mine))
        return found

    def to_dict(self) -> dict[str, Any]:
        space = self.space
        return {
            "file": self.name,
            "problem": space.problem.to_dict(),
            "family": space.family.family,
            "card": space.limits.name,
            "predicted": space.predicted,
            "variants": len(space.entries),
            "timed": sum(e.median_us is not None for e in space.entries),
            "best_us": space.best_us,
            "spearman": self.rho,
            "allowed_evaluations": self.allowed,
            "methods": [
                {
                    "method": c.method,
                    "mean": c.mean.round(5).tolist(),
                    f"p{LOW}": c.quantile(LOW).round(5).tolist(),
                    f"p{HIGH}": c.quantile(HIGH).round(5).tolist(),
                    "evaluations_to_goal": [int(n) if np.isfinite(n) else None for n in c.until()],
                }
                for c in self.curves
            ],
        }
