"""The cost model as a search sees it: a time for any variant."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from .catalogue import Catalogue
from .cost_model import predict

#: Predicted time of a variant, in microseconds.
Prior = Callable[[Variant], float]


def prior_of(problem: Problem, limits: DeviceLimits) -> Prior:
    """Returns the cost model as a function of variants; infinite for one that it says cannot be resident."""

    def predicted_us(variant: Variant) -> float:
        try:
            return predict(variant, problem, limits).median_us
        except ValueError:
            return float("inf")

    return predicted_us


def remembered(prior: Prior, catalogue: Catalogue, said: MutableMapping[int, float]) -> Prior:
    """Returns the same prior, asked at most once about a variant of the catalogue: what it says of a row is
    kept in ``said``, and what is there already is taken for its word."""

    def recalled_us(variant: Variant) -> float:
        row = catalogue.row(variant)
        if row is None:
            return prior(variant)
        us = said.get(row)
        if us is None:
            us = said[row] = prior(variant)
        return us

    return recalled_us
