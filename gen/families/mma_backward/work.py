"""What an `MmaBackward` kernel makes a card do, counted along its template."""

from __future__ import annotations

from dataclasses import replace

from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...work import BlockWork, Counts, LaunchesWork, LaunchWork, count_work
from ..gradient_work import (
    bytes_of_keys,
    bytes_of_rows,
    masked_share,
    moved_by_keys,
    moved_by_rows,
    moved_by_statistics,
    scoring_counts,
    walk_of_keys,
    walk_of_rows,
)
from ..mma.layouts import SWIZZLED
from ..mma.work import ALU_PER_COPY, ALU_PER_SWIZZLE, ALU_PER_TILE, PADDED_PASSES, WIDE_FLOPS
from .family import MmaBackward

#: Threads of a quarter warp have the same row of an accumulator, and as many rows lie between its halves.
LANE_ROWS = 8


@count_work.register
def mma_backward_work(variant: MmaBackward, problem: Problem, limits: DeviceLimits) -> LaunchesWork:
    """Returns the work of a kernel of this family on a problem and a card."""
    registers = variant.registers(problem, limits)
    launches = (
        LaunchWork(
            _of_rows(variant, problem, limits),
            variant.row_warps * WARP,
            variant.smem_bytes_of_rows(problem),
            registers,
        ),
        LaunchWork(
            _of_keys(variant, problem, limits),
            variant.threads(),
            variant.smem_bytes(problem, limits),
            registers,
        ),
    )
    return LaunchesWork(launches, others=1, moved_bytes=moved_by_statistics(problem))


def _of_keys(variant: MmaBackward, problem: Problem, limits: DeviceLimits) -> BlockWork:
    """Blocks that keep keys: four products of each tile of rows, two of which make weights."""
    d, dv = variant.columns(problem.head_dim), variant.columns(problem.head_dim_v)
    walks = walk_of_keys(problem, variant.bc, variant.br, variant.key_warps)
    block = BlockWork(
        once=_moved(variant, problem, 2 * bytes_of_keys(problem, variant.bc)),
        per_tile=_copied(variant, problem, bytes_of_rows(problem, variant.br)),
        per_warp_tile=_products(variant, variant.key_tiles, variant.br, d + dv, d + dv, limits),
        walks=walks,
        heads=problem.batch * problem.num_kv_heads,
        warps=variant.key_warps,
        heads_share_keys=False,
        moved_bytes=moved_by_keys(problem),
        passing_bytes=problem.group * bytes_of_rows(problem, problem.seqlen_q),
    )
    return _with_scores(block, problem, variant.key_tiles, variant.bc, variant.br)


def _of_rows(variant: MmaBackward, problem: Problem, limits: DeviceLimits) -> BlockWork:
    """Blocks that keep query rows: three products of each tile of keys."""
    d, dv = variant.columns(problem.head_dim), variant.columns(problem.head_dim_v)
    walks = walk_of_rows(problem, variant.rows, variant.keys, variant.row_warps)
    kept = bytes_of_rows(problem, variant.rows)
    written = variant.rows * problem.head_dim * ITEM_BYTES[problem.dtype]
    block = BlockWork(
        once=_moved(variant, problem, kept + written),
        per_tile=_copied(variant, problem, bytes_of_keys(problem, variant.keys)),
        per_warp_tile=_products(variant, variant.row_tiles, variant.keys, d + dv, d, limits),
        walks=walks,
        heads=problem.batch * problem.num_q_heads,
        warps=variant.row_warps,
        moved_bytes=moved_by_rows(problem),
        passing_bytes=bytes_of_keys(problem, problem.seqlen_k),
    )
    return _with_scores(block, problem, variant.row_tiles, variant.rows, variant.keys)


def _products(
    variant: MmaBackward, tiles: int, passing: int, deep: int, wide: int, limits: DeviceLimits
) -> Counts:
    """One warp's products of its tiles of 16 rows with so many that pass by: over ``deep`` columns, and into
    ``wide`` of them."""
    steps = deep // 16 * (passing // 8)
    sums = passing // 16 * (wide // 8)
    products = tiles * (steps + sums)
    # A load brings an operand of sixteen rows, of what stays anew for each tile, or two of eight.
    loads = deep // 16 * (tiles + passing / 16) + passing / 16 * wide / 16
    weights = 4 * tiles * passing / 8
    known = 4 * passing / 8
    swizzled = ALU_PER_SWIZZLE * loads if variant.layout == SWIZZLED else 0.0
    return Counts(
        products=products,
        tensor=products * 4 * WIDE_FLOPS / limits.mma_flops_per_sm,
        # Scores less the log-sum-exp, gradients of weights less what they share, and times weights.
        ffma=weights,
        alu=2 * weights + weights * wide / deep + swizzled + ALU_PER_TILE,
        exp=weights,
        accesses=loads + known,
        wavefronts=4 * loads + known,
        delivered=4 * loads + known,
        shared_waits=4,
    )


def _with_scores(block: BlockWork, problem: Problem, tiles: int, stay: int, passing: int) -> BlockWork:
    """The same with what masks and changes of scores ask of a warp."""
    masked = masked_share(problem, stay, passing, block.mean_tiles)
    asked = scoring_counts(
        problem, 2 * tiles, passing / 4, masked=masked, warp_rows=LANE_ROWS, approximate=True
    )
    compute = block.per_warp_tile + asked
    copies = block.per_tile.instructions / block.warps
    return replace(block, per_warp_tile=compute, loop_instructions=compute.instructions + copies)


def _copied(variant: MmaBackward, problem: Problem, tile_bytes: float) -> Counts:
    """A tile that passes by, from global to shared memory."""
    copies = tile_bytes / (variant.access_width(problem) * ITEM_BYTES[problem.dtype] * WARP)
    passes = 1.0 if variant.layout == SWIZZLED else PADDED_PASSES
    return Counts(
        alu=ALU_PER_COPY * copies,
        accesses=copies,
        wavefronts=passes * tile_bytes / 128,
        l2_bytes=tile_bytes,
        barriers=1 if variant.stages > 1 else 2,
        global_waits=0 if variant.stages > 1 else 1,
    )


def _moved(variant: MmaBackward, problem: Problem, num_bytes: float) -> Counts:
    """What a block keeps, read, and the gradients of it, written."""
    accesses = num_bytes / (variant.access_width(problem) * ITEM_BYTES[problem.dtype] * WARP)
    return Counts(
        alu=12 * accesses,
        accesses=accesses,
        wavefronts=2 * num_bytes / 128,
        l2_bytes=num_bytes,
        global_waits=2,
        barriers=1,
    )
