"""How long kernels whose work is counted by blocks should take: the part of the cost model for all families
but `wgmma`.

A block's loop over K/V tiles occupies several pipes at once: FMA units, integer units, tensor cores,
special-function units, shared memory and L1, the schedulers' issue slots, the way to L2. The fullest one
bounds the SM's throughput; the others are not quite hidden behind it. A block also has a latency of its
own, its warps' waits; blocks that share an SM hide each other's. Before the loop a block starts and waits
for its first tiles. The grid fills SMs in waves, or, under a causal mask, as blocks of different length
end; device memory bounds the whole.

The coefficients marked "fitted" minimize the error on some 2500 kernels timed on an H200 (head dims 32, 64
and 128, with and without a causal mask), one set for all: each problem is ranked about as well by a fit to
the others alone. Kernels on tensor cores have a set of their own, fitted to some 1300 and held to 400 more
that decode. Other cards are assumed to be like that one but for their limits and for what the constants below
say of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ...gen.limits import MEMORY_LATENCY_NS, PORTABLE_CLUSTER, WARP, DeviceLimits
from ...gen.problem import ITEM_BYTES, Problem
from ...gen.work import SCHEDULERS, BlockWork, Counts
from .prediction import (
    Prediction,
    combine_us,
    in_front_us,
    join,
    next_launch_us,
    reread_part,
    stretch,
    written_back_bytes,
)


@dataclass(frozen=True)
class Coefficients:
    """Everything the model assumes beyond the card's limits. Cycles are of the SM's clock."""

    #: How much of the other pipes shows beside the fullest: the exponent of the norm that joins them. 1 would
    #: mean no overlap, infinity a perfect one. Fitted.
    overlap: float = 5.5
    #: How much of throughput shows beside latency, or the other way round: the exponent of the norm that
    #: joins them. Fitted.
    hiding: float = 9.0
    #: How much of the SMs' time shows beside device memory's, or the other way round: the exponent of the
    #: norm that joins them. Fitted.
    memory_hiding: float = 9.0
    #: The same of kernels of few rows, whose copies are far ahead of what computes. Fitted.
    ahead_hiding: float = 9.0
    #: FFMAs issued over the most the units could take, when nothing else is in the way. An H200 runs 60.9 of
    #: 67 TFLOP/s in a bare loop; it bounds cards with half as many units, on which it is assumed.
    ffma_efficiency: float = 0.90
    #: Cycles that an FFMA with scattered operands loses beside one without: as often as the compiler fails to
    #: keep two of them out of one register bank. Fitted; profiles of single kernels show 0.05 to 0.3.
    bank_stall: float = 0.13
    #: Issue slots that a matrix product takes, its own included: operands are read for it meanwhile. Fitted;
    #: multiply-adds beside one suggest five on an H200, of the 6.1 cycles that it takes alone.
    product_slots: float = 3.5
    #: Issue slots of a matrix product as a part of its cycles on the tensor core, where that is fewer.
    product_issue: float = 0.85
    #: Part of its clock that a card holds while its tensor cores are busy: an H200 falls to 1.8 GHz.
    held_clock: float = 1.0
    #: How likely a warp has nothing to issue, in waits of a cycle or two that it cannot fill itself. A slot
    #: stays empty when that holds for all the warps of a scheduler. Fitted.
    idle_warp: float = 0.34
    #: How far a block whose warps do not divide among the schedulers falls back to the pace of the fullest
    #: one; 0 would mean that other blocks' warps fill the rest. Fitted.
    unevenness: float = 0.75
    #: Instructions of 16 bytes that the instruction caches hold for a loop, and cycles to fetch one of those
    #: beyond. Warps of one block walk the loop together; blocks that share an SM drift apart, and each
    #: fetches what the others evicted. Fitted.
    cached_instructions: float = 1280.0
    fetch_cycles: float = 0.28
    #: Warp-wide integer and comparison instructions per cycle and SM, from Volta on in units beside FMA.
    alu_per_cycle: float = 2.0
    #: Passes of 128 bytes through the banks of shared memory or L1 per cycle and SM. Fitted.
    wavefronts_per_cycle: float = 0.75
    #: Passes of 128 bytes per cycle and SM from shared memory or L1 into registers, which a broadcast does
    #: not spare. Fitted.
    delivered_per_cycle: float = 0.98
    #: Bytes per cycle and SM that L2 delivers when all SMs ask.
    l2_bytes_per_cycle: float = 32.0
    #: Cycles until a shared-memory read, a shuffle or an exponential can be used.
    shared_latency: float = 30.0
    #: Cycles until a read of global memory arrives, mostly from L2.
    global_latency: float = 500.0
    #: Cycles in which a block gathers at a barrier.
    barrier_latency: float = 50.0
    #: Cycles until a tile is there that no other work of its block hides. Fitted to gradients.
    late_tile: float = 1300.0
    #: Cycles from one block's end to the first tile of the block that takes its place. Fitted.
    block_start: float = 3900.0
    #: Whether other blocks' loops hide a block's start: blocks soon drift apart. Fitted.
    starts_hide: bool = False
    #: What is left of that where a block stays, and what the next tile needs is brought before its own ends.
    #: Of gradients on an H200, by one block or two on an SM.
    left_of_start: float = 0.5
    #: Nanoseconds from a request to device memory until its answer when all ask.
    memory_latency_ns: float = float(MEMORY_LATENCY_NS)
    #: Bytes per cycle that one SM draws from device memory, however many are under way: half of an H200's
    #: SMs drew 37 each.
    sm_bytes_per_cycle: float = 40.0
    #: Part of the theoretical bandwidth of device memory that a copy reaches.
    dram_efficiency: float = 0.85
    #: Part of L2 that holds what has to be written back before something else takes its place: none where
    #: that is part of ``launch_us``.
    left_in_l2: float = 0.0
    #: Part of the re-reads of keys that miss L2 where blocks that walk the same keys run at once. Fitted.
    out_of_step: float = 1.0
    #: How much longer device memory takes to deliver what is marked as what L2 should give up first: of seven
    #: kernels on an H200, each as fast as its twin without it otherwise.
    evicting: float = 1.07
    #: How much longer all of it takes where clusters are larger than all cards with clusters form: they lie
    #: in one part of the card, among others. Of eleven pairs of sixteen blocks and eight.
    beyond_portable: float = 1.1
    #: Microseconds for each of the blocks' results that are put together by way of memory, one behind the
    #: other. Of nine kernels.
    share_us: float = 0.13
    #: Microseconds from one kernel's end to the next one's, its blocks' start and the constants' first read
    #: included.
    launch_us: float = 3.0


COEFFICIENTS = Coefficients()
#: For kernels on tensor cores. A warp's products, maxima and exponentials wait for each other, so that pipes
#: overlap less and a tile has a latency of its own, here the barrier's; their copies pass L1 by, and matrix
#: loads have no conflicts. Launches and device memory are by how times of one query grow from 17 MB of keys
#: to 1 GB on an H200: 5 us, 4.7 TB/s, and once more what L2 has to write back; what is out of step is by
#: kernels of 32 and 64 packed rows in tiles of 16. The others are fitted to times of that card: see `fit`.
TENSOR_COEFFICIENTS = replace(
    COEFFICIENTS,
    overlap=2.43,
    hiding=3.6,
    memory_hiding=2.2,
    ahead_hiding=3.0,
    idle_warp=0.55,
    product_slots=2.3,
    held_clock=0.91,
    wavefronts_per_cycle=1.0,
    l2_bytes_per_cycle=64.0,
    shared_latency=36.0,
    global_latency=1330.0,
    barrier_latency=540.0,
    block_start=720.0,
    starts_hide=True,
    dram_efficiency=0.975,
    left_in_l2=1.0,
    out_of_step=0.12,
    launch_us=5.0,
)
#: Exponentials per cycle and SM (CUDA C++ Programming Guide, throughput of arithmetic instructions).
EXP_LANES, EXP_LANES_SM_61 = 16, 32
SCHEDULERS_SM_60 = 2
#: The first compute capability whose integer units stand beside the FMA units.
SEPARATE_ALU_ARCH = 70


def predict_blocks(
    work: BlockWork,
    problem: Problem,
    limits: DeviceLimits,
    resident: int,
    coefficients: Coefficients | None = None,
) -> Prediction:
    """Returns the time of counted work with ``resident`` blocks per SM; by the coefficients of its kind, CUDA
    cores or tensor cores, unless others are given."""
    if coefficients is None:
        coefficients = TENSOR_COEFFICIENTS if work.per_warp_tile.products else COEFFICIENTS
    loop = work.loop
    per_sm = work.blocks / limits.num_sms
    warps = min(resident, ceil(per_sm)) * work.warps
    pipes = pipe_cycles(loop, work.warps, warps, limits, coefficients)
    us = 1.0 / (limits.clock_mhz * coefficients.held_clock)
    parts = {name: per_sm * value * us for name, value in pipes.items()}
    alone = latency_cycles(loop, work.warps, limits, coefficients) + _start_latency(work, coefficients)
    parts["latency"] = ceil(per_sm / resident) * alone * us
    parts["device memory"] = _memory_us(work, problem, limits, resident, coefficients)
    cycles = _makespan(work, limits, resident, coefficients)
    hiding = coefficients.memory_hiding if work.bytes_ahead is None else coefficients.ahead_hiding
    busy = join([cycles * us, parts["device memory"]], hiding)
    if work.cluster > PORTABLE_CLUSTER:
        busy *= coefficients.beyond_portable
    combining = combine_us(
        work.left_bytes * work.blocks,
        limits,
        coefficients.l2_bytes_per_cycle,
        next_launch_us(limits) + coefficients.share_us * work.shares,
    )
    in_front = in_front_us(work, limits, coefficients.dram_efficiency)
    if in_front:
        parts["launches in front"] = in_front
    return Prediction(
        median_us=busy + coefficients.launch_us + combining + in_front,
        limiter=max(parts, key=lambda name: parts[name]),
        parts_us=parts,
        blocks_per_sm=resident,
        waves=per_sm / resident,
    )


def pipe_cycles(
    counts: Counts, warps: int, warps_on_sm: int, limits: DeviceLimits, coefficients: Coefficients
) -> dict[str, float]:
    """Returns the cycles for which a block of ``warps`` with these counts occupies each pipe of an SM that
    holds ``warps_on_sm``.

    A scheduler has arithmetic units of its own, so that the one with the most warps sets the pace.
    """
    schedulers = _schedulers(limits)
    fma = counts.ffma * WARP / limits.fp32_lanes_per_sm / coefficients.ffma_efficiency
    alu = counts.alu / coefficients.alu_per_cycle
    if limits.arch < SEPARATE_ALU_ARCH:
        fma, alu = fma + counts.alu * WARP / limits.fp32_lanes_per_sm, 0.0
    exp_lanes = EXP_LANES_SM_61 if limits.arch == 61 else EXP_LANES
    uneven = _unevenness(warps, schedulers, coefficients)
    filled = 1 - coefficients.idle_warp ** (warps_on_sm / schedulers)
    return {
        "arithmetic": uneven * fma,
        "integer arithmetic": uneven * alu,
        "tensor cores": uneven * counts.tensor / schedulers,
        "exponentials": uneven * counts.exp * WARP / exp_lanes,
        "shared memory": max(
            counts.wavefronts / coefficients.wavefronts_per_cycle,
            counts.delivered / coefficients.delivered_per_cycle,
        ),
        "issue slots": uneven / filled * _issue_cycles(counts, coefficients) / schedulers,
        "L2": counts.l2_bytes / coefficients.l2_bytes_per_cycle,
    }


def latency_cycles(counts: Counts, warps: int, limits: DeviceLimits, coefficients: Coefficients) -> float:
    """Returns the cycles that a block of ``warps`` takes when it has an SM to itself: its instructions and
    its waits."""
    schedulers = _schedulers(limits)
    issue = _issue_cycles(counts, coefficients) / min(schedulers, warps)
    return (
        _unevenness(warps, schedulers, coefficients) * issue
        + counts.shared_waits * coefficients.shared_latency
        + counts.global_waits * coefficients.global_latency
        + counts.barriers * coefficients.barrier_latency
    )


def _issue_cycles(counts: Counts, coefficients: Coefficients) -> float:
    """Cycles in which one scheduler issues all of it."""
    slots = min(counts.products * coefficients.product_slots, counts.tensor * coefficients.product_issue)
    held = max(0.0, slots - counts.products)
    return counts.instructions + counts.scattered * coefficients.bank_stall + held


def _schedulers(limits: DeviceLimits) -> int:
    return SCHEDULERS_SM_60 if limits.arch == 60 else SCHEDULERS


def _unevenness(warps: int, schedulers: int, coefficients: Coefficients) -> float:
    """The busiest scheduler's share of a block's warps over the mean. So few warps that they leave half of
    the schedulers free do so for other blocks' warps."""
    if warps <= schedulers // 2:
        return 1.0
    busiest = ceil(warps / schedulers) * schedulers / warps
    return 1 + coefficients.unevenness * (busiest - 1)


