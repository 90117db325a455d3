"""How well predicted times rank what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Two pairs are always in order or in reverse.
FEWEST_PAIRS = 3


def spearman(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> float | None:
    """Returns Spearman's correlation of ranks, equal values sharing the mean of theirs.

    None where there are fewer than three pairs or all values of one side are equal: it is undefined then.
    """
    if len(one) < FEWEST_PAIRS or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    # Slow to import, and asked for at the end of a run.
    from scipy.stats import spearmanr

    found: Any = spearmanr(one, other)
    return float(found.statistic)
