"""What a kernel of latent attention makes a card do, counted along ``templates/families/latent``.

Counted as the work of two warpgroups that each take a pair of tiles: the scores of one, and half of the
columns of outputs of both.
"""

from __future__ import annotations

from ...limits import DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...work import count_work, walk_tiles
from ..wgmma.parameters import GROUP, GROUP_ROWS
from ..wgmma.work import WGMMA_FLOPS_PER_CLOCK, GroupWork
from .family import Latent
from .parameters import CONSUMERS

#: Tiles of keys that both warpgroups take at a time.
PAIR = CONSUMERS


@count_work.register
def latent_work(variant: Latent, problem: Problem, limits: DeviceLimits) -> GroupWork:
    """Returns the work of a kernel of this family on a problem and a card."""
    bc, d, dv, item = variant.bc, problem.head_dim, problem.head_dim_v, ITEM_BYTES[problem.dtype]
    walked = walk_tiles(problem, variant.br, bc, 1, skips=False, packed=problem.group)
    walks = tuple(
        max(1, -(-each.tiles // (PAIR * variant.key_shares())))
        for each in walked
        for _ in range(each.blocks * variant.key_shares())
    )
    flops = 2 * GROUP_ROWS * bc
    # Q and keys; values twice, the other's weights, which were written, and what arrives.
    factor_bytes = item * ((GROUP_ROWS + bc) * d + PAIR * bc * dv / 2 + 2 * GROUP_ROWS * bc + bc * d)
    scores = GROUP_ROWS * bc / GROUP
    tiles = sum(walks) / len(walks)
    return GroupWork(
        groups=CONSUMERS,
        score_cycles=flops * d / WGMMA_FLOPS_PER_CLOCK,
        output_cycles=PAIR * flops * dv / 2 / WGMMA_FLOPS_PER_CLOCK,
        scores=scores,
        polynomials=0.0,
        straight=0.0,
        paired=0.0,
        masked=scores / max(1.0, tiles),
        wavefronts=factor_bytes / 128,
        stages=2,
        chained=False,
        ordered_exponentials=False,
        stays=False,
        early_q=False,
        outputs_apart=False,
        tiles=tiles,
        walks=walks,
        heads=problem.num_kv_heads * problem.batch,
        heads_together=1,
        tile_bytes=PAIR * item * bc * d,
        cluster=variant.splits,
        left_bytes=variant.left_bytes(problem),
        shares=variant.workspace_splits,
    )