def _start_latency(work: BlockWork, coefficients: Coefficients) -> float:
    start = coefficients.block_start + work.once.global_waits * coefficients.global_latency
    return coefficients.left_of_start * start if work.stays else start


def _cycles_together(
    work: BlockWork, limits: DeviceLimits, together: int, coefficients: Coefficients
) -> float:
    """Cycles in which ``together`` average blocks, sharing an SM, all finish."""
    loop, once = work.loop, work.once
    pipes = pipe_cycles(loop, work.warps, together * work.warps, limits, coefficients)
    throughput = join(list(pipes.values()), coefficients.overlap)
    latency = latency_cycles(loop, work.warps, limits, coefficients)
    start = together * max(
        once.instructions / _schedulers(limits),
        once.wavefronts / coefficients.wavefronts_per_cycle,
        once.l2_bytes / coefficients.l2_bytes_per_cycle,
    )
    if coefficients.starts_hide:
        latency += _start_latency(work, coefficients)
    else:
        # Blocks on an SM start together, or nearly: nothing fills their first wait.
        start += _start_latency(work, coefficients)
    missing = max(0.0, work.loop_instructions - coefficients.cached_instructions)
    fetches = (together - 1) * work.mean_tiles * missing * coefficients.fetch_cycles
    # Other blocks compute meanwhile.
    late = work.late * work.mean_tiles * coefficients.late_tile
    start += max(0.0, late - (together - 1) * throughput)
    return start + work.pace * join([together * throughput, latency], coefficients.hiding) + fetches


