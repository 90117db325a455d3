"""What a `WgmmaBackward` kernel makes a card do, counted along its template: by warps of consumers."""

from __future__ import annotations

from dataclasses import replace

from ...handover.reach import reaches_of_heads, work_in_front
from ...handover.split_tiles import CHUNK_WORDS, TILE_ROWS, UNIT_WORDS
from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...work import BlockWork, Counts, LaunchesWork, LaunchWork, Walk, count_work
from ..gradient_work import (
    FLOAT_BYTES,
    READS_PER_SUM,
    STATISTICS_BYTES,
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
from ..wgmma.parameters import GROUP, GROUP_ROWS, is_split
from ..wgmma.shared_memory import CHUNK, chunks
from ..wgmma.work import WGMMA_FLOPS_PER_CLOCK
from .family import WgmmaBackward
from .parameters import (
    AHEAD,
    ATOMICS,
    BULK,
    BY_SECTION,
    EVEN,
    HEAVIEST_FIRST,
    LATE,
    NARROW,
    OF_KEYS,
    WEIGHTS_FIRST,
)
from .registers import launch_registers
from .slices import slices_of_left, tiles_left

#: Warps of a warpgroup, whose shares of a tile are 16 rows each, and rows between those of a lane.
GROUP_WARPS, LANE_ROWS = GROUP // WARP, 8
#: How much of what masks take is left where the rows that see a key are known for all of a block's tiles: by
#: instructions of compiled kernels, 0.4 of windows and 0.7 of causal masks.
SHARE_OF_KEYS = 0.6
#: Columns that an instruction multiplies along.
DEPTH = 16
#: How much of a tile's way is waited for where there is room for one alone, as a part of that of queries:
#: these are needed from a tile's first product to its last; gradients of outputs not at its end. By times of
#: an H200.
LATE_GRADIENTS, LATE_KEYS = 0.15, 0.3
#: Passes of sums on their way: written, and read by the copy engine or, in a cluster, by those who add them
#: up; or sent to memory by threads, which takes a little longer.
SHARED_PASSES, THREAD_PASSES = 2.0, 2.3
#: How much longer a tile takes whose products with weights come before those with gradients, by six pairs;
#: and of parts, where the first are split meanwhile, by eight.
WEIGHTS_FIRST_PACE, WEIGHTS_FIRST_PACE_OF_PARTS = 1.01, 0.95
#: How much longer a tile of parts takes whose block has one consumer: nobody multiplies while it splits. By
#: four kernels of an H200.
ALONE_PACE = 1.14
#: How much longer a tile takes whose sums the copy engine adds, where rows are no whole chunks of 64 columns,
#: beside those that threads add: by times of an H200 at head dims 72, 80 and 112; 40 and 96 agree.
BULK_PACE = 1.08
#: How much longer where blocks of a head do not start together, though none has less to do than others: of
#: sixteen pairs of an H200 between none and 11 %, most on 512 rows.
SECTION_PACE = 1.03
#: And where blocks that hand on sums start together, at least: up to 4.6 times as long, on an H200.
TOGETHER_PACE = 1.2
#: How much sooner a tile is done with where blocks hand on sums but do not wait for each other in between,
#: and where consumers do not wait for others' sums to end, either; and in sections of as many heads each. By
#: nine kernels of an H200, by one, and by six.
ENDS_PACE, FINISHER_PACE, EVEN_PACE = 0.985, 0.97, 0.995
#: And in sections of half as many heads as L2 holds, by two kernels, on 512 rows without a mask.
NARROW_PACE = 0.985
#: And where consumers have gradients of keys written: 0.5 to 5 % of five kernels of an H200, most where few
#: rows pass by in a turn.
WRITER_PACE = 0.99
#: And where products of warpgroups apart come in turns, two of each: by six kernels of an H200 of 224 and 256
#: columns, in its share of their time. Where these blocks stay, a tile takes a little longer, by seven.
APART_AHEAD_PACE, APART_STAYS_PACE = 0.965, 1.02
#: How much longer than what is counted a tile takes whose sums blocks of a cluster send each other, in step:
#: of 28 kernels of an H200, at 512 and 2048 rows.
CLUSTER_PACE = 1.65
#: And one whose rows they copy to each other. No card has timed it: as much as keeps what has been timed in
#: front, for it brings less from L2 by count, and waits more.
COPIES_PACE = 1.05
#: Products of two numbers in parts, and a lane's instructions to split one: its share of a key's largest,
#: times the inverse of a unit, rounded, what that leaves, rounded.
PRODUCTS_OF_PARTS, ALU_PER_SPLIT = 3, 5.0
#: Instructions of a warp around one tile: barriers, descriptors, the loop.
ALU_PER_TILE = 60


@count_work.register
def wgmma_backward_work(variant: WgmmaBackward, problem: Problem, limits: DeviceLimits) -> LaunchesWork:
    """Returns the work of a kernel of this family on a problem and a card."""
    in_front = work_in_front(problem) if variant.leaves_far_keys_out else {}
    others = in_front.get("launches_in_front", 0)
    moved = moved_by_statistics(problem) + in_front.get("bytes_in_front", 0)
    smem_bytes = variant.smem_bytes(problem, limits)
    if is_split(problem):
        moved += moved_by_sums(problem, problem.head_dim) + _moved_by_splitting(problem)
        of_parts = _launch(_of_keys_in_parts(variant, problem), variant.threads(), smem_bytes, limits)
        return LaunchesWork((of_parts,), others=4 + others, moved_bytes=moved, by_warpgroups=True)
    blocks = replace(_of_keys(variant, problem), **_last_turn(variant, problem, limits))
    of_keys = _launch(blocks, variant.threads(), smem_bytes, limits, variant.min_blocks)
    if not variant.reads_sums:
        # What blocks hand on stays in L2, of a cluster's in shared memory.
        moved += problem.num_q_heads * problem.total_q * problem.head_dim * ITEM_BYTES[problem.dtype]
        return LaunchesWork((of_keys,), others=1 + others, moved_bytes=moved, by_warpgroups=True)
    if columns := variant.summed_columns(problem):
        moved += moved_by_sums(problem, columns)
        return LaunchesWork((of_keys,), others=2 + others, moved_bytes=moved, by_warpgroups=True)
    threads_of_rows, smem_of_rows, _ = variant.blocks_of_queries(problem)
    of_rows = _launch(_of_rows(variant, problem), threads_of_rows, smem_of_rows, limits)
    return LaunchesWork(
        (of_rows, of_keys),
        others=1,
        moved_bytes=moved,
        by_warpgroups=True,
        last_beside=variant.begins_beside,
    )


def _last_turn(variant: WgmmaBackward, problem: Problem, limits: DeviceLimits) -> dict[str, int]:
    """`BlockWork.last_slices` and the turns of these."""
    if not variant.shares_last_turn():
        return {}
    blocks = limits.blocks_at_once(variant.min_blocks, 1)
    left = tiles_left(variant, problem, blocks)
    slices = slices_of_left(variant, problem, left, blocks)
    return {"last_slices": slices, "last_turns": -(-left * slices // blocks)}


def _launch(
    work: BlockWork, threads: int, smem_bytes: int, limits: DeviceLimits, blocks: int = 1
) -> LaunchWork:
    return LaunchWork(work, threads, smem_bytes, launch_registers(threads * blocks, limits))


def _of_keys(variant: WgmmaBackward, problem: Problem) -> BlockWork:
    """Blocks that keep keys: two products of each tile of rows make weights, two more the gradients; one more
    where those of queries are added up, too."""
    d, dv, br = problem.head_dim, problem.head_dim_v, variant.br
    both = d + dv
    # Apart, either of two warpgroups makes one product of each kind, and weights go through shared memory.
    share = 2 if variant.apart else 1
    products = _products(variant.weighed_rows, both / share, kept=sum(variant.kept_columns(problem)))
    compute = products * variant.parts + _summed(br, both / share) + _weights(br)
    if variant.apart:
        compute += Counts(accesses=br / 16, wavefronts=br / 2, barriers=1)
    warps = variant.consumers * GROUP_WARPS
    copied_by = variant.cluster if variant.shares_copies else 1
    per_tile, sums = Counts(l2_bytes=bytes_of_rows(problem, br) / copied_by), 0
    once, heads = _moved(2 * bytes_of_keys(problem, variant.bc)), heads_of(problem, problem.num_kv_heads)
    walks = walk_of_keys(problem, variant.bc, br, warps, _reaches(variant, problem))
    if variant.sums_queries:
        compute += _queries(variant, problem)
    if variant.sums_in_cluster:
        turns = -(-problem.seqlen_k // (variant.bc * variant.cluster))
        if turns > 1:
            # What other keys have added is read, and left for those to come.
            sums = ITEM_BYTES["f32"] * problem.seqlen_q * d
            per_tile += Counts(l2_bytes=2 * ITEM_BYTES["f32"] * br * d / variant.cluster)
        walks = (_of_cluster(walks, variant, warps),)
        once, heads = once * (turns * variant.heads), -(-heads // variant.heads)
    elif variant.sums_queries:
        sums = ITEM_BYTES["f32"] * problem.seqlen_q * d
        per_tile += Counts(l2_bytes=READS_PER_SUM * ITEM_BYTES["f32"] * br * d)
    block = BlockWork(
        once=once,
        per_tile=per_tile,
        per_warp_tile=compute,
        walks=walks,
        heads=heads,
        warps=warps,
        cluster=variant.cluster,
        heads_share_keys=False,
        heads_interleaved=variant.order == HEAVIEST_FIRST,
        moved_bytes=moved_by_keys(problem),
        passing_bytes=problem.group * (bytes_of_rows(problem, problem.seqlen_q) + sums),
        stays=variant.persistent,
        pace=_pace(variant, problem),
        late=(variant.q_stages == 1) + LATE_GRADIENTS * (variant.dout_stages == 1),
    )
    share = SHARE_OF_KEYS if variant.ranges == OF_KEYS else 1.0
    return _with_waits(block, problem, (variant.bc, br), share)


def _reaches(variant: WgmmaBackward, problem: Problem) -> tuple[float, ...]:
    """How far rows look, by head; none where they look at all that they see."""
    return reaches_of_heads(problem) if variant.leaves_far_keys_out else ()


def _pace(variant: WgmmaBackward, problem: Problem) -> float:
    if variant.sums_in_cluster:
        return CLUSTER_PACE
    pace = BULK_PACE if variant.dq_path == BULK and problem.head_dim % CHUNK else 1.0
    if variant.starts_together(problem):
        pace *= TOGETHER_PACE
    if variant.adds_in_between:
        pace *= ENDS_PACE
    if variant.finishes_behind:
        pace *= FINISHER_PACE
    if variant.sections == EVEN:
        pace *= EVEN_PACE
    if variant.sections == NARROW:
        pace *= NARROW_PACE
    if variant.writes_by_consumers:
        pace *= WRITER_PACE
    if variant.order == BY_SECTION and problem.scores.all_rows_alike:
        pace *= SECTION_PACE
    if variant.shares_copies:
        pace *= COPIES_PACE
    if variant.apart and variant.schedule == AHEAD:
        pace *= APART_AHEAD_PACE * (APART_STAYS_PACE if variant.persistent else 1.0)
    return pace * (WEIGHTS_FIRST_PACE if variant.schedule == WEIGHTS_FIRST else 1.0)


def _of_keys_in_parts(variant: WgmmaBackward, problem: Problem) -> BlockWork:
    """The same of float32 in parts: each consumer makes all five products of its own keys, three times, and
    adds up what they make of queries by itself."""
    d, dv, rows = problem.head_dim, problem.head_dim_v, TILE_ROWS
    d_chunks, dv_chunks = chunks(d), chunks(dv)
    both, steps, weighed = d + dv, rows / DEPTH, variant.weighed_rows
    weights = GROUP_ROWS * rows / GROUP
    # Products along columns read both factors, as those of queries do; other sums have weights in registers.
    along = both / DEPTH * variant.parts
    instructions = along + steps * (2 * d_chunks + dv_chunks)
    factors = along * 2 * DEPTH * (GROUP_ROWS + weighed)
    factors += steps * 2 * DEPTH * (both + GROUP_ROWS * d_chunks + d)
    flops = 2 * GROUP_ROWS * rows * (2 * both + d)
    compute = _multiplied(*(PRODUCTS_OF_PARTS * each for each in (flops, instructions, factors)))
    # Weights and their gradients are split, these brought into another unit and stored; sums leave units.
    sums, stored = d / 8, 2 * rows / DEPTH
    passes = SHARED_PASSES if variant.dq_path != ATOMICS else THREAD_PASSES
    compute += _weights(rows) + Counts(
        ffma=both / 2,
        alu=(2 * ALU_PER_SPLIT + 1) * weights + 1.5 * d,
        shuffles=8 * variant.parts,
        accesses=stored + sums,
        wavefronts=4 * stored + 4 * sums * passes,
        barriers=1 + variant.parts,
        # Of each part for scores and for each chunk of sums, and then for those of queries.
        shared_waits=variant.parts * (1 + d_chunks + dv_chunks) + d_chunks - 3,
    )
    warps = variant.consumers * GROUP_WARPS
    passing = _bytes_of_tiles(problem) + STATISTICS_BYTES * rows
    added = FLOAT_BYTES * rows * d
    kept = variant.consumers * _bytes_of_tiles(problem)
    block = BlockWork(
        once=_moved(kept + bytes_of_keys(problem, variant.bc)),
        per_tile=Counts(l2_bytes=passing + READS_PER_SUM * added * variant.consumers),
        per_warp_tile=compute,
        walks=walk_of_keys(problem, variant.bc, rows, warps, _reaches(variant, problem)),
        heads=heads_of(problem, problem.num_kv_heads),
        warps=warps,
        heads_share_keys=False,
        heads_interleaved=variant.order == HEAVIEST_FIRST,
        moved_bytes=moved_by_keys(problem),
        passing_bytes=problem.group * problem.seqlen_q / rows * (passing + added),
        pace=(WEIGHTS_FIRST_PACE_OF_PARTS if variant.schedule == WEIGHTS_FIRST else 1.0)
        * (ALONE_PACE if variant.consumers == 1 else 1.0),
    )
    return _with_waits(block, problem, (variant.bc, weighed))


def _bytes_of_tiles(problem: Problem) -> float:
    """The bytes of a tile of an array of keys' columns and of one of values', in parts."""
    words = CHUNK_WORDS * (chunks(problem.head_dim) + chunks(problem.head_dim_v)) + 2 * UNIT_WORDS
    return FLOAT_BYTES * words


def _moved_by_splitting(problem: Problem) -> float:
    """The bytes that the launches in front move: what passes by and what is kept, read, and written in
    tiles."""
    rows, keys = problem.num_q_heads * problem.total_q, problem.num_kv_heads * problem.total_k
    read = FLOAT_BYTES * (problem.head_dim + problem.head_dim_v)
    return (rows + keys) * (read + _bytes_of_tiles(problem) / TILE_ROWS)


def _of_cluster(walks: tuple[Walk, ...], variant: WgmmaBackward, warps: int) -> Walk:
    """The walk of all of a cluster's blocks, which take the tiles of some heads in turns: in step, so that
    each takes as long as the one among them that has most to walk."""
    tiles = [walk.tiles for walk in walks for _ in range(walk.blocks)]
    turns = [max(tiles[i : i + variant.cluster]) for i in range(0, len(tiles), variant.cluster)]
    walked = sum(turns) * variant.heads
    return Walk(variant.cluster, walked, warps * walked, warps * walked)


def _of_rows(variant: WgmmaBackward, problem: Problem) -> BlockWork:
    """Blocks that keep query rows: three products of each tile of keys."""
    d, dv, keys = problem.head_dim, problem.head_dim_v, variant.keys
    warps = variant.row_consumers * GROUP_WARPS
    written = variant.rows * d * ITEM_BYTES[problem.dtype]
    block = BlockWork(
        once=_moved(bytes_of_rows(problem, variant.rows) + written),
        per_tile=Counts(l2_bytes=bytes_of_keys(problem, keys)),
        per_warp_tile=_products(keys, d + dv) + _summed(keys, d) + _weights(keys),
        walks=walk_of_rows(problem, variant.rows, keys, warps),
        heads=heads_of(problem, problem.num_q_heads),
        warps=warps,
        heads_interleaved=variant.order == HEAVIEST_FIRST,
        moved_bytes=moved_by_rows(problem),
        passing_bytes=bytes_of_keys(problem, problem.seqlen_k),
        late=LATE_KEYS * (variant.k_stages == 1),
    )
    return _with_waits(block, problem, (variant.rows, keys))


def _products(passing: int, columns: float, *, kept: int = 0) -> Counts:
    """A warp's share of products of 64 rows that stay with what passes by: both are read from shared memory,
    but for those columns of what stays that are ``kept`` in registers."""
    flops = 2 * GROUP_ROWS * passing * columns
    return _multiplied(flops, columns / DEPTH, 2 * (GROUP_ROWS * (columns - kept) + columns * passing))


def _summed(passing: int, columns: float) -> Counts:
    """A warp's share of sums over what passes by, whose weights are in registers."""
    flops = 2 * GROUP_ROWS * passing * columns
    packed = Counts(alu=GROUP_ROWS * passing / GROUP / 2)
    return _multiplied(flops, passing / DEPTH, 2 * passing * columns) + packed


def _queries(variant: WgmmaBackward, problem: Problem) -> Counts:
    """A warp's share of what a block makes of a tile's gradients of queries: gradients of scores pass through
    shared memory, where both factors are read, and sums leave by it or by the threads."""
    tiles, columns = variant.query_share(problem)
    columns *= variant.query_passes(problem)
    flops = 2 * tiles * GROUP_ROWS * variant.bc * columns
    factors = 2 * tiles * variant.bc * (GROUP_ROWS + columns)
    sums = tiles * columns / 8  # of four numbers of each lane
    stored = Counts(
        accesses=variant.br / DEPTH + sums,
        wavefronts=4 * variant.br / DEPTH
        + 4 * sums * (THREAD_PASSES if variant.dq_path == ATOMICS else SHARED_PASSES),
        # Late, gradients are there once they are awaited. With room for one tile of a cluster's sums all
        # blocks wait for who is last.
        barriers=3
        - variant.ds_stages
        - (variant.meeting == LATE)
        + (variant.sums_in_cluster and variant.sum_stages == 1),
    )
    return _multiplied(flops, tiles * variant.bc / DEPTH, factors) + stored


def _multiplied(flops: float, instructions: float, num_bytes: float) -> Counts:
    return Counts(
        products=instructions,
        # Of a warpgroup's product each scheduler has a quarter, as it has one of its warps.
        tensor=flops / WGMMA_FLOPS_PER_CLOCK,
        wavefronts=num_bytes / 128 / GROUP_WARPS,
    )


def _weights(passing: int) -> Counts:
    """What a warp makes of its scores, and of the gradients of its weights."""
    weights, known = GROUP_ROWS * passing / GROUP, passing / 2
    return Counts(
        ffma=weights,
        alu=2 * weights + ALU_PER_TILE,
        exp=weights,
        accesses=known,
        wavefronts=known,
        delivered=known,
        shared_waits=3,
    )


def _with_waits(block: BlockWork, problem: Problem, tiles: tuple[int, int], share: float = 1.0) -> BlockWork:
    """The same with what masks and changes of scores ask of a warp, and with a tile's waits; ``tiles`` are
    what a block keeps and what passes by, ``share`` how much of a mask's instructions they take."""
    masked = masked_share(problem, *tiles, block.mean_tiles) * share
    asked = scoring_counts(problem, 2, tiles[1] / 4, masked=masked, warp_rows=LANE_ROWS, approximate=True)
    compute = block.per_warp_tile + asked
    return replace(block, per_tile=block.per_tile + Counts(barriers=0.5), per_warp_tile=compute)


def _moved(num_bytes: float) -> Counts:
    """What a block keeps, read, and the gradients of it, written."""
    accesses = num_bytes / (8 * WARP)
    return Counts(
        alu=4 * accesses,
        accesses=accesses,
        wavefronts=2 * num_bytes / 128,
        l2_bytes=num_bytes,
        global_waits=2,
        barriers=1,
    )
