"""Sequences of lengths of their own, as kernels are told of them: arrays of 32-bit integers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.problem import Problem
from .appended import new_counts
from .pages import draw_table, told_of_pages

_INT32 = np.dtype(np.int32)


def sizes_of_call(
    problem: Problem, q: np.ndarray, k: np.ndarray, values: Mapping[str, Any] | None
) -> dict[str, int]:
    """Returns the lengths that a kernel is told of arrays (batch, heads, rows, columns); of packed sequences,
    which are one batch of all rows, and of caches (pages, heads, page_size, columns) those that ``values``
    tell. Raises ValueError where they say too little.
    """
    sizes = {"num_q_heads": q.shape[1], "num_kv_heads": k.shape[1]}
    given = index_arrays(problem, values)
    if problem.layout.is_packed:
        starts = given["cu_seqlens_q"]
        sizes |= {"batch": len(starts) - 1, "seqlen_q": _longest(starts), "total_q": q.shape[2]}
    else:
        sizes |= {"batch": q.shape[0], "seqlen_q": q.shape[2]}
    if problem.layout.is_paged:
        table = given["page_table"]
        sizes |= {"num_pages": k.shape[0], "page_size": k.shape[2], "max_pages": table.shape[1]}
        used = given.get("seqused_k")
        longest = room = table.shape[1] * k.shape[2]
        if used is not None:
            longest = max(0, int((used + new_counts(problem, values, len(used))).max()))
        if problem.append is not None:
            longest = min(longest, room)  # new keys for which there is no room are left out
        return {**sizes, "seqlen_k": longest}
    if problem.layout.is_packed:
        return {**sizes, "seqlen_k": _longest(given["cu_seqlens_k"]), "total_k": k.shape[2]}
    return {**sizes, "seqlen_k": k.shape[2]}


def _longest(starts: np.ndarray) -> int:
    """The longest of the sequences that begin at ``starts``, the last of which is the last one's end."""
    return max(0, int(np.diff(starts).max()))


def index_arrays(problem: Problem, values: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Returns the arrays that tell the lengths of a problem's sequences and their pages, of those that are
    there; none where all are as long. Raises ValueError for what is missing, or is of different sequences."""
    layout = problem.layout
    if not layout.index_arrays:
        return {}
    given = values or {}
    found: dict[str, np.ndarray] = {}
    for name, meaning in layout.index_arrays:
        if given.get(name) is None:
            if not name.startswith("seqused_"):
                raise ValueError(f"the kernel reads {name} ({meaning}); give it")
            continue
        # A table's rows may have gaps.
        found[name] = np.require(given[name], _INT32, [] if name in dict(layout.table) else ["C"])
    counts = {name: len(array) - name.startswith("cu_") for name, array in found.items()}
    if min(counts.values()) < 1 or len(set(counts.values())) > 1:
        told = ", ".join(f"{name} of {count}" for name, count in counts.items())
        raise ValueError(f"lengths of different numbers of sequences: {told}; give those of the same")
    return found


def index_strides(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns the strides that a kernel is told of such arrays, in elements."""
    tables = {name: array for name, array in arrays.items() if array.ndim == 2}
    return {f"{name}_stride": array.strides[0] // array.itemsize for name, array in tables.items()}


def lengths_as_values(q: tuple[int, ...], k: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns what tells a kernel of sequences without gaps between them."""
    return {
        "cu_seqlens_q": np.concatenate([[0], np.cumsum(q)]).astype(_INT32),
        "cu_seqlens_k": np.concatenate([[0], np.cumsum(k)]).astype(_INT32),
    }


def sequence_slices(values: Mapping[str, Any], name: str) -> list[slice]:
    """Returns where the rows of each sequence are that count, of ``q`` or ``k``."""
    starts = [int(x) for x in values[f"cu_seqlens_{name}"]]
    used = values.get(f"seqused_{name}")
    lengths = np.diff(starts) if used is None else np.minimum(np.diff(starts), np.asarray(used))
    return [slice(start, start + max(0, int(n))) for start, n in zip(starts, lengths, strict=False)]


def rows_of_sequences(
    problem: Problem, values: Mapping[str, Any] | None, total: int, name: str = "q"
) -> np.ndarray:
    """Returns which of ``total`` rows of queries, or by ``name`` of keys, are of a sequence, and so are
    written: bool, all where sequences are as long as each other."""
    if not problem.layout.is_packed:
        return np.ones(total, bool)
    rows = np.zeros(total, bool)
    for each in sequence_slices(values or {}, name):
        rows[each] = True
    return rows


def typical_indices(problem: Problem) -> dict[str, np.ndarray]:
    """Returns the arrays that tell of the sequences a problem's kernels are timed with: as long as it says,
    their pages in an order that follows no rule."""
    lengths, told = problem.lengths, {}
    if problem.layout.is_packed:
        told = lengths_as_values(lengths.q, lengths.k)
    if problem.layout.is_paged:
        told |= told_of_pages(lengths.k, draw_table(lengths.k, problem.page_size))
        if problem.append is not None:
            told["seqused_k"] = np.maximum(told["seqused_k"] - np.array(lengths.q), 0)
    return index_arrays(problem, told)
