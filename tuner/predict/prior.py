"""The cost model as a search sees it: a time for any variant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from . import cost_model, prediction, warpgroup_model

GEN = Path(__file__).resolve().parents[2] / "gen"
COUNTED_FROM = ("limits.py", "problem.py", "variant.py", "shared_memory/banks.py", "shared_memory/tiles.py")
#: Predicted time of a variant, in microseconds.
Prior = Callable[[Variant], float]


def prior_of(problem: Problem, limits: DeviceLimits) -> Prior:
    """The cost model's time; infinite for a variant that it says cannot be resident."""

    def predicted_us(variant: Variant) -> float:
        try:
            return cost_model.predict(variant, problem, limits).median_us
        except ValueError:
            return float("inf")

    return predicted_us


def cost_model_version() -> str:
    """What tells one cost model's predictions from another's: its source, that of the work it weighs and
    that of what the work is counted from: layouts, bank conflicts, registers, a card's limits."""
    counted = sorted(
        {*GEN.glob("*work.py"), *GEN.glob("families/*/*.py"), *(GEN / name for name in COUNTED_FROM)}
    )
    models = [Path(str(module.__file__)) for module in (cost_model, warpgroup_model, prediction)]
    return "\0".join(path.read_text(encoding="utf-8") for path in (*models, *counted))
