"""A Gaussian process as the model of times: smooth in every parameter alike.

One length for all features (Matern 3/2) and one level of noise, each the likeliest of a few: from some ten
times, a length per parameter would be chosen by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

#: Lengths and noise to choose from, in units of the features and of the values' variance.
LENGTHS = (0.5, 1.0, 2.0, 4.0)
NOISES = (1e-3, 1e-2, 5e-2)
#: More values than these are not learned from: solving for them takes their number cubed. Half are the
#: smallest, which the search is about, half any.
MOST_LEARNED = 400


@dataclass(frozen=True)
class Gaussian:
    """What a process expects at ``columns``; see `surrogate.Belief`.

    The covariance of two rows is ``scale`` times their kernel less the product of their rows of ``known``:
    what has been seen, whitened. More of it is a further column of ``known``.
    """

    columns: np.ndarray
    mean: np.ndarray
    known: np.ndarray
    scale: float
    length: float
    noise: float

    @property
    def deviation(self) -> np.ndarray:
        return np.sqrt(np.maximum(self.scale * (1 - np.square(self.known).sum(axis=1)), 1e-12 * self.scale))

    def supposing(self, indices: Sequence[int], values: np.ndarray) -> Gaussian:
        chosen = list(indices)
        cross = _matern(_distances(self.columns, self.columns[chosen]) / self.length)
        cross -= self.known @ self.known[chosen].T
        factor = np.linalg.cholesky(cross[chosen] + self.noise * np.eye(len(chosen)))
        whitened = np.linalg.solve(factor, cross.T).T
        surprise = np.linalg.solve(factor, values - self.mean[chosen])
        return replace(
            self, mean=self.mean + whitened @ surprise, known=np.concatenate([self.known, whitened], axis=1)
        )


def process(columns: np.ndarray, values: np.ndarray, at: np.ndarray, seed: int) -> Gaussian:
    """Returns what a Gaussian process that has learned ``values`` at the rows ``columns`` expects at the rows
    ``at``: a `surrogate.Model`. Of more than `MOST_LEARNED` values it learns from as many, half of them drawn
    by ``seed``."""
    if len(values) > MOST_LEARNED:
        kept = _kept(values, seed)
        columns, values = columns[kept], values[kept]
    columns, at = columns.astype(np.float64), at.astype(np.float64)
    centre, spread = float(values.mean()), max(float(values.std()), 1e-6)
    scaled = (values - centre) / spread
    length, noise = _likeliest(columns, scaled)
    kernel = _matern(_distances(columns, columns) / length)
    inverse = np.linalg.inv(np.linalg.cholesky(kernel + noise * np.eye(len(scaled))))
    white = inverse @ scaled
    known = _matern(_distances(at, columns) / length) @ inverse.T
    scale = spread**2 * float(white @ white) / len(scaled)
    return Gaussian(at, centre + spread * (known @ white), known, scale, length, noise)


def _likeliest(columns: np.ndarray, scaled: np.ndarray) -> tuple[float, float]:
    """The length and noise under which the values are likeliest, whatever their scale."""
    distances = _distances(columns, columns)
    best, chosen = -np.inf, (LENGTHS[0], NOISES[-1])
    for length in LENGTHS:
        kernel = _matern(distances / length)
        for noise in NOISES:
            factor = np.linalg.cholesky(kernel + noise * np.eye(len(scaled)))
            white = np.linalg.solve(factor, scaled)
            scale = max(float(white @ white) / len(scaled), 1e-12)
            likelihood = -0.5 * len(scaled) * np.log(scale) - np.log(np.diag(factor)).sum()
            if likelihood > best:
                best, chosen = likelihood, (length, noise)
    return chosen


def _matern(distances: np.ndarray) -> np.ndarray:
    scaled = np.sqrt(3) * distances
    return (1 + scaled) * np.exp(-scaled)


def _distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    squares = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * one @ other.T
    return np.sqrt(np.maximum(squares, 0))


def _kept(values: np.ndarray, seed: int) -> np.ndarray:
    order = np.argsort(values, kind="stable")
    fastest, rest = order[: MOST_LEARNED // 2], order[MOST_LEARNED // 2 :]
    some = np.random.default_rng(seed).choice(rest, MOST_LEARNED - len(fastest), replace=False)
    return np.concatenate([fastest, some])
