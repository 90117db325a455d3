"""What a kernel of the mma family makes a card do: counts that follow ``templates/mma.cu.jinja``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limits import WARP, DeviceLimits
from .problem import ITEM_BYTES, Problem
from .work import Counts, Work, walk_tiles

if TYPE_CHECKING:
    from .families.mma import Mma

#: Floating-point operations of an m16n8k16 product.
WIDE_FLOPS = 2 * 16 * 8 * 16
#: A product half as deep takes two thirds of the time (measured on an H200).
NARROW_COST = 0.66
#: Multiply-adds of an exponential by polynomial, range reduction and scaling included.
POLYNOMIAL_OPS = 8
#: Integer instructions per copy of a tile's chunk: addresses, bounds.
ALU_PER_COPY = 3
#: Tiles out of ten whose maxima outgrow the last by enough to rescale.
LAZY_SHARE = 0.1


def mma_work(variant: Mma, problem: Problem, limits: DeviceLimits) -> Work:
    """The counts of ``variant`` on ``problem``."""
    compute = _per_warp_tile(variant, problem, limits)
    size = ITEM_BYTES[problem.dtype]
    tile_bytes = variant.bc * (problem.head_dim + problem.head_dim_v) * size
    copies = tile_bytes / (variant.access_width(problem) * size * WARP)
    per_tile = Counts(
        alu=ALU_PER_COPY * copies,
        accesses=copies,
        wavefronts=2 * tile_bytes / 128,
        l2_bytes=tile_bytes,
        barriers=2 if variant.stages == 1 else 1,
        global_waits=0.3 if variant.stages == 1 else 0.0,
    )
    return Work(
        once=_once(variant, problem),
        per_tile=per_tile,
        per_warp_tile=compute,
        walks=walk_tiles(problem, variant.br, variant.bc, variant.warps, skips=True),
        heads=problem.batch * problem.num_q_heads,
        warps=variant.warps,
        heads_interleaved=variant.block_order == "heaviest_first",
        loop_instructions=compute.instructions + copies / variant.warps * (1 + ALU_PER_COPY),
    )


def _per_warp_tile(variant: Mma, problem: Problem, limits: DeviceLimits) -> Counts:
    """One warp's share of one tile."""
    rows, keys = variant.row_tiles, variant.key_tiles
    values = -(-problem.head_dim_v // 8)
    scores = rows * keys * 4
    always = variant.rescale == "always"
    rescaled = 1.0 if always else LAZY_SHARE
    # Maxima three at a time where they only bound; in full, with two shuffles a row, where they count.
    maxima = scores * (1.0 if always else 0.5 + LAZY_SHARE)
    shuffles = 4 * rows * rescaled
    polynomials = scores / variant.poly_exp if variant.poly_exp else 0.0
    softmax = Counts(
        ffma=2 * scores + polynomials * POLYNOMIAL_OPS,
        alu=maxima + 8,
        exp=scores - polynomials + 2 * rows * rescaled,
        shuffles=shuffles,
        wavefronts=shuffles,
        shared_waits=2 + 2 * rescaled,
    )
    if problem.dtype == "f32":
        return softmax + _float32_products(variant, problem, limits, values)
    return softmax + _half_products(variant, problem, limits, values, rescaled)


def _half_products(
    variant: Mma, problem: Problem, limits: DeviceLimits, values: int, rescaled: float
) -> Counts:
    rows, keys = variant.row_tiles, variant.key_tiles
    deep, rest = divmod(variant.d_columns(problem), 16)
    pairs, single = divmod(keys, 2)
    steps, operands = deep + rest / 8, pairs + single
    if not limits.has_async_copy:
        steps, operands = variant.d_columns(problem) / 8, keys
    wide = rows * (deep * keys + pairs * values) if limits.has_async_copy else 0
    narrow = rows * (rest // 8 * keys + single * values) if limits.has_async_copy else 0
    if not limits.has_async_copy:
        narrow = rows * (variant.d_columns(problem) // 8 * keys + keys * values)
    loads = steps * keys / 2 + operands * values / 2 + (0 if variant.q_in_registers else rows * steps)
    return Counts(
        tensor=(wide + NARROW_COST * narrow) * _wide_cycles(limits),
        products=wide + narrow,
        ffma=4 * rows * values * rescaled,
        alu=2 * rows * keys,
        accesses=loads,
        wavefronts=4 * loads,
        delivered=4 * loads,
        shared_waits=2,
    )


def _float32_products(variant: Mma, problem: Problem, limits: DeviceLimits, values: int) -> Counts:
    rows, keys = variant.row_tiles, variant.key_tiles
    steps = variant.d_columns(problem) // 8
    three = problem.precision != "tf32"
    products = (3 if three else 1) * rows * keys * (steps + values)
    # Each factor is split, or rounded, by every warp; Q once for all where it lies in shared memory.
    split = 2 * keys * (steps + values) + 4 * rows * keys
    split += 4 * rows * steps if variant.q_in_registers else 0
    q_loads = 0 if variant.q_in_registers else rows * steps * (2 if three else 1)
    loads = steps * keys / 2 + q_loads
    value_loads = 2 * keys * values
    return Counts(
        tensor=products * _wide_cycles(limits),
        products=products,
        ffma=4 * rows * values + (split + 4 * rows * keys if three else 0),
        alu=split,
        accesses=loads + value_loads,
        wavefronts=4 * loads + value_loads,
        delivered=4 * loads + value_loads,
        shared_waits=2,
    )


def _wide_cycles(limits: DeviceLimits) -> float:
    """Cycles of one scheduler's tensor core for an m16n8k16 product, or m16n8k8 of TF32."""
    return 4 * WIDE_FLOPS / limits.mma_flops_per_sm


def _once(variant: Mma, problem: Problem) -> Counts:
    """Q in, O out."""
    size = ITEM_BYTES[problem.dtype]
    q_bytes, o_bytes = (variant.br * dim * size for dim in (problem.head_dim, problem.head_dim_v))
    accesses = (q_bytes + o_bytes) / (16 * WARP)
    return Counts(
        alu=12 * accesses + 40 * variant.warps,
        exp=4 * variant.warps,
        accesses=accesses,
        wavefronts=2 * (q_bytes + o_bytes) / 128,
        l2_bytes=q_bytes + o_bytes,
        global_waits=2,
        barriers=1,
    )
