"""What a random forest makes of the times seen so far: how much each other variant promises.

Trees need no scaling and no smoothness: tile sizes, switches and the cost model's word stand side by side.
What is modelled is the logarithm of time, so that a few very slow variants do not outweigh the rest. Failures
have no time, and none is invented for them: a second forest tells how likely a variant runs at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .catalogue import Catalogue

if TYPE_CHECKING:
    from sklearn.ensemble import ExtraTreesRegressor

#: Trees of the forest of times, and of the one of failures.
TREES, FAILURE_TREES = 64, 32
#: Failures before it is worth asking what they have in common.
FEWEST_FAILURES = 3
#: What is left of a variant's promise when everything like it has failed.
LEAST_CHANCE = 0.1
#: Beyond the slowest prediction, for variants that the cost model says cannot run: a step, no cliff.
UNRUNNABLE_STEP = 1.0


@dataclass(frozen=True)
class Seen:
    """What became of the variants tried so far, by their rows. ``pending`` are in flight, each with what it
    was expected to take; the others have not failed."""

    rows: tuple[int, ...]
    log_us: tuple[float, ...]
    failed: tuple[int, ...] = ()
    pending: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Promise:
    """Of each candidate: by how much it is expected to beat the fastest, and its expected time, both in
    logarithms of microseconds."""

    gains: np.ndarray
    log_us: np.ndarray


def features(catalogue: Catalogue) -> np.ndarray:
    """The variants as a forest splits them, shape (variants, features): a column per number (its rank among
    the choices) or switch, one per value of what has no order."""
    columns: list[np.ndarray] = []
    for parameter, codes in zip(catalogue.family.parameters(), catalogue.codes, strict=True):
        present = np.unique(codes)
        if len(present) < 2:
            continue
        choices = parameter.choices
        if len(present) == 2 or all(isinstance(c, int) for c in choices):
            sizes = [float(c) if isinstance(c, int) else i for i, c in enumerate(choices)]
            ranks = np.argsort(np.argsort(sizes))
            columns.append(ranks[codes])
        else:
            columns += [codes == code for code in present]
    if not columns:
        return np.zeros((len(catalogue), 1), dtype=np.float32)
    return np.stack(columns, axis=1).astype(np.float32)


def with_predictions(columns: np.ndarray, log_us: np.ndarray) -> np.ndarray:
    """The features and the cost model's word beside them. Of what it was not asked about it says nothing."""
    finite = log_us[np.isfinite(log_us)]
    slowest = float(finite.max()) if len(finite) else 0.0
    word = np.where(np.isfinite(log_us), log_us, slowest + UNRUNNABLE_STEP)
    return np.column_stack([columns, word.astype(np.float32)])


def promise(columns: np.ndarray, seen: Seen, candidates: np.ndarray, seed: int) -> Promise:
    """What the candidates promise.

    Variants in flight count as if they had come out as expected, or as the fastest seen where that is faster:
    what is like them promises less, so that a batch spreads.
    """
    fastest = min(seen.log_us)
    rows = [*seen.rows, *seen.pending]
    log_us = [*seen.log_us, *(max(expected, fastest) for expected in seen.pending.values())]
    trees = _each_tree(_grown(columns[rows], np.array(log_us), TREES, seed), columns[candidates])
    mean = trees.mean(axis=0)
    gains = expected_improvement(mean, trees.std(axis=0), fastest)
    if len(seen.failed) >= FEWEST_FAILURES:
        gains = gains * (LEAST_CHANCE + (1 - LEAST_CHANCE) * _chance(columns, seen, candidates, seed))
    return Promise(gains, mean)


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, fastest: float) -> np.ndarray:
    """Of a normal variable over ``fastest``, downwards."""
    deviation = np.maximum(deviation, 1e-9)
    z = (fastest - mean) / deviation
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return (fastest - mean) * _normal_cdf(z) + deviation * density


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.fromiter(map(math.erf, (z / math.sqrt(2)).tolist()), dtype=np.float64, count=len(z)))


def _chance(columns: np.ndarray, seen: Seen, candidates: np.ndarray, seed: int) -> np.ndarray:
    """How likely each candidate runs."""
    rows = [*seen.rows, *seen.failed]
    runs = np.repeat([1.0, 0.0], [len(seen.rows), len(seen.failed)])
    forest = _grown(columns[rows], runs, FAILURE_TREES, seed, fewest_per_leaf=2)
    return _each_tree(forest, columns[candidates]).mean(axis=0)


def _grown(
    columns: np.ndarray, values: np.ndarray, trees: int, seed: int, *, fewest_per_leaf: int = 1
) -> ExtraTreesRegressor:
    # Slow to import, and needed only once there is something to learn from.
    from sklearn.ensemble import ExtraTreesRegressor

    forest = ExtraTreesRegressor(trees, min_samples_leaf=fewest_per_leaf, random_state=seed)
    return forest.fit(columns, values)


def _each_tree(forest: ExtraTreesRegressor, columns: np.ndarray) -> np.ndarray:
    """Every tree's prediction, shape (trees, variants), without the checks that cost more than the walk."""
    columns = np.ascontiguousarray(columns, dtype=np.float32)
    return np.stack([_walk(tree, columns) for tree in forest.estimators_])


def _walk(tree: object, columns: np.ndarray) -> np.ndarray:
    return tree.tree_.predict(columns)[:, 0]  # type: ignore[attr-defined]
