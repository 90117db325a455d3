"""What launches of gradients make a card do, whatever their family: who walks which tiles, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

import numpy as np

from ..formula.derivative import derivative
from ..handover.reach import mean_tiles_in_reach
from ..problem import ITEM_BYTES, Problem
from ..scoring.scores import BATCH, SCORE, laid_over
from ..scoring.values import typical_values
from ..work import Counts, Walk, sequences_alone
from .scoring_work import pair_counts

#: A score is masked by two comparisons and a selection.
ALU_PER_MASKED = 3.0
#: What is known of a row beside its elements: its log-sum-exp and what gradients of its scores are less by.
STATISTICS_BYTES = 8
FLOAT_BYTES = 4
#: Bytes that L2 could have delivered in the time in which it adds one up: on an H200 an SM was seen to add
#: 30 GB a second where it reads 85.
READS_PER_SUM = 2.8


@lru_cache(maxsize=4096)
def walk_of_keys(
    problem: Problem, bc: int, br: int, warps: int, reaches: tuple[float, ...] = ()
) -> tuple[Walk, ...]:
    """Counts the walks of the tiles of ``bc`` keys of one head, the first one first: past each come, in tiles
    of ``br``, the query rows of all heads that share the keys which see some of them. ``reaches``: how far
    from their places the rows of each head look, of which the mean counts. Of packed sequences the walks are
    those of all."""
    if problem.layout.is_packed:
        return _of_sequences(lambda alone: walk_of_keys(alone, bc, br, warps), problem)
    begins, ends = _bounds(problem)
    found, shift = [], problem.seqlen_k - problem.seqlen_q
    for first in range(0, problem.seqlen_k, bc):
        first_row = int(np.searchsorted(ends, first, side="right"))
        end_row = int(np.searchsorted(begins, min(first + bc, problem.seqlen_k), side="left"))
        rows = end_row - first_row // br * br if first_row < end_row else 0
        tiles: float = -(-rows // br)
        if reaches:
            places = first - shift, min(first + bc, problem.seqlen_k) - 1 - shift
            tiles = mean_tiles_in_reach(reaches, places, (first_row, end_row), br)
        found.append(round(tiles * problem.group))
    return _walks(found, warps)


@lru_cache(maxsize=4096)
def walk_of_rows(problem: Problem, br: int, bc: int, warps: int) -> tuple[Walk, ...]:
    """Counts the walks of the tiles of ``br`` query rows of one head, the first one first: past each come, in
    tiles of ``bc``, the keys between those that its rows see first and last. Of packed sequences the walks
    are those of all."""
    if problem.layout.is_packed:
        return _of_sequences(lambda alone: walk_of_rows(alone, br, bc, warps), problem)
    begins, ends = _bounds(problem)
    found = []
    for first in range(0, problem.seqlen_q, br):
        begin, end = int(begins[first]), int(ends[min(first + br, problem.seqlen_q) - 1])
        found.append(-(-(end - begin // bc * bc) // bc) if begin < end else 0)
    return _walks(found, warps)


def _of_sequences(walks_of: Callable[[Problem], tuple[Walk, ...]], problem: Problem) -> tuple[Walk, ...]:
    """The walks of all packed sequences, those that are longest first."""
    found = [
        replace(walk, blocks=count * walk.blocks)
        for count, alone in sequences_alone(problem)
        for walk in walks_of(alone)
    ]
    return tuple(sorted(found, key=lambda walk: -walk.tiles))


def heads_of(problem: Problem, heads: int) -> int:
    """Returns how many heads have such walks: of all batches, or of packed sequences those of one."""
    return heads * (1 if problem.layout.is_packed else problem.batch)


def _bounds(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """What each row sees of the keys begins and ends there; of what differs from batch to batch, the first
    stands for all."""
    values = laid_over(typical_values(problem), {BATCH.name: 0})
    rows = np.arange(problem.seqlen_q)
    begins, ends = problem.scores.interval(rows, problem.seqlen_q, problem.seqlen_k, values)
    return np.broadcast_to(begins, rows.shape), np.broadcast_to(ends, rows.shape)


def _walks(tiles: list[int], warps: int) -> tuple[Walk, ...]:
    """The walks of blocks of so many tiles each, of which all warps compute every one; neighbours that are
    alike together."""
    alike = ((count, len(list(blocks))) for count, blocks in groupby(tiles))
    return tuple(Walk(blocks, count, warps * count, warps * count) for count, blocks in alike)


def masked_share(problem: Problem, stay: int, passing: int, tiles: float) -> float:
    """Returns the share of a block's ``tiles`` that it masks pair by pair: those that a bound crosses, and
    where arrays end; all of them under a predicate."""
    scores = problem.scores
    if scores.predicate is not None:
        return 1.0
    ends = any(not each.flag or each.flag in scores.flags for each in scores.ends[1:])
    crossed = (bool(scores.begins) + ends) * (stay / passing + 1)
    return min(1.0, (crossed + 1) / max(1.0, tiles))


def scoring_counts(
    problem: Problem, rows: float, columns: float, *, masked: float, warp_rows: int, approximate: bool = False
) -> Counts:
    """Counts what one warp does to mask and to change the scores of a tile and to find how steep the changes
    are, where a lane has ``rows`` by ``columns`` of them and so large a share of tiles is ``masked``."""
    counts = Counts(alu=ALU_PER_MASKED * rows * columns * masked)
    told = {"warp_rows": warp_rows, "approximate": approximate}
    if problem.scores.change is not None or problem.scores.predicate is not None:
        counts += pair_counts(problem, rows, columns, **told)
    if problem.scores.change is not None:
        slope = derivative(problem.scores.change, SCORE.name)
        counts += pair_counts(problem, rows, columns, partial=0.0, change=(slope,), **told)
        counts += Counts(ffma=rows * columns)
    return counts


def bytes_of_rows(problem: Problem, rows: int) -> float:
    """Returns the bytes of query rows with their gradients of outputs and what is known of them."""
    return rows * ((problem.head_dim + problem.head_dim_v) * ITEM_BYTES[problem.dtype] + STATISTICS_BYTES)


def bytes_of_keys(problem: Problem, keys: int) -> float:
    """Returns the bytes of keys and values."""
    return keys * (problem.head_dim + problem.head_dim_v) * ITEM_BYTES[problem.dtype]


def moved_by_keys(problem: Problem) -> float:
    """Returns the fewest bytes that pass through device memory for the gradients of keys and values."""
    return _all_rows(problem) + 2 * _all_keys(problem)


def moved_by_rows(problem: Problem) -> float:
    """Returns the same for the gradients of query rows."""
    gradients = problem.head_dim * ITEM_BYTES[problem.dtype] * problem.total_q
    return _all_rows(problem) + _all_keys(problem) + problem.num_q_heads * gradients


def moved_by_statistics(problem: Problem) -> float:
    """Returns the bytes that the launch of the rows' statistics moves: outputs and their gradients, the
    log-sum-exp, and what it leaves."""
    of_row = 2 * problem.head_dim_v * ITEM_BYTES[problem.output_dtype] + 1.5 * STATISTICS_BYTES
    return problem.num_q_heads * problem.total_q * of_row


def moved_by_sums(problem: Problem, columns: int) -> float:
    """Returns the bytes that the sums of the queries' gradients take through device memory beside being added
    up: they are cleared before, and afterwards read, and written as gradients."""
    rows = problem.num_q_heads * problem.total_q
    return rows * (2 * FLOAT_BYTES * columns + problem.head_dim * ITEM_BYTES[problem.dtype])


def _all_rows(problem: Problem) -> float:
    return problem.num_q_heads * bytes_of_rows(problem, problem.total_q)


def _all_keys(problem: Problem) -> float:
    return problem.num_kv_heads * bytes_of_keys(problem, problem.total_k)
