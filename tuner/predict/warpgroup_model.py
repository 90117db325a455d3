"""How long kernels of warpgroups should take: the part of the cost model for family `wgmma`.

The warpgroups that compute on an SM each work on a tile of keys at a time. Together they are bound by what
they share: the tensor cores, the special-function units, the schedulers' issue slots, shared memory. Each
alone is bound by its chain: its scores, then their maxima, exponentials and weights, and in the chained
schedule part of the outputs before; of float32, also by the few warps that split its keys and values. A block
starts, walks its tiles, and ends or goes on to the next query tile; device memory bounds the whole.

The coefficients marked "fitted" minimize the error on some 5800 kernels timed on an H200: see `fit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from statistics import fmean

from ...gen.families.wgmma.parameters import GROUP
from ...gen.families.wgmma.work import GroupWork
from ...gen.limits import MEMORY_LATENCY_NS, DeviceLimits
from ...gen.problem import ITEM_BYTES, Problem
from .prediction import (
    Prediction,
    combine_us,
    in_front_us,
    join,
    next_launch_us,
    reread_part,
    stretch,
    strided,
    written_back_bytes,
)

#: Exponentials per cycle and SM (CUDA C++ Programming Guide, throughput of arithmetic instructions).
EXP_LANES = 16
#: A block's start and end take about as long as so many tiles.
ENDS = 2


@dataclass(frozen=True)
class GroupCoefficients:
    """What the model assumes beyond the card's limits. Cycles are of the SM's clock."""

    #: How much of the others shows beside the fullest of what warpgroups share: the exponent of the norm that
    #: joins them. Fitted.
    overlap: float = 2.4
    #: How much of what warpgroups share shows beside the chain of one, or the other way round: the exponent
    #: of the norm that joins them. Fitted.
    hiding: float = 1.25
    #: How much of the SMs' time shows beside device memory's, or the other way round: the exponent of the
    #: norm that joins them.
    memory_hiding: float = 2.7
    #: Issue slots of a warp per score and thread: a multiply-add, an addition, an exponential, and half a
    #: maximum and half a conversion of two slots each.
    score_slots: float = 5.0
    #: The same where straight lines stand for exponentials: by count two multiply-adds, half a maximum and
    #: three quarters of a permutation of two slots each; by 190 kernels timed on an H200 two more.
    straight_slots: float = 6.5
    #: And of those whose scores are pairs: by count a multiply-add and a maximum of a pair, a quarter of two
    #: maxima and of a permutation of two slots each; as many more as there, by half as many instructions.
    paired_slots: float = 3.5
    #: Issue slots of a warp around a tile: barriers, descriptors, the loop. Fitted.
    tile_slots: float = 77.0
    #: Issue slots of a warp for a polynomial, and for a score's mask. Fitted.
    polynomial_slots: float = 17.0
    mask_slots: float = 8.9
    #: Passes of 128 bytes through shared memory per cycle. Fitted.
    wavefronts_per_cycle: float = 1.43
    #: Cycles in which a warpgroup's own waits of a tile add up, and such cycles per score. Fitted.
    tile_latency: float = 122.0
    score_latency: float = 1.63
    #: Part of a tile's outputs that the chained schedule waits for before its scores. Fitted.
    exposed_outputs: float = 0.57
    #: Cycles lost to each tile that comes late: with one stage, and with two. Fitted.
    late_after_one: float = 700.0
    late_after_two: float = 18.0
    #: How much longer a tile takes when exponentials take turns, and in the chained schedule. Fitted.
    turns: float = 1.035
    chained: float = 0.945
    #: The same when products take turns: mostly as fast, but without warpgroups may fall into step by chance.
    products_in_turns: float = 0.995
    #: Cycles in which a warp splits float32: of a round, and of its waits for a tile of keys and one of
    #: values; how much of the products shows beside that. By sixteen kernels timed on an H200.
    split_round: float = 500.0
    split_waits: float = 600.0
    split_hiding: float = 1.5
    #: Cycles in which a producer asks for one box, whose instructions wait for each other; in which it awaits
    #: and announces a tile of keys and one of values, and where it finds their pages as well; how much of a
    #: tile's work shows beside that. Of pages fitted to ten kernels that were timed without them, too, of
    #: others to one whose tiles have sixteen keys.
    copy: float = 80.0
    copied_tile: float = 400.0
    found_tile: float = 1600.0
    copy_hiding: float = 6.0
    #: Cycles from a query tile's end to the next one's first scores; when its Q came early; and when it came
    #: after the last scores of the tile before, whose outputs have a place of their own. Fitted.
    start: float = 3900.0
    start_with_q: float = 1700.0
    start_apart: float = 2200.0
    #: Bytes that pass from device memory, as a part of its bandwidth; part of L2 that holds what has to be
    #: written back before something else takes its place; part of the re-reads of keys that miss L2 where
    #: blocks that walk the same keys run at once. As of the other families.
    dram_efficiency: float = 0.975
    left_in_l2: float = 1.0
    out_of_step: float = 0.12
    #: The same of kernels whose rows are few, which read all of it once; nanoseconds from a request to device
    #: memory until its answer when all ask; bytes per cycle that one SM draws. As of the other families.
    few_rows_efficiency: float = 0.975
    memory_latency_ns: float = float(MEMORY_LATENCY_NS)
    sm_bytes_per_cycle: float = 40.0
    #: Cycles in which the blocks of a cluster wait for each other's partial results, and bytes of these that
    #: one of them reads per cycle.
    merging: float = 2000.0
    merged_bytes_per_cycle: float = 32.0
    #: Microseconds for each of the blocks whose shares of keys are of the same rows, where a launch puts them
    #: together; bytes of these that pass through L2 per cycle and SM. As of the other families.
    share_us: float = 0.13
    left_bytes_per_cycle: float = 50.0
    #: Microseconds that handing on and taking over takes in a last turn, beside the bytes: the median of 66
    #: pairs of variants that differ in that alone.
    handing_us: float = 14.0
    #: Microseconds from one kernel's end to the next one's, with caches cold. Fitted.
    launch_us: float = 6.84


GROUP_COEFFICIENTS = GroupCoefficients()


def predict_groups(
    work: GroupWork,
    problem: Problem,
    limits: DeviceLimits,
    resident: int,
    coefficients: GroupCoefficients | None = None,
) -> Prediction:
    """Returns the time of work counted by warpgroups with ``resident`` blocks per SM; by the coefficients in
    use unless others are given."""
    coefficients = coefficients or GROUP_COEFFICIENTS
    shared = _shared_cycles(work, resident * work.groups, coefficients)
    chain = _chain_cycles(work, coefficients)
    # Warpgroups share an SM by what all of them compute, but a block ends with the one of most tiles.
    longest = max(1.0, work.mean_walk / work.tiles) if work.tiles else 1.0
    tile = join([join(list(shared.values()), coefficients.overlap), longest * chain], coefficients.hiding)
    if work.ordered_exponentials:
        tile *= coefficients.turns
    if work.ordered_products:
        tile *= coefficients.products_in_turns
    if work.chained:
        tile *= coefficients.chained
    splitting = _splitting_cycles(work, coefficients)
    tile = join([tile, splitting], coefficients.split_hiding)
    copying = _copying_cycles(work, coefficients)
    tile = join([tile, copying], coefficients.copy_hiding)
    start = coefficients.start_apart if work.outputs_apart else coefficients.start
    if work.early_q:
        start = coefficients.start_with_q
    if work.partial_bytes:
        start += coefficients.merging + work.partial_bytes / coefficients.merged_bytes_per_cycle
    slots = limits.blocks_at_once(resident, work.cluster)
    query_tiles = _query_tiles_of_the_last(work, problem, slots)
    us = 1.0 / limits.clock_mhz
    per_sm = query_tiles * work.tiles * us
    parts = {name: per_sm * cycles for name, cycles in shared.items()}
    parts["latency"] = (per_sm * chain) + query_tiles * start * us
    if splitting:
        parts["splitting"] = per_sm * splitting
    if copying:
        parts["copies"] = per_sm * copying
    parts["device memory"] = _memory_us(work, problem, limits, resident, coefficients)
    on_sms = per_sm * tile + query_tiles * start * us
    busy = join([on_sms, parts["device memory"]], coefficients.memory_hiding)
    combining = combine_us(
        work.left_bytes * len(work.walks) * work.heads,
        limits,
        coefficients.left_bytes_per_cycle,
        coefficients.handing_us
        if work.shares_turn
        else next_launch_us(limits) + coefficients.share_us * work.shares,
    )
    in_front = in_front_us(work, limits, coefficients.dram_efficiency)
    if in_front:
        parts["launches in front"] = in_front
    return Prediction(
        median_us=busy + combining + in_front + coefficients.launch_us,
        limiter=max(parts, key=lambda name: parts[name]),
        parts_us=parts,
        blocks_per_sm=resident,
        waves=len(work.walks) * work.heads / slots,
    )


def _shared_cycles(work: GroupWork, groups: int, coefficients: GroupCoefficients) -> dict[str, float]:
    """Cycles for which ``groups`` warpgroups, a tile each, occupy what they share."""
    slots = (
        (work.scores - work.straight) * coefficients.score_slots
        + (work.straight - work.paired) * coefficients.straight_slots
        + work.paired * coefficients.paired_slots
        + work.polynomials * coefficients.polynomial_slots
        + work.masked * coefficients.mask_slots
        + coefficients.tile_slots
        + work.split_slots
        + work.splitter_slots
        + work.asked_slots
    )
    wavefronts = work.wavefronts + work.asked_wavefronts
    return {
        "tensor cores": groups * (work.score_cycles + work.output_cycles),
        "exponentials": groups * _exp_cycles(work),
        "issue slots": groups * slots,
        "shared memory": groups * wavefronts / coefficients.wavefronts_per_cycle,
    }


def _exp_cycles(work: GroupWork) -> float:
    return (work.scores - work.polynomials - work.straight + work.asked_functions) * GROUP / EXP_LANES


def _chain_cycles(work: GroupWork, coefficients: GroupCoefficients) -> float:
    """Cycles of one warpgroup's tile when nothing is in its way."""
    late = {1: coefficients.late_after_one, 2: coefficients.late_after_two}.get(work.stages, 0.0)
    outputs = coefficients.exposed_outputs * work.output_cycles if work.chained else 0.0
    # Columns that are summed behind others stand beside nothing of the warpgroup's own.
    outputs += work.late_outputs * (work.output_cycles - outputs)
    softmax = _exp_cycles(work) + coefficients.score_latency * work.scores + coefficients.tile_latency
    return work.score_cycles + outputs + softmax + work.split_slots + work.asked_slots + late


