"""What blocks of a gradient kernel of Hopper keep in shared memory."""

from __future__ import annotations

from ...handover.split_tiles import TILE_ROWS
from ...problem import ITEM_BYTES, Problem
from ..wgmma.parameters import GROUP_ROWS, is_split
from ..wgmma.shared_memory import ALIGNMENT, BARRIER_BYTES, CHUNK_BYTES, chunks
from .parameters import BULK, LATE, Parameters

#: How many warps of the producer add up what blocks of a cluster send each other.
ADDING_WARPS = 3
#: What a thread of the producer that hands on what blocks add up in memory has in shared memory, as large as
#: barriers, so that it needs no more registers than others; and what turns come with.
MOVER_WORDS, TURN_WORDS = 9, 16


def smem_bytes(variant: Parameters, problem: Problem) -> int:
    """Returns the bytes of shared memory of a block that keeps keys."""
    if is_split(problem):
        return _smem_bytes_of_parts(variant, problem)
    d, dv = chunks(problem.head_dim), chunks(problem.head_dim_v)
    tiles = variant.bc * (d + dv) + variant.br * (variant.q_stages * d + variant.dout_stages * dv)
    if variant.apart:
        # Weights on their way from one warpgroup to another.
        tiles += 2 * variant.br * variant.bc // GROUP_ROWS
    if variant.sums_queries:
        tiles += variant.ds_stages * variant.br * chunks(variant.bc)  # gradients of scores
    sums = 0
    if variant.dq_path == BULK:
        share_tiles, columns = variant.query_share(problem)
        sums = ITEM_BYTES["f32"] * variant.consumers * share_tiles * GROUP_ROWS * columns
    statistics = ITEM_BYTES["f32"] * variant.br * (variant.q_stages + variant.dout_stages)
    barriers = 1 + 2 * (variant.q_stages + variant.dout_stages)
    if variant.meeting == LATE:
        barriers += variant.ds_stages
    # The number of a turn takes no more room than a barrier.
    barriers += variant.persistent + 3 * variant.counts_turns
    if variant.hands_on_sums:
        # One tile's are moved while the next one's are made, and gradients of keys and values likewise.
        of_rows = ITEM_BYTES["f32"] * variant.br * problem.head_dim
        of_keys = 0 if variant.writes_by_consumers else CHUNK_BYTES * variant.bc * max(d, dv)
        moved = max(of_rows, of_keys)
        sums = 2 * _storage(moved, 0)
        # Who finishes behind has a word; then neither mover says where sums end.
        barriers += 2 * MOVER_WORDS + TURN_WORDS - variant.finishes_behind
    if variant.sums_in_cluster:
        sums = ITEM_BYTES["f32"] * variant.sum_stages * variant.br * problem.head_dim
        barriers += 1 + 2 * variant.sum_stages
        barriers += ADDING_WARPS * (variant.cluster + 1)  # as large are two numbers of each block
    return _storage(CHUNK_BYTES * tiles + sums + statistics, barriers)


def smem_bytes_of_rows(variant: Parameters, problem: Problem) -> int:
    """Returns the bytes of shared memory of a block that keeps query rows; 0 without such blocks."""
    if variant.sums_queries:
        return 0
    d, dv = chunks(problem.head_dim), chunks(problem.head_dim_v)
    tiles = variant.rows * (d + dv) + variant.keys * (variant.k_stages * d + variant.v_stages * dv)
    return _storage(CHUNK_BYTES * tiles, 1 + 2 * (variant.k_stages + variant.v_stages))


def _smem_bytes_of_parts(variant: Parameters, problem: Problem) -> int:
    """The same where numbers are of two parts: each consumer has gradients of scores of its own."""
    d, dv = chunks(problem.head_dim), chunks(problem.head_dim_v)
    rows = variant.consumers * (d + dv + 1) + variant.q_stages * d + variant.dout_stages * dv
    sums = GROUP_ROWS * problem.head_dim * variant.consumers if variant.dq_path == BULK else 0
    stages = variant.q_stages + variant.dout_stages
    # Of each tile four words have its unit; of each warp one has that of its gradients of scores.
    units = 4 * (2 * variant.consumers + stages) + 4 * variant.consumers * variant.parts
    tiles = 2 * CHUNK_BYTES * TILE_ROWS * rows
    return _storage(tiles + ITEM_BYTES["f32"] * (sums + variant.br * stages + units), 1 + 2 * stages)


def _storage(tile_bytes: int, barriers: int) -> int:
    return -(-(tile_bytes + BARRIER_BYTES * barriers) // ALIGNMENT) * ALIGNMENT
