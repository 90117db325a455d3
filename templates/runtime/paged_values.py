"""Keys and values in caches of pages: how these lie, and the table of which pages a sequence has."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .appended_values import _NEW_FIELDS, _NEW_ROWS, _TABLES, _placed_new
from .arrays import _View
from .facts import Tuned
from .packed_values import (
    _check_integers,
    _check_longest,
    _check_slots,
    _counts_of,
    _is_symbol,
    _PackedTable,
    _placed_ints,
    _Sequences,
    _shape,
)
from .plans import _INT_MAX, _PLAN, _ROTATED, _Plan
from .scored_values import _Placed
from .table import _SIZES, _Output, _Table

#: The arrays that tell where keys are, and where queries that are packed.
_PAGE_ARRAYS = ("page_table", "seqused_k", "cu_seqlens_q", "seqused_q")
#: How queries may lie, packed ones last, and caches: with rows or heads first.
_QUERY_LAYOUTS, _PACKED_QUERIES, _CACHE_LAYOUTS = ("bhsd", "bshd"), "thd", ("NHD", "HND")


class _Paged(NamedTuple):
    """The layout of queries beside a cache of pages: how many sequences there are, how long the longest may
    be (0 for queries of dense arrays), how many pages each may have, and the order of the arrays' axes."""

    batch: int
    max_seqlen_q: int
    max_seqlen_k: int
    max_pages: int
    queries: str
    cache: str


class _PagedTable(_PackedTable):
    """A kernel of keys in pages, whose caches are (pages, page_size, kv_heads, head_dim) or have heads
    first."""

    def inspect(self, name: str, described: tuple[Any, ...], layout: Any, torch: Any) -> _View:
        if name in ("q", "out"):
            if layout.queries == _PACKED_QUERIES:
                return super().inspect(name, described, layout, torch)
            return _Table.inspect(self, name, described, layout.queries, torch)
        rows_first = layout.cache == "NHD"
        if len(described[1]) != 4:
            order = "page_size, kv_heads" if rows_first else "kv_heads, page_size"
            raise ValueError(
                f"{name}_cache has {len(described[1])} dimensions, {tuple(described[1])}; 4 are needed, "
                f"(pages, {order}, head_dim)"
            )
        return _Table.inspect(self, name, described, "bshd" if rows_first else "bhsd", torch)

    def check_shapes(self, query: _View, key: _View, value: _View) -> tuple[int, int]:
        if key.shape != value.shape:
            raise ValueError(
                f"k_cache and v_cache differ in (pages, kv_heads, page_size): {key.shape} and {value.shape}"
            )
        pages, kv_heads, page_size = key.shape
        # Pages are of no batch.
        shape = (query.shape[0], kv_heads, page_size if pages else 0)
        return super().check_shapes(query, key._replace(shape=shape), value._replace(shape=shape))

    def output_like(self, query: _View, head_dim: int, layout: Any) -> _Output:
        if layout.queries == _PACKED_QUERIES:
            return super().output_like(query, head_dim, layout)
        return _Table.output_like(self, query, head_dim, layout.queries)

    def sizes(self, query: _View, key: _View, layout: Any) -> dict[str, int]:
        assert isinstance(layout, _Paged)
        batch, heads, rows = query.shape
        pages, kv_heads, page_size = key.shape
        _check_cache(self.kernels[0], pages, page_size, layout)
        sizes = {
            "batch": layout.batch,
            "num_q_heads": heads,
            "num_kv_heads": kv_heads,
            "seqlen_q": rows,
            "seqlen_k": layout.max_seqlen_k,
            "num_pages": pages,
            "page_size": page_size,
            "max_pages": layout.max_pages,
        }
        if layout.queries == _PACKED_QUERIES:
            return sizes | {"seqlen_q": layout.max_seqlen_q, "total_q": rows}
        if batch != layout.batch:
            raise ValueError(
                f"q has the batch {batch}, page_table lists the pages of {layout.batch} sequences; they must "
                "be equal"
            )
        return sizes

    def sizes_of_grid(self, sizes: dict[str, int]) -> tuple[int, int, int, int]:
        rows = sizes.get("total_q", sizes["seqlen_q"])
        return sizes["batch"], sizes["num_q_heads"], sizes["num_kv_heads"], rows


def _sizes_of_pages(q: Any, k_cache: Any, layout: _Paged) -> dict[str, int]:
    """The sizes of arrays that are as they should be; whether they are, is found out later."""
    of_q, of_k, packed = _shape(q), _shape(k_cache), layout.queries == _PACKED_QUERIES
    if len(of_q) != (3 if packed else 4) or len(of_k) != 4:
        return {}
    heads, rows = (of_q[1], layout.max_seqlen_q) if packed else of_q[1:3]
    if layout.queries == "bshd":
        heads, rows = rows, heads
    kv_heads = of_k[2 if layout.cache == "NHD" else 1]
    return dict(zip(_SIZES, (layout.batch, heads, kv_heads, rows, layout.max_seqlen_k), strict=True))


class _PagedSequences(_Sequences):
    """What a call says of keys in pages, and of masks and changes of scores."""

    names = (*_PAGE_ARRAYS, *_NEW_FIELDS)

    def place(self, name: str, array: Any, plan: _Plan, may_copy: bool) -> tuple[_Placed, dict[str, float]]:
        if name in (*_NEW_ROWS, *_TABLES, _ROTATED):
            return _placed_new(name, array, self.layout.queries, plan)
        if name != "page_table":
            return super().place(name, array, plan, may_copy)
        placed = _placed_ints(name, array, (self.layout.batch, self.layout.max_pages), plan, may_copy)
        return placed, {name: placed.address, f"{name}_stride": placed.strides[0]}


