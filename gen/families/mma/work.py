"""What an `Mma` kernel makes a card do, counted along ``templates/families/mma/main.cu.jinja``."""

from __future__ import annotations

from functools import lru_cache

from ...handover.reach import reaches_of_heads, work_in_front
from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...scored_tiles.change import changed_tile
from ...scored_tiles.period import split_period
from ...scored_tiles.seen import partial_share
from ...work import BlockWork, Counts, Walk, count_work, heads_alike, shared_walks, walk_tiles
from ..scoring_work import mask_counts, pair_counts, period_counts, sliding_counts
from .decoding import decodes
from .family import Mma
from .layouts import PADDED
from .parameters import AT_ONCE, E4M3_STEP, MULTIPLIES_EIGHT_BITS, WIDENS_FROM

#: Floating-point operations of an m16n8k16 product.
WIDE_FLOPS = 2 * 16 * 8 * 16
#: A product half as deep takes two thirds of the time (4.05 of 6.1 cycles on an H200).
NARROW_COST = 0.66
#: An exponential by polynomial: additions and multiply-adds, and comparisons and integer instructions.
POLYNOMIAL_FMAS, POLYNOMIAL_ALU = 6, 3
#: Instructions of a warp around one tile: the loop, tests of what is to be masked, addresses of stages.
ALU_PER_TILE = 40
#: Instructions around one copied chunk and, where a swizzle mixes lane and place, around one load: most
#: addresses are kept from tile to tile.
ALU_PER_COPY = 3
ALU_PER_SWIZZLE = 0.5
#: Passes through shared memory of 128 copied bytes where rows start anywhere, fitted to times of an H200.
PADDED_PASSES = 1.5
#: How much longer it all takes where rows are padded and have so many columns, beside rows that are swizzled:
#: by a hundred pairs of kernels on an H200.
PADDED_PACE, PADDED_COLUMNS = 1.06, 96
#: Registers that the compiler takes beyond those needed, where it may.
SPARE_HALF, SPARE_FLOAT32 = 50, 29
#: With less than so many to spare, each one missing costs a warp so many instructions per tile: spills, and
#: loads put off. Fitted to times of an H200.
ROOMY = 38
ACCESSES_PER_MISSING = 3.5
#: Scores are masked by a comparison and a selection each.
ALU_PER_MASKED = 2
#: Slots that four numbers of e4m3 take to become f16: by two conversions at half the rate, where there are
#: such; by their bits else.
WIDENING, WIDENING_BY_BITS = 4, 14
#: Where each pass of a copy looks up a page of its own, and an address follows from that: instructions of a
#: look, and such waits as shared memory's. By one kernel of three warps on an H200, with pages of 16 and
#: without.
ALU_PER_LOOK, WAITS_PER_LOOK = 8, 4
#: Key tiles that float32 sums apart before it adds them to the output.
TILES_PER_SUM = 4


