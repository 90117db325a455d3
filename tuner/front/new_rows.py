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
    layout: str = "bshd"
    """How the caller's rows lie, as which shapes are told."""

    def check(self, cache: Cache, batch: int) -> None:
        """Raises TypeError and ValueError, by the caller's names, for rows and tables that cannot be written
        to that cache behind the keys of so many sequences, as far as the host knows."""
        for name, array in (("k_cache", cache.k_cache), ("v_cache", cache.v_cache)):
            if not hasattr(array, "__setitem__") or library_of(name, array).__name__.startswith("jax"):
                raise TypeError(
                    f"{name} is a {_kind(array)}, which is not written to: pass torch or CuPy arrays"
                )
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ValueError(f"{name} is read-only, and new rows are written to it")
        self._check_rows(cache, batch)
        self._check_tables()
        rows = int(self.k.shape[1])
        for name, array in (("cache_seqlens", cache.used), ("cache_batch_idx", cache.slots)):
            if array is not None and not isinstance(array, int | np.integer):
                _check_indices(name, array, batch)
        self._check_room(cache, rows)
        if isinstance(cache.k_cache, np.ndarray):
            places = self._places(rows, cache.used)
            self._check_places(cache, places)

    def _check_rows(self, cache: Cache, batch: int) -> None:
        for name, array, into in (("k", self.k, cache.k_cache), ("v", self.v, cache.v_cache)):
            library_of(name, array)
            if type(array).__module__.partition(".")[0] != type(into).__module__.partition(".")[0]:
                raise TypeError(
                    f"{name}_cache is a {_kind(into)}, but {name} a {_kind(array)}; pass arrays of one "
                    "library"
                )
            if array.dtype != into.dtype:
                raise TypeError(f"{name} is {array.dtype}, and {name}_cache {into.dtype}: they must be alike")
            wanted = (batch, self.k.shape[1], *into.shape[2:])
            if len(array.shape) != 4 or tuple(array.shape) != tuple(wanted):
                found, needed = (_as_passed(tuple(map(int, x)), self.layout) for x in (array.shape, wanted))
                raise ValueError(
                    f"{name} has the shape {found}; with these queries, caches and rows of k it must be "
                    f"{needed}"
                )

    def _check_tables(self) -> None:
        if self.rotary_cos is None:
            return
        shapes = [tuple(x.shape) for x in (self.rotary_cos, self.rotary_sin)]
        columns = int(self.k.shape[3])
        if len(shapes[0]) != 2 or shapes[0] != shapes[1] or 2 * shapes[0][1] > columns:
            raise ValueError(
                f"rotary_cos and rotary_sin have the shapes {shapes[0]} and {shapes[1]}; both must be "
                f"(positions, columns / 2), of at most {columns} columns"
            )

    def _check_room(self, cache: Cache, rows: int) -> None:
        used = cache.used
        if isinstance(used, int | np.integer):
            most, least, whose = int(used), int(used), ""
        elif isinstance(used, np.ndarray) and used.size:
            most, least, whose = int(used.max()), int(used.min()), f" of sequence {int(used.argmax())}"
        else:
            return
        if least < 0:
            raise ValueError(f"cache_seqlens is {least}; it must be 0 or more")
        if most + rows > cache.room:
            raise ValueError(
                f"k has {rows} rows behind {most} keys{whose}, and the cache has room for {cache.room}: "
                "enlarge it"
            )
        positions = most + rows if self.rotary_cos is None else int(self.rotary_cos.shape[0])
        if most + rows > positions:
            raise ValueError(
                f"rotary_cos has {positions} positions, and k has {rows} rows behind {most} keys{whose}: "
                f"pass {most + rows} or more"
            )

    def _check_places(self, cache: Cache, places: Any) -> None:
        """Raises ValueError for slots and pages that a cache of the host has not."""
        if cache.page_table is None and cache.slots is None:
            return
        where, _ = _in_cache(cache, places, int(self.k.shape[0]))
        count = len(cache.k_cache)
        wrong = (where < 0) | (where >= count)
        if wrong.any():
            name = "cache_batch_idx" if cache.page_table is None else "page_table"
            what = "slots" if cache.page_table is None else "pages"
            at = int(np.argwhere(wrong)[0, 0])
            raise ValueError(
                f"{name} has {int(where[wrong][0])} at sequence {at}, where new rows are written, and "
                f"k_cache has {count} {what}: it must lie in 0..{count - 1}"
            )

    def write(self, cache: Cache) -> None:
        """Writes the rows behind the keys that each sequence has, in place."""
        places = self._places(int(self.k.shape[1]), cache.used)
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


def _as_passed(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """A shape with rows before heads as the layout has it."""
    return (shape[0], shape[2], shape[1], *shape[3:]) if layout == "bhsd" and len(shape) == 4 else shape


def _check_indices(name: str, array: Any, batch: int) -> None:
    """Raises TypeError and ValueError unless it is an integer for each sequence."""
    shape, dtype = getattr(array, "shape", None), str(getattr(array, "dtype", "")).removeprefix("torch.")
    if shape is None:
        raise TypeError(f"{name} is a {_kind(array)}; pass integers (batch) of the caches' library")
    if tuple(shape) != (batch,):
        raise ValueError(
            f"{name} has the shape {tuple(shape)}, but must be ({batch},), one for each sequence"
        )
    wanted = ("int32",) if name == "cache_seqlens" else ("int32", "int64")
    if dtype not in wanted:
        raise TypeError(f"{name} is {dtype}; served are {', '.join(wanted)}")


def _float(x: Any) -> Any:
    return x.float() if _torch_of(x) is not None else x.astype(np.float32)


def _of_type(made: Any, like: Any) -> Any:
    return made.to(like.dtype) if _torch_of(like) is not None else made.astype(like.dtype)