def _makespan(work: BlockWork, limits: DeviceLimits, resident: int, coefficients: Coefficients) -> float:
    """Cycles from the first block's start to the last one's end."""

    def cycles(together: int) -> float:
        return _cycles_together(work, limits, together, coefficients)

    per_sm = ceil(work.blocks * resident / limits.blocks_at_once(resident, work.cluster))
    if work.is_even:
        # Whole waves, then one with fewer blocks per SM.
        waves, rest = divmod(per_sm, resident)
        if work.last_slices > 1:
            shared = _cycles_together(_shortened(work), limits, resident, coefficients)
            return (waves - 1) * cycles(resident) + work.last_turns * shared
        return (waves * cycles(resident) if waves else 0.0) + (cycles(rest) if rest else 0.0)
    together = min(resident, per_sm)
    slots = limits.num_sms * together
    # A block's start and end take about as long as a tile.
    lengths = tuple(walk.paced_tiles + work.warps for walk in work.walks for _ in range(walk.blocks))
    longer = stretch(lengths, work.heads, slots, work.heads if work.heads_interleaved else 1)
    return work.blocks / slots * cycles(together) * longer


def _shortened(work: BlockWork) -> BlockWork:
    """The work of blocks with slices of the tiles of a last turn: as much once, of the loop a part."""
    slices = work.last_slices
    walks = (
        replace(
            walk,
            tiles=-(-walk.tiles // slices),
            warp_tiles=-(-walk.warp_tiles // slices),
            paced_tiles=-(-walk.paced_tiles // slices),
        )
        for walk in work.walks
    )
    return replace(work, walks=tuple(walks))


def idle_us(
    work: BlockWork, limits: DeviceLimits, resident: int, coefficients: Coefficients = TENSOR_COEFFICIENTS
) -> float:
    """Returns how long multiprocessors stand idle at the end of a launch, in the mean of all: from when there
    are no more blocks for them until the last one has ended."""
    together = min(resident, ceil(work.blocks * resident / limits.blocks_at_once(resident, work.cluster)))
    share = work.blocks / limits.blocks_at_once(together, work.cluster)
    busy = share * _cycles_together(work, limits, together, coefficients)
    idle = max(0.0, _makespan(work, limits, resident, coefficients) - busy)
    return idle / (limits.clock_mhz * coefficients.held_clock)


def _memory_us(
    work: BlockWork, problem: Problem, limits: DeviceLimits, resident: int, coefficients: Coefficients
) -> float:
    """Returns the time for device memory alone. Blocks that are few, or have few bytes under way, leave part
    of its bandwidth unused; so does a last wave of them."""
    gbps = (
        limits.dram_gbps * coefficients.dram_efficiency / (coefficients.evicting if work.evicts_first else 1)
    )
    moved = dram_bytes(work, problem, limits, resident, coefficients.out_of_step)
    back_us = coefficients.left_in_l2 * written_back_bytes(problem, limits, moved) / (1e3 * gbps)
    ahead = work.bytes_ahead
    if ahead is None:
        return moved / (1e3 * gbps) + back_us
    sm_gbps = coefficients.sm_bytes_per_cycle * limits.clock_mhz / 1e3
    slots = limits.blocks_at_once(resident, work.cluster)

    def us(blocks: int) -> float:
        under_way = blocks * ahead / coefficients.memory_latency_ns
        reached = min(gbps, under_way, min(blocks, limits.num_sms) * sm_gbps)
        return blocks * moved / work.blocks / (1e3 * reached)

    waves, rest = divmod(work.blocks, slots)
    return waves * us(slots) + (us(rest) if rest else 0.0) + back_us


def dram_bytes(
    work: BlockWork, problem: Problem, limits: DeviceLimits, resident: int, out_of_step: float = 1.0
) -> float:
    """Returns the bytes through device memory: each tensor once, and again what L2 cannot hold of the K and V
    in use. Blocks that read the same at once come by while it is still there, but for a part
    ``out_of_step``."""
    traffic = work.blocks * work.mean.l2_bytes
    slots = limits.num_sms * resident
    blocks_per_head = work.blocks / work.heads
    group = problem.group if work.heads_share_keys else 1
    # Interleaved, a head's next block comes after a block of every other head.
    q_heads = work.heads if work.heads_interleaved else min(work.heads, ceil(slots / blocks_per_head) + 1)
    kv_heads = max(1.0, q_heads / group)
    passing = work.passing_bytes
    if passing is None:
        columns = problem.head_dim + problem.head_dim_v
        passing = problem.seqlen_k * columns * ITEM_BYTES[problem.key_dtype]
    missing = max(0.0, 1 - limits.l2_bytes / (kv_heads * passing))
    least = problem.min_bytes if work.moved_bytes is None else work.moved_bytes
    sequences = problem.batch if problem.layout.is_packed else 1
    readers = blocks_per_head * group / (work.cluster * work.shares * sequences)
    at_once = slots * group / work.heads if work.heads_interleaved else slots
    missing = 1.0 if work.evicts_first else missing * reread_part(readers, at_once, out_of_step)
    return least + missing * max(0.0, traffic - least)
