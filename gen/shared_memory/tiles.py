"""Tiles of shared memory: their layouts, how a block copies into them, and what their accesses conflict.

A warp's 32 lanes stand ``lanes`` wide along a tile's keys or columns and 32 / lanes tall along its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import index

from ..columns import least
from ..limits import WARP
from .banks import wavefronts

ROW, PADDED, SWIZZLED, TRANSPOSED = "row", "padded", "swizzled", "transposed"
#: Keys per step of the PV product: one 16-byte read of P.
KEY_STEP = 4


@dataclass(frozen=True)
class TileLayout:
    """A 2-D tile in shared memory. ``stride`` is in floats, between rows or, transposed, between columns.

    ``swizzle`` is (period, divisor): chunk c of row r is stored as c XOR (r / divisor % period); transposed,
    chunks are of rows and the columns choose.
    """

    kind: str
    stride: int
    floats: int
    chunk: int = 4
    swizzle: tuple[int, int] = (1, 1)

    @property
    def transposed(self) -> bool:
        return self.kind == TRANSPOSED

    def without_rows(self) -> TileLayout:
        """Returns the same of no rows, by which conflicts are remembered: they depend on none."""
        period, divisor = map(index, self.swizzle)
        return TileLayout(self.kind, index(self.stride), 0, index(self.chunk), (period, divisor))

    def offset(self, row: int, column: int) -> int:
        """Returns the offset of one element, in floats."""
        period, divisor = self.swizzle
        if self.transposed:
            return column * self.stride + (row ^ (column // divisor % period * self.chunk))
        return row * self.stride + (column ^ (row // divisor % period * self.chunk))


@dataclass(frozen=True)
class Copy:
    """How a block moves one K or V tile, ``unit`` floats per access.

    Row by row, ``across`` threads stand side by side along the head dim. Into a transposed tile each warp
    moves a patch of ``tall`` rows by ``wide`` columns, ``across`` warps side by side and ``rows_wide`` rows
    of warps. Threads from ``idle_from`` on have no share; a guard is needed where the last pass reaches past
    the tile.
    """

    unit: int
    across: int
    row_step: int
    row_passes: int
    x_step: int
    x_passes: int
    row_guard: bool
    x_guard: bool
    idle_from: int = 0
    wide: int = 0
    tall: int = 0
    rows_wide: int = 0


def plan_copy(tile: TileLayout, rows: int, columns: int, vec: int, threads: int) -> Copy:
    """Plans the copy that touches whole 32-byte sectors of global memory and spreads over the banks.

    Into a transposed tile without padding, half sectors are the better trade.
    """
    if tile.transposed:
        wide = min(8 if tile.stride % 8 else 4, columns & -columns)
        unit, tall, workers, chunks = 1, WARP // wide, threads // WARP, columns // wide
    else:
        wide, unit, tall, workers, chunks = 0, vec, 1, threads, columns // vec
    across = min(chunks, workers)
    rows_wide = workers // across
    row_step, x_step = rows_wide * tall, across * (wide or unit)
    used = across * rows_wide
    return Copy(
        unit=unit,
        across=across,
        row_step=row_step,
        row_passes=-(-rows // row_step),
        x_step=x_step,
        x_passes=-(-columns // x_step),
        row_guard=rows % row_step != 0,
        x_guard=columns % x_step != 0,
        idle_from=used * (threads // workers) if used < workers else 0,
        wide=wide,
        tall=tall,
        rows_wide=rows_wide,
    )


def _padded(extent: int, residue: int, modulus: int) -> int:
    """The least stride >= extent that is congruent to residue."""
    return extent + (residue - extent) % modulus


def make_layout(
    kind: str, rows: int, columns: int, width: int, group: int, *, written_once: bool = False
) -> TileLayout:
    """Returns the layout of a tile whose lanes read ``width`` floats of one row, neighbours ``group`` rows
    apart.

    Padding makes the stride an odd number of ``width``-float chunks, so that eight rows start in eight
    different 16-byte banks; the swizzle reaches the same without the memory where the row is long enough.
    A transposed tile is read ``group`` rows at a time.
    """
    if kind == TRANSPOSED:
        # Padding keeps apart the banks of the stores; where they are few it is not worth its memory.
        stride = _padded(rows, 0, 4) if written_once else _padded(rows, 4, 8)
        return TileLayout(kind, stride, columns * stride)
    if kind == PADDED:
        stride = _padded(columns, width, 2 * width)
        return TileLayout(kind, stride, rows * stride, width)
    if kind == SWIZZLED:
        chunks = columns // width
        period = least(8, chunks & -chunks)
        return TileLayout(kind, columns, rows * columns, width, (period, group))
    return TileLayout(kind, columns, rows * columns, width)


def make_p_layout(
    kind: str, rows: int, keys: int, lanes: int, row_group: int, col_group: int, roomy: bool
) -> TileLayout:
    """Returns the layout of P's slab, which is written as well as read in every tile: the one whose stores
    conflict least.

    A warp stores ``row_group`` rows of one key (transposed) or ``col_group`` keys of one row per lane. Only a
    ``roomy`` slab may be padded when transposed.
    """
    if kind == PADDED:
        # Rows `lanes` banks apart keep apart the stores of single keys too.
        stride = _padded(keys, max(lanes, KEY_STEP), WARP)
        return TileLayout(PADDED, stride, rows * stride, KEY_STEP)
    if kind != TRANSPOSED:
        return make_layout(kind, rows, keys, KEY_STEP, row_group)
    best = _transposed_p(*map(index, (rows, lanes, row_group, col_group)), roomy=bool(roomy))
    return replace(best, floats=keys * best.stride)


@lru_cache(maxsize=4096)
def _transposed_p(rows: int, lanes: int, row_group: int, col_group: int, *, roomy: bool) -> TileLayout:
    """The layout of a transposed slab, for any number of keys."""
    chunks = rows // row_group
    candidates = [
        TileLayout(TRANSPOSED, stride, 0, row_group, (period, divisor))
        for stride in ((rows, _padded(rows, 4, 8)) if roomy else (_padded(rows, 0, 4),))
        for period in (1, 2, 4, 8)
        if chunks % period == 0
        # A step reads KEY_STEP keys at one chunk order.
        for divisor in ((1,) if period == 1 else (KEY_STEP, 2 * KEY_STEP))
    ]
    spots = [lane_spot(lane, lanes) for lane in range(WARP)]

    def stores(tile: TileLayout) -> int:
        return wavefronts([tile.offset(y * row_group, x * col_group) for x, y in spots], row_group)

    return min(candidates, key=lambda tile: (stores(tile), tile.swizzle[0], tile.stride))


def lane_spot(lane: int, lanes: int) -> tuple[int, int]:
    """Returns a lane's place (x, y) in a warp that is ``lanes`` wide.

    Sixteen lanes wide, eight lanes are followed by the eight that read the same columns for the other row, so
    that both share a wavefront.
    """
    if lanes == 16:
        return lane % 8 + lane // 16 * 8, lane // 8 % 2
    return lane % lanes, lane // lanes


@cache
def lane_corners(lanes: int, columns: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the columns and the rows where each lane's first group of so many columns and rows starts."""
    spots = [lane_spot(lane, lanes) for lane in range(WARP)]
    return tuple(x * columns for x, _ in spots), tuple(y * rows for _, y in spots)


def vector_group(extent: int) -> int:
    """Returns the widest vector (4, 2 or 1) that divides a micro-tile's extent."""
    return least(4, extent & -extent)


@lru_cache(maxsize=4096)
def read_conflict(tile: TileLayout, rows: tuple[int, ...], width: int) -> float:
    """Returns the wavefronts of a warp reading ``width`` floats, lane i at ``rows[i]``, over the least
    possible."""
    words = len(set(rows)) * width
    fewest = max(1, -(-words // WARP))
    return wavefronts([tile.offset(row, 0) for row in rows], width) / fewest


def wasted(name: str, tile: int, length: int) -> str | None:
    """Says why tiles of that size waste a sequence of that length: a third of what they cover is padding.
    None where they do not."""
    covered = -(-length // tile) * tile
    if tile > 16 and covered > 1.5 * max(length, 16):
        return f"{name}={tile} covers {covered} for a length of {length}, {1.5 * length:.0f} at most"
    return None
