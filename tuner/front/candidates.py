"""Which kernels may serve a call, and how long each should take on its very shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..cards.slug import same_card
from ..predict.catalogue import build_catalogue
from ..predict.cost_model import predict
from ..predict.least import least_us
from ..predict.prior import prior_of
from ..predict.ranking import quickly_fastest
from ..serving import serving_families
from ..shelf.expected import Errors, of_sibling, order_of
from ..shelf.library import Entry
from .asked import in_steps

#: The untuned variants of each family that stand beside the tuned ones.
UNTUNED = 8
#: What a prediction is multiplied by of a variant that nobody timed: it is seldom as good as it looks.
UNTRIED = 1.05
#: And a tuned one's time, at least, of its like that makes the same bits every run: of seven on an H200 1.00
#: to 1.07.
IN_ORDER = 1.03


@dataclass(frozen=True)
class Candidate:
    """A variant for a problem, and the time it should take.

    ``record`` is what it was tuned as; None: it was not. ``model_us`` is the cost model's own prediction,
    ``predicted_us`` what its known errors make of it, ``exact`` whether it was tuned for just this problem on
    this card, ``elsewhere`` whether on another of its architecture.
    """

    variant: Variant
    predicted_us: float
    model_us: float
    limiter: str
    record: Entry | None = None
    exact: bool = False
    elsewhere: bool = False


def candidates(
    problem: Problem, limits: DeviceLimits, known: Iterable[Entry], *, repeating: bool = False
) -> list[Candidate]:
    """Returns what may serve a problem on a card, the fastest by prediction first; what was tuned here for
    just this stands before all others, and if shipped, or on another card where nothing was on this one,
    before all that are not clearly faster.
    ``repeating``: only what makes the same bits every run.

    Raises NotServed where no family computes it there.
    """
    families = serving_families(problem, limits)
    records = [each for each in known if _is_alike(each, problem, limits)]
    errors = Errors(records, limits)
    found = [
        each
        for each in _tuned(problem, families, errors, repeating)
        if not repeating or makes_same_bits(each.variant, problem, limits)
    ]
    has_own = any(each.exact and each.record is not None and not each.record.predicted for each in found)
    if not has_own:
        found += _untuned(problem, families, errors, found, repeating)
    best = {each.variant: each for each in sorted(found, key=_tells, reverse=True)}

    def order(candidate: Candidate) -> tuple[bool, float]:
        exact = candidate.exact or (candidate.elsewhere and not has_own)
        return order_of(candidate.predicted_us, candidate.record, limits, exact=exact)

    return sorted(best.values(), key=order)


def _tells(candidate: Candidate) -> tuple[bool, bool, float]:
    """Of records of one variant that comes first which tells its time."""
    return (not candidate.exact, not candidate.elsewhere, candidate.predicted_us)


def _is_alike(entry: Entry, problem: Problem, limits: DeviceLimits) -> bool:
    """Whether a record's variant may compute the problem: of its operation, layout and types, on such a
    card. Where all tiles between bounds are walked, what masks within these had others tuned for tells
    nothing, and takes long to be counted."""
    tuned = entry.kernel.problem
    return (
        entry.kernel.arch == limits.arch
        and tuned.operation is problem.operation
        and tuned.dtype == problem.dtype
        and tuned.kv_dtype == problem.kv_dtype
        and tuned.precision == problem.precision
        and tuned.layout is problem.layout
        and tuned.append == problem.append
        and (problem.scores.needs_lists or not tuned.scores.needs_lists)
    )


def _tuned(
    problem: Problem, families: Sequence[type[Variant]], errors: Errors, repeating: bool
) -> Iterator[Candidate]:
    """The records' variants, each by the record of it that is nearest; their likes that make the same bits,
    where they must be ``repeating``."""
    for entry in errors.records:
        variant, tuned = entry.kernel.variant, entry.kernel.problem
        told = errors.expect(entry, problem) if type(variant) in families else None
        if told is not None:
            alike = replace(tuned, scoring=in_steps(tuned.scoring))
            exact = alike == problem and same_card(entry.slug, errors.limits.slug)
            elsewhere = alike == problem and of_sibling(entry, errors.limits)
            like = variant.with_same_bits(problem) if repeating else variant
            if like != variant:
                model_us = predict(like, problem, errors.limits).median_us
                longer = max(IN_ORDER, model_us / told.model_us)
                yield Candidate(like, told.us * longer, model_us, told.limiter)
                continue
            yield Candidate(variant, told.us, told.model_us, told.limiter, entry, exact, elsewhere)


def makes_same_bits(variant: Variant, problem: Problem, limits: DeviceLimits) -> bool:
    """Whether a variant's kernel makes the same bits every run."""
    return variant.repeats_bits(variant.launches(problem, limits))


def _untuned(
    problem: Problem,
    families: Sequence[type[Variant]],
    errors: Errors,
    tuned: Iterable[Candidate],
    repeating: bool,
) -> Iterator[Candidate]:
    """The families' variants that the cost model calls fastest; where they must be ``repeating`` those of
    them alone, however far behind others. Families that cannot be as fast as what others have, or was
    ``tuned``, have none."""
    prior = prior_of(problem, errors.limits)

    def of_repeating(variant: Variant) -> float:
        return prior(variant) if makes_same_bits(variant, problem, errors.limits) else 0.0

    told = of_repeating if repeating else prior
    known = sorted(tuned, key=lambda each: each.predicted_us)
    best_us = min((each.predicted_us for each in known), default=math.inf)
    bounds = {family: least_us(family, problem, errors.limits) for family in families}
    for family in sorted(families, key=lambda family: bounds[family]):
        unlike = math.exp(errors.mean_of(family)) * UNTRIED
        if bounds[family] * unlike > best_us:
            continue
        catalogue = build_catalogue(family, problem, errors.limits)
        alike = [each.variant for each in known if type(each.variant) is family][:UNTUNED]
        for us, row in quickly_fastest(catalogue, told, alike, best_us / unlike)[:UNTUNED]:
            if not math.isfinite(us):
                break
            variant = catalogue.variant(row)
            best_us = min(best_us, us * unlike)
            yield Candidate(variant, us * unlike, us, predict(variant, problem, errors.limits).limiter)
