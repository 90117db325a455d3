"""Values of eight bits as products want them: in tiles that a launch leaves in the workspace as they lie in
shared memory, so that blocks copy bytes and turn nothing into anything else.

A tile has the values of as many keys as are walked at a time; there are zeros for keys that are not there.
Products of weights of f16 take f16, rows of keys in chunks of 64 columns. Those of weights of eight bits
take columns: chunks of 32 keys, of which each sixteen are in the order in which a thread has its weights.
Rows are swizzled either way, of 128 bytes and of 32.
"""

from __future__ import annotations

from ..expression import Constant, divided_up
from ..launch import BATCH, KEYS, KV_HEADS, WALKED_TILES_ROLE, Launch
from .workspace import Region

#: Threads of a block, which makes one tile, and the bytes of shared memory that it has no use for.
VALUE_TILE_THREADS, VALUE_TILE_SMEM_BYTES = 128, 16


def value_region(keys_per_tile: int, tile_bytes: int) -> Region:
    """Returns where in a workspace values are, in tiles of so many keys and bytes."""
    tiles = BATCH * KV_HEADS * divided_up(KEYS, Constant(keys_per_tile))
    return Region("v_tiles", tiles * (tile_bytes // 4), "values as products read them")


def value_tile_launch(keys_per_tile: int) -> Launch:
    """Returns the launch that makes tiles of so many keys."""
    return Launch(
        VALUE_TILE_THREADS, VALUE_TILE_SMEM_BYTES, keys_per_tile, role=WALKED_TILES_ROLE, of_keys=True
    )
