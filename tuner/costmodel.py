"""How long a variant should take on a card: predicted from counted work, to rank variants without the card.

A block occupies several pipes at once: FMA units, integer units, special-function units, shared memory and
L1, the schedulers' issue slots, the way to L2. The fullest one bounds the SM's throughput; the others are not
quite hidden behind it. A block also has a latency of its own, its warps' waits; blocks that share an SM hide
each other's. The grid fills SMs in waves, and device memory bounds the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from ..gen.limits import WARP, DeviceLimits
from ..gen.problem import Problem
from ..gen.variant import Variant
from ..gen.work import Counts, Work


@dataclass(frozen=True)
class Coefficients:
    """Everything the model assumes beyond the card's limits. Cycles are of the SM's clock."""

    #: How much of the other pipes shows beside the fullest: the exponent of the norm that joins them. 1 would
    #: mean no overlap, infinity a perfect one.
    overlap: float = 4.0
    #: The same for throughput against latency, and for SMs against device memory.
    hiding: float = 4.0
    #: FFMAs issued over the most the units could take, when nothing else is in the way: operands from one
    #: register bank cost a cycle. An H200 runs 60.9 of 67 TFLOP/s in a bare loop.
    ffma_efficiency: float = 0.90
    #: Issue slots that a warp lets pass, over those it takes: waits of a cycle or two that no instruction of
    #: its own fills. The other warps of its scheduler can.
    issue_gap: float = 0.3
    #: Warp-wide integer and comparison instructions per cycle and SM, from Volta on in units beside FMA.
    alu_per_cycle: float = 2.0
    #: Passes of 128 bytes through the banks of shared memory or L1 per cycle and SM.
    wavefronts_per_cycle: float = 1.0
    #: Passes of 128 bytes from there into registers, which a broadcast does not spare.
    delivered_per_cycle: float = 1.0
    #: Bytes per cycle and SM that L2 delivers when all SMs ask.
    l2_bytes_per_cycle: float = 32.0
    #: Cycles until a shared-memory read, a shuffle or an exponential can be used.
    shared_latency: float = 30.0
    #: Cycles until a read of global memory arrives, mostly from L2.
    global_latency: float = 500.0
    #: Cycles in which a block gathers at a barrier.
    barrier_latency: float = 30.0
    #: Part of the theoretical bandwidth of device memory that a copy reaches.
    dram_efficiency: float = 0.85
    #: From one kernel's end to the next one's, its blocks' start and the constants' first read included.
    launch_us: float = 3.0
    #: Under a causal mask: the part of the longest block for which the last SM runs alone.
    causal_tail: float = 0.5
    causal_tail_heaviest_first: float = 0.1


COEFFICIENTS = Coefficients()
#: Exponentials per cycle and SM (CUDA C++ Programming Guide, throughput of arithmetic instructions).
EXP_LANES, EXP_LANES_SM_61 = 16, 32
#: Warp schedulers of an SM; sm_60 alone has two.
SCHEDULERS, SCHEDULERS_SM_60 = 4, 2
#: The first compute capability whose integer units stand beside the FMA units.
SEPARATE_ALU_ARCH = 70


@dataclass(frozen=True)
class Prediction:
    """A predicted time and what it is made of: ``limiter`` names the largest part, ``parts_us`` how long each
    resource alone would need for the whole launch."""

    median_us: float
    limiter: str
    parts_us: Mapping[str, float]
    blocks_per_sm: int
    waves: float


def predict(
    variant: Variant, problem: Problem, limits: DeviceLimits, coefficients: Coefficients = COEFFICIENTS
) -> Prediction:
    """The time of ``variant`` on ``problem``. Deterministic, some hundred microseconds of work.

    The variant must be legal on that card: a block that fits no SM raises ValueError.
    """
    launch = variant.launch(problem, limits)
    registers = min(variant.registers(problem, limits), limits.max_registers_per_thread)
    resident = limits.blocks_per_sm(launch.threads, registers, launch.smem_bytes)
    if resident < 1:
        raise ValueError(f"{variant.name} does not fit an SM of {limits.name}")
    return predict_work(variant.work(problem, limits), problem, limits, resident, coefficients)


def predict_work(
    work: Work,
    problem: Problem,
    limits: DeviceLimits,
    resident: int,
    coefficients: Coefficients = COEFFICIENTS,
) -> Prediction:
    """The time of counted work with ``resident`` blocks per SM."""
    mean = work.mean
    per_sm = work.blocks / limits.num_sms
    warps = min(resident, ceil(per_sm)) * work.warps
    pipes = pipe_cycles(mean, warps, limits, coefficients)
    cycles = _makespan(work, limits, resident, coefficients)
    us = 1.0 / limits.clock_mhz
    parts = {name: per_sm * value * us for name, value in pipes.items()}
    alone = latency_cycles(mean, work.warps, limits, coefficients)
    parts["latency"] = ceil(per_sm / resident) * alone * us
    parts["device memory"] = dram_bytes(work, problem, limits, resident) / (
        1e3 * limits.dram_gbps * coefficients.dram_efficiency
    )
    busy = _join([cycles * us, parts["device memory"]], coefficients.hiding)
    return Prediction(
        median_us=busy + coefficients.launch_us,
        limiter=max(parts, key=lambda name: parts[name]),
        parts_us=parts,
        blocks_per_sm=resident,
        waves=per_sm / resident,
    )


def pipe_cycles(
    counts: Counts, warps: int, limits: DeviceLimits, coefficients: Coefficients
) -> dict[str, float]:
    """Cycles for which a block with these counts occupies each pipe of an SM that holds ``warps`` warps.

    A scheduler has arithmetic units of its own, so that the one with the most warps sets the pace.
    """
    fma = counts.ffma * WARP / limits.fp32_lanes_per_sm / coefficients.ffma_efficiency
    alu = counts.alu / coefficients.alu_per_cycle
    if limits.arch < SEPARATE_ALU_ARCH:
        fma, alu = fma + counts.alu * WARP / limits.fp32_lanes_per_sm, 0.0
    exp_lanes = EXP_LANES_SM_61 if limits.arch == 61 else EXP_LANES
    schedulers = _schedulers(limits)
    uneven = ceil(warps / schedulers) * schedulers / warps
    gaps = 1 + coefficients.issue_gap * schedulers / warps
    return {
        "arithmetic": uneven * fma,
        "integer arithmetic": uneven * alu,
        "exponentials": uneven * counts.exp * WARP / exp_lanes,
        "shared memory": max(
            counts.wavefronts / coefficients.wavefronts_per_cycle,
            counts.delivered / coefficients.delivered_per_cycle,
        ),
        "issue slots": uneven * gaps * counts.instructions / schedulers,
        "L2": counts.l2_bytes / coefficients.l2_bytes_per_cycle,
    }


def latency_cycles(counts: Counts, warps: int, limits: DeviceLimits, coefficients: Coefficients) -> float:
    """Cycles that a block of ``warps`` takes when it has an SM to itself: its instructions and its waits."""
    return (
        counts.instructions / min(_schedulers(limits), warps)
        + counts.shared_waits * coefficients.shared_latency
        + counts.global_waits * coefficients.global_latency
        + counts.barriers * coefficients.barrier_latency
    )


def _schedulers(limits: DeviceLimits) -> int:
    return SCHEDULERS_SM_60 if limits.arch == 60 else SCHEDULERS


def _block_cycles(
    counts: Counts, warps: int, limits: DeviceLimits, together: int, coefficients: Coefficients
) -> float:
    """Cycles in which ``together`` such blocks of ``warps``, sharing an SM, all finish."""
    pipes = pipe_cycles(counts, together * warps, limits, coefficients)
    throughput = _join(list(pipes.values()), coefficients.overlap)
    latency = latency_cycles(counts, warps, limits, coefficients)
    return _join([together * throughput, latency], coefficients.hiding)


def _makespan(work: Work, limits: DeviceLimits, resident: int, coefficients: Coefficients) -> float:
    """Cycles from the first block's start to the last one's end."""

    def cycles_of(counts: Counts, together: int) -> float:
        return _block_cycles(counts, work.warps, limits, together, coefficients)

    mean, per_sm = work.mean, ceil(work.blocks / limits.num_sms)
    if work.is_even:
        # Whole waves, then one with fewer blocks per SM.
        waves, rest = divmod(per_sm, resident)
        return waves * cycles_of(mean, resident) + (cycles_of(mean, rest) if rest else 0.0)
    together = min(resident, per_sm)
    even = work.blocks / (limits.num_sms * together) * cycles_of(mean, together)
    longest = cycles_of(work.of(work.heaviest), 1)
    tail = coefficients.causal_tail_heaviest_first if work.heads_interleaved else coefficients.causal_tail
    return max(even, longest) + tail * longest


def dram_bytes(work: Work, problem: Problem, limits: DeviceLimits, resident: int) -> float:
    """Bytes through device memory: each tensor once, and again what L2 cannot hold of the K and V in use."""
    traffic = work.blocks * work.mean.l2_bytes
    slots = limits.num_sms * resident
    blocks_per_head = work.blocks / work.heads
    group = problem.num_q_heads / problem.num_kv_heads
    q_heads = min(work.heads, slots if work.heads_interleaved else ceil(slots / blocks_per_head) + 1)
    kv_heads = max(1.0, q_heads / group)
    footprint = kv_heads * 2 * problem.seqlen_k * problem.head_dim * 4
    missing = max(0.0, 1 - limits.l2_bytes / footprint)
    return problem.min_bytes + missing * max(0.0, traffic - problem.min_bytes)


def _join(values: list[float], exponent: float) -> float:
    """The norm of that exponent: at least the largest, at most the sum."""
    largest = max(values)
    if largest == 0:
        return 0.0
    return largest * sum((value / largest) ** exponent for value in values) ** (1 / exponent)
