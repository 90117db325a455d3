"""How long known kernels should take on a problem: what the cost model says of each there, and how far it was
from what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Illegal, Variant
from ..cards.slug import same_card
from ..predict.cost_model import predict
from ..search.nearness import scores_differ, shape_distance
from .library import Entry

#: What a prediction is multiplied by for other head dims and scores than a record's.
OTHER_STEM = 1.03
#: Doublings over which what a record says of the cost model's error fades to its family's mean.
FADING = 2.0


@dataclass(frozen=True)
class Expectation:
    """The time a record's variant should take on a problem, ``us``; ``model_us`` is the cost model's own
    prediction of it and ``limiter`` what that says bounds it."""

    us: float
    model_us: float
    limiter: str


class Errors:
    """How far the cost model is from what records measured on a card: of each, and of their families in the
    mean."""

    def __init__(self, records: Iterable[Entry], limits: DeviceLimits) -> None:
        self.limits = limits
        told = {each: _error(each, limits) for each in records}
        self._of_record = {each: error for each, error in told.items() if error is not None}
        of_families: dict[type[Variant], list[float]] = {}
        for each, error in self._of_record.items():
            if _measured_there(each, limits):
                of_families.setdefault(type(each.kernel.variant), []).append(error)
        self._means = {family: sum(found) / len(found) for family, found in of_families.items()}

    @property
    def records(self) -> tuple[Entry, ...]:
        """Those of which the cost model can say something."""
        return tuple(self._of_record)

    def mean_of(self, family: type[Variant]) -> float:
        """Returns the mean logarithm of measured over predicted times; 0 where nothing was measured."""
        return self._means.get(family, 0.0)

    def expect(self, record: Entry, problem: Problem) -> Expectation | None:
        """Returns what a record's variant should take on a problem; None where it cannot run, or the cost
        model says nothing of the record itself."""
        variant, tuned = record.kernel.variant, record.kernel.problem
        error, told = self._of_record.get(record), predicted_us(variant, problem, self.limits)
        if error is None or told is None:
            return None
        us, limiter = told
        other = is_of_other_stem(tuned, problem)
        here = _measured_there(record, self.limits)
        counts = math.exp(-(shape_distance(tuned, problem) + other) / FADING) if here else 0.0
        mean = self.mean_of(type(variant))
        corrected = us * math.exp(mean + counts * (error - mean)) * (OTHER_STEM if other else 1.0)
        return Expectation(corrected, us, limiter)


def is_of_other_stem(tuned: Problem, problem: Problem) -> bool:
    """Tells whether two problems have other head dims, or other masks and changes of scores."""
    dims = [(each.head_dim, each.head_dim_v) for each in (tuned, problem)]
    return scores_differ(tuned, problem) or dims[0] != dims[1]


@lru_cache(maxsize=4096)
def predicted_us(variant: Variant, problem: Problem, limits: DeviceLimits) -> tuple[float, str] | None:
    """Returns the cost model's time of a variant and what it says bounds it; None where the variant cannot
    run."""
    try:
        variant.check(problem, limits)
        told = predict(variant, problem, limits)
    except (Illegal, ValueError):
        return None
    return told.median_us, told.limiter


def _error(record: Entry, limits: DeviceLimits) -> float | None:
    """The logarithm of what a record measured over what the cost model says of it, None where that says
    nothing; 0 where it was itself predicted, or measured on another card."""
    if not _measured_there(record, limits):
        return 0.0
    told = predicted_us(record.kernel.variant, record.kernel.problem, limits)
    return None if told is None else math.log(record.kernel.measurement.median_us / told[0])


def _measured_there(record: Entry, limits: DeviceLimits) -> bool:
    return not record.predicted and same_card(record.slug, limits.slug)
