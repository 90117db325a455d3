"""A random forest as the model of times: no smoothness, and parameters that matter not at all are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

TREES = 64


@dataclass(frozen=True)
class Trees:
    """What trees grown on ``values`` at ``columns`` expect at the rows ``at``; see `surrogate.Belief`."""

    columns: np.ndarray
    values: np.ndarray
    at: np.ndarray
    seed: int

    @property
    def mean(self) -> np.ndarray:
        return self._each.mean(axis=0)

    @property
    def deviation(self) -> np.ndarray:
        """How far the trees disagree."""
        return self._each.std(axis=0)

    def supposing(self, indices: Sequence[int], values: np.ndarray) -> Trees:
        """Returns trees grown anew, which have also seen these values at some of the rows ``at``."""
        return replace(
            self,
            columns=np.concatenate([self.columns, self.at[list(indices)]]),
            values=np.concatenate([self.values, values]),
        )

    @cached_property
    def _each(self) -> np.ndarray:
        """Every tree's word on every row."""
        # Slow to import, and needed only once there is something to learn from.
        from sklearn.ensemble import ExtraTreesRegressor

        grown = ExtraTreesRegressor(TREES, random_state=self.seed).fit(self.columns, self.values)
        at = np.ascontiguousarray(self.at, dtype=np.float32)
        # Each tree itself: around it are checks that cost more than the walk.
        return np.stack([tree.tree_.predict(at)[:, 0] for tree in grown.estimators_])


def forest(columns: np.ndarray, values: np.ndarray, at: np.ndarray, seed: int) -> Trees:
    """Returns what trees grown on ``values`` at the rows ``columns`` expect at the rows ``at``: a
    `surrogate.Model`. ``seed`` draws the trees."""
    return Trees(columns, values, at, seed)
