"""What a report tells of a tuned problem, as data."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..evaluate.outcome import Measurement, Outcome
from ..predict.bounds import Bounds
from ..predict.peak import Peak
from ..predict.prediction import Prediction
from ..search.importance import Importance, Worth

#: Trials of a family that have a prediction: one takes up to a third of a millisecond.
MOST_PREDICTED = 4000


@dataclass(frozen=True)
class Trial:
    """One trial; ``number`` counts those of all families in the order in which they ended. Of very many not
    all have a ``prediction``."""

    number: int
    outcome: Outcome
    origin: str
    ended_at: datetime.datetime | None
    prediction: Prediction | None

    @property
    def variant(self) -> Variant:
        return self.outcome.variant

    @property
    def median_us(self) -> float | None:
        return self.outcome.measurement.median_us if self.outcome.measurement else None


@dataclass(frozen=True)
class Pruned:
    """A family's space: all combinations, what each rule removed, what is left."""

    total: int
    removed: Mapping[str, int]
    legal: int


@dataclass(frozen=True)
class FamilyPart:
    """One family's share of the report. ``unreadable`` counts trials with values that are none any more;
    ``rho`` is Spearman's between predicted and measured times."""

    family: type[Variant]
    trials: tuple[Trial, ...]
    unreadable: int
    pruned: Pruned | None
    importance: Importance | None
    rho: float | None

    @property
    def name(self) -> str:
        return self.family.family

    @cached_property
    def timed(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.median_us is not None)

    @cached_property
    def best_us(self) -> float:
        return min((t.median_us for t in self.trials if t.median_us is not None), default=float("inf"))


@dataclass(frozen=True)
class Winner:
    """The fastest kernel. ``retimed``: a run came to its end and timed the finalists once more; ``search_us``
    is what its trial took, where that is known, ``source_note`` where the source comes from."""

    variant: Variant
    measurement: Measurement
    retimed: bool
    search_us: float | None
    number: int | None
    tuned_at: str
    worth: tuple[Worth, ...]
    bounds: Bounds | None
    source: str
    source_note: str


@dataclass(frozen=True)
class Origin:
    """What one way of proposing variants found."""

    name: str
    trials: int
    best_us: float | None


@dataclass(frozen=True)
class Report:
    """Everything that a report tells of a problem on a card. ``families`` has the fastest first; ``older``
    counts groups of the same problem and card by other versions, of which nothing is told. ``peak`` is what
    the card's arithmetic could do, by its data sheet."""

    problem: Problem
    device: str
    limits: DeviceLimits
    peak: Peak | None
    slug: str
    predicted: bool
    about: Mapping[str, str]
    studies: tuple[str, ...]
    families: tuple[FamilyPart, ...]
    trials: tuple[Trial, ...]
    winner: Winner | None
    statuses: Mapping[str, int]
    reasons: Mapping[str, int]
    origins: tuple[Origin, ...]
    in_flight: int
    older: int

    @cached_property
    def timed(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.median_us is not None)

    @cached_property
    def failed(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.median_us is None)

    def to_dict(self) -> dict[str, Any]:
        winner = self.winner
        bounds = winner.bounds if winner else None
        return {
            "problem": self.problem.to_dict(),
            "device": self.device,
            "predicted": self.predicted,
            "peak_tflops": self.peak.tflops if self.peak else None,
            "studies": list(self.studies),
            "trials": len(self.trials),
            "statuses": dict(self.statuses),
            "reasons": dict(self.reasons),
            "winner": None
            if winner is None
            else {
                "family": winner.variant.family,
                "variant": winner.variant.to_dict(),
                "median_us": winner.measurement.median_us,
                "peak_share": self.peak.share(winner.measurement.tflops) if self.peak else None,
                "retimed": winner.retimed,
                "limiter": bounds.limiter.name if bounds else None,
                "parts_us": {part.name: part.us for part in bounds.parts} if bounds else None,
            },
            "families": {
                part.name: {
                    "trials": len(part.trials),
                    "best_us": part.best_us if part.timed else None,
                    "importance": part.importance.shares if part.importance else None,
                    "spearman": part.rho,
                    "legal": part.pruned.legal if part.pruned else None,
                    "removed": dict(part.pruned.removed) if part.pruned else None,
                }
                for part in self.families
            },
        }
