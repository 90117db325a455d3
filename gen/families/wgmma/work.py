"""What a `Wgmma` kernel makes a card do, counted along ``templates/families/wgmma``.

Counted by warpgroups: they take turns at the tensor cores of their SM, and each waits for its own products
alone. ``tuner/predict/warpgroup_model.py`` turns the counts into a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...handover.last_turn import MOST_SHARES
from ...handover.reach import mean_tiles_in_reach, reaches_of_heads, work_in_front
from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...scored_tiles.arrays import met_by
from ...scored_tiles.change import tile_predicate
from ...scored_tiles.lists import words_of_scores
from ...scored_tiles.period import split_period
from ...scored_tiles.seen import partial_share, seen_shares
from ...scoring.scores import BATCH, laid_over
from ...scoring.values import typical_values
from ...work import Counts, Walk, Work, count_work, heads_alike, sequences_alone, shared_walks
from ..scoring_work import array_counts, pair_counts, period_counts, sliding_counts
from .caps import cap_in_exponents
from .family import Wgmma
from .parameters import GROUP, GROUP_ROWS, MIXED, POLYNOMIAL, PRODUCTS, SEGMENT_KEYS, UNIT, is_split
from .ramps import change_of_tiles, ramp_columns
from .registers import SPLITTERS
from .shared_memory import CHUNK, UNIT_ROWS, chunks, partial_bytes, qk_chunks, tensor_maps, tiles_ahead

if TYPE_CHECKING:
    import numpy as np

#: Operations of one SM's tensor cores per clock: a warpgroup's 64 x n x 16 product takes n / 2 clocks.
WGMMA_FLOPS_PER_CLOCK = 4096
#: Issue slots that a thread takes for each output that it leaves and finds again: packed, stored and loaded
#: with seven others, multiplied and added, and zero.
KEEPING_SLOTS = 3.25
#: Products of float32 in two parts each, but for that of the small ones.
PARTS_PRODUCTS = 3
#: Columns that come together, and how many such boxes of rows that share a unit a warp holds at a time.
BOX_COLUMNS, HELD_BOXES = 32, 4
#: Issue slots beside what 16 bits take: per score to leave its key's unit and be split, per eight keys for
#: their units; of the warps that split, per four elements of a lane.
SPLIT_SCORE_SLOTS, UNIT_SLOTS, SPLITTING_SLOTS = 5, 3, 27
#: And where a tile has one unit, per score to be split, and per score to leave its keys' unit where something
#: changes it.
SPLIT_WEIGHT_SLOTS, LEAVE_UNIT_SLOTS = 3, 1
#: Keys and columns of values that a warp transposes at once, and the issue slots that this takes: a load,
#: four permutations of bytes, a store and addresses.
TRANSPOSED_KEYS, TRANSPOSED_COLUMNS, TRANSPOSING_SLOTS = 32, 16, 8
#: Issue slots per score to bound magnitudes, which are cut off, rather than scores.
CAP_BOUND_SLOTS = 0.25
#: Issue slots per score that bits hide or leave: it is selected, seven bits at a time become predicates.
SEEN_BIT_SLOTS = 1.25
#: How much longer splitting by whole tiles takes where there are two stages.
SPLIT_LATE = 1.3


@dataclass(frozen=True)
class GroupWork(Work):
    """One warpgroup's work on one tile of keys, and how many there are of both."""

    groups: int
    """Consumer warpgroups of a block."""
    score_cycles: float
    """Cycles of the SM's tensor cores for a warpgroup's scores of one tile."""
    output_cycles: float
    """Cycles of the SM's tensor cores for a warpgroup's outputs of one tile."""
    scores: float
    """Scores of one tile that a thread holds."""
    polynomials: float
    """Scores of a thread and tile whose exponential is a polynomial."""
    straight: float
    """Scores of a thread and tile whose weights are by straight lines, with no exponentials and no sums."""
    paired: float
    """Of these, the ones that come as pairs of f16."""
    masked: float
    """Scores of a thread and tile that a mask is laid over, on average."""
    wavefronts: float
    """Passes of 128 bytes through shared memory that a warpgroup's products take for a tile."""
    stages: int
    """Tiles of K and of V that there is room for, the lesser of both."""
    chained: bool
    """Whether a tile's outputs come before the next one's scores."""
    ordered_exponentials: bool
    """Whether warpgroups make their exponentials one after the other."""
    stays: bool
    """Whether blocks take several query tiles."""
    early_q: bool
    """Whether the next query tile's Q comes beside the work on this one."""
    outputs_apart: bool
    """Whether it comes after this one's last scores, beside what is left."""
    tiles: float
    """Tiles of keys that a warpgroup computes for its rows of a query tile, on average."""
    walks: tuple[int, ...]
    """Tiles of keys that each query tile of a head needs, in the order in which they start; of a head of
    packed sequences, those of all of them."""
    heads: int
    """Query heads of all batches together, those that fill up clusters included; of packed sequences, which
    have their walks together, of one."""
    heads_together: int
    """Heads whose query tiles start together by length, 1 if heads come one after the other."""
    tile_bytes: float
    """What a block asks of L2 for a tile of keys and one of values."""
    cluster: int = 1
    """Blocks of a cluster, which start together, near each other."""
    ordered_products: bool = False
    """Whether warpgroups start their products one after the other."""
    tiles_together: int = 1
    """Neighbouring query tiles of a head that the blocks of a cluster take."""
    copies: float = 0.0
    """Boxes that a warp of a block's producer asks for, one after the other, for a tile of keys and one of
    values."""
    finds_pages: bool = False
    """Whether it looks up where these are."""
    heads_share_keys: bool = True
    """Whether ``heads`` counts query heads that share keys apart; packed, they are one."""
    bytes_ahead: float | None = None
    """Bytes that a block has under way from device memory where its rows are few; None where other things
    bound it."""
    partial_bytes: float = 0.0
    """Bytes that a block reads of others' shared memory where they share keys."""
    left_bytes: float = 0.0
    """Bytes that a block leaves, for each query tile on average, for who puts together what blocks with the
    same rows made of shares of the keys: another launch, or one of these blocks."""
    shares: int = 1
    """Blocks that leave something for the same rows."""
    shares_turn: bool = False
    """Whether blocks that stay share the tiles of a last turn evenly, for which no other launch is needed."""
    split_rounds: float = 0.0
    """Rounds of eight reads, by a lane of the busiest warp that splits float32, for a tile of keys and one of
    values."""
    split_waits: float = 0.0
    """How often the busiest warp that splits float32 waits for a tile of keys and one of values."""
    split_slots: float = 0.0
    """Issue slots of a consumer's warp that splitting its scores and weights, or adding a tile's outputs to
    others, takes for a tile."""
    splitter_slots: float = 0.0
    """Issue slots of a scheduler that the producer's warps take to split or transpose a tile, by consumer's
    warp."""
    late_outputs: float = 0.0
    """Part of a tile's outputs whose products a warpgroup starts only once others of them have ended."""
    asked_slots: float = 0.0
    """Issue slots of a consumer's warp that masks and changes of scores take for a tile."""
    asked_functions: float = 0.0
    """What of that a thread asks of the special-function unit."""
    asked_wavefronts: float = 0.0
    """Passes of 128 bytes that a warpgroup's arrays for that take for a tile."""

    @property
    def mean_walk(self) -> float:
        """Tiles of keys that a block needs for a query tile, on average: those of its rows that see most."""
        return sum(self.walks) / len(self.walks)

    @property
    def is_even(self) -> bool:
        """Whether all query tiles need as many tiles of keys."""
        return self.walks[0] == self.walks[-1]


