"""What an `MmaBackward` kernel makes a card do, counted along its template."""

from __future__ import annotations

from dataclasses import replace

from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...work import BlockWork, Counts, LaunchesWork, LaunchWork, count_work
from ..gradient_work import (
    FLOAT_BYTES,
    READS_PER_SUM,
    bytes_of_keys,
    bytes_of_rows,
    heads_of,
    masked_share,
    moved_by_keys,
    moved_by_rows,
    moved_by_statistics,
    moved_by_sums,
    scoring_counts,
    walk_of_keys,
    walk_of_rows,
)
from ..gradients import VECTOR_SUMS
from ..mma.layouts import CHUNK_BYTES, SWIZZLED, TILE_ROWS
from ..mma.work import ALU_PER_COPY, ALU_PER_SWIZZLE, ALU_PER_TILE, NARROW_COST, PADDED_PASSES, WIDE_FLOPS
from .family import MmaBackward
from .parameters import COLUMN_STEP

#: Threads of a quarter warp have the same row of an accumulator, and as many rows lie between its halves.
LANE_ROWS = 8


@count_work.register
def mma_backward_work(variant: MmaBackward, problem: Problem, limits: DeviceLimits) -> LaunchesWork:
    """Returns the work of a kernel of this family on a problem and a card."""
    registers, moved, split = variant.registers(problem, limits), moved_by_statistics(problem), 0
    if problem.dtype == "f32":  # what passes by is read, and written in parts, by launches in front
        gradients = problem.batch * problem.num_kv_heads * bytes_of_keys(problem, problem.seqlen_k)
        split, moved = 2, moved + 2 * (moved_by_keys(problem) - gradients)
    of_keys = LaunchWork(
        _of_keys(variant, problem, limits), variant.threads(), variant.smem_bytes(problem, limits), registers
    )
    if columns := variant.summed_columns(problem):
        moved += moved_by_sums(problem, columns)
        return LaunchesWork((of_keys,), others=2 + split, moved_bytes=moved)
    of_rows = LaunchWork(
        _of_rows(variant, problem, limits),
        variant.threads_of_rows,
        variant.smem_bytes_of_rows(problem),
        variant.registers_of_rows(problem),
    )
    return LaunchesWork((of_rows, of_keys), others=1 + split, moved_bytes=moved)


