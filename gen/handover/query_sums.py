"""Gradients of queries that blocks of keys add up in memory, and the launch that reads them from there.

Sums are float32, in the workspace and in the order in which tensor cores leave them: of tiles of 16 rows by 8
columns, one behind the other, each lane has four numbers. So a warp adds its share to neighbouring numbers,
by as few instructions as there are, and whoever reads them knows their places by the same function. Of packed
sequences each begins with a tile of its own, of as many rows as their statistics are filled up to.
"""

from __future__ import annotations

from ..expression import Constant, divided_up
from ..launch import BATCH, POSTPROCESS_ROLE, Q_HEADS, ROWS, Launch
from ..limits import WARP
from .statistics import filled_rows
from .workspace import Region

#: The region of a workspace that has them.
QUERY_SUMS = "query_sums"
#: Rows of a tile: those of a head are filled up to whole tiles.
TILE_ROWS = 16
#: Threads of a block of the launch that reads them, a warp for each tile.
POSTPROCESS_THREADS, POSTPROCESS_ROWS = 128, 64


def query_sums_region(columns: int, tile: int = TILE_ROWS, *, packed: bool = False) -> Region:
    """Returns where in a workspace sums of so many columns are: of each head's rows, or where sequences are
    ``packed`` of each sequence's, filled up to tiles of so many."""
    if packed:
        rows = Q_HEADS * filled_rows(tile)
    else:
        rows = BATCH * Q_HEADS * (divided_up(ROWS, Constant(tile)) * tile)
    return Region(QUERY_SUMS, rows * columns, "sums of the queries' gradients, unscaled")


def postprocess_launch(packed_tile: int = 0) -> Launch:
    """Returns the launch that makes gradients of the sums; with ``packed_tile`` of packed sequences, a block
    for each tile of so many rows."""
    if packed_tile:
        threads = packed_tile // TILE_ROWS * WARP
        return Launch(threads, 0, packed_tile, role=POSTPROCESS_ROLE, packed=True)
    return Launch(POSTPROCESS_THREADS, 0, POSTPROCESS_ROWS, role=POSTPROCESS_ROLE)