@count_work.register
def wgmma_work(variant: Wgmma, problem: Problem, limits: DeviceLimits) -> GroupWork:
    """Returns the work of a kernel of this family on a problem and a card.

    The producer counts for nothing: it waits.
    """
    bc, groups = variant.bc, variant.consumers
    d, dv = -(-problem.head_dim // 16) * 16, problem.head_dim_v
    columns = variant.value_columns(problem)
    flops = 2 * GROUP_ROWS * bc
    scores = GROUP_ROWS * bc / GROUP
    key_tiles = variant.key_tiles(problem)
    packed = problem.group if variant.pack_heads else 1
    by_plan = variant.workspace_splits > 1 and problem.layout.is_packed
    shares = 1 if by_plan else variant.key_shares()
    reaches = reaches_of_heads(problem) if variant.leaves_far_keys_out else ()
    walks, computed = _walks(variant.br, variant.tiles_per_cluster(), bc, packed, shares, problem, reaches)
    if by_plan:
        walks = _planned_walks(walks, variant, problem, limits)
    tiles = computed / (groups * len(walks))
    tail_fits = not problem.layout.is_packed and 0 < problem.seqlen_k % bc <= variant.tail
    if variant.tail and problem.scores.all_rows_alike and tail_fits:
        tiles *= 1 - (1 - variant.tail / bc) / key_tiles
    masked_share = min(1.0, _masked_tiles(variant, problem) / max(1.0, tiles))
    asked = _asked(variant, problem, limits, masked_share)
    heads_per_cluster = variant.heads_per_cluster()
    clusters = heads_alike(problem) // problem.group * -(-problem.group // heads_per_cluster)
    heads = heads_alike(problem) // packed if variant.pack_heads else clusters * heads_per_cluster
    item = ITEM_BYTES[problem.dtype]
    # Of 16 bits; scores of eight bits are half the work and half the bytes.
    score_size = item / 2
    value_size = 1 if variant.has_small_weights() else 2
    factor_bytes = value_size * bc * dv + score_size * 2 * d * (
        bc + (0 if variant.q_in_registers else GROUP_ROWS)
    )
    ramp = ramp_columns(problem)
    factor_bytes += 2 * bc * ramp
    weight_bytes = item * 2 * GROUP_ROWS * bc if variant.p_in_shared else 0  # written and read
    products = 1
    split: dict[str, Any] = {}
    if problem.has_scales:
        weight_bytes, split = _of_eight_bits(variant, problem, value_size)
    if problem.dtype == "f32":
        products, score_size = PARTS_PRODUCTS, 1.0
        factor_bytes = PARTS_PRODUCTS * 2 * (bc * dv + d * (bc + GROUP_ROWS))
        weight_bytes, split = (_split_in_front if variant.splits_in_front else _split_in_place)(
            variant, problem, scores
        )
    if reaches:
        split |= work_in_front(problem)
    return GroupWork(
        groups=groups,
        score_cycles=flops * (products * d * score_size + ramp) / WGMMA_FLOPS_PER_CLOCK,
        output_cycles=products * flops * columns * value_size / 2 / WGMMA_FLOPS_PER_CLOCK,
        scores=scores,
        polynomials=scores / variant.poly_exp if variant.poly_exp else 0.0,
        straight=scores if variant.sums_by_products else 0.0,
        paired=scores if variant.pairs_scores else 0.0,
        masked=scores * masked_share,
        wavefronts=(factor_bytes + weight_bytes) / 128,
        stages=min(variant.k_stages, variant.v_stages, max(1, key_tiles)),
        chained=variant.schedule == "chained",
        ordered_exponentials=variant.order_of_groups == "exponentials",
        ordered_products=variant.order_of_groups == PRODUCTS,
        stays=variant.persistent,
        early_q=variant.q_stages > 1,
        outputs_apart=variant.o_apart,
        tiles=tiles,
        walks=walks,
        heads=heads,
        heads_together=min(heads, variant.section) if variant.section else heads,
        tile_bytes=bc
        * (item * problem.head_dim + (value_size if variant.turns_values_in_front else item) * dv)
        / variant.cluster,
        copies=_copies(variant, problem) / variant.copiers,
        finds_pages=problem.layout.is_paged,
        cluster=variant.cluster * variant.bias_heads * variant.splits,
        tiles_together=variant.tiles_per_cluster(),
        heads_share_keys=not variant.pack_heads,
        partial_bytes=_partial_bytes(variant, problem),
        bytes_ahead=item * bc * (problem.head_dim * variant.k_stages + dv * variant.v_stages)
        if variant.pack_heads or variant.key_shares() > 1
        else None,
        **_left(variant, problem, limits, walks),
        asked_slots=asked.ffma + asked.alu + asked.exp + asked.accesses,
        asked_functions=asked.exp,
        asked_wavefronts=asked.wavefronts * GROUP / WARP,
        **split,
    )


@lru_cache(maxsize=256)
def _walks(
    br: int,
    tiles_per_cluster: int,
    bc: int,
    packed: int,
    splits: int,
    problem: Problem,
    reaches: tuple[float, ...] = (),
) -> tuple[tuple[int, ...], int]:
    """`GroupWork.walks`, and the tiles of keys that a head's warpgroups compute in all. ``packed``: so many
    rows, of different heads, stand at one position. ``reaches``: how far from their places the rows of each
    head look, of which the mean counts."""
    if problem.layout.is_packed:
        found = [
            (count, *_walks(br, tiles_per_cluster, bc, packed, splits, each))
            for count, each in sequences_alone(problem)
        ]
        every = [tiles for count, walks, _ in found for tiles in walks * count]
        computed = sum(count * tiles for count, _, tiles in found)
        return tuple(sorted(every, reverse=True)) or (0,), computed
    rows, all_rows = br * tiles_per_cluster, problem.seqlen_q * packed
    query_tiles = -(-all_rows // rows) * tiles_per_cluster
    begins, ends = _interval(problem)

    listed = seen_shares(problem, -(-rows // packed), bc, -(-all_rows // rows)).tolist()
    shift = problem.seqlen_k - problem.seqlen_q

    def seen(first_row: int, count: int) -> int:
        last_row = min(first_row + count, all_rows) - 1
        first_key, end_key = int(begins[first_row // packed]), int(ends[last_row // packed])
        tiles = -(-end_key // bc) - first_key // bc
        if reaches:
            places = first_row + shift, last_row + shift
            return round(mean_tiles_in_reach(reaches, places, (first_key, end_key), bc))
        return max(0, round(listed[first_row // rows] * tiles))

    walks = [seen(tile * br // rows * rows, rows) for tile in range(query_tiles)]
    # Blocks that share the keys of a tile have so many of them each.
    walks = [(i + 1) * tiles // splits - i * tiles // splits for tiles in walks for i in range(splits)]
    starts = range(0, all_rows, GROUP_ROWS)
    return tuple(reversed(walks)), sum(seen(start, GROUP_ROWS) for start in starts)


def _planned_walks(
    walks: tuple[int, ...], variant: Wgmma, problem: Problem, limits: DeviceLimits
) -> tuple[int, ...]:
    """Walks of packed sequences, shared by blocks as a plan does it."""
    heads = problem.num_kv_heads if variant.pack_heads else problem.num_q_heads
    whole = tuple(Walk(1, tiles, tiles, tiles) for tiles in walks)
    shared = shared_walks(whole, variant.workspace_splits, wanted=variant.wanted_blocks(limits) // heads)
    return tuple(sorted((each.tiles for each in shared for _ in range(each.blocks)), reverse=True))


@lru_cache(maxsize=64)
def _interval(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The keys that rows see; of what differs from batch to batch, the first stands for all."""
    import numpy as np

    values = laid_over(typical_values(problem), {BATCH.name: 0})
    return problem.scores.interval(np.arange(problem.seqlen_q), problem.seqlen_q, problem.seqlen_k, values)


def _left(variant: Wgmma, problem: Problem, limits: DeviceLimits, walks: tuple[int, ...]) -> dict[str, Any]:
    """`GroupWork.left_bytes` and what else differs where blocks leave some for each other."""
    if not variant.shares_last_turn():
        return {"left_bytes": variant.left_bytes(problem), "shares": variant.workspace_splits}
    items, blocks = variant.items(problem), limits.blocks_at_once(variant.min_blocks, 1)
    takers = min(blocks, MOST_SHARES * (items % max(1, min(items, blocks))))
    handed = 4.0 * variant.consumers * variant.handed_floats(problem)
    return {
        "left_bytes": handed * takers / (problem.batch * variant.heads_apart(problem) * len(walks)),
        "shares_turn": True,
        "launches_in_front": 1,
    }


def _partial_bytes(variant: Wgmma, problem: Problem) -> float:
    """`GroupWork.partial_bytes`: of each block of a cluster a share of the rows."""
    return partial_bytes(variant, problem) if variant.splits > 1 else 0.0


def _masked_tiles(variant: Wgmma, problem: Problem) -> float:
    """Tiles of keys of a warpgroup's rows that some of these do not see whole, as far as bounds tell."""
    scores = problem.scores
    if scores.all_rows_alike:
        return float(problem.layout.is_packed or problem.seqlen_k % variant.bc > 0)
    ends = any(not each.flag or each.flag in scores.flags for each in scores.ends[1:])
    return (bool(scores.begins) + ends) * (1 + GROUP_ROWS / variant.bc)


def _asked(variant: Wgmma, problem: Problem, limits: DeviceLimits, masked_share: float) -> Counts:
    """What a warp does to a tile for masks and changes of scores: a thread has two rows, eight apart. A
    ``masked_share`` of its tiles are not seen whole."""
    scores = problem.scores
    if scores.is_plain:
        return Counts()
    at_hand = variant.bias_stages or tiles_ahead(variant, problem, limits)
    ahead = variant.met_arrays(problem) if at_hand else ()
    period, asked = split_period(scores.predicate)
    changing, seeing = met_by(scores.change, ahead), met_by(asked, ahead)
    predicate = (tile_predicate(asked, arrays=seeing).body,) if asked else ()
    partial = partial_share(problem, variant.br * variant.tiles_per_cluster(), variant.bc)

    def changed_by(tangent: str) -> Counts:
        change = change_of_tiles(problem, changing, tangent, slides=not variant.pack_heads)
        counts = pair_counts(
            problem,
            2,
            variant.bc / 4,
            warp_rows=8,
            partial=partial if predicate and not variant.seen_bits else 0.0,  # else it is asked in front
            approximate=problem.dtype != "f32",
            change=change and change.in_names_of_pairs,
            predicate=predicate,
        )
        for each in change.sliding if change else ():
            counts += sliding_counts(each, 2, variant.bc // 4)
        return counts

    cap = cap_in_exponents(problem, variant.tangent)
    if cap is not None:
        pairs = variant.bc / 2
        # Where scores leave their keys' unit by themselves, it takes one more to make arguments of them.
        makes_arguments = is_split(problem) and not variant.splits_in_front
        within = Counts(ffma=(len(cap.coefficients) + makes_arguments) * pairs, alu=CAP_BOUND_SLOTS * pairs)
        otherwise = max(masked_share, partial if scores.predicate else 0.0)
        counts = changed_by(variant.tangent) * otherwise + within * (1.0 - otherwise)
    elif variant.tangent == MIXED:
        counts = (changed_by(POLYNOMIAL) + changed_by(UNIT)) * 0.5
    else:
        counts = changed_by(variant.tangent)
    if period and not variant.seen_bits:
        counts += period_counts(2, variant.bc / 4) * partial
    if variant.seen_bits:
        slots, words = SEEN_BIT_SLOTS * variant.bc / 2 * partial, words_of_scores(variant.bc)
        counts += Counts(alu=slots, accesses=words + 1.0, l2_bytes=WARP * 4.0 * words)
    for each in ahead:
        counts += array_counts(each, variant.bc / 2, copies_itself=not variant.bias_stages) * (
            1.0 if changing else partial
        )
    return counts


def _of_eight_bits(variant: Wgmma, problem: Problem, value_size: int) -> tuple[float, dict[str, Any]]:
    """Bytes of shared memory that a tile's values of eight bits cost a warpgroup, turned into ``value_size``
    bytes each, and what else they and sums of their products do."""
    bc, groups, dv = variant.bc, variant.consumers, problem.head_dim_v
    found: dict[str, Any] = {}
    if variant.has_small_weights():
        found["split_slots"] = KEEPING_SLOTS * dv / 2 * bc / SEGMENT_KEYS if variant.keeps_sums() else dv / 2
    if variant.turns_values_in_front:
        values = problem.batch * problem.num_kv_heads * problem.seqlen_k * dv
        return 0.0, found | {"launches_in_front": 1, "bytes_in_front": (1 + value_size) * values}
    if variant.has_small_weights():
        blocks = bc / TRANSPOSED_KEYS * dv / TRANSPOSED_COLUMNS
        found["splitter_slots"] = blocks * TRANSPOSING_SLOTS / (4 * groups)
    # Read as they came and written as f16, or transposed.
    return (1 + value_size) * bc * dv / groups, found


def _split_in_place(variant: Wgmma, problem: Problem, scores: float) -> tuple[float, dict[str, Any]]:
    """Bytes of shared memory and what else a tile costs a warpgroup that its block splits."""
    bc, groups, dv = variant.bc, variant.consumers, problem.head_dim_v
    boxes = [-(-columns // BOX_COLUMNS) for columns in (problem.head_dim, dv)]
    fours = bc / UNIT_ROWS * 2 * sum(boxes)  # of a warp's lanes
    # They arrive, are read and written; the widest rows are read twice.
    passes = 4 if max(boxes) > HELD_BOXES else 3
    return passes * fours * 512 / groups, {
        "split_rounds": sum(_split_rounds(variant, each) for each in boxes),
        "split_waits": 1 / SPLITTERS if variant.split_by == "tiles" else 1.0,
        "split_slots": scores * SPLIT_SCORE_SLOTS + bc / UNIT_ROWS * UNIT_SLOTS + dv / 2,
        "splitter_slots": fours * SPLITTING_SLOTS / (4 * groups),
    }


def _split_in_front(variant: Wgmma, problem: Problem, scores: float) -> tuple[float, dict[str, Any]]:
    """The same of one that launches in front have split: it arrives; and what these cost."""
    bc, dv = variant.bc, problem.head_dim_v
    d_columns, dv_columns = (CHUNK * each for each in (qk_chunks(problem), chunks(dv)))
    item = ITEM_BYTES["f32"]  # that of two parts, too
    rows, keys = (
        problem.batch * heads * length
        for heads, length in (
            (problem.num_q_heads, problem.seqlen_q),
            (problem.num_kv_heads, problem.seqlen_k),
        )
    )
    read = rows * problem.head_dim + keys * (problem.head_dim + dv)
    written = rows * d_columns + keys * (d_columns + dv_columns)
    leaving = LEAVE_UNIT_SLOTS if problem.scores.change is not None else 0
    return item * bc * (d_columns + dv_columns) / variant.consumers, {
        "split_slots": scores * (SPLIT_WEIGHT_SLOTS + leaving) + dv / 2,
        "late_outputs": max(0.0, 1 - variant.summed_columns / dv) if variant.summed_columns else 0.0,
        "launches_in_front": 2,
        "bytes_in_front": item * (read + written),
    }


def _copies(variant: Wgmma, problem: Problem) -> float:
    """`GroupWork.copies`: pieces of a tile, of pages those that are of one, by as many columns as come side
    by side."""
    share = variant.bc // variant.cluster
    widths = {"k": problem.head_dim, "v": problem.head_dim_v}
    maps = [each for each in tensor_maps(variant, problem) if each.array in widths]
    return sum(share / each.rows * -(-widths[each.array] // each.columns) for each in maps)


def _split_rounds(variant: Wgmma, boxes: int) -> float:
    """`GroupWork.split_rounds` of a tile: of narrow rows those of two units are read together. Of whole tiles
    each warp has a third, but with two stages the next is waited for."""
    together = 2 if 2 * boxes <= HELD_BOXES else 1
    reads, units = together * boxes / HELD_BOXES, variant.bc // UNIT_ROWS
    if variant.split_by == "rows":
        return -(-units // (SPLITTERS * together)) * reads
    late = SPLIT_LATE if min(variant.k_stages, variant.v_stages) <= 2 else 1.0
    return late * -(-units // together) * reads / SPLITTERS
