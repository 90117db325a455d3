"""What masks and changes of scores read in a case: arrays as they are drawn, and such as show mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ...gen.scoring.asked import BOOLEAN
from ...gen.scoring.scores import Buffer
from ...gen.scoring.values import draw_values
from ..cards.dtypes import BUFFER_DTYPES, bits_dtype, largest, unwritten_bits
from ..cards.score_values import values_as_read
from .cases import Case

#: A sink that takes most of the weight of scores of ordinary size.
LARGE_SINK = 12.0
#: What many add to a score to hide its key.
HIDING_SCORE = 1e9


def case_values(case: Case, problem: Problem, rng: np.random.Generator) -> Mapping[str, Any]:
    """Makes what the problem's scores read in a case, as the types of its kernels' buffers hold it."""
    if problem.scores.is_plain:
        return {}
    sizes = case.sized(problem)
    values = draw_values(case.scoring, problem.scores, sizes, rng)
    change = {"various": _various, "extreme": _extreme, "hiding": _hiding}.get(case.values)
    if change is not None:
        for each in problem.scores.buffers:
            values[each.name] = change(each, np.array(values[each.name]), problem, case, rng)
    values = values_as_read(sizes, values)
    if case.values == "various":
        values |= {each.name: _with_gaps(values[each.name], each.dtype) for each in problem.scores.buffers}
    return values


def _various(
    buffer: Buffer, array: np.ndarray, problem: Problem, case: Case, rng: np.random.Generator
) -> np.ndarray:
    """Values that no two batches and heads share; computed indices find arrays of other lengths."""
    match buffer.name:
        case "bias" if problem.scoring.bias == BOOLEAN:
            return rng.random(array.shape) < 0.7
        case "bias" if problem.scoring.bias:
            return rng.standard_normal(array.shape, np.float32)
        case "slopes" if problem.scoring.alibi:
            return rng.random(array.shape, np.float32)
    shorter = [
        slice(0, max(1, array.shape[axis] // 2)) if not names else slice(None)
        for axis, names in enumerate(buffer.axes)
    ]
    return array[tuple(shorter)]


def _extreme(
    buffer: Buffer, array: np.ndarray, problem: Problem, case: Case, rng: np.random.Generator
) -> np.ndarray:
    """Values at the ends of what they may be."""
    scoring = problem.scoring
    match buffer.name:
        case "lengths" if scoring.lengths:
            array[:] = rng.permutation(np.resize([case.seqlen_k, 1, 0], array.size))
        case "prefix" if scoring.prefix:
            array[:] = rng.permutation(np.resize([case.seqlen_k + 1, 0, 1], array.size))
        case "tree" if scoring.tree:
            array[...] = rng.choice([-1, 0, 1, np.iinfo(np.int64).min], array.shape)
        case "slopes" if scoring.alibi:
            array[...] = rng.permutation(np.resize([0.0, 1.0, -0.01], array.size)).reshape(array.shape)
        case "sinks" if scoring.sinks:
            array[:] = rng.permutation(np.resize([-np.inf, LARGE_SINK, 0.0], array.size))
        case "bias" if scoring.bias == BOOLEAN:
            array[...] = True
            array[..., : case.seqlen_k // 2] = False
        case "bias" if scoring.bias:
            # As PyTorch's masks have it: what is hidden, by the least number there is, by infinity, or by
            # -1e9, of which nothing is left beside other scores but what rounds to anything.
            hidden = rng.random(array.shape) < 0.3
            hidden[..., : case.seqlen_k // 2] = True
            most = largest(buffer.dtype)
            least = rng.choice([-np.inf, -most, -min(most, HIDING_SCORE)], array.shape)
            array = np.where(hidden, least, array).astype(np.float32)
            array[..., -1] = 0.0
    return array


def _hiding(
    buffer: Buffer, array: np.ndarray, problem: Problem, case: Case, rng: np.random.Generator
) -> np.ndarray:
    """Values that hide all keys of some rows."""
    scoring = problem.scoring
    rows = rng.random(case.seqlen_q) < 0.4
    rows[rng.integers(case.seqlen_q)] = True
    match buffer.name:
        case "lengths" if scoring.lengths:
            array[rng.integers(array.size)] = 0
        case "tree" if scoring.tree:
            array[:, rows] = 0
        case "sinks" if scoring.sinks:
            array[rng.integers(array.size)] = -np.inf
        case "bias" if scoring.bias == BOOLEAN:
            array[..., rows, :] = False
        case "bias" if scoring.bias:
            array[..., rows, :] = -np.inf
        case "document_end" if scoring.documents:
            # The last document of all is empty.
            array[...] = np.minimum(array, int(array.max()) // 2)
    return array


def _with_gaps(array: np.ndarray, dtype: str) -> np.ndarray:
    """The same values with a gap behind each row that nobody wrote, where there are rows."""
    if array.ndim == 1:
        return array
    unwritten = unwritten_bits(BUFFER_DTYPES[dtype])
    wide = np.full((*array.shape[:-1], array.shape[-1] + 3), unwritten, bits_dtype(array.dtype))
    view = wide.view(array.dtype)[..., : array.shape[-1]]
    view[...] = array
    return view
