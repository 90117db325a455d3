"""What a module of keys in pages does when it is run: it checks and times its kernel."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .appended_values import _TABLES, _rotary_of
from .arrays import _Buffer
from .facts import Tuned
from .packed_program import (
    _CHECKED_HEADS,
    _CHECKED_KEYS,
    _CHECKED_ROWS,
    _check_and_time_sequences,
    _error_of,
    _packed_shapes,
    _parts,
)
from .packed_values import SequencePlan
from .paged_attention import PagedAttention
from .paged_values import _PACKED_QUERIES, _Paged, _PagedSequences, _takes_packed
from .plans import _Beside
from .program import _from_host, _median_time_us, _to_host
from .scored_program import _Drawn
from .scored_values import Scored
from .table import _SIZES

#: The rows of each sequence where all have as many, and the keys that they have then: as many, or none.
_CHECKED_BATCH_ROWS, _CHECKED_BATCH_KEYS = 37, (333, 70, 37, 0)


def run_paged_module(attention: PagedAttention, doc: str | None) -> int:
    """Says what the module is, checks its kernel on device 0 and times it on sequences that are as long as
    the longest it was tuned for, their pages in any order; the exit code."""
    check, time_us = (functools.partial(each, attention) for each in (_paged_check, _paged_time_us))
    return _check_and_time_sequences(attention, check, time_us, doc)


def _page_rows(
    tuned: Tuned, sizes: Mapping[str, Any], rows: tuple[int, ...], keys: tuple[int, ...]
) -> tuple[_PagedSequences, list[NDArray[Any]], int]:
    """Sequences of those lengths in pages in any order, the first of which are nobody's: what is told of
    them, where each one's keys lie in the cache row after row, and how many pages there are. Masks and
    changes of scores are drawn."""
    page_size = int(tuned.problem["page_size"])
    counts = [-(-length // page_size) for length in keys]
    order = 1 + np.random.default_rng(1).permutation(sum(counts))
    table = np.zeros((len(keys), max(1, *counts)), np.int32)
    places = []
    for row, count, end, length in zip(table, counts, np.cumsum(counts), keys, strict=True):
        row[:count] = order[end - count : end]
        places.append((row[:count, None] * page_size + np.arange(page_size)).reshape(-1)[:length])
    arrays = {"page_table": table, "seqused_k": np.array(keys, np.int32)}
    packed = _takes_packed(tuned)
    if packed:
        arrays["cu_seqlens_q"] = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    pairs, columns = _rotary_of(tuned)
    if pairs:  # by nothing: what is checked and timed is what there is without new keys
        shape = (max(1, *keys), columns // 2)
        told = zip(_TABLES, (np.ones(shape, np.float32), np.zeros(shape, np.float32)), strict=True)
        arrays |= {name: _to_host(table, tuned.dtype) for name, table in told}
    queries = _PACKED_QUERIES if packed else "bshd"
    longest = max(rows) if packed else 0
    layout = _Paged(len(keys), longest, max(keys), table.shape[1], queries, "NHD")
    scoring = _Drawn(tuned, sizes) if isinstance(tuned, Scored) else None
    return _PagedSequences(tuned, arrays, layout, None, scoring), places, 1 + sum(counts)


def _paged_shapes(
    tuned: Tuned, rows: tuple[int, ...], pages: int, heads: int, kv_heads: int
) -> list[tuple[int, ...]]:
    """The shapes of q, both caches and o."""
    page_size = int(tuned.problem["page_size"])
    q, k, v, o = _packed_shapes(tuned, sum(rows), pages * page_size, heads, kv_heads)
    shapes = [q, *((pages, page_size, *each[1:]) for each in (k, v)), o]
    if not _takes_packed(tuned):
        shapes = [(len(rows), rows[0], *each[1:]) if each in (q, o) else each for each in shapes]
    return shapes


def _paged_check(attention: PagedAttention, tuned: Tuned) -> float:
    """The largest error of a head of a sequence over both masks."""
    random = np.random.default_rng(0)
    (heads, kv_heads), keys = _CHECKED_HEADS, _CHECKED_KEYS
    rows: tuple[int, ...] = _CHECKED_ROWS
    if not _takes_packed(tuned):
        keys = _CHECKED_BATCH_KEYS
        rows = (_CHECKED_BATCH_ROWS,) * len(keys)
    sizes: dict[str, Any] = dict(zip(_SIZES, (len(rows), heads, kv_heads, max(rows), max(keys)), strict=True))
    told, places, pages = _page_rows(tuned, sizes, rows, keys)
    shapes = _paged_shapes(tuned, rows, pages, heads, kv_heads)
    uniform = (random.uniform(-3, 3, shape).astype(np.float32) for shape in shapes[:3])
    hosts = list(map(_to_host, uniform, tuned.input_dtypes))
    if tuned.problem.get("latent"):
        hosts[2] = np.ascontiguousarray(hosts[1][..., : tuned.head_dim_v])
    wide = map(_from_host, hosts, tuned.input_dtypes)
    queries, *caches = (each.reshape(-1, *each.shape[-2:]) for each in wide)
    made = _to_host(np.zeros(shapes[3], np.float32), tuned.output_dtype)
    worst = 0.0
    for causal in (False, True):
        attention._group._through_buffers(
            hosts[0], hosts[1], hosts[2], causal, None, made, 0, False, told.layout, tuned.dtype, told
        )
        found = _from_host(made, tuned.output_dtype).astype(np.float64).reshape(-1, *made.shape[-2:])
        sequences = [
            (queries[part], *(cache[place] for cache in caches), found[part])
            for part, place in zip(_parts(rows), places, strict=True)
        ]
        drawn = told.scoring if isinstance(told.scoring, _Drawn) else None
        worst = float(np.maximum(worst, _error_of(tuned, drawn, causal, sequences)))
    return worst


def _paged_time_us(attention: PagedAttention, tuned: Tuned, repeats: int = 20) -> float:
    """The median time of a call whose plan is made, by CUDA events, with a warm cache."""
    problem = tuned.problem
    rows, keys = ((problem[each],) * problem["batch"] for each in ("seqlen_q", "seqlen_k"))
    told, _, pages = _page_rows(tuned, problem, rows, keys)
    shapes = _paged_shapes(tuned, rows, pages, problem["num_q_heads"], problem["num_kv_heads"])

    def place(put: Callable[..., _Buffer]) -> tuple[Any, _Beside]:
        placed = told.on_device(put)
        placed.plan = SequencePlan() if _takes_packed(tuned) else None
        return placed.layout, placed

    return _median_time_us(attention._group, tuned, shapes, place, repeats)
