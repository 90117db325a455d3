"""New keys and values that a call writes into a cache before it attends, by the arrays' own library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...templates.runtime.arrays import _kind, _torch_of
from .libraries import count, library_of


@dataclass(frozen=True)
class Cache:
    """Keys and values of earlier calls: in slots of sequences, (slots, room, heads, head_dim), or in pages,
    (pages, page_size, heads, head_dim), that ``page_table`` lists."""

    k_cache: Any
    v_cache: Any
    used: Any
    """How many keys each sequence has there, an int or integers (batch)."""
    page_table: Any = None
    slots: Any = None
    """The slots of the sequences, integers (batch); None: the first is the first's."""

    @property
    def room(self) -> int:
        """The most keys that a sequence may have."""
        room = int(self.k_cache.shape[1])
        return room if self.page_table is None else room * int(self.page_table.shape[1])


@dataclass(frozen=True)
class NewRows:
    """New keys and values, (batch, rows, heads, head_dim), and tables of cosines and sines, (positions, half
    of the rotated columns), by which keys and queries are rotated; None where they are not."""

    k: Any
    v: Any
    rotary_cos: Any = None
    rotary_sin: Any = None
    interleaved: bool = True

    def write(self, cache: Cache) -> None:
        """Writes the rows behind the keys that each sequence has, in place. Raises TypeError for arrays that
        cannot be written to, ValueError where a sequence has no room and the host knows."""
        for name, array in (("k_cache", cache.k_cache), ("v_cache", cache.v_cache)):
            if not hasattr(array, "__setitem__") or library_of(name, array).__name__.startswith("jax"):
                raise TypeError(
                    f"{name} is a {_kind(array)}, which is not written to: pass torch or CuPy arrays"
                )
        rows = int(self.k.shape[1])
        if isinstance(cache.used, int | np.integer) and cache.used + rows > cache.room:
            raise ValueError(
                f"k has {rows} rows behind {cache.used} keys, and the cache has room for {cache.room}: "
                "enlarge it"
            )
        places = self._places(rows, cache.used)
        where = _in_cache(cache, places, int(self.k.shape[0]))
        cache.k_cache[where] = self._rotated(self.k, places)
        cache.v_cache[where] = self.v

    def rotated_queries(self, q: Any, used: Any, *, by_their_places: bool) -> Any:
        """Returns queries, (batch, rows, heads, head_dim), rotated, each by its place behind the keys that
        there were, or all by the first."""
        if self.rotary_cos is None:
            return q
        rows = int(q.shape[1])
        places = self._places(rows, used)
        return self._rotated(q, places if by_their_places else places - count(q, rows))

    def _places(self, rows: int, used: Any) -> Any:
        """Where rows stand in their sequences, (batch, rows)."""
        before = used if isinstance(used, int | np.integer) else used[:, None]
        places = count(self.k, rows)[None] + before
        return library_of("k", self.k).broadcast_to(places, (int(self.k.shape[0]), rows))

    def _rotated(self, x: Any, places: Any) -> Any:
        if self.rotary_cos is None:
            return x
        library = library_of("k", x)
        cos, sin = (_float(table[places])[:, :, None] for table in (self.rotary_cos, self.rotary_sin))
        half = int(cos.shape[-1])
        turned = _float(x[..., : 2 * half])
        if self.interleaved:
            one, other = turned[..., 0::2], turned[..., 1::2]
        else:
            one, other = turned[..., :half], turned[..., half:]
        parts = (one * cos - other * sin, other * cos + one * sin)
        if self.interleaved:
            made = library.stack(parts, axis=-1).reshape(turned.shape)
        else:
            made = library.concatenate(parts, axis=-1)
        return library.concatenate((_of_type(made, x), x[..., 2 * half :]), axis=-1)


def _in_cache(cache: Cache, places: Any, batch: int) -> tuple[Any, Any]:
    """The slots or pages, and the places in these, of keys at those places of their sequences."""
    if cache.page_table is None:
        slots = count(places, batch) if cache.slots is None else cache.slots
        return slots[:, None], places
    page_size = int(cache.k_cache.shape[1])
    return cache.page_table[count(places, batch)[:, None], places // page_size], places % page_size


def _float(x: Any) -> Any:
    return x.float() if _torch_of(x) is not None else x.astype(np.float32)


def _of_type(made: Any, like: Any) -> Any:
    return made.to(like.dtype) if _torch_of(like) is not None else made.astype(like.dtype)
