"""What a launch of the backward pass leaves of each query row for the others: what all its keys share."""

from __future__ import annotations

from ..expression import Constant, Expression, divided_up
from ..launch import BATCH, Q_HEADS, ROWS, STATISTICS_ROLE, TOTAL_ROWS, Launch
from ..limits import WARP
from .workspace import Region

#: Threads of a block that makes statistics, and the rows that it does: whole tiles of sums, which it begins.
STATISTICS_THREADS, STATISTICS_ROWS = 256, 32


def statistics_lanes(columns: int, width: int) -> int:
    """Returns how many neighbouring lanes of a warp share a row of so many columns, each ``width`` of them at
    once: a power of two."""
    return min(WARP, 1 << (-(-columns // width) - 1).bit_length())


def statistics_launch(*, packed: bool) -> Launch:
    """Returns the launch that makes them, of one row after the other whatever its sequence where those are
    ``packed``."""
    return Launch(STATISTICS_THREADS, 0, STATISTICS_ROWS, role=STATISTICS_ROLE, packed=packed)


def filled_rows(tile: int) -> Expression:
    """Returns how many rows there is room for where each packed sequence's begin at a multiple of ``tile``:
    those of number n that begins at row r at (r // tile + n) * tile, whatever the lengths of others."""
    return (TOTAL_ROWS // Constant(tile) + BATCH) * tile


def statistics_regions(tile: int = 1, *, packed: bool = False) -> tuple[Region, ...]:
    """Returns where in a workspace they are: of each head's rows, filled up to whole tiles of so many; where
    sequences are ``packed``, of those of all, each filled up by itself."""
    rows = BATCH * Q_HEADS * (divided_up(ROWS, Constant(tile)) * tile if tile > 1 else ROWS)
    if packed:
        rows = Q_HEADS * (filled_rows(tile) if tile > 1 else TOTAL_ROWS)
    return (
        Region("lse", rows, "the log-sum-exp in powers of two"),
        Region("delta", rows, "what gradients of scores are less by"),
    )
