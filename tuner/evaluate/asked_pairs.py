"""What is asked of pairs of a row and a key, in float64: which are seen, and what their scores become."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gen.expression import Load
from ...gen.scoring.scores import BATCH, HEAD, KEY, NUM_KEYS, NUM_ROWS, QUERY, SCORE, Scores, laid_over
from .score_rounding import UNIT, Rounded, rounded_change

#: Scores below this, in powers of two, are infinite in float32, and their keys as good as hidden: PyTorch's
#: masks may have the least number that there is for what is hidden.
LEAST_SCORE = -float(np.finfo(np.float32).max) / math.log2(math.e)


@dataclass(frozen=True)
class AskedPairs:
    """The scores of a problem with what they read, over some of its batches and query heads.

    ``first`` are the batch and the head among ``values`` that the first of the arrays are. Scores are
    ``(heads, rows, keys)`` of one batch ``b`` of the arrays.
    """

    scores: Scores
    values: Mapping[str, Any]
    first: tuple[int, int]
    num_heads: int
    seqlen_q: int
    seqlen_k: int

    def interval(self, b: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where what each row may see of the keys begins and ends."""
        values = laid_over(self.values, {BATCH.name: self.first[0] + b})
        return self.scores.interval(rows, self.seqlen_q, self.seqlen_k, values)

    def hidden(self, b: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns which keys each row does not see: of one head where all are alike, else of each."""
        heads = range(self.num_heads if self.scores.vary_by_head else 1)
        return ~np.stack([self.visible(b, h, rows, keys) for h in heads])

    def visible(self, b: int, h: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns which keys each row of a head sees, ``(rows, keys)``."""
        at = (self.first[0] + b, self.first[1] + h)
        return self.scores.visible(self.values, *at, rows, keys, self.seqlen_q, self.seqlen_k)

    def changed(
        self, b: int, products: np.ndarray, rows: np.ndarray, keys: np.ndarray, tanh_error: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what becomes of scaled scores, and their errors: what comes of a relative error of the
        scaled ones, over that error, and of the change's own operations."""
        if self.scores.change is None:
            return products, np.abs(products), np.zeros(1)
        changed, inherited, own = (np.empty_like(products) for _ in range(3))
        for h, scores in enumerate(products):
            found = self.change(b, h, scores, UNIT * np.abs(scores), rows, keys, tanh_error)
            changed[h], inherited[h], own[h] = found.value, found.inherited, found.own
        inherited /= UNIT
        return changed, inherited, own

    def change(
        self,
        b: int,
        h: int,
        scores: np.ndarray,
        errors: np.ndarray,
        rows: np.ndarray,
        keys: np.ndarray,
        tanh_error: float,
    ) -> Rounded:
        """Returns what becomes of one head's scaled scores, and of their errors."""
        if self.scores.change is None:
            return Rounded(scores, errors)
        values = laid_over(self.values, {**self._places(b, h, rows, keys), SCORE.name: scores})
        return rounded_change(self.scores.change, values, errors, tanh_error=tanh_error)

    def _places(self, b: int, h: int, rows: np.ndarray, keys: np.ndarray) -> dict[str, Any]:
        """Where the pairs of a head's rows and keys are, by the names that expressions have for it."""
        return {
            BATCH.name: self.first[0] + b,
            HEAD.name: self.first[1] + h,
            QUERY.name: rows[:, None],
            KEY.name: keys[None, :],
            NUM_ROWS.name: self.seqlen_q,
            NUM_KEYS.name: self.seqlen_k,
        }

    def index_of(
        self, load: Load, shape: tuple[int, ...], b: int, h: int, rows: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Returns which element of a buffer of that ``shape``, counted one after the other, each pair of a
        head reads, ``(rows, keys)``; along axes of length 1 all read the same."""
        values = laid_over(self.values, self._places(b, h, rows, keys))
        places = (np.asarray(index.value(values)) for index in load.indices)
        # Negative ones count from the end; what is outside is the nearest that there is.
        within = (
            np.clip(np.where(place < 0, place + length, place), 0, length - 1)
            for place, length in zip(places, shape, strict=True)
        )
        found = np.ravel_multi_index(np.broadcast_arrays(*within), shape)
        return np.broadcast_to(found, (len(rows), len(keys)))

    def sinks(self) -> np.ndarray:
        """Returns the sink of each head; -inf where there are none."""
        if not self.scores.sinks:
            return np.full(self.num_heads, -np.inf)
        heads = slice(self.first[1], self.first[1] + self.num_heads)
        sinks = np.asarray(self.values["sinks"], np.float64)[heads]
        return np.where(sinks < LEAST_SCORE, -np.inf, sinks)