@count_work.register
def mma_work(variant: Mma, problem: Problem, limits: DeviceLimits) -> BlockWork:
    """Returns the work of a kernel of this family on a problem and a card."""
    packed = problem.group if variant.pack_heads else 1
    row_warps = variant.warps // variant.key_warps
    reaches = reaches_of_heads(problem) if variant.leaves_far_keys_out else ()
    walks = walk_tiles(problem, variant.br, variant.bc, row_warps, skips=True, packed=packed, reaches=reaches)
    heads = heads_alike(problem) // packed
    shares = variant.splits * variant.workspace_splits
    wanted = (
        variant.wanted_blocks(limits) // heads
        if problem.layout.is_packed and variant.workspace_splits > 1
        else None
    )
    walks = shared_walks(walks, shares, variant.key_warps, wanted=wanted)
    blocks = sum(walk.blocks for walk in walks)
    tiles = max(1.0, sum(walk.blocks * walk.tiles for walk in walks) / blocks)
    compute = _per_warp_tile(variant, problem, limits, tiles) + _scoring(variant, problem, tiles)
    copies = _copies(variant, problem)
    if problem.layout.is_paged:
        copies = copies + _looks(variant, problem)
    if variant.arithmetic(problem) == "3xf16":
        copies = copies + _splits(variant, problem)
    copies = copies * variant.key_warps
    once = _once(variant, problem)
    if variant.key_shares() > 1:
        once = once + _parts(variant, problem)
    taken = variant.registers(problem, limits) + (SPARE_FLOAT32 if problem.dtype == "f32" else SPARE_HALF)
    if variant.heads > 1:
        # The next head's first tiles arrive beside this one's last products, but its Q is waited for.
        once = once * variant.heads
        walks = tuple(_repeated(walk, variant.heads) for walk in walks)
        heads = -(-heads // variant.heads)
    return BlockWork(
        once=once,
        per_tile=copies + Counts(barriers=_barriers(variant, problem)),
        per_warp_tile=compute,
        walks=walks,
        heads=heads,
        warps=variant.warps,
        heads_share_keys=not variant.pack_heads,
        bytes_ahead=_copies(variant, problem).l2_bytes * variant.tiles_ahead if decodes(problem) else None,
        cluster=variant.splits,
        heads_interleaved=variant.block_order == "heaviest_first",
        registers=min(taken, _registers_left(variant.threads(), variant.min_blocks, limits)),
        loop_instructions=compute.instructions + copies.instructions / variant.warps,
        left_bytes=variant.left_bytes(problem),
        shares=variant.workspace_splits,
        evicts_first=variant.evict_first,
        pace=PADDED_PACE if variant.layout == PADDED and problem.head_dim >= PADDED_COLUMNS else 1.0,
        **(work_in_front(problem) if reaches else {}),
    )


def _parts(variant: Mma, problem: Problem) -> Counts:
    """Results of shares of keys, put together: in shared memory, and between the blocks of a cluster."""
    accesses = variant.br * problem.head_dim_v / (2 * WARP)
    by_halves = variant.merge != AT_ONCE
    turns = (variant.key_warps - 1).bit_length() if by_halves else 1
    meetings = (2 if by_halves else 1) if variant.splits > 1 else 0
    return Counts(
        alu=2 * accesses,
        accesses=accesses * (2 * turns + 2),
        wavefronts=2 * accesses * (2 * turns + 2),
        shared_waits=2 * turns,
        global_waits=meetings,
        barriers=1 + turns + meetings,
    )


def _repeated(walk: Walk, times: int) -> Walk:
    """A block that walks as often."""
    return Walk(walk.blocks, walk.tiles * times, walk.warp_tiles * times, walk.paced_tiles * times)


def _copies(variant: Mma, problem: Problem) -> Counts:
    """A tile of K and one of V, from global to shared memory."""
    tile_bytes = variant.bc * (problem.head_dim + problem.head_dim_v) * ITEM_BYTES[problem.key_dtype]
    copies = tile_bytes / (variant.key_access_bytes(problem) * WARP)
    # Copies of 16 bytes pass L1 by.
    passes = 1.0 if variant.layout == "swizzled" else PADDED_PASSES
    return Counts(
        alu=ALU_PER_COPY * copies,
        accesses=copies,
        wavefronts=passes * tile_bytes / 128,
        l2_bytes=tile_bytes,
    )


def _looks(variant: Mma, problem: Problem) -> Counts:
    """The pages of a tile of K and of one of V, where each pass of the copy looks up its own, because passes
    do not fall together with pages. Else all are looked up at first, at once."""
    size, looks = problem.page_size, 0
    for plan in (variant.copy_plan(name, problem) for name in ("k", "v")):
        together = size % plan.row_step == 0 or plan.row_step % size == 0
        if not variant.knows_page_size(problem) or (size % variant.bc and not together):
            looks += plan.row_passes
    by_warps = looks * variant.warps / variant.key_warps
    return Counts(alu=ALU_PER_LOOK * by_warps, accesses=by_warps, shared_waits=WAITS_PER_LOOK * looks)


def _splits(variant: Mma, problem: Problem) -> Counts:
    """A tile of K and one of V, in shared memory, into parts of f16: by whoever copied them."""
    elements = variant.bc * (problem.head_dim + problem.head_dim_v) / WARP
    chunks = elements / 4
    return Counts(
        # To the unit, what the big part leaves, and that part as float32; magnitudes, and packing in pairs.
        ffma=3 * elements,
        alu=2 * elements,
        # Read as 16 bytes, written as 8 and 8.
        accesses=3 * chunks,
        wavefronts=8 * chunks,
        shared_waits=1,
    )


def _barriers(variant: Mma, problem: Problem) -> int:
    """Counts the barriers for a tile of K and V; a warp with tiles of its own waits for no other."""
    if variant.key_warps > 1:
        return 0
    twice = 2 if variant.arithmetic(problem) == "3xf16" else 1
    return twice * (1 if variant.stages > 1 else 2)


def _per_warp_tile(variant: Mma, problem: Problem, limits: DeviceLimits, tiles: float) -> Counts:
    """One warp's share of one of so many tiles."""
    rows, keys = variant.row_tiles, variant.key_tiles
    scores = 4 * rows * keys
    always = variant.rescale == "always"
    # From the second tile on maxima seldom grow by enough.
    rescaled = 1.0 if always else 1 / tiles
    # Taken two at a time where they only bound; in full, with two shuffles a row, where they count.
    maxima = scores * (rescaled + (0.0 if always else 0.5))
    masked = scores * ALU_PER_MASKED * min(1.0, _masked_tiles(variant, problem) / tiles)
    polynomials = scores / variant.poly_exp if variant.poly_exp else 0.0
    left = _registers_left(variant.threads(), variant.min_blocks, limits)
    missing = max(0, variant.registers(problem, limits) + ROOMY - left)
    shuffles = 4 * rows * rescaled
    softmax = Counts(
        ffma=2 * scores + polynomials * POLYNOMIAL_FMAS,
        alu=maxima + masked + polynomials * POLYNOMIAL_ALU + ALU_PER_TILE,
        accesses=ACCESSES_PER_MISSING * missing,
        exp=scores - polynomials + 2 * rows * rescaled,
        shuffles=shuffles,
        wavefronts=shuffles,
        delivered=shuffles,
        shared_waits=2 + 4 * rescaled,
    )
    match variant.arithmetic(problem):
        case "3xf16":
            return softmax + _split_products(variant, problem, limits)
        case "3xtf32" | "tf32":
            return softmax + _float32_products(variant, problem, limits)
        case "e4m3 keys":
            return softmax + _widened_products(variant, problem, limits, rescaled)
        case "e4m3":
            return softmax + _eight_bit_products(variant, problem, limits, rescaled)
    return softmax + _half_products(variant, problem, limits, rescaled)


def _scoring(variant: Mma, problem: Problem, tiles: float) -> Counts:
    """One warp's share of what masks and changes of scores ask for in one of so many tiles."""
    rows, columns = 2 * variant.row_tiles, 2 * variant.key_tiles
    of_warp = variant.rows_per_warp
    masked = mask_counts(problem, rows, columns, warp_rows=of_warp, bc=variant.bc, tiles=tiles)
    approximate = problem.dtype != "f32"
    packed = problem.group if variant.pack_heads else 1
    partial = partial_share(problem, -(-variant.br // packed), variant.bc)
    # A lane's rows are eight apart.
    change = changed_tile(problem, slides=not variant.pack_heads)
    period, predicate = split_period(problem.scores.predicate)
    asked = pair_counts(
        problem,
        rows,
        columns,
        warp_rows=8,
        partial=partial,
        approximate=approximate,
        change=change and change.in_names_of_pairs,
        # Where a row begins among the steps is found for each tile.
        predicate=[each for each in (period and period.body, predicate) if each],
    )
    if period:
        asked += period_counts(rows, columns) * partial
    for each in change.sliding if change else ():
        asked += sliding_counts(each, rows, columns)
    return masked + asked


@lru_cache(maxsize=256)
def _registers_left(threads: int, blocks: int, limits: DeviceLimits) -> int:
    """The most per thread with so many blocks resident."""
    choices = (limits.max_registers_per_thread, *range(248, 0, -8))
    return next((n for n in choices if limits.blocks_per_sm(threads, n, 0) >= blocks), 0)


def _masked_tiles(variant: Mma, problem: Problem) -> float:
    """Tiles that a warp masks where nothing is asked but a causal mask: those its diagonal crosses, or the
    last where keys end within it."""
    if not problem.scores.is_plain:
        return 0.0
    if problem.causal:
        return 1 + variant.rows_per_warp / variant.bc
    return 1.0 if problem.layout.is_packed or problem.seqlen_k % variant.bc else 0.0


def _half_products(variant: Mma, problem: Problem, limits: DeviceLimits, rescaled: float) -> Counts:
    """Counts the products of 16-bit numbers: sixteen deep, or eight where no more is left and on sm_75."""
    rows, keys, values = variant.row_tiles, variant.key_tiles, -(-problem.head_dim_v // 8)
    columns = variant.d_columns(problem) // 8
    deep_steps, narrow_steps = divmod(columns, 2) if limits.has_async_copy else (0, columns)
    deep_keys, narrow_keys = divmod(keys, 2) if limits.has_async_copy else (0, keys)
    deep = rows * (deep_steps * keys + deep_keys * values)
    narrow = rows * (narrow_steps * keys + narrow_keys * values)
    # A load brings four 8x8 matrices: of K, of V, and of Q where no register holds it.
    loads = columns * keys / 4 + keys * values / 4
    if not variant.q_in_registers:
        loads += rows * columns / 2
    return Counts(
        products=deep + narrow,
        tensor=(deep + NARROW_COST * narrow) * _wide_cycles(limits),
        ffma=4 * rows * values * rescaled,
        # Weights are packed in pairs.
        alu=2 * rows * keys + _addresses(variant, loads),
        shared_waits=2,
    ) + _matrix_loads(loads)


def _widened_products(variant: Mma, problem: Problem, limits: DeviceLimits, rescaled: float) -> Counts:
    """Counts the products of f16 with keys and values of e4m3, which matrix loads bring four to a register
    and become f16 there."""
    rows, keys, values = variant.row_tiles, variant.key_tiles, variant.value_columns(problem) // 8
    steps = variant.d_columns(problem) // 16
    products = rows * (steps * keys + -(-keys // 2) * values)
    of_keys, of_values = steps * keys, keys * values / 2  # registers of four
    loads = (of_keys + of_values) / 4
    widened = WIDENING if limits.arch >= WIDENS_FROM else WIDENING_BY_BITS
    # Of bf16 scores come by the unit of their row.
    units = 4 * rows * keys if problem.dtype == "bf16" else 0
    return Counts(
        products=products,
        tensor=products * _wide_cycles(limits),
        ffma=4 * rows * values * rescaled + units,
        # Neighbouring keys of one column, which come two columns wide, are brought together.
        alu=2 * rows * keys + widened * (of_keys + of_values) + of_values + _addresses(variant, loads),
        shared_waits=2,
    ) + _matrix_loads(loads)


def _eight_bit_products(variant: Mma, problem: Problem, limits: DeviceLimits, rescaled: float) -> Counts:
    """Counts the products of q and k of e4m3, 32 deep, and those of f16 with values that are widened on the
    way. Where tensor cores know no such products by warps, the compiler makes two of f16 of each, and widens
    keys, too."""
    rows, keys, values = variant.row_tiles, variant.key_tiles, variant.value_columns(problem) // 8
    steps = variant.d_columns(problem) // E4M3_STEP
    at_once = limits.arch in MULTIPLIES_EIGHT_BITS
    scores, outputs = rows * steps * keys * (1 if at_once else 2), rows * -(-keys // 2) * values
    of_keys, of_values = 2 * steps * keys, keys * values / 2  # registers of four
    of_queries = 0 if variant.q_in_registers else 4 * rows * steps
    widened = of_values + (0 if at_once else of_keys + of_queries)
    loads = (of_keys + of_values + of_queries) / 4
    return Counts(
        products=scores + outputs,
        tensor=(scores + outputs) * _wide_cycles(limits),
        ffma=4 * rows * values * rescaled,
        # Neighbouring keys of one column, which come two columns wide, are brought together.
        alu=2 * rows * keys + WIDENING * widened + of_values + _addresses(variant, loads),
        shared_waits=2,
    ) + _matrix_loads(loads)


def _split_products(variant: Mma, problem: Problem, limits: DeviceLimits) -> Counts:
    """Three of f16 for each of float32, whose tiles were split once for all warps."""
    rows, keys, values = variant.row_tiles, variant.key_tiles, -(-problem.head_dim_v // 8)
    weights = 4 * rows * keys
    halves = _half_products(variant, problem, limits, 0.0)
    return Counts(
        products=3 * halves.products,
        tensor=3 * halves.tensor,
        # Sums of some keys added to the output, scores in two parts, weights split as tiles are.
        ffma=4 * rows * values * -(-keys // (2 * TILES_PER_SUM)) + 3 * weights,
        alu=weights + 2 * halves.alu,
        shared_waits=2,
    ) + _matrix_loads(2 * halves.accesses)


def _float32_products(variant: Mma, problem: Problem, limits: DeviceLimits) -> Counts:
    """Counts the products of TF32, eight deep: one where factors are rounded, three where each is split in
    two."""
    rows, keys, values = variant.row_tiles, variant.key_tiles, -(-problem.head_dim_v // 8)
    steps = variant.d_columns(problem) // 8
    parts = 1 if problem.precision == "tf32" else 2
    weights = 4 * rows * keys
    # Every warp rounds or splits all of K and V, and its weights; Q in two parts was split beforehand.
    whole = 2 * keys * (steps + values)
    rounded = weights + (4 * rows * steps if variant.q_in_registers or variant.q_whole else 0)
    loads = steps * keys / 2
    if not variant.q_in_registers:
        loads += rows * steps * (1 if variant.q_whole else parts)
    single = 2 * keys * values
    products = rows * keys * (steps + values) * (1 if parts == 1 else 3)
    sums = -(-keys // TILES_PER_SUM) if parts == 2 else 1
    return Counts(
        products=products,
        tensor=products * _wide_cycles(limits),
        # Remainders, scores in two parts, sums of some keys added to the output.
        ffma=4 * rows * values * sums + (whole + rounded + weights if parts == 2 else 0),
        alu=whole + rounded * parts + _addresses(variant, loads + 2 * single),
        accesses=single,
        wavefronts=single,
        delivered=single,
        shared_waits=2,
    ) + _matrix_loads(loads)


def _matrix_loads(loads: float) -> Counts:
    """Counts matrix loads, of 512 bytes each; neither layout lets their rows conflict."""
    return Counts(accesses=loads, wavefronts=4 * loads, delivered=4 * loads)


def _addresses(variant: Mma, loads: float) -> float:
    return ALU_PER_SWIZZLE * loads if variant.layout == "swizzled" else 0.0


def _wide_cycles(limits: DeviceLimits) -> float:
    """Cycles of one scheduler's tensor core for an m16n8k16 product, or m16n8k8 of TF32."""
    return 4 * WIDE_FLOPS / limits.mma_flops_per_sm


def _once(variant: Mma, problem: Problem) -> Counts:
    """Q in, O out."""
    size = ITEM_BYTES[problem.dtype]
    q_bytes = variant.br * problem.head_dim * size
    o_bytes = variant.br * problem.head_dim_v * ITEM_BYTES[problem.output_dtype]
    accesses = (q_bytes + o_bytes) / (variant.access_width(problem) * size * WARP)
    splits = variant.br * problem.head_dim / WARP if problem.dtype == "f32" else 0.0
    return Counts(
        alu=12 * accesses + 10 * splits + 40 * variant.warps,
        exp=4 * variant.warps,
        accesses=accesses + 3 * splits,
        wavefronts=2 * (q_bytes + o_bytes) / 128 + 3 * splits,
        l2_bytes=q_bytes + o_bytes,
        global_waits=2,
        barriers=1,
    )
