"""A predicted time, and what models of one have in common."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ...gen.launch import DEPENDENT_ARCH
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.work import Work


@dataclass(frozen=True)
class Prediction:
    """A predicted time and what it is made of: ``limiter`` names the largest part, ``parts_us`` how long each
    resource alone would need for the whole launch."""

    median_us: float
    limiter: str
    parts_us: Mapping[str, float]
    blocks_per_sm: int
    waves: float


#: Microseconds from one launch of a kernel's to the next one's, which waits for its results and which the
#: host has sent by then. Of nine kernels, each of whose launches began once the one before had ended.
NEXT_LAUNCH_US = 2.0
#: The same where the next one's blocks may be there before that (`flashgen.gen.launch.in_turn`): what is left
#: is to hear of the end and to read what is there. Assumed, until it is measured.
DEPENDENT_LAUNCH_US = 1.0


def next_launch_us(limits: DeviceLimits) -> float:
    """Returns the microseconds from one launch of a kernel's to the next one's on such a card."""
    return DEPENDENT_LAUNCH_US if limits.arch >= DEPENDENT_ARCH else NEXT_LAUNCH_US


def combine_us(left_bytes: float, limits: DeviceLimits, bytes_per_cycle: float, waited_us: float) -> float:
    """Returns the microseconds of the launch that puts together what blocks have left of shares of the keys,
    which passes through L2 and back, so many bytes per cycle and SM, ``waited_us`` apart; 0 where they leave
    nothing."""
    if not left_bytes:
        return 0.0
    return waited_us + 2 * left_bytes / (bytes_per_cycle * limits.num_sms * limits.clock_mhz)


def in_front_us(work: Work, limits: DeviceLimits, efficiency: float) -> float:
    """Returns the microseconds of the launches in front of a kernel's blocks, which device memory bounds, of
    whose throughput they have such a part; 0 where there are none."""
    moved = work.bytes_in_front / (1e3 * limits.dram_gbps * efficiency)
    return moved + work.launches_in_front * next_launch_us(limits)


def written_back_bytes(problem: Problem, limits: DeviceLimits, moved: float) -> float:
    """Returns the bytes that pass to device memory to make room in L2 for so many ``moved``: of what stood
    there before, which who ran in front had written, as timing does, less what is left there in turn."""
    outputs = _output_bytes(problem)
    return max(0.0, min(moved, limits.l2_bytes) - min(outputs, limits.l2_bytes))


@lru_cache(maxsize=4096)
def _output_bytes(problem: Problem) -> int:
    return sum(each.num_bytes(problem) for each in problem.operation.outputs if not each.is_optional)


def reread_part(readers: float, at_once: float, out_of_step: float) -> float:
    """Returns the part of what ``readers`` of the same read after the first of them that no other brings at
    that moment: all of it where they take turns, ``out_of_step`` where so many run ``at_once``."""
    if readers <= 1:
        return 1.0
    in_turn = (readers / min(readers, max(1.0, at_once)) - 1) / (readers - 1)
    return in_turn + out_of_step * (1 - in_turn)


#: Blocks that a simulated grid has at most: what the end of a longer one costs does not depend on its length.
SIMULATED_BLOCKS = 4096


@lru_cache(maxsize=4096)
def stretch(lengths: tuple[int, ...], heads: int, slots: int, together: int) -> float:
    """Returns how much longer than an even share of the work the last of ``slots`` runs.

    Each slot takes the next block as it ends one. ``lengths`` are those of one head's blocks in the order in
    which they start; of so many heads ``together``, each starts one before any starts its next.
    """
    together = min(together, heads)
    simulated = min(heads, max(1, max(SIMULATED_BLOCKS, 4 * slots) // len(lengths)))
    if together < simulated < heads:  # of whole sections and, as it stands, the last
        simulated = heads - -(-(heads - simulated) // together) * together
    sections = [min(together, simulated - first) for first in range(0, simulated, together)]
    order = [length for section in sections for length in lengths for _ in range(section)]
    ends = [0] * slots
    for length in order:
        heapq.heapreplace(ends, ends[0] + length)
    even = sum(order) / slots
    return 1 + (max(ends) / even - 1) * simulated / heads


@lru_cache(maxsize=4096)
def strided(lengths: tuple[int, ...], heads: int, takers: int) -> int:
    """Returns how much the last of so many ``takers`` has to do where each takes every so-many-th turn,
    whatever it is: ``lengths`` are those of the turns of one head, which is followed by the next."""
    import numpy as np

    turns = len(lengths) * heads
    rounds = np.zeros((-(-turns // takers), takers), dtype=np.int64)
    rounds.flat[:turns] = np.tile(lengths, heads)
    return int(rounds.sum(axis=0).max())


def join(values: list[float], exponent: float) -> float:
    """Returns the norm of the values with that exponent: at least the largest, at most the sum."""
    largest = max(values)
    if largest == 0:
        return 0.0
    return largest * sum((value / largest) ** exponent for value in values) ** (1 / exponent)
