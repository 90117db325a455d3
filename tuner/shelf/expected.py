"""How long known kernels should take on a problem: what the cost model says of each there, and how far it was
from what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ...gen.limits import PRESETS, DeviceLimits, preset_of
from ...gen.problem import Problem
from ...gen.variant import Illegal, Variant
from ..cards.slug import same_card
from ..predict.cost_model import predict
from ..search.nearness import scores_differ, shape_distance
from .library import Entry, is_shipped

#: What a prediction is multiplied by for other head dims and scores than a record's.
OTHER_STEM = 1.03
#: By what a kernel must be expected to be faster than one that was tuned for just the problem, elsewhere or
#: before others were known. Of fourteen that looked faster on an H100, five by over 30 % and nine by up to
#: that, the five were by 32 % and more, and the nine by 1 % at most.
CLEARLY = 1.3
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
    """How far the cost model is from what records measured on a card and on others of its architecture: of
    each, and of their families in the mean."""

    def __init__(self, records: Iterable[Entry], limits: DeviceLimits) -> None:
        self.limits = limits
        told = {each: _error(each, limits) for each in records}
        self._of_record = {each: error for each, error in told.items() if error is not None}
        elsewhere, here = self._means_of(is_here=False), self._means_of(is_here=True)
        self._means = elsewhere | here

    @property
    def records(self) -> tuple[Entry, ...]:
        """Those of which the cost model can say something."""
        return tuple(self._of_record)

    def mean_of(self, family: type[Variant]) -> float:
        """Returns the mean logarithm of measured over predicted times: of what was measured on the card, else
        on others of its architecture; 0 where nothing was."""
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
        was_measured = measured_on(record, self.limits) is not None
        counts = math.exp(-(shape_distance(tuned, problem) + other) / FADING) if was_measured else 0.0
        mean = self.mean_of(type(variant))
        corrected = us * math.exp(mean + counts * (error - mean)) * (OTHER_STEM if other else 1.0)
        return Expectation(corrected, us, limiter)

    def _means_of(self, *, is_here: bool) -> dict[type[Variant], float]:
        """The mean errors of families: of what was measured on this very card, or on others like it."""
        found: dict[type[Variant], list[float]] = {}
        for each, error in self._of_record.items():
            if measured_on(each, self.limits) is not None and is_here != of_sibling(each, self.limits):
                found.setdefault(type(each.kernel.variant), []).append(error)
        return {family: sum(errors) / len(errors) for family, errors in found.items()}


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


def measured_on(record: Entry, limits: DeviceLimits) -> DeviceLimits | None:
    """Returns the card that a record was measured on: ``limits`` itself, or the preset of another card of its
    architecture; None where it was predicted, or nothing is known of its card."""
    if record.predicted:
        return None
    if same_card(record.slug, limits.slug):
        return limits
    name = preset_of(record.kernel.device)
    # How far the model is off is a matter of instructions and of what blocks wait for: of the architecture.
    # What cards of one differ in, clocks and memories, are its inputs, which leave the error as it is.
    if name is None or not record.kernel.arch == PRESETS[name].arch == limits.arch:
        return None
    return PRESETS[name]


def of_sibling(record: Entry, limits: DeviceLimits) -> bool:
    """Tells whether a record was measured on another card of the same architecture that has a preset."""
    return measured_on(record, limits) is not None and not same_card(record.slug, limits.slug)


def order_of(us: float, record: Entry | None, limits: DeviceLimits, *, exact: bool) -> tuple[bool, float]:
    """Returns by what kernels that should take ``us`` are ordered, the first of which serves; of an ``exact``
    one, tuned for just the problem, ``record`` is that.

    What was tuned here stands before all others. It leaves the problem to what should be clearly faster where
    that was on another card of the architecture, or where it was shipped: others may have been found since.
    What was tuned on another card is no exact one where something was for just the problem on this one.
    """
    if record is None or not exact:
        return True, us
    if of_sibling(record, limits) or is_shipped(record):
        return True, us / CLEARLY
    return False, us


def _error(record: Entry, limits: DeviceLimits) -> float | None:
    """The logarithm of what a record measured over what the cost model says of it on the card that measured
    it, None where that says nothing; 0 where nothing was measured that counts here."""
    card = measured_on(record, limits)
    if card is None:
        return 0.0
    told = predicted_us(record.kernel.variant, record.kernel.problem, card)
    return None if told is None else math.log(record.kernel.measurement.median_us / told[0])
