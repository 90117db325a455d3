"""How the registers of a Hopper kernel are shared out between its producer and its consumers."""

from __future__ import annotations

from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from .parameters import CHAINED, OVERLAPPED, Parameters, is_split
from .shared_memory import CHUNK

#: Warps of the producer that convert or split what comes: all but the one that copies.
SPLITTERS = 3
#: Threads of the producer's warps that convert or split.
CONVERTERS = WARP * SPLITTERS
#: Loads of sixteen values that each of those threads has under way at once.
CONVERTED_TOGETHER = 4
#: What a thread of the producer keeps: the least that there is; where it also turns values into f16; and
#: where it splits float32, which spills with 56.
COPYING_REGISTERS, CONVERTING_REGISTERS, SPLITTING_REGISTERS = 24, 56, 72
#: Where it copies tiles that it finds in memory itself, at least: some of its loops spill with fewer.
FINDING_REGISTERS = 32
#: Where it finds its block's share of a last turn.
DEALING_REGISTERS = 32
#: Where several of its warps copy pieces of pages, and one of them queries besides.
SHARING_REGISTERS = 56
#: Where another warp brings arrays: of all tiles of keys, or of those on a list.
BRINGING_REGISTERS, LISTING_REGISTERS = 32, 40
#: And where it transposes values: some of its loops spill with the fewer, which consumers may need more.
TRANSPOSING_REGISTERS = (56, 40)
#: What one may have of those that others gave up, and what makes that needless.
MAX_CONSUMER_REGISTERS, ENOUGH_REGISTERS = 240, 248
#: What ptxas wants for one product beside its sums, of the registers that a launch gives.
REGISTERS_BESIDE_SUMS = 30
#: Columns up to which rows of float32 are narrow, and beyond which they are wide; keys of a tile that are
#: few.
NARROW_ROWS, WIDE_ROWS, FEW_KEYS = 128, 192, 32
#: Bytes of a row of Q that a product takes, four registers of a thread.
OPERAND_BYTES = 32
#: Keys per tile of float32 beyond which its products are serialized for want of registers.
MANY_KEYS = 128


def launch_registers(variant: Parameters, limits: DeviceLimits) -> int:
    """Returns what a launch gives each thread before the warpgroups share them out."""
    allowed = limits.registers_per_sm // (variant.threads() * variant.min_blocks) // 8 * 8
    return min(allowed, limits.max_registers_per_thread)


def producer_registers(variant: Parameters, problem: Problem, limits: DeviceLimits) -> int:
    """Returns what a thread of the producer keeps of what the launch gives."""
    if is_split(problem):
        return _finding_registers(variant, limits) if variant.splits_in_front else SPLITTING_REGISTERS
    if variant.shares_last_turn():
        return DEALING_REGISTERS
    if variant.turns_values_in_front:
        return COPYING_REGISTERS
    if variant.has_small_weights():
        many, few = TRANSPOSING_REGISTERS
        return many if needed_registers(variant, problem) <= _left(variant, limits, many) else few
    if variant.bias_stages:
        return LISTING_REGISTERS if problem.scores.needs_lists else BRINGING_REGISTERS
    if problem.has_scales:
        return CONVERTING_REGISTERS
    return SHARING_REGISTERS if variant.copiers > 1 and not variant.pack_heads else COPYING_REGISTERS


def _finding_registers(variant: Parameters, limits: DeviceLimits) -> int:
    """Returns the least that it keeps, and what consumers cannot share out evenly."""
    all_of_launch = launch_registers(variant, limits) * (1 + variant.consumers)
    return all_of_launch - variant.consumers * _left(variant, limits, FINDING_REGISTERS)


def consumer_registers(variant: Parameters, problem: Problem, limits: DeviceLimits) -> int:
    """Returns what a thread of a consumer has once the producer has given up its own."""
    given = launch_registers(variant, limits)
    if given >= ENOUGH_REGISTERS:
        return ENOUGH_REGISTERS  # nothing to gain
    return min(MAX_CONSUMER_REGISTERS, _left(variant, limits, producer_registers(variant, problem, limits)))


def _left(variant: Parameters, limits: DeviceLimits, kept: int) -> int:
    """What a consumer's thread may take where one of the producer keeps so many."""
    spare = launch_registers(variant, limits) * (1 + variant.consumers) - kept
    return spare // variant.consumers // 8 * 8


def _needed_in_front(variant: Parameters, problem: Problem) -> int:
    """The same where launches in front split float32: weights have two parts, of a tile's outputs some
    columns are summed apart."""
    outputs = (problem.head_dim_v + (variant.summed_columns or problem.head_dim_v)) // 2
    return outputs + variant.bc + _rest_in_front(variant, problem)


def _rest_in_front(variant: Parameters, problem: Problem) -> int:
    """What else its loops need and, in blocks that stay, what keeps their place among tiles: of wide rows
    more. By what nvcc 13 spills."""
    widest = max(problem.head_dim, problem.head_dim_v)
    # The last columns, where they are fewer, have registers of their own.
    few_at_last = variant.summed_columns > 0 and problem.head_dim_v % variant.summed_columns > 0
    if widest > WIDE_ROWS and variant.persistent:
        rest = 64
    elif widest > WIDE_ROWS and variant.bc <= FEW_KEYS and not few_at_last:
        rest = 40
    elif widest > NARROW_ROWS or few_at_last:
        rest = 44
    else:
        keeps_more = widest > CHUNK or (variant.persistent and variant.schedule == CHAINED)
        rest = 36 if keeps_more else 32
    # Of a single K tile the compiler keeps the descriptors of all steps at hand.
    return rest + (24 if variant.k_stages == 1 and problem.head_dim > NARROW_ROWS else 0)


def needed_registers(variant: Parameters, problem: Problem) -> int:
    """Returns how many a consumer's thread needs not to spill: for outputs, scores, weights and the rest."""
    if variant.splits_in_front:
        return _needed_in_front(variant, problem)
    steps = -(-problem.head_dim // 16)
    queries = (
        4 * -(-problem.head_dim * ITEM_BYTES[problem.dtype] // OPERAND_BYTES) if variant.q_in_registers else 0
    )
    # Of a single K tile the compiler keeps the descriptors of all steps at hand.
    descriptors = 24 if variant.k_stages == 1 and steps > 8 else 0
    # In shared memory, a register for each of the four places within a chunk's rows.
    weights = 4 if variant.p_in_shared else variant.bc // 4
    outputs = variant.value_columns(problem) // 2
    if is_split(problem):
        # Weights have two parts, and a tile's outputs are summed apart.
        weights, outputs = 2 * weights, 2 * outputs
    # Scores and weights of few keys leave room for less.
    rest = 16 if is_split(problem) and variant.bc <= MANY_KEYS else 28
    if variant.has_small_weights():
        # Blocks that stay keep their place among tiles of different lengths.
        rest = 28 if variant.persistent and problem.causal else 24
        # And, where wide outputs are kept, which of them are.
        plain = variant.schedule == OVERLAPPED and variant.rescale == "lazy"
        wide = problem.head_dim_v > NARROW_ROWS
        rest += 8 if variant.keeps_sums() and problem.causal and wide and not plain else 0
        weights, outputs = variant.bc // 8, outputs if variant.keeps_sums() else 2 * outputs
    rest += queries + descriptors + (4 if variant.poly_exp else 0)
    return outputs + variant.score_registers() + weights + rest
