"""The cost model as a search sees it: a time for any variant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..gen.limits import DeviceLimits
from ..gen.problem import Problem
from ..gen.variant import Variant
from . import costmodel

#: Predicted time of a variant, in microseconds.
Prior = Callable[[Variant], float]


def prior_of(problem: Problem, limits: DeviceLimits) -> Prior:
    return lambda variant: costmodel.predict(variant, problem, limits).median_us


def cost_model_version() -> str:
    """What tells one cost model's predictions from another's."""
    return Path(costmodel.__file__).read_text(encoding="utf-8")
