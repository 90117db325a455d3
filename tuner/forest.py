"""A random forest as the model of times: no smoothness, and parameters that matter not at all are ignored."""

from __future__ import annotations

import numpy as np

TREES = 64


def forest(
    columns: np.ndarray, values: np.ndarray, at: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """See `surrogate.Model`. How far the trees disagree is the uncertainty."""
    # Slow to import, and needed only once there is something to learn from.
    from sklearn.ensemble import ExtraTreesRegressor

    grown = ExtraTreesRegressor(TREES, random_state=seed).fit(columns, values)
    at = np.ascontiguousarray(at, dtype=np.float32)
    # Each tree itself: around it are checks that cost more than the walk.
    each = np.stack([tree.tree_.predict(at)[:, 0] for tree in grown.estimators_])
    return each.mean(axis=0), each.std(axis=0)