def _takes_packed(tuned: Tuned) -> bool:
    """Whether a kernel takes packed queries, for which there is a plan."""
    return any(name == _PLAN for name, _ in tuned.launches[0].arguments)


def _own_page_size(tuned: Tuned) -> int | None:
    """The only size of pages that a kernel takes: where maps have boxes of them, and where its tiles are of
    whole pages, or pages of whole tiles; else None, and it takes any."""
    page_size, tile = int(tuned.problem["page_size"]), int(tuned.variant.get("bc", 1))
    knows = tuned.has_maps or page_size % tile == 0 or tile % page_size == 0
    return page_size if knows else None


def _check_cache(tuned: Tuned, pages: int, page_size: int, layout: _Paged) -> None:
    """Raises ValueError for pages that the kernel does not take, and too few for the keys there may be."""
    own = _own_page_size(tuned)
    if own is not None and page_size != own:
        raise ValueError(
            f"k_cache has pages of {page_size} keys, and {tuned.name} takes pages of {own}: make another "
            f"with {tuned.command} --page-size {page_size}"
        )
    keys, room = layout.max_seqlen_k, layout.max_pages * page_size
    if keys > room:
        raise ValueError(
            f"max_seqlen_k is {keys}, and page_table has room for {room} keys, {layout.max_pages} pages of "
            f"{page_size}: pass a wider one, or leave max_seqlen_k out"
        )
    if keys and not pages:
        raise ValueError(f"k_cache has no pages, and sequences may have {keys} keys: pass a larger cache")


def _paged_layout(
    tuned: Tuned,
    q: Any,
    k_cache: Any,
    arrays: Mapping[str, Any],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    queries: str,
    cache: str,
) -> _Paged:
    """The layout of a call; raises TypeError and ValueError for arrays that tell no sequences."""
    if cache not in _CACHE_LAYOUTS:
        raise ValueError(f"kv_layout is {cache!r}; choose 'NHD' or 'HND'")
    packed = _takes_packed(tuned)
    _check_packing(tuned, arrays, max_seqlen_q, packed)
    counts = _counts_of(q, arrays)
    if packed:
        _check_longest("max_seqlen_q", max_seqlen_q)
    max_pages = _shape(arrays["page_table"])[1]
    if max_seqlen_k is None:
        max_seqlen_k = max_pages * _pages_of(k_cache, cache)[1]
        if not _is_symbol(max_seqlen_k):
            max_seqlen_k = min(max_seqlen_k, _INT_MAX)
    _check_longest("max_seqlen_k", max_seqlen_k)
    rows = (max_seqlen_q or 0) if packed else 0
    queries = _PACKED_QUERIES if packed else queries
    return _Paged(counts["page_table"], rows, max_seqlen_k, max_pages, queries, cache)


def _pages_of(k_cache: Any, cache: str) -> tuple[int, int]:
    """How many pages a cache has, and of how many keys; none where it is no cache, as is found out later."""
    shape = _shape(k_cache)
    return (shape[0], shape[1 if cache == "NHD" else 2]) if len(shape) == 4 else (0, 0)


def _check_packing(tuned: Tuned, arrays: Mapping[str, Any], max_seqlen_q: int | None, packed: bool) -> None:
    """Raises TypeError unless a call tells of packed queries where the kernel takes these, and only there."""
    missing = [name for name in ("page_table", *["cu_seqlens_q"] * packed) if name not in arrays]
    missing += ["max_seqlen_q"] if packed and max_seqlen_q is None else []
    if missing:
        of = "packed queries and keys in pages" if packed else "keys in pages"
        raise TypeError(f"{missing[0]}= is missing: {tuned.name} takes {of}")
    told = [name for name in ("cu_seqlens_q", "seqused_q") if name in arrays]
    told += [] if max_seqlen_q is None else ["max_seqlen_q"]
    if told and not packed:
        raise TypeError(
            f"{told[0]}= tells of packed queries, and {tuned.name} takes a batch of them, each sequence as "
            f"many: leave it out, or make another with {tuned.command} --varlen"
        )


def _check_paged(arrays: Mapping[str, Any], q: Any, k_cache: Any, layout: _Paged) -> None:
    """Raises TypeError and ValueError for tables and lengths on the host that no such cache has; q and the
    cache are looked at later."""
    num_pages, page_size = _pages_of(k_cache, layout.cache)
    if not page_size or q.ndim != (3 if layout.queries == _PACKED_QUERIES else 4):
        return
    _check_integers(arrays)
    if "cu_seqlens_q" in arrays:
        _check_slots("q", arrays, len(q), layout.max_seqlen_q)
    table, used = arrays["page_table"], arrays.get("seqused_k")
    lengths = np.full(layout.batch, layout.max_seqlen_k) if used is None else used.astype(np.int64)
    room = min(layout.max_seqlen_k, layout.max_pages * page_size)
    for at, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise ValueError(
                f"seqused_k is {length} at sequence {at}, and there is room for {room} keys, in "
                f"{layout.max_pages} pages of {page_size}: it must lie in 0..{room}"
            )
        pages = table[at, : -(-int(length) // page_size)] if length else table[at, :0]
        wrong = (pages < 0) | (pages >= num_pages)
        if wrong.any():
            nth = int(np.argmax(wrong))
            raise ValueError(
                f"page_table has page {pages[nth]} at sequence {at}, place {nth}, and the cache has "
                f"{num_pages} pages: it must lie in 0..{num_pages - 1}"
            )
