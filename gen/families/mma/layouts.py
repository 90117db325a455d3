"""Tiles of Q, K and V in shared memory, and how a block copies them there."""

from __future__ import annotations

from dataclasses import dataclass

from ...columns import least
from ...problem import ITEM_BYTES, Problem

#: Rows of an mma's left operand, and columns of its right one.
TILE_ROWS, TILE_COLUMNS = 16, 8
#: Columns of keys and values of eight bits that a matrix load brings at once.
KEY_COLUMNS = 16
CHUNK_BYTES = 16
PADDED, SWIZZLED = "padded", "swizzled"
#: Head dim beyond which Q in two parts leaves no room for rows enough: one warp for each scheduler at 256.
WIDE_HEAD_DIM = 128


@dataclass(frozen=True)
class Tile:
    """Rows of ``stride`` elements in shared memory, whose 16-byte chunks a swizzle XORs with
    row / ``divisor`` % ``period``; a chunk has ``chunk`` elements."""

    stride: int
    chunk: int
    period: int = 1
    divisor: int = 1


@dataclass(frozen=True)
class Fetch:
    """How a block copies a tile: ``across`` threads side by side, ``row_step`` rows at a time."""

    across: int
    row_step: int
    row_passes: int
    x_step: int
    row_guard: bool
    idle_from: int


def unswizzled_head_dim(problem: Problem) -> int:
    """Returns the head dim whose rows no swizzle spreads over the banks, 0 if there is none."""
    chunk = CHUNK_BYTES // ITEM_BYTES[problem.key_dtype]
    dims = (problem.head_dim, problem.head_dim_v)
    return next((dim for dim in dims if -(-whole(dim, TILE_COLUMNS) // chunk) % 4), 0)


def whole(extent: int, unit: int) -> int:
    """Returns the least multiple of ``unit`` that is no less than ``extent``."""
    return -(-extent // unit) * unit


def widest(count: int) -> int:
    """Returns how many of ``count`` tiles are taken at once: 4, 2 or 1."""
    return min(4, count & -count)


def tile_of(layout: str, columns: int, chunk: int) -> Tile:
    """Returns a layout in which eight rows, from one column on, start in eight different 16-byte banks: by an
    odd number of chunks per row, or by a swizzle."""
    chunks = columns // chunk
    if layout == SWIZZLED:
        period = least(8, chunks & -chunks)
        return Tile(columns, chunk, period, 8 // period)
    return Tile((chunks | 1) * chunk, chunk)


def plan_fetch(rows: int, columns: int, width: int, threads: int, *, split: bool = False) -> Fetch:
    """Plans the copy of fewest passes whose neighbouring threads read at least 64 bytes, or the row. Of a
    tile that they split eight share a row where that can be: sixteen threads then write to all banks."""
    chunks = columns // width
    candidates = [
        n for n in range(1, chunks + 1) if chunks % n == 0 and n <= threads and (n >= 4 or n == chunks)
    ]
    # Of wide rows the addresses would take too many registers.
    if split and 8 in candidates and columns <= WIDE_HEAD_DIM:
        candidates = [8]

    def passes(across: int) -> int:
        return -(-rows // (threads // across)) * (chunks // across)

    across = min(candidates or [1], key=lambda n: (passes(n), -n))
    row_step = threads // across
    used = across * row_step
    return Fetch(
        across=across,
        row_step=row_step,
        row_passes=-(-rows // row_step),
        x_step=across * width,
        row_guard=rows % row_step != 0,
        idle_from=used if used < threads else 0,
    )
