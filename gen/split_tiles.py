"""float32 arrays as sums of two f16 numbers in tiles, which launches leave in the workspace as they lie in
shared memory: whoever multiplies them copies bytes.

A tile has 64 rows and a unit, a power of two that brings its largest element below f16's largest number. It
is made of chunks of 64 columns, one behind the other, of which each has its big parts and then its small
ones, rows of 128 bytes that are swizzled; what there is no row or column for is zero. Its unit stands behind
them.
"""

from __future__ import annotations

from .expression import Constant, divided_up
from .launch import BATCH, KEY_TILES_ROLE, KEYS, KV_HEADS, Q_HEADS, QUERY_TILES_ROLE, ROWS, Launch
from .limits import WARP
from .workspace import Region

#: Rows of a tile, and the 32-bit words of a chunk: of two parts 64 rows of 128 bytes.
TILE_ROWS, CHUNK_WORDS = 64, 2 * 64 * 32
#: Words of a tile behind its chunks, the first of which is its unit: so that tiles are aligned to 128 bytes.
UNIT_WORDS = 32
#: Threads of a block that splits a tile of each of two arrays, and the bytes by which its warps agree on
#: units.
TILE_THREADS = 256
TILE_SMEM_BYTES = 4 * TILE_THREADS // WARP


def tile_regions(chunks: int, chunks_v: int) -> tuple[Region, ...]:
    """Returns where in a workspace queries and keys of so many chunks are, and gradients of outputs and
    values of as many as ``chunks_v``."""
    rows = Constant(TILE_ROWS)
    queries, keys = BATCH * Q_HEADS * divided_up(ROWS, rows), BATCH * KV_HEADS * divided_up(KEYS, rows)
    words, words_v = (CHUNK_WORDS * each + UNIT_WORDS for each in (chunks, chunks_v))
    return (
        Region("q_tiles", queries * words, "queries in parts"),
        Region("dout_tiles", queries * words_v, "gradients of outputs in parts"),
        Region("k_tiles", keys * words, "keys in parts"),
        Region("v_tiles", keys * words_v, "values in parts"),
    )


def split_tile_launches() -> tuple[Launch, Launch]:
    """Returns the launches that split arrays of query rows and arrays of keys, a block for each tile."""
    return (
        Launch(TILE_THREADS, TILE_SMEM_BYTES, TILE_ROWS, role=QUERY_TILES_ROLE),
        Launch(TILE_THREADS, TILE_SMEM_BYTES, TILE_ROWS, role=KEY_TILES_ROLE, of_keys=True),
    )
