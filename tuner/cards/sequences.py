"""Sequences of lengths of their own, as kernels are told of them: arrays of 32-bit integers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.problem import Problem

_INT32 = np.dtype(np.int32)


def sizes_of_call(
    problem: Problem, q: np.ndarray, k: np.ndarray, values: Mapping[str, Any] | None
) -> dict[str, int]:
    """Returns the lengths that a kernel is told of arrays (batch, heads, rows, columns); of packed sequences,
    which are one batch of all rows, those that ``values`` tell. Raises ValueError where they say too little.
    """
    sizes = {"num_q_heads": q.shape[1], "num_kv_heads": k.shape[1]}
    if not problem.layout.is_packed:
        return {**sizes, "batch": q.shape[0], "seqlen_q": q.shape[2], "seqlen_k": k.shape[2]}
    given = length_arrays(problem, values)
    longest = [max(0, int(np.diff(given[f"cu_seqlens_{x}"]).max())) for x in "qk"]
    return {
        **sizes,
        "batch": len(given["cu_seqlens_q"]) - 1,
        "seqlen_q": longest[0],
        "seqlen_k": longest[1],
        "total_q": q.shape[2],
        "total_k": k.shape[2],
    }


def length_arrays(problem: Problem, values: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Returns the arrays that tell the lengths of a problem's sequences, of those that are there; none where
    all are as long. Raises ValueError for lengths that are missing, or that are of different sequences."""
    if not problem.layout.is_packed:
        return {}
    given = values or {}
    found: dict[str, np.ndarray] = {}
    for name, meaning in problem.layout.lengths:
        if given.get(name) is None:
            if name.startswith("cu_"):
                raise ValueError(f"the kernel reads {name} ({meaning}); give it")
            continue
        found[name] = np.ascontiguousarray(given[name], _INT32)
    counts = {name: len(array) - name.startswith("cu_") for name, array in found.items()}
    if min(counts.values()) < 1 or len(set(counts.values())) > 1:
        told = ", ".join(f"{name} of {count}" for name, count in counts.items())
        raise ValueError(f"lengths of different numbers of sequences: {told}; give those of the same")
    return found


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


def rows_of_sequences(problem: Problem, values: Mapping[str, Any] | None, total: int) -> np.ndarray:
    """Returns which of ``total`` rows of queries are of a sequence, and so are written: bool, all where
    sequences are as long as each other."""
    if not problem.layout.is_packed:
        return np.ones(total, bool)
    rows = np.zeros(total, bool)
    for each in sequence_slices(values or {}, "q"):
        rows[each] = True
    return rows
