"""Which kernels may serve a call, and how long each should take on its very shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Illegal, Variant
from ..cards.slug import same_card
from ..predict.catalogue import build_catalogue
from ..predict.cost_model import predict
from ..predict.prior import prior_of
from ..predict.ranking import predicted_fastest
from ..search.nearness import scores_differ, shape_distance
from ..serving import serving_families
from ..shelf.library import Entry
from .asked import in_steps

#: The untuned variants of each family that stand beside the tuned ones.
UNTUNED = 8
#: What a prediction is multiplied by of a variant that nobody timed, and for other head dims and scores than
#: a record's: what nobody tried is seldom as good as it looks.
UNTRIED, OTHER_STEM = 1.05, 1.03
#: Doublings over which what a record says of the cost model's error fades to its family's mean.
FADING = 2.0


@dataclass(frozen=True)
class Candidate:
    """A variant for a problem, and the time it should take.

    ``record`` is what it was tuned as; None: it was not. ``model_us`` is the cost model's own prediction,
    ``predicted_us`` what its known errors make of it, ``exact`` whether it was tuned for just this problem on
    this card.
    """

    variant: Variant
    predicted_us: float
    model_us: float
    limiter: str
    record: Entry | None = None
    exact: bool = False


def candidates(problem: Problem, limits: DeviceLimits, known: Iterable[Entry]) -> list[Candidate]:
    """Returns what may serve a problem on a card, the fastest by prediction first; what was tuned for just
    this stands before all others.

    Raises NotServed where no family computes it there.
    """
    families = serving_families(problem, limits)
    records = [each for each in known if _is_alike(each, problem, limits)]
    errors = {each: error for each in records if (error := _model_error(each, limits)) is not None}
    means = {family: _mean_error(family, errors) for family in families}
    found = list(_tuned(problem, limits, errors, means))
    if not any(each.exact and each.record is not None and not each.record.predicted for each in found):
        found += _untuned(problem, limits, families, means)
    best = {each.variant: each for each in sorted(found, key=_order, reverse=True)}
    return sorted(best.values(), key=_order)


def _order(candidate: Candidate) -> tuple[bool, float]:
    return (not candidate.exact, candidate.predicted_us)


def _is_alike(entry: Entry, problem: Problem, limits: DeviceLimits) -> bool:
    """Whether a record's variant may compute the problem: of its operation, layout and types, on such a
    card."""
    tuned = entry.kernel.problem
    return (
        entry.kernel.arch == limits.arch
        and tuned.operation is problem.operation
        and tuned.dtype == problem.dtype
        and tuned.kv_dtype == problem.kv_dtype
        and tuned.precision == problem.precision
        and tuned.layout is problem.layout
        and tuned.append == problem.append
    )


def _model_error(entry: Entry, limits: DeviceLimits) -> float | None:
    """The logarithm of what a record measured over what the cost model says of it; nothing where it was
    itself predicted, or measured on another card."""
    if entry.predicted or not same_card(entry.slug, limits.slug):
        return 0.0
    predicted = _predicted_us(entry.kernel.variant, entry.kernel.problem, limits)
    return None if predicted is None else math.log(entry.kernel.measurement.median_us / predicted[0])


def _mean_error(family: type[Variant], errors: Mapping[Entry, float]) -> float:
    of_family = [error for each, error in errors.items() if type(each.kernel.variant) is family and error]
    return sum(of_family) / len(of_family) if of_family else 0.0


def _tuned(
    problem: Problem,
    limits: DeviceLimits,
    errors: Mapping[Entry, float],
    means: Mapping[type[Variant], float],
) -> Iterator[Candidate]:
    """The records' variants, each by the record of it that is nearest."""
    for entry, error in errors.items():
        variant, tuned = entry.kernel.variant, entry.kernel.problem
        told = _predicted_us(variant, problem, limits) if type(variant) in means else None
        if told is None:
            continue
        us, limiter = told
        here = not entry.predicted and same_card(entry.slug, limits.slug)
        other = scores_differ(tuned, problem) or (tuned.head_dim, tuned.head_dim_v) != (
            problem.head_dim,
            problem.head_dim_v,
        )
        alike = replace(tuned, scoring=in_steps(tuned.scoring))
        exact = alike == problem and same_card(entry.slug, limits.slug)
        counts = math.exp(-(shape_distance(tuned, problem) + other) / FADING) if here else 0.0
        mean = means[type(variant)]
        corrected = us * math.exp(mean + counts * (error - mean)) * (OTHER_STEM if other else 1.0)
        yield Candidate(variant, corrected, us, limiter, entry, exact)


def _untuned(
    problem: Problem,
    limits: DeviceLimits,
    families: Sequence[type[Variant]],
    means: Mapping[type[Variant], float],
) -> Iterator[Candidate]:
    """The families' variants that the cost model calls fastest."""
    for family in families:
        catalogue = build_catalogue(family, problem, limits)
        if not len(catalogue):
            continue
        for us, row in predicted_fastest(catalogue, prior_of(problem, limits))[:UNTUNED]:
            variant = catalogue.variant(row)
            limiter = predict(variant, problem, limits).limiter
            yield Candidate(variant, us * math.exp(means[family]) * UNTRIED, us, limiter)


@lru_cache(maxsize=4096)
def _predicted_us(variant: Variant, problem: Problem, limits: DeviceLimits) -> tuple[float, str] | None:
    """The cost model's time of a variant and what it says bounds it; None where the variant cannot run."""
    try:
        variant.check(problem, limits)
        told = predict(variant, problem, limits)
    except (Illegal, ValueError):
        return None
    return told.median_us, told.limiter
