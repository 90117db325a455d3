"""Which share of the tiles of keys tiles of rows see, where a predicate says it pair by pair.

It is counted on a sample of rows: lists of tiles are known only where they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..problem import Problem
from ..scoring.scores import BATCH, laid_over
from ..scoring.values import typical_values

#: The stretches of rows that are looked at, how long each is, and the pairs of rows and keys in all of them.
STRETCHES, STRETCH_ROWS, MOST_PAIRS = 8, 256, 2**23
#: Keys that are looked at together: what all tiles are multiples of.
STEP = 8


@dataclass(frozen=True)
class Share:
    """Of the tiles between the bounds of a tile of rows, the share of which they see anything; and of these,
    the share that some row does not see whole."""

    first_row: int
    seen: float
    partial: float


@dataclass(frozen=True)
class _Stretch:
    """Neighbouring rows, or every so many of them, and what each sees of every step of keys."""

    first_row: int
    stride: int
    some: np.ndarray
    whole: np.ndarray


@lru_cache(maxsize=65536)
def seen_shares(problem: Problem, br: int, bc: int, count: int) -> np.ndarray:
    """Returns the share that each of ``count`` tiles of ``br`` rows, from the first on, walks of the tiles of
    ``bc`` keys between its bounds."""
    if not problem.scores.needs_lists:
        return np.ones(count)
    shares = _shares_of_tiles(problem, br, bc)
    # Whether what is seen grows as the bounds do or stays, the inverse of the share is a straight line.
    inverse = np.interp(
        np.arange(count) * br, [each.first_row for each in shares], [1.0 / each.seen for each in shares]
    )
    return 1.0 / inverse


@lru_cache(maxsize=65536)
def partial_share(problem: Problem, br: int, bc: int) -> float:
    """Returns the share of the tiles walked that are masked pair by pair: all but those seen whole."""
    if problem.scores.predicate is None:
        return 1.0
    shares = _shares_of_tiles(problem, br, bc)
    return sum(each.seen * each.partial for each in shares) / sum(each.seen for each in shares)


@lru_cache(maxsize=65536)
def _shares_of_tiles(problem: Problem, br: int, bc: int) -> tuple[Share, ...]:
    """The shares of the tiles of rows that are looked at; of the first batch and query head."""
    found = []
    begins, ends = _bounds(problem)
    for each in _stretches(problem):
        length = len(each.some) * each.stride
        rows, steps = max(1, br // each.stride), max(1, bc // STEP)
        edges = np.arange(0, each.some.shape[1], steps)
        for first in range(0, max(1, length - br + 1), br):
            part = slice(first // each.stride, first // each.stride + rows)
            seen = np.logical_or.reduceat(np.any(each.some[part], axis=0), edges)
            whole = seen & np.logical_and.reduceat(np.all(each.whole[part], axis=0), edges)
            first_row = each.first_row + first
            last_row = min(first_row + br, problem.seqlen_q) - 1
            between = max(1, -(-int(ends[last_row]) // bc) - int(begins[first_row]) // bc)
            number = max(0.5, float(seen.sum()))  # of none, so little that it counts for nothing
            partial = 1.0 - float(whole.sum()) / number
            found.append(Share(first_row, min(1.0, number / between), partial))
    return tuple(found)


@lru_cache(maxsize=16)
def _bounds(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Of each row the first key that its bounds let it see, and the end of these; of the first batch."""
    values = laid_over(typical_values(problem), {BATCH.name: 0})
    return problem.scores.interval(np.arange(problem.seqlen_q), problem.seqlen_q, problem.seqlen_k, values)


@lru_cache(maxsize=16)
def _stretches(problem: Problem) -> tuple[_Stretch, ...]:
    num_rows, num_keys = problem.seqlen_q, problem.seqlen_k
    whole_stretches = max(1, num_rows // STRETCH_ROWS)
    count, length = min(STRETCHES, whole_stretches), min(STRETCH_ROWS, num_rows)
    # Of many keys, every so many rows of a stretch stand for those between them.
    stride = max(1, count * length * num_keys // MOST_PAIRS)
    keys = np.arange(num_keys)
    edges = np.arange(0, num_keys, STEP)
    found = []
    for nth in range(count):
        first_row = (whole_stretches - 1) * nth // max(1, count - 1) * STRETCH_ROWS
        rows = np.arange(first_row, first_row + length, stride)
        seen = problem.scores.visible(typical_values(problem), 0, 0, rows, keys, num_rows, num_keys)
        some, whole = (each.reduceat(seen, edges, axis=1) for each in (np.logical_or, np.logical_and))
        found.append(_Stretch(first_row, stride, some, whole))
    return tuple(found)
