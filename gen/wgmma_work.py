"""What a `Wgmma` kernel makes a card do, counted along ``templates/wgmma.cu.jinja``.

Counted by warpgroups: they take turns at the tensor cores of their SM, and each waits for its own products
alone. ``tuner/groupmodel.py`` turns the counts into a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .limits import DeviceLimits
from .problem import ITEM_BYTES, Problem

if TYPE_CHECKING:
    from .families.wgmma import Wgmma

#: Threads of a warpgroup, and rows of its products.
GROUP, GROUP_ROWS = 128, 64
#: Operations of one SM's tensor cores per clock: a warpgroup's 64 x n x 16 product takes n / 2 clocks.
WGMMA_FLOPS_PER_CLOCK = 4096


@dataclass(frozen=True)
class GroupWork:
    """One warpgroup's work on one tile of keys, and how many there are of both."""

    groups: int
    """Warpgroups of a block that compute."""
    score_cycles: float
    """Of the SM's tensor cores, for a warpgroup's scores of a tile, and"""
    output_cycles: float
    """for its outputs."""
    scores: float
    """Per thread and tile,"""
    polynomials: float
    """those whose exponential is a polynomial, and"""
    masked: float
    """those that a mask is laid over, on average."""
    wavefronts: float
    """Passes of 128 bytes through shared memory that a warpgroup's products take for a tile."""
    stages: int
    """Tiles of K and of V that there is room for, the lesser of both."""
    chained: bool
    """Whether a tile's outputs come before the next one's scores."""
    exponentials_in_turns: bool
    stays: bool
    """Whether blocks take several query tiles, and"""
    early_q: bool
    """whether the next one's Q comes beside this one's work."""
    tiles: float
    """Tiles of keys that a warpgroup computes for its rows of a query tile, on average."""
    walks: tuple[int, ...]
    """Tiles of keys that each query tile of a head needs, in the order in which they start."""
    heads: int
    """Of all batches together, those that fill up clusters included, and"""
    heads_together: int
    """those whose query tiles start together by length, 1 if heads come one after the other."""
    tile_bytes: float
    """What a block asks of L2 for a tile of keys and one of values."""
    cluster: int = 1
    """Blocks that start together, near each other."""
    registers: int | None = None
    """Per thread, that the compiler takes: those of the variant."""

    @property
    def is_even(self) -> bool:
        """Whether all query tiles need as many tiles of keys."""
        return self.walks[0] == self.walks[-1]


def wgmma_work(variant: Wgmma, problem: Problem, limits: DeviceLimits) -> GroupWork:
    """The counts of ``variant`` on ``problem``. The warpgroup that copies counts for nothing: it waits."""
    bc, groups = variant.bc, variant.consumers
    d, dv = -(-problem.head_dim // 16) * 16, problem.head_dim_v
    flops = 2 * GROUP_ROWS * bc
    scores = GROUP_ROWS * bc / GROUP
    key_tiles = -(-problem.seqlen_k // bc)
    walks, computed = _walks(variant, problem)
    tiles = computed / (groups * len(walks))
    if variant.tail and not problem.causal and 0 < problem.seqlen_k % bc <= variant.tail:
        tiles *= 1 - (1 - variant.tail / bc) / key_tiles
    masked_tiles = 1 + GROUP_ROWS / bc if problem.causal else float(problem.seqlen_k % bc > 0)
    heads_per_cluster = variant.heads_per_cluster()
    clusters = problem.batch * problem.num_kv_heads * -(-problem.group // heads_per_cluster)
    heads = clusters * heads_per_cluster
    item = ITEM_BYTES[problem.dtype]
    # Of 16 bits; scores of eight bits are half the work and half the bytes.
    score_size = item / 2
    factor_bytes = 2 * bc * dv + score_size * 2 * d * (bc + (0 if variant.q_in_registers else GROUP_ROWS))
    weight_bytes = item * 2 * GROUP_ROWS * bc if variant.p_in_shared else 0  # written and read
    if problem.has_scales:
        weight_bytes = 3 * bc * dv / groups  # of values, read as they came and written as f16
    return GroupWork(
        groups=groups,
        score_cycles=flops * d * score_size / WGMMA_FLOPS_PER_CLOCK,
        output_cycles=flops * dv / WGMMA_FLOPS_PER_CLOCK,
        scores=scores,
        polynomials=scores / variant.poly_exp if variant.poly_exp else 0.0,
        masked=scores * min(1.0, masked_tiles / max(1.0, tiles)),
        wavefronts=(factor_bytes + weight_bytes) / 128,
        stages=min(variant.k_stages, variant.v_stages, max(1, key_tiles)),
        chained=variant.schedule == "chained",
        exponentials_in_turns=variant.order_of_groups == "exponentials",
        stays=variant.persistent,
        early_q=variant.q_stages > 1 or variant.o_apart,
        tiles=tiles,
        walks=walks,
        heads=heads,
        heads_together=min(heads, variant.section) if variant.section else heads,
        tile_bytes=item * bc * (problem.head_dim + dv) / variant.cluster,
        cluster=variant.cluster,
    )


def _walks(variant: Wgmma, problem: Problem) -> tuple[tuple[int, ...], int]:
    """`GroupWork.walks`, and the tiles of keys that a head's warpgroups compute in all."""
    rows = variant.br * variant.tiles_per_cluster()
    query_tiles = -(-problem.seqlen_q // rows) * variant.tiles_per_cluster()

    def seen(last_row: int) -> int:
        keys = problem.seqlen_k
        if problem.causal:
            keys = max(0, min(keys, last_row + 1 + keys - problem.seqlen_q))
        return -(-keys // variant.bc)

    walks = [seen((tile * variant.br // rows + 1) * rows - 1) for tile in range(query_tiles)]
    starts = range(0, problem.seqlen_q, GROUP_ROWS)
    return tuple(reversed(walks)), sum(seen(start + GROUP_ROWS - 1) for start in starts)
