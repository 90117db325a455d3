"""float32 arrays as sums of two f16 numbers in tiles, which launches leave in the workspace as they lie in
shared memory: whoever multiplies them copies bytes.

A tile has 64 rows and a unit, a power of two that brings its largest element below f16's largest number. It
is made of chunks of 64 columns, one behind the other, of which each has its big parts and then its small
ones, rows of 128 bytes that are swizzled; what there is no row or column for is zero. Its unit stands behind
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..expression import Constant, divided_up
from ..launch import (
    BATCH,
    KEY_TILES_ROLE,
    KEYS,
    KV_HEADS,
    Q_HEADS,
    QUERY_TILES_ROLE,
    ROWS,
    WALKED_TILES_ROLE,
    Launch,
)
from ..limits import WARP
from .workspace import Region

#: Rows of a tile, and the 32-bit words of a chunk: of two parts 64 rows of 128 bytes.
TILE_ROWS, CHUNK_WORDS = 64, 2 * 64 * 32
#: Words of a tile behind its chunks, the first of which is its unit: so that tiles are aligned to 128 bytes.
UNIT_WORDS = 32
#: Threads of a block that splits a tile of each of two arrays, and the bytes by which its warps agree on
#: units.
TILE_THREADS = 256
TILE_SMEM_BYTES = 4 * TILE_THREADS // WARP
#: The same where tiles of keys have any number of rows that is a multiple of sixteen.
WALKED_TILE_THREADS = 128
WALKED_TILE_SMEM_BYTES = 4 * WALKED_TILE_THREADS // WARP


@dataclass(frozen=True)
class SplitArray:
    """An array that launches split, by names that their text has: of the array, of the ``function`` that
    finds a head's tiles, of a tile's rows and ``words``; and its ``meaning``. ``sign``: what elements are
    times.
    """

    name: str
    function: str
    meaning: str
    tile_rows: str
    words: str
    sign: str = ""

    @property
    def of_keys(self) -> bool:
        """Whether it has a row for each key."""
        return self.name in ("k", "v")

    @property
    def heads(self) -> str:
        """The argument that says how many heads it has."""
        return "num_kv_heads" if self.of_keys else "num_q_heads"

    @property
    def rows(self) -> str:
        """The argument that says how many rows."""
        return "seqlen_k" if self.of_keys else "seqlen_q"

    @property
    def width(self) -> str:
        """How many columns a row has."""
        return "kD" if self.name in ("q", "k") else "kDv"

    @property
    def chunks(self) -> str:
        """How many chunks hold them."""
        return f"{self.width}Chunks"


#: What the launches of gradients split, by their roles.
ARRAYS_OF_GRADIENTS = {
    QUERY_TILES_ROLE: (
        SplitArray("q", "queries_of", "queries", "kTileRows", "kTileWords"),
        SplitArray("dout", "outputs_of", "gradients of outputs", "kTileRows", "kTileWordsV"),
    ),
    KEY_TILES_ROLE: (
        SplitArray("k", "keys_of_head", "keys", "kTileRows", "kTileWords"),
        SplitArray("v", "values_of_head", "values", "kTileRows", "kTileWordsV"),
    ),
}
#: And those of outputs: tiles of keys are those that are walked. Maxima are taken of raw scores, so that
#: queries have the scale's sign; where that is zero, so are they.
ARRAYS_OF_OUTPUTS = {
    QUERY_TILES_ROLE: (
        SplitArray(
            "q",
            "queries_of",
            "queries",
            "kTileRows",
            "kQueryWords",
            "args.scale < 0.0f ? -1.0f : args.scale > 0.0f ? 1.0f : 0.0f",
        ),
    ),
    WALKED_TILES_ROLE: (
        SplitArray("k", "keys_of_head", "keys", "kBc", "kKeyWords"),
        SplitArray("v", "values_of_head", "values", "kBc", "kValueWords"),
    ),
}


def tile_words(rows: int, chunks: int) -> int:
    """Returns the 32-bit words of a tile of so many rows and chunks, and of its unit."""
    return CHUNK_WORDS * rows // TILE_ROWS * chunks + UNIT_WORDS


def tile_regions(chunks: int, chunks_v: int) -> tuple[Region, ...]:
    """Returns where in a workspace queries and keys of so many chunks are, and gradients of outputs and
    values of as many as ``chunks_v``."""
    rows = Constant(TILE_ROWS)
    queries, keys = BATCH * Q_HEADS * divided_up(ROWS, rows), BATCH * KV_HEADS * divided_up(KEYS, rows)
    words, words_v = (tile_words(TILE_ROWS, each) for each in (chunks, chunks_v))
    return (
        Region("q_tiles", queries * words, "queries in parts"),
        Region("dout_tiles", queries * words_v, "gradients of outputs in parts"),
        Region("k_tiles", keys * words, "keys in parts"),
        Region("v_tiles", keys * words_v, "values in parts"),
    )


def walked_regions(keys_per_tile: int, chunks: int, chunks_v: int) -> tuple[Region, ...]:
    """Returns where in a workspace queries, keys and values are, the last two in tiles of so many keys."""
    queries = BATCH * Q_HEADS * divided_up(ROWS, Constant(TILE_ROWS))
    keys = BATCH * KV_HEADS * divided_up(KEYS, Constant(keys_per_tile))
    return (
        Region("q_tiles", queries * tile_words(TILE_ROWS, chunks), "queries in parts"),
        Region("k_tiles", keys * tile_words(keys_per_tile, chunks), "keys in parts"),
        Region("v_tiles", keys * tile_words(keys_per_tile, chunks_v), "values in parts"),
    )


def split_tile_launches() -> tuple[Launch, Launch]:
    """Returns the launches that split arrays of query rows and arrays of keys, a block for each tile."""
    return (
        Launch(TILE_THREADS, TILE_SMEM_BYTES, TILE_ROWS, role=QUERY_TILES_ROLE),
        Launch(TILE_THREADS, TILE_SMEM_BYTES, TILE_ROWS, role=KEY_TILES_ROLE, of_keys=True),
    )


def walked_tile_launches(keys_per_tile: int) -> tuple[Launch, Launch]:
    """Returns the launches that split queries, and keys and values into tiles of so many keys."""
    threads, smem_bytes = WALKED_TILE_THREADS, WALKED_TILE_SMEM_BYTES
    return (
        Launch(threads, smem_bytes, TILE_ROWS, role=QUERY_TILES_ROLE),
        Launch(threads, smem_bytes, keys_per_tile, role=WALKED_TILES_ROLE, of_keys=True),
    )
