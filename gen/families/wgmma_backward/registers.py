"""How the registers of a gradient kernel of Hopper are shared out, and how many its threads need."""

from __future__ import annotations

from ...expression import Name, loads_of
from ...limits import DeviceLimits
from ...problem import Problem
from ...scoring.scores import KEY, QUERY
from ..wgmma.parameters import GROUP, is_split
from ..wgmma.shared_memory import CHUNK
from .parameters import AHEAD, ATOMICS, LATE, OF_KEYS, STEP, WEIGHTS_FIRST, Parameters

#: What a thread of the producer keeps, and the most that one of a consumer has of the rest.
PRODUCER_REGISTERS, MAX_CONSUMER_REGISTERS, ENOUGH_REGISTERS = 24, 240, 248
#: Where it finds tiles in the workspace, which takes more.
PRODUCER_REGISTERS_OF_TILES = 40
#: What one keeps where the producer's other warps add up what blocks of a cluster send each other.
ADDING_REGISTERS = 56
#: Registers of a consumer beside its sums and products: addresses, numbers of rows, scales; and more where
#: changes of scores are made and differentiated, or threads of warpgroups apart, or of blocks that stay, add
#: to memory.
REGISTERS_BESIDE, REGISTERS_OF_CHANGE, REGISTERS_OF_ADDRESSES = 32, 8, 24
#: And for elements of arrays that a change reads row by row as these pass by, or key by key, for each that is
#: weighed at a time: the compiler begins to read elements of all before it needs the first; some more for
#: each kind of places that is kept beside them, of sums that threads or copies add to and of rows that see a
#: key, but for scores a tile ahead, which have room for these. By what nvcc 13 spills, under tables of
#: distances and biases. The last is of the launch that keeps query rows.
REGISTERS_OF_ROWS, REGISTERS_OF_PLACES, REGISTERS_OF_KEYS = 0.125, 4, 0.75
#: The first where numbers come in parts, which are made of nothing that is kept.
REGISTERS_BESIDE_PARTS = 24


def launch_registers(threads: int, limits: DeviceLimits) -> int:
    """Returns what a launch gives each of so many threads of an SM before warpgroups share them out."""
    return min(limits.registers_per_sm // threads // 8 * 8, limits.max_registers_per_thread)


def consumer_registers(
    threads: int, limits: DeviceLimits, producer: int = PRODUCER_REGISTERS, blocks: int = 1
) -> int:
    """Returns what a thread of a consumer has once the producer's have given up theirs but for so many, of
    blocks that an SM has so many of; 0 where a launch gives all enough."""
    given, groups = launch_registers(threads * blocks, limits), threads // GROUP
    if given >= ENOUGH_REGISTERS:
        return 0
    return min(MAX_CONSUMER_REGISTERS, (given * groups - producer) // (groups - 1) // 8 * 8)


def needed_registers(variant: Parameters, problem: Problem) -> int:
    """Returns what a thread of a consumer needs where keys are kept: for sums, products and the rest."""
    d, dv = problem.head_dim // 2, problem.head_dim_v // 2
    if is_split(problem):
        # Products of scores and of their gradients, weights in parts, and what a chunk's columns gain.
        added = min(CHUNK, max(problem.head_dim, problem.head_dim_v)) // 2
        beside = _beside(problem) - REGISTERS_BESIDE + REGISTERS_BESIDE_PARTS
        return d + dv + 3 * variant.weighed_rows // 2 + added + beside
    tiles, columns = variant.query_share(problem) if variant.sums_queries else (0, 0)
    rows = variant.weighed_rows
    products = rows + (rows // 4 if variant.schedule in (WEIGHTS_FIRST, AHEAD) else 0)
    beside_shares = rows // 4 + (rows // 2 if variant.schedule == AHEAD else 0)
    passing = max(products, tiles * columns // 2 + beside_shares) + kept_registers(variant, problem)
    # Where threads add to memory beside all that warpgroups apart, or turns, have them know.
    addresses = (
        REGISTERS_OF_ADDRESSES if variant.dq_path == ATOMICS and (variant.apart or variant.persistent) else 0
    )
    # Where sums are handed on, half the rows for a part begun while others are awaited, as ptxas has it.
    begins = variant.hands_on_sums and variant.schedule == AHEAD and variant.meeting == LATE
    begun = rows // 2 if begins else 0
    if variant.apart:
        # What another warpgroup has of gradients leaves room for elements.
        summed = max(d, dv)
    else:
        places = 0 if variant.schedule == AHEAD else (not variant.hands_on_sums) + (variant.ranges == OF_KEYS)
        elements = REGISTERS_OF_ROWS * rows + REGISTERS_OF_PLACES * places
        summed = d + dv + _registers_of_elements(problem, QUERY, elements)
    return summed + passing + addresses + begun + _beside(problem)


def producer_registers(variant: Parameters, problem: Problem) -> int:
    """Returns what a thread of the producer keeps."""
    if variant.sums_in_cluster:
        return ADDING_REGISTERS
    return PRODUCER_REGISTERS_OF_TILES if is_split(problem) else PRODUCER_REGISTERS


def kept_registers(variant: Parameters, problem: Problem) -> int:
    """Returns how many registers of a consumer's thread have what stays."""
    return sum(4 * -(-columns // STEP) for columns in variant.kept_columns(problem))


def needed_registers_of_rows(variant: Parameters, problem: Problem) -> int:
    """Returns what a thread of a consumer needs where query rows are kept; 0 without such blocks."""
    if variant.sums_queries:
        return 0
    # What else a change takes comes once elements are there.
    elements = _registers_of_elements(problem, KEY, REGISTERS_OF_KEYS * variant.keys)
    beside = max(_beside(problem), REGISTERS_BESIDE + elements)
    return problem.head_dim // 2 + variant.keys + beside


def _registers_of_elements(problem: Problem, passing: Name, registers: float) -> int:
    """Returns so many where a change of scores reads arrays element by element of what is ``passing`` by."""
    change = problem.scores.change
    if change is None or not any(passing.name in load.names() for load in loads_of(change)):
        return 0
    return int(registers)


def _beside(problem: Problem) -> int:
    return REGISTERS_BESIDE + (REGISTERS_OF_CHANGE if problem.scores.change is not None else 0)
