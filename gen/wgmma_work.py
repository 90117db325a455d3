"""What a `Wgmma` kernel makes a card do, counted along ``templates/wgmma.cu.jinja``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limits import WARP, DeviceLimits
from .problem import ITEM_BYTES, Problem
from .work import Counts, Work, walk_tiles

if TYPE_CHECKING:
    from .families.wgmma import Wgmma

#: Operations of one SM's tensor cores per clock: a warpgroup's 64 x n x 16 product takes n / 2 clocks.
WGMMA_FLOPS_PER_CLOCK = 4096
#: An exponential by polynomial: additions and multiply-adds, and comparisons and integer instructions.
POLYNOMIAL_FMAS, POLYNOMIAL_ALU = 6, 3
#: Instructions of a warp around one tile: barriers, the loop, descriptors, the test of what is to be masked.
ALU_PER_TILE = 40
#: Scores are masked by a comparison and a selection each.
ALU_PER_MASKED = 2


def wgmma_work(variant: Wgmma, problem: Problem, limits: DeviceLimits) -> Work:
    """The counts of ``variant`` on ``problem``. The warpgroup that copies counts for nothing: it waits."""
    warps = 4 * variant.consumers
    walks = walk_tiles(problem, variant.br, variant.bc, warps, skips=True)
    tiles = max(1.0, sum(w.blocks * w.tiles for w in walks) / sum(w.blocks for w in walks))
    compute = _per_warp_tile(variant, problem, tiles)
    return Work(
        once=_once(variant, problem, warps),
        per_tile=_copies(variant, problem),
        per_warp_tile=compute,
        walks=walks,
        heads=problem.batch * problem.num_q_heads,
        warps=warps,
        heads_interleaved=variant.section != 1,
        loop_instructions=compute.instructions,
    )


def _copies(variant: Wgmma, problem: Problem) -> Counts:
    """A tile of K and one of V, by the copy engine: of L2 a block asks its share, and gets the rest from its
    neighbours."""
    tile_bytes = variant.bc * (problem.head_dim + problem.head_dim_v) * ITEM_BYTES[problem.dtype]
    return Counts(wavefronts=tile_bytes / 128, l2_bytes=tile_bytes / variant.cluster, barriers=2)


def _per_warp_tile(variant: Wgmma, problem: Problem, tiles: float) -> Counts:
    """One warp's share of one of so many tiles: 16 rows."""
    scores = 16 * variant.bc / WARP
    d_steps, dv = -(-problem.head_dim // 16), problem.head_dim_v
    flops = 2 * 16 * variant.bc * (16 * d_steps + dv)
    always = variant.rescale == "always"
    rescaled = 1.0 if always else 1 / tiles
    maxima = scores * (rescaled + (0.0 if always else 0.5))
    masked_tiles = 1 + 64 / variant.bc if problem.causal else float(problem.seqlen_k % variant.bc > 0)
    masked = scores * ALU_PER_MASKED * min(1.0, masked_tiles / tiles)
    polynomials = scores / variant.poly_exp if variant.poly_exp else 0.0
    shuffles = 4 * rescaled
    # Each of four warps feeds the tensor core of its scheduler.
    tensor = flops / (WGMMA_FLOPS_PER_CLOCK / 4)
    # A warpgroup reads K and V from shared memory once for all its warps, and each warp its own rows of Q.
    q_bytes = 0 if variant.q_in_registers else 16 * 16 * d_steps * 2
    read_bytes = variant.bc * 2 * (16 * d_steps + dv) / 4 + q_bytes
    return Counts(
        products=d_steps / 4 + variant.bc / 16 / 4,
        tensor=tensor,
        ffma=2 * scores + polynomials * POLYNOMIAL_FMAS + 16 * dv / WARP * rescaled,
        alu=maxima + masked + polynomials * POLYNOMIAL_ALU + scores / 2 + ALU_PER_TILE,
        exp=scores - polynomials + 2 * rescaled,
        shuffles=shuffles,
        wavefronts=shuffles + read_bytes / 128,
        delivered=shuffles,
        shared_waits=2 + 4 * rescaled,
    )


def _once(variant: Wgmma, problem: Problem, warps: int) -> Counts:
    """Q in, O out."""
    size = ITEM_BYTES[problem.dtype]
    moved = variant.br * (problem.head_dim + problem.head_dim_v) * size
    outputs = variant.br * problem.head_dim_v / WARP
    return Counts(
        alu=2 * outputs + 60 * warps,
        exp=4 * warps,
        accesses=outputs / 8,
        wavefronts=2 * moved / 128,
        l2_bytes=moved,
        global_waits=1 if variant.q_stages > 1 else 3,
        barriers=2,
    )
