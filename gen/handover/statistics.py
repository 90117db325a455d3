"""What a launch of the backward pass leaves of each query row for the others: what all its keys share."""

from __future__ import annotations

from dataclasses import dataclass

from ..expression import Constant, Expression, divided_up
from ..launch import BATCH, Q_HEADS, ROWS, STATISTICS_ROLE, TOTAL_ROWS, Launch
from ..limits import WARP
from .workspace import Region

#: Threads of a block that makes statistics, and the rows that it does unless tensor cores sum them: whole
#: tiles of sums, which it begins.
STATISTICS_THREADS, STATISTICS_ROWS = 256, 32
#: Lanes of a warp that read a row for tensor cores, elements that these read at once, and how many of a row
#: or of several are under way for each thread: fewer do not keep memory busy, more do no better.
PRODUCT_LANES, PRODUCT_COLUMNS, COLUMNS_UNDER_WAY = 4, 32, 128


@dataclass(frozen=True)
class RowSums:
    """How a block sums rows: ``lanes`` neighbouring ones of a warp share a row, ``rows`` are a block's.
    ``by_products``: tensor cores multiply eight rows with eight, of which the diagonal is what is wanted."""

    lanes: int
    rows: int = STATISTICS_ROWS
    by_products: bool = False


def sums_by_lanes(columns: int, width: int) -> RowSums:
    """Returns how rows of so many columns are summed by lanes that read ``width`` of them at once."""
    return RowSums(min(WARP, 1 << (-(-columns // width) - 1).bit_length()))


def sums_by_products(columns: int) -> RowSums:
    """Returns how rows of so many columns of 16 bits are summed by tensor cores."""
    at_once = STATISTICS_THREADS // PRODUCT_LANES
    read = -(-columns // PRODUCT_COLUMNS) * PRODUCT_COLUMNS
    return RowSums(PRODUCT_LANES, at_once * max(1, COLUMNS_UNDER_WAY // read), by_products=True)


def statistics_launch(*, packed: bool, rows: int = STATISTICS_ROWS) -> Launch:
    """Returns the launch that makes them, of so many rows by block; of one row after the other whatever its
    sequence where those are ``packed``."""
    return Launch(STATISTICS_THREADS, 0, rows, role=STATISTICS_ROLE, packed=packed)


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
