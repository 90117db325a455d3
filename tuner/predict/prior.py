"""The cost model as a search sees it: a time for any variant."""

from __future__ import annotations

from collections.abc import Callable

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
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
