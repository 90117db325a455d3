"""A cache as flash-attn's functions name it, in flashgen's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..front.libraries import shape_of
from .contiguous import has_contiguous_rows

_CACHE = "slots or pages, room, heads, head_dim"


@dataclass(frozen=True)
class Cache:
    """Keys and values of earlier calls: in slots of sequences, or in pages that a ``block_table`` lists."""

    k_cache: Any
    v_cache: Any
    cache_seqlens: Any = None
    cache_batch_idx: Any = None
    cache_leftpad: Any = None
    block_table: Any = None

    @property
    def room(self) -> int:
        """The most keys that a sequence may have."""
        room = shape_of("k_cache", self.k_cache, _CACHE)[1]
        return room if self.block_table is None else room * int(self.block_table.shape[1])

    def told(self) -> dict[str, Any]:
        """Returns what `flashgen.attention_with_cache` is told of the cache."""
        told = {
            "page_table": self.block_table,
            "cache_batch_idx": self.cache_batch_idx,
            "cache_seqlens": self.cache_seqlens,
        }
        return {name: value for name, value in told.items() if value is not None}

    def check(self) -> None:
        """Raises ValueError for a left padding, for arrays of other strides than kernels read, and for what
        does not go together."""
        if self.cache_leftpad is not None:
            raise ValueError(
                "cache_leftpad is given, and caches are read from their first slot here: move keys there, or "
                "list pages that begin with them in block_table"
            )
        if self.block_table is not None and self.cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx is given beside block_table, which says where keys are: leave it out"
            )
        for name, array in (("k_cache", self.k_cache), ("v_cache", self.v_cache)):
            if not has_contiguous_rows(array):
                raise ValueError(
                    f"the last axis of {name} is not contiguous, and caches are never copied: lay it out so"
                )

    def keys(self, k: Any) -> Any:
        """Returns how many keys are attended to, an int or an array (batch)."""
        new = 0 if k is None else int(k.shape[1])
        told = self.room if self.cache_seqlens is None else self.cache_seqlens
        return (int(told) if isinstance(told, int | np.integer) else told) + new