def _splitting_cycles(work: GroupWork, coefficients: GroupCoefficients) -> float:
    """Cycles in which a block's warps split a tile of keys and one of values."""
    if not work.split_rounds:
        return 0.0
    return work.split_rounds * coefficients.split_round + work.split_waits * coefficients.split_waits


def _copying_cycles(work: GroupWork, coefficients: GroupCoefficients) -> float:
    """Cycles in which a block's producer asks for a tile of keys and one of values."""
    if not work.copies:
        return 0.0
    tile = coefficients.found_tile if work.finds_pages else coefficients.copied_tile
    return tile + work.copies * coefficients.copy


def _query_tiles_of_the_last(work: GroupWork, problem: Problem, slots: int) -> float:
    """Query tiles, of average length, of the one of ``slots`` that ends last."""
    query_tiles = len(work.walks)
    share = query_tiles * work.heads / slots
    lengths = tuple(walk + ENDS for walk in work.walks)
    if work.shares_turn:
        return max(1.0, share)  # there are no more blocks than tiles
    if work.stays and (work.is_even or problem.layout.is_packed or problem.scores.begins):
        # Where they differ in length, those who took the longest take the shortest next.
        turns = query_tiles if work.is_even else ceil(query_tiles / 2)
        return share * ceil(turns * work.heads / slots) * slots / (turns * work.heads)
    if work.stays:
        # By turns of a cluster, in each of which every block of it has a tile.
        pairs = _pairs(lengths[:: work.tiles_together])
        heads = work.heads * work.tiles_together // work.cluster
        return strided(pairs, heads, slots // work.cluster) / fmean(lengths)
    if work.is_even:
        return float(ceil(share))
    return share * stretch(lengths, work.heads, slots, work.heads_together)


def _pairs(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The turns of a head whose blocks stay: its longest and its shortest tile that are left, together."""
    count = len(lengths)
    half = [lengths[i] + lengths[count - 1 - i] for i in range(count // 2)]
    return (*half, lengths[count // 2]) if count % 2 else tuple(half)


def _memory_us(
    work: GroupWork, problem: Problem, limits: DeviceLimits, resident: int, coefficients: GroupCoefficients
) -> float:
    """Returns the time for device memory alone. Blocks with few rows that are few themselves, or have few
    bytes under way, leave part of its bandwidth unused; so does a last wave of them."""
    moved = _memory_bytes(work, problem, limits, resident, coefficients)
    back_bytes = coefficients.left_in_l2 * written_back_bytes(problem, limits, moved)
    ahead = work.bytes_ahead
    if ahead is None:
        return (moved + back_bytes) / (1e3 * limits.dram_gbps * coefficients.dram_efficiency)
    gbps = limits.dram_gbps * coefficients.few_rows_efficiency
    sm_gbps = coefficients.sm_bytes_per_cycle * limits.clock_mhz / 1e3
    blocks = len(work.walks) * work.heads

    def us(together: int) -> float:
        under_way = together * ahead / coefficients.memory_latency_ns
        reached = min(gbps, under_way, min(together, limits.num_sms) * sm_gbps)
        return together * moved / blocks / (1e3 * reached)

    slots = limits.blocks_at_once(resident, work.cluster)
    waves, rest = divmod(blocks, slots)
    return waves * us(slots) + (us(rest) if rest else 0.0) + back_bytes / (1e3 * gbps)


def _memory_bytes(
    work: GroupWork, problem: Problem, limits: DeviceLimits, resident: int, coefficients: GroupCoefficients
) -> float:
    """Bytes through device memory: each tensor once, and again what L2 cannot hold of the K and V in use.
    Blocks that read the same at once come by while it is still there, but for a part."""
    sequences = problem.batch if problem.layout.is_packed else 1  # that a head's walks are of
    slots = limits.num_sms * resident
    q_heads = min(
        work.heads * sequences,
        max(
            work.heads_together if work.heads_together > 1 else 0,
            slots * sequences / len(work.walks) + 1,
        ),
    )
    group = problem.group if work.heads_share_keys else 1
    columns = problem.head_dim + problem.head_dim_v
    footprint = max(1.0, q_heads / group) * problem.seqlen_k * columns * ITEM_BYTES[problem.key_dtype]
    missing = max(0.0, 1 - limits.l2_bytes / footprint)
    keys = _key_bytes(problem)
    traffic = work.heads * sum(work.walks) * work.tile_bytes
    # Tiles of a head walk from the last keys that they see, which are the same where all rows see alike.
    tiles = len(work.walks) / sequences
    in_step = min(tiles, max(1.0, slots / work.heads_together)) if work.is_even else 1.0
    readers = traffic / keys
    at_once = readers * in_step / tiles
    missing *= reread_part(readers, at_once, coefficients.out_of_step)
    return problem.min_bytes + missing * max(0.0, traffic - keys)


@lru_cache(maxsize=4096)
def _key_bytes(problem: Problem) -> int:
    """Bytes of keys and values."""
    return sum(each.num_bytes(problem) for each in problem.operation.arrays if each.name in ("k", "v"))
