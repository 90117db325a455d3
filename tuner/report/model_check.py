"""How far the cost model can be trusted: its order, its first choice and its times beside measured ones."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from .content import FamilyPart


@dataclass(frozen=True)
class ModelCheck:
    """The cost model beside the measured times of one family. ``first_choice_costs`` is how much longer than
    the best trial the one takes that the model calls fastest, ``measured_over_predicted`` the median."""

    family: str
    trials: int
    rho: float | None
    first_choice_costs: float
    measured_over_predicted: float


def model_check(part: FamilyPart) -> ModelCheck | None:
    """Holds the cost model against a family's times; None where there is nothing to compare."""
    pairs = [
        (t.prediction.median_us, t.median_us)
        for t in part.timed
        if t.prediction is not None and t.median_us is not None
    ]
    if not pairs:
        return None
    return ModelCheck(
        family=part.name,
        trials=len(pairs),
        rho=part.rho,
        first_choice_costs=min(pairs)[1] / min(us for _, us in pairs) - 1,
        measured_over_predicted=median(us / predicted for predicted, us in pairs),
    )
