"""A random forest as the model of times: no smoothness, and parameters that matter not at all are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

TREES = 64


@dataclass(frozen=True)
class Forest:
    """Trees grown on ``values`` at ``columns``."""

    columns: np.ndarray
    values: np.ndarray
    seed: int

    def at(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `surrogate.Fit`. How far the trees disagree is the uncertainty."""
        columns = np.ascontiguousarray(columns, dtype=np.float32)
        # Each tree itself: around it are checks that cost more than the walk.
        each = np.stack([tree.tree_.predict(columns)[:, 0] for tree in self._grown.estimators_])
        return each.mean(axis=0), each.std(axis=0)

    def supposing(self, columns: np.ndarray, values: np.ndarray) -> Forest:
        """See `surrogate.Fit`: the forest is grown anew."""
        return Forest(
            np.concatenate([self.columns, columns]), np.concatenate([self.values, values]), self.seed
        )

    @cached_property
    def _grown(self) -> Any:
        # Slow to import, and needed only once there is something to learn from.
        from sklearn.ensemble import ExtraTreesRegressor

        return ExtraTreesRegressor(TREES, random_state=self.seed).fit(self.columns, self.values)


def forest(columns: np.ndarray, values: np.ndarray, seed: int) -> Forest:
    """See `surrogate.Model`."""
    return Forest(columns, values, seed)
