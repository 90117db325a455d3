"""What the variants tried so far say of the others: how far each may beat the fastest.

The logarithm of time is modelled, so that a few very slow variants do not outweigh the rest. Failures have
no time, and none is invented for them: how likely a variant runs at all is a model of its own. Models
(`process`, `forest`) are functions of what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from ..predict.catalogue import Catalogue

#: Failures before it is worth asking what they have in common.
FEWEST_FAILURES = 3
#: What is left of a variant's promise when everything like it has failed.
LEAST_CHANCE = 0.1
#: Beyond the slowest prediction, for variants that the cost model says cannot run: a step, no cliff.
UNRUNNABLE_STEP = 1.0
#: How far the cost model's word spreads, where a parameter's smallest and largest value lie 1 apart.
WORD_SPREAD = 0.6


class Belief(Protocol):
    """What a model that has learned expects of some rows: the mean and the standard deviation of each."""

    @property
    def mean(self) -> np.ndarray: ...

    @property
    def deviation(self) -> np.ndarray: ...

    def supposing(self, indices: Sequence[int], values: np.ndarray) -> Belief:
        """Returns what the model would expect had it also seen these values at some of the rows."""
        ...


class Model(Protocol):
    """Learns values of some rows of features and predicts those of others, each with its uncertainty."""

    def __call__(self, columns: np.ndarray, values: np.ndarray, at: np.ndarray, seed: int) -> Belief:
        """Returns the belief about the rows ``at`` of who has seen ``values`` at the rows ``columns``."""
        ...


@dataclass(frozen=True)
class Seen:
    """What became of the variants tried so far, by their rows; of those in ``pending`` nothing is known."""

    rows: Sequence[int]
    log_us: Sequence[float]
    failed: Sequence[int] = ()
    pending: Sequence[int] = ()


def features(catalogue: Catalogue) -> np.ndarray:
    """Returns the variants as numbers, shape (variants, features): a column from 0 to 1 per number, by its
    rank among the choices, or switch, and one per value of what has no order."""
    columns: list[np.ndarray] = []
    for parameter, codes in zip(catalogue.family.parameters(), catalogue.codes, strict=True):
        present = np.unique(codes)
        if len(present) < 2:
            continue
        choices = parameter.choices
        if len(present) == 2 or all(isinstance(c, int) for c in choices):
            sizes = [float(c) if isinstance(c, int) else i for i, c in enumerate(choices)]
            ranks = np.argsort(np.argsort(sizes))[codes]
            columns.append((ranks - ranks.min()) / (ranks.max() - ranks.min()))
        else:
            columns += [codes == code for code in present]
    if not columns:
        return np.zeros((len(catalogue), 1), dtype=np.float32)
    return np.stack(columns, axis=1).astype(np.float32)


def with_predictions(columns: np.ndarray, log_us: np.ndarray) -> np.ndarray:
    """Returns the features with the cost model's word as one more column; a variant that has no finite
    prediction is given more than the slowest one."""
    finite = log_us[np.isfinite(log_us)]
    if not len(finite):
        return columns
    word = np.where(np.isfinite(log_us), log_us, finite.max() + UNRUNNABLE_STEP)
    word = WORD_SPREAD * (word - finite.min()) / max(float(finite.std()), 1e-9)
    return np.column_stack([columns, word.astype(np.float32)])


@cache
def _thread_pools() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def single_threaded() -> AbstractContextManager[Any]:
    """Holds numpy's linear algebra to one thread: its matrices are small, and compilers have all the cores.
    With a thread on each it waits for them, eight times as long as it computes."""
    return _thread_pools().limit(limits=1, user_api="blas")


class Outlook:
    """An estimate of how much each candidate will beat the fastest seen, as more and more of them are chosen.

    Variants in flight count as if they had come out as predicted, or as the fastest seen where that is
    faster: what is like them promises less, so that a batch spreads.
    """

    def __init__(
        self, model: Model, columns: np.ndarray, seen: Seen, candidates: np.ndarray, seed: int
    ) -> None:
        log_us = np.array(seen.log_us)
        self._fastest = float(log_us.min())
        self._num = len(candidates)
        self._chosen = np.zeros(self._num, dtype=bool)
        at = columns[[*candidates, *seen.pending]]
        self._belief = model(columns[list(seen.rows)], log_us, at, seed)
        if seen.pending:
            self._suppose(range(self._num, len(at)))
        self._chance: np.ndarray | float = 1.0
        if len(seen.failed) >= FEWEST_FAILURES:
            tried = [*seen.rows, *seen.failed]
            runs = np.repeat([1.0, 0.0], [len(seen.rows), len(seen.failed)])
            chance = model(columns[tried], runs, columns[candidates], seed).mean
            self._chance = LEAST_CHANCE + (1 - LEAST_CHANCE) * np.clip(chance, 0, 1)

    def gains(self) -> np.ndarray:
        """Returns by how much each candidate is expected to beat the fastest seen, in logarithms of time,
        less where it may not run; minus infinity for those chosen."""
        mean, deviation = self._belief.mean[: self._num], self._belief.deviation[: self._num]
        gains = expected_improvement(mean, deviation, self._fastest) * self._chance
        return np.where(self._chosen, -np.inf, gains)

    def choose(self, index: int) -> None:
        """Counts that candidate as in flight from now on."""
        self._chosen[index] = True
        self._suppose([index])

    def _suppose(self, indices: Sequence[int]) -> None:
        guesses = self._belief.mean[list(indices)]
        self._belief = self._belief.supposing(indices, np.maximum(guesses, self._fastest))


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, fastest: float) -> np.ndarray:
    """Returns by how much a normal variable is expected to fall below ``fastest``, elementwise."""
    # Slow to import, and needed only once there is something to learn from.
    from scipy.special import ndtr

    deviation = np.maximum(deviation, 1e-9)
    z = (fastest - mean) / deviation
    # scipy.stats has the density too, for a second's import.
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return (fastest - mean) * ndtr(z) + deviation * density
