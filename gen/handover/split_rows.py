"""float32 arrays as sums of two f16 numbers, which launches leave in the workspace for others to multiply.

Each row has a unit of its own, a power of two that brings its largest element below f16's largest number. In
the workspace a row is its big parts, its small ones, and its unit; columns are filled up with zeros.
"""

from __future__ import annotations

from ..launch import BATCH, KEY_PARTS_ROLE, KEYS, KV_HEADS, Q_HEADS, QUERY_PARTS_ROLE, ROWS, Launch
from .workspace import Region

#: Words of a row behind its parts, the first of which is its unit: so that rows are aligned to 16 bytes.
UNIT_WORDS = 4
#: Threads of a block that splits rows, a warp for each.
SPLIT_THREADS, SPLIT_ROWS = 256, 8


def split_regions(columns: int, columns_v: int) -> tuple[Region, ...]:
    """Returns where in a workspace queries and keys of so many columns are, and gradients of outputs and
    values of as many as ``columns_v``."""
    queries, keys = BATCH * Q_HEADS * ROWS, BATCH * KV_HEADS * KEYS
    return (
        Region("q_parts", queries * (columns + UNIT_WORDS), "queries in parts"),
        Region("dout_parts", queries * (columns_v + UNIT_WORDS), "gradients of outputs in parts"),
        Region("k_parts", keys * (columns + UNIT_WORDS), "keys in parts"),
        Region("v_parts", keys * (columns_v + UNIT_WORDS), "values in parts"),
    )


def split_launches() -> tuple[Launch, Launch]:
    """Returns the launches that split arrays of query rows and arrays of keys, a warp for each row."""
    return (
        Launch(SPLIT_THREADS, 0, SPLIT_ROWS, role=QUERY_PARTS_ROLE),
        Launch(SPLIT_THREADS, 0, SPLIT_ROWS, role=KEY_PARTS_ROLE, of_keys=True),
    )
