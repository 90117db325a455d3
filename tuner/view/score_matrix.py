"""What a head's rows see of the keys and what becomes of their scores, in cells that make a small matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...gen.problem import Problem

#: Rows and keys of the tiles that are counted: what most kernels walk.
TILE = 64
#: Pairs that are all looked at. Of more, of each row of cells one row of tiles is.
MOST_PAIRS = 2**24
#: How far scores are spread where what becomes of them hangs on what they are.
SPREAD = 4.0
#: Two changes that differ by less are the same.
_SAME = 1e-9


@dataclass(frozen=True)
class ScoreMatrix:
    """One head's pairs of a row and a key, each cell being ``cell_rows`` rows by ``cell_keys`` keys.

    ``seen`` is the share of a cell's pairs that are visible. ``change`` is what is added to their scores, or
    with ``is_factor`` what they are multiplied by, on average, NaN where none is visible; None: nothing. A
    ``sink`` is the logit beside the scores. ``is_sampled``: shares are of some of the rows.
    """

    seen: np.ndarray
    change: np.ndarray | None
    is_factor: bool
    sink: float | None
    cell_rows: int
    cell_keys: int
    visible_share: float
    skipped_share: float
    is_sampled: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns the matrix as JSON has it; what no visible pair has is null."""
        return {
            "visible": self.visible_share,
            "tiles_skipped": self.skipped_share,
            "tile": TILE,
            "sampled": self.is_sampled,
            "cell": [self.cell_rows, self.cell_keys],
            "seen": [[float(share) for share in row] for row in self.seen],
            "change": None
            if self.change is None
            else [[None if np.isnan(each) else float(each) for each in row] for row in self.change],
            "change_is_factor": self.is_factor,
            "sink": self.sink,
        }


def score_matrix(
    problem: Problem, values: Mapping[str, Any], *, batch: int = 0, head: int = 0, most_cells: int = 32
) -> ScoreMatrix:
    """Returns the matrix of a batch and a query head in at most so many cells along either side.

    ``values`` are what the problem's masks and changes read: scalars and arrays by name.
    """
    scores, rows_end, keys_end = problem.scores, problem.seqlen_q, problem.seqlen_k
    cell_rows, cell_keys = (_cell(length, most_cells) for length in (rows_end, keys_end))
    keys = np.arange(keys_end)
    blocks = _blocks(rows_end, keys_end, cell_rows)
    drawn = np.random.default_rng(5)
    cells = np.zeros((len(_Sums._fields), -(-rows_end // cell_rows), -(-keys_end // cell_keys)))
    tiles = tiles_seen = 0
    is_added = True
    for first, end in blocks:
        rows = np.arange(first, end)
        where = (batch, head, rows, keys, rows_end, keys_end)
        seen = scores.visible(values, *where)
        in_tiles = _blocked(seen, TILE, TILE)
        tiles, tiles_seen = tiles + in_tiles.size, tiles_seen + np.count_nonzero(in_tiles)
        added = factors = None
        if scores.change is not None:
            added = scores.changed(values, np.zeros(seen.shape), *where)
            score = SPREAD * drawn.standard_normal(seen.shape)
            changed = scores.changed(values, score, *where)
            seen = seen & (changed > -np.inf)  # as masks are written that are no masks
            with np.errstate(all="ignore"):
                is_added = is_added and bool((np.abs(changed - score - added)[seen] < _SAME).all())
                factors = changed / score
        sums = np.stack([_blocked(each, cell_rows, cell_keys) for each in _Sums.of(seen, added, factors)])
        cells[:, first // cell_rows : first // cell_rows + sums.shape[1]] += sums
    total = _Sums(*cells)
    change = None
    if scores.change is not None:
        with np.errstate(all="ignore"):
            change = np.where(
                total.seen > 0, (total.added if is_added else total.factors) / total.seen, np.nan
            )
    return ScoreMatrix(
        seen=total.seen / total.pairs,
        change=change,
        is_factor=not is_added,
        sink=float(np.asarray(values["sinks"])[head]) if scores.sinks else None,
        cell_rows=cell_rows,
        cell_keys=cell_keys,
        visible_share=float(total.seen.sum() / total.pairs.sum()),
        skipped_share=1 - tiles_seen / tiles,
        is_sampled=sum(end - first for first, end in blocks) < rows_end,
    )


class _Sums(NamedTuple):
    """Of pairs, or in sum of cells: 1 where one is visible, 1, and what becomes of visible scores."""

    seen: np.ndarray
    pairs: np.ndarray
    added: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, seen: np.ndarray, added: np.ndarray | None, factors: np.ndarray | None) -> _Sums:
        none = np.broadcast_to(0.0, seen.shape)
        told = (none if each is None else np.where(seen, each, 0.0) for each in (added, factors))
        return cls(seen, np.broadcast_to(True, seen.shape), *told)


def _cell(length: int, most: int) -> int:
    """The least power of two by which a length comes in at most so many cells."""
    cell = 1
    while -(-length // cell) > most:
        cell *= 2
    return cell


def _blocks(rows_end: int, keys_end: int, cell_rows: int) -> list[tuple[int, int]]:
    """The rows that are looked at, some of each row of cells, by whole tiles where there are that many."""
    step = max(cell_rows, TILE)
    if rows_end * keys_end <= MOST_PAIRS:
        step = max(TILE, MOST_PAIRS // (16 * keys_end) // step * step)
        return [(first, min(first + step, rows_end)) for first in range(0, rows_end, step)]
    middle = (step // TILE - 1) // 2 * TILE  # of a diagonal as much is before as behind
    firsts = [min(first + middle, (rows_end - 1) // TILE * TILE) for first in range(0, rows_end, step)]
    return [(first, min(first + TILE, rows_end)) for first in firsts]


def _blocked(values: np.ndarray, rows: int, keys: int) -> np.ndarray:
    """Sums over blocks of so many rows and keys."""
    kind = np.int32 if values.dtype == bool else np.float64
    by_keys = np.add.reduceat(values, range(0, values.shape[1], keys), axis=1, dtype=kind)
    return np.add.reduceat(by_keys, range(0, values.shape[0], rows), axis=0)
