"""Inputs of a case: random tensors as views of memory in the layout that the case names."""

from __future__ import annotations

import math

import numpy as np

from ...gen.problem import Problem
from ..cards.pages import told_of_pages
from ..cards.sequences import lengths_as_values, sequence_slices
from . import reference
from .cases import Case
from .paged import case_table, in_pages

#: Rows of packed arrays behind those of the last sequence.
ROWS_BEHIND = 3


def make_inputs(
    case: Case, problem: Problem, rng: np.random.Generator, *, access_width: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Makes q, k, v in the case's layout, as views shaped (batch, heads, seqlen, head_dim), and the scale.

    Packed sequences are one batch of all rows, of which those of no sequence are no numbers. Keys and values
    in pages are of the shape (pages, heads, page_size, head_dim).
    Of ``problem`` only the type and the head dims count. All strides are multiples of ``access_width``
    elements, as long as the head dims are.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    scale = float(np.float32(case.scale / math.sqrt(d)))
    batch, rows, keys = case.batch, case.seqlen_q, case.seqlen_k
    if case.lengths is not None:
        # All sequences in one batch, and rows behind the last.
        batch, rows, keys = 1, sum(case.lengths.q) + ROWS_BEHIND, sum(case.lengths.k) + ROWS_BEHIND
    q_shape = (batch, case.num_q_heads, rows, d)
    kv_shape = (batch, case.num_kv_heads, keys, d)
    q, k, v = reference.random_inputs(
        case.inputs,
        q_shape,
        kv_shape,
        scale=scale,
        rng=rng,
        dtype=problem.dtype,
        head_dim_v=dv,
        latent=problem.latent,
        one_sign=case.lengths is not None,
        key_dtype=problem.key_dtype,
    )
    if case.counted is not None and case.page_size:
        whole = (q if problem.layout.is_packed else q[:, :, :-ROWS_BEHIND], k, v)
        q, k, v = in_pages(problem, whole, case.batch, case.counted.k, case_table(case))
    if case.layout == "packed":
        q, k, v = _packed_where_alike(q, k, v)
    elif case.layout == "bnhd":
        q, k, v = (_packed(x)[0] for x in (q, k, v))
    elif case.layout == "padded":
        q, k, v = (_padded(x, access_width) for x in (q, k, v))
    if problem.layout.is_packed:
        told = lengths_of(case)
        for name, arrays in (("q", (q,)), *([("k", (k, v))] if not case.page_size else [])):
            for array in arrays:
                array[:, :, ~_rows(told, name, array.shape[2])] = np.nan
    return q, k, v, scale


def lengths_of(case: Case) -> dict[str, np.ndarray]:
    """Returns what tells a kernel of a case's sequences and their pages."""
    if case.lengths is None:
        return {}
    told = lengths_as_values(case.lengths.q, case.lengths.k)
    if case.used is not None:
        told |= {f"seqused_{x}": np.array(getattr(case.used, x), np.int32) for x in "qk"}
    if case.counted is not None and case.page_size:
        told |= told_of_pages(case.counted.k, case_table(case))
    return told


def _rows(told: dict[str, np.ndarray], name: str, total: int) -> np.ndarray:
    """Which of so many rows are of a sequence."""
    rows = np.zeros(total, bool)
    for each in sequence_slices(told, name):
        rows[each] = True
    return rows


def _packed(*tensors: np.ndarray) -> tuple[np.ndarray, ...]:
    """The tensors side by side in one array (batch, seqlen, tensor, heads, head_dim)."""
    whole = np.ascontiguousarray(np.stack([x.transpose(0, 2, 1, 3) for x in tensors], axis=2))
    return tuple(whole[:, :, i].transpose(0, 2, 1, 3) for i in range(len(tensors)))


def _packed_where_alike(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns those of one shape and type side by side in one array, the others each in its own."""
    if q.dtype != k.dtype:
        return (*_packed(q), *(_packed(k, v) if k.shape == v.shape else (*_packed(k), *_packed(v))))
    if q.shape == k.shape == v.shape:
        return _packed(q, k, v)
    if k.shape == v.shape:
        return *_packed(q), *_packed(k, v)
    if q.shape == k.shape:
        return *_packed(q, k), *_packed(v)
    return *_packed(q), *_packed(k), *_packed(v)


def _padded(x: np.ndarray, access_width: int) -> np.ndarray:
    """The same values with a gap of NaN after each row, to the next stride that suits the accesses."""
    head_dim = x.shape[-1]
    gap = access_width - head_dim % access_width
    wide = np.full((*x.shape[:-1], head_dim + gap), np.nan, x.dtype)
    wide[..., :head_dim] = x
    return wide[..., :head_dim]
