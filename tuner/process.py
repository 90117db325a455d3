"""A Gaussian process as the model of times: smooth in every parameter alike.

One length for all features (Matern 3/2) and one level of noise, each the likeliest of a few: from some ten
times, a length per parameter would be chosen by chance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

#: Lengths and noise to choose from, in units of the features and of the values' variance.
LENGTHS = (0.5, 1.0, 2.0, 4.0)
NOISES = (1e-3, 1e-2, 5e-2)
#: More values than these are not learned from: solving for them takes their number cubed. Half are the
#: smallest, which the search is about, half any.
MOST_LEARNED = 400


@dataclass(frozen=True)
class Process:
    """A process that has seen ``values`` at ``columns``. They vary by ``spread`` around ``centre``."""

    columns: np.ndarray
    values: np.ndarray
    centre: float
    spread: float
    length: float
    noise: float

    def at(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `surrogate.Fit`."""
        inverse, weights, scale = self._solved
        cross = _matern(_distances(columns.astype(np.float64), self.columns) / self.length)
        variance = scale * (1 - np.square(cross @ inverse.T).sum(axis=1))
        deviation = np.sqrt(np.maximum(variance, 1e-12))
        return self.centre + self.spread * (cross @ weights), self.spread * deviation

    def supposing(self, columns: np.ndarray, values: np.ndarray) -> Process:
        """See `surrogate.Fit`: length, noise, centre and spread stay."""
        return replace(
            self,
            columns=np.concatenate([self.columns, columns.astype(np.float64)]),
            values=np.concatenate([self.values, values]),
        )

    @cached_property
    def _solved(self) -> tuple[np.ndarray, np.ndarray, float]:
        """The inverse of the covariances' Cholesky factor, the weights of the values, and their variance."""
        scaled = (self.values - self.centre) / self.spread
        kernel = _matern(_distances(self.columns, self.columns) / self.length)
        inverse = np.linalg.inv(np.linalg.cholesky(kernel + self.noise * np.eye(len(scaled))))
        weights = inverse.T @ (inverse @ scaled)
        return inverse, weights, float(scaled @ weights) / len(scaled)


def process(columns: np.ndarray, values: np.ndarray, seed: int) -> Process:
    """See `surrogate.Model`."""
    if len(values) > MOST_LEARNED:
        kept = _kept(values, seed)
        columns, values = columns[kept], values[kept]
    columns = columns.astype(np.float64)
    centre, spread = float(values.mean()), max(float(values.std()), 1e-6)
    length, noise = _likeliest(columns, (values - centre) / spread)
    return Process(columns, values, centre, spread, length, noise)


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
