"""Keys and values in pages, queries in batches: from packed sequences and back, to be compared like these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ..cards.pages import PageTable, draw_table, gather, scatter
from ..cards.sequences import lengths_as_values
from .cases import Case


def case_table(case: Case) -> PageTable:
    """Returns the pages of a case's sequences, the same each time."""
    assert case.counted is not None
    return draw_table(case.counted.k, case.page_size, hostile=True, share=True, cached=case.cached)


def in_pages(
    problem: Problem,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    batch: int,
    lengths: tuple[int, ...],
    pages: PageTable,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns packed q, k, v of sequences of ``lengths`` keys as the problem's kernels take them: keys and
    values in pages, queries in batches unless they are packed there too."""
    q, k, v = arrays
    if not problem.layout.is_packed:
        _, heads, rows, columns = q.shape
        q = np.ascontiguousarray(q.reshape(heads, batch, rows // batch, columns).transpose(1, 0, 2, 3))
    k, v = (scatter(x, lengths, pages) for x in (k, v))
    return q, k, v


def row_after_row(array: np.ndarray) -> np.ndarray:
    """Returns an array of batches, (batch, heads, rows, ...), as one of packed sequences."""
    joined = array.swapaxes(0, 1)
    return joined.reshape(1, joined.shape[0], -1, *joined.shape[3:])


def out_of_pages(
    problem: Problem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    values: Mapping[str, Any],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Returns what a kernel took as packed sequences, and what tells of these."""
    lengths = tuple(int(n) for n in values["seqused_k"])
    k, v = (gather(x, lengths, values["page_table"]) for x in (k, v))
    told = lengths_as_values((q.shape[2],) * len(lengths), lengths)
    if problem.layout.is_packed:
        told["cu_seqlens_q"] = values["cu_seqlens_q"]
    else:
        q = row_after_row(q)
    others = {name: value for name, value in values.items() if name != "seqused_k"}
    return q, k, v, {**others, **told}