def _of_keys(variant: MmaBackward, problem: Problem, limits: DeviceLimits) -> BlockWork:
    """Blocks that keep keys: two products of each tile of rows make weights, and as many gradients of keys
    and values; one more where the gradients of queries are added up, too."""
    d, dv = variant.columns(problem.head_dim), variant.columns(problem.head_dim_v)
    own = variant.own_columns(problem.head_dim) + variant.own_columns(problem.head_dim_v)
    warps, br = variant.key_warps * variant.column_warps, variant.br
    compute = _weights(variant, variant.key_tiles, br // variant.column_warps, d + dv, limits)
    compute += _sums(variant, variant.key_tiles, br, own, limits)
    compute += _weights_in_shared_memory(variant)
    per_tile = _copied(variant, problem, bytes_of_rows(problem, br), limits)
    if variant.summed_columns(problem):
        compute += _queries(variant, problem, limits)
        per_tile += _added_up(variant, problem, limits)
    block = BlockWork(
        once=_moved(variant, problem, 2 * bytes_of_keys(problem, variant.bc)),
        per_tile=per_tile + Counts(barriers=int(variant.weights_kept > 0)),
        per_warp_tile=_in_parts(problem, compute),
        walks=walk_of_keys(problem, variant.bc, br, warps),
        heads=heads_of(problem, problem.num_kv_heads),
        warps=warps,
        heads_share_keys=False,
        moved_bytes=moved_by_keys(problem),
        passing_bytes=problem.group * bytes_of_rows(problem, problem.seqlen_q),
    )
    columns = br / (4 * variant.column_warps)
    return _with_scores(block, problem, 2 * variant.key_tiles, columns, (variant.bc, br))


def _of_rows(variant: MmaBackward, problem: Problem, limits: DeviceLimits) -> BlockWork:
    """Blocks that keep query rows: three products of each tile of keys."""
    d, dv = variant.columns(problem.head_dim), variant.columns(problem.head_dim_v)
    own, warps = variant.own_columns_of_rows(problem.head_dim), variant.row_warps * variant.gradient_warps
    compute = _weights(variant, variant.row_tiles, variant.keys, d + dv, limits)
    written = variant.rows * problem.head_dim * ITEM_BYTES[problem.dtype]
    block = BlockWork(
        once=_moved(variant, problem, bytes_of_rows(problem, variant.rows) + written),
        per_tile=_copied(variant, problem, bytes_of_keys(problem, variant.keys), limits),
        per_warp_tile=_in_parts(
            problem, compute + _sums(variant, variant.row_tiles, variant.keys, own, limits)
        ),
        walks=walk_of_rows(problem, variant.rows, variant.keys, warps),
        heads=heads_of(problem, problem.num_q_heads),
        warps=warps,
        moved_bytes=moved_by_rows(problem),
        passing_bytes=bytes_of_keys(problem, problem.seqlen_k),
    )
    return _with_scores(block, problem, 2 * variant.row_tiles, variant.keys / 4, (variant.rows, variant.keys))


def _weights(variant: MmaBackward, tiles: int, passing: int, columns: int, limits: DeviceLimits) -> Counts:
    """One warp's scores and gradients of weights of its tiles of 16 rows with so many that pass by, over so
    many columns of both, and what it makes of them."""
    # A load brings an operand of sixteen rows, of what stays anew for each tile, or two of eight.
    loads = columns // 16 * (tiles + passing / 16)
    weights, known = 4 * tiles * passing / 8, 4 * passing / 8
    return (
        _multiplied(tiles * (columns // 16) * (passing // 8), limits)
        + Counts(
            # Scores less the log-sum-exp, gradients of weights less what they share, and times weights.
            ffma=weights,
            alu=2 * weights + ALU_PER_TILE,
            exp=weights,
            accesses=known,
            wavefronts=known,
            delivered=known,
            shared_waits=4,
        )
        + _loaded(variant, loads)
    )


def _sums(variant: MmaBackward, tiles: int, passing: int, columns: int, limits: DeviceLimits) -> Counts:
    """One warp's sums over what passes by into so many columns of its tiles of 16 rows, by weights that are
    packed in pairs."""
    loads = passing / 16 * columns / 16
    packed = Counts(alu=tiles * passing / 4)
    return _multiplied(tiles * (passing // 16) * (columns // 8), limits) + packed + _loaded(variant, loads)


def _weights_in_shared_memory(variant: MmaBackward) -> Counts:
    """One warp's share of weights, and of gradients of scores, that other warps need: two at a time."""
    stores = variant.weights_kept * variant.key_tiles * (variant.br // variant.column_warps) / 4
    loads = 2 * variant.key_tiles * variant.br / 16 if variant.column_warps > 1 else 0
    return Counts(accesses=stores, wavefronts=stores) + _loaded(variant, loads)


def _queries(variant: MmaBackward, problem: Problem, limits: DeviceLimits) -> Counts:
    """One warp's share of what a block makes of a tile's gradients of queries."""
    groups = variant.sum_groups(problem)
    rows = variant.br // TILE_ROWS // groups[0]
    steps = -(-variant.columns(problem.head_dim) // COLUMN_STEP // groups[1])
    loads = variant.bc / 16 * (rows + steps)
    return _multiplied(rows * 2 * steps * (variant.bc // 16), limits) + _loaded(variant, loads)


def _added_up(variant: MmaBackward, problem: Problem, limits: DeviceLimits) -> Counts:
    """What a block adds to the queries' gradients in memory."""
    floats = variant.br * variant.columns(problem.head_dim)
    accesses = floats / (WARP * (4 if limits.arch >= VECTOR_SUMS else 1))
    added = FLOAT_BYTES * floats
    return Counts(accesses=accesses, wavefronts=added / 128, l2_bytes=READS_PER_SUM * added)


def _in_parts(problem: Problem, counts: Counts) -> Counts:
    """The same where numbers are of two parts: three products of each two, twice the loads and the stores."""
    if problem.dtype != "f32":
        return counts
    twice = counts + replace(counts, ffma=0.0, exp=0.0, products=0.0, tensor=0.0, shared_waits=0.0)
    return replace(twice, products=3 * counts.products, tensor=3 * counts.tensor)


def _multiplied(products: float, limits: DeviceLimits) -> Counts:
    """Products sixteen deep, or of two eight deep each."""
    cycles = products * 4 * WIDE_FLOPS / limits.mma_flops_per_sm
    if limits.has_async_copy:
        return Counts(products=products, tensor=cycles)
    return Counts(products=2 * products, tensor=2 * NARROW_COST * cycles)


def _loaded(variant: MmaBackward, loads: float) -> Counts:
    """Matrix loads, of 512 bytes each; neither layout lets their rows conflict."""
    swizzled = ALU_PER_SWIZZLE * loads if variant.layout == SWIZZLED else 0.0
    return Counts(alu=swizzled, accesses=loads, wavefronts=4 * loads, delivered=4 * loads)


def _with_scores(
    block: BlockWork, problem: Problem, rows: float, columns: float, tiles: tuple[int, int]
) -> BlockWork:
    """The same with what masks and changes of scores ask of a warp, whose lanes have ``rows`` by ``columns``;
    ``tiles`` are what a block keeps and what passes by."""
    masked = masked_share(problem, *tiles, block.mean_tiles)
    asked = scoring_counts(problem, rows, columns, masked=masked, warp_rows=LANE_ROWS, approximate=True)
    compute = block.per_warp_tile + asked
    copies = block.per_tile.instructions / block.warps
    return replace(block, per_warp_tile=compute, loop_instructions=compute.instructions + copies)


def _copied(variant: MmaBackward, problem: Problem, tile_bytes: float, limits: DeviceLimits) -> Counts:
    """A tile that passes by, from global to shared memory: through registers where nothing else copies."""
    in_parts = problem.dtype == "f32"  # which fill whole chunks
    width = CHUNK_BYTES if in_parts else variant.access_width(problem) * ITEM_BYTES[problem.dtype]
    copies = tile_bytes / (width * WARP)
    passes = 1.0 if variant.layout == SWIZZLED else PADDED_PASSES
    return Counts(
        alu=ALU_PER_COPY * copies,
        accesses=copies * (1 if limits.has_async_copy else 2),
        wavefronts=passes * tile_bytes / 128,
        l2_bytes=tile_bytes,
        barriers=1 if variant.stages > 1 else 2,
        global_waits=0 if variant.stages > 1 and limits.has_async_copy else 1,
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
