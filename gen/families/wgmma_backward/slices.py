"""Slices of tiles of keys that are left for a last turn of fewer blocks than stay."""

from __future__ import annotations

from ...problem import Problem
from .parameters import Parameters

#: The most slices of a tile of keys, and what each takes beside its tiles of rows, as so many of these: keys
#: and values that are brought, sums that are handed on. By bytes, and by blocks that wait for each other as
#: simulated: where these are no longer in step, more slices gain nothing.
MOST_SLICES, SLICE_TILES = 4, 3


def tiles_left(variant: Parameters, problem: Problem, blocks: int) -> int:
    """Returns how many tiles of keys so many blocks that stay leave for a last turn of fewer of them."""
    tiles = problem.batch * problem.num_kv_heads * -(-problem.seqlen_k // variant.bc)
    return tiles % blocks if tiles > blocks else 0


def slices_of_left(variant: Parameters, problem: Problem, left: int, blocks: int) -> int:
    """Returns into how many slices of its rows each of the tiles of keys is cut that are left for fewer
    than ``blocks``: as many as these have done with soonest."""
    rows = problem.group * -(-problem.seqlen_q // variant.br)

    def tiles_of(slices: int) -> float:
        return -(-left * slices // blocks) * (rows / slices + SLICE_TILES)

    return min(range(1, min(MOST_SLICES, rows) + 1), key=tiles_of)
