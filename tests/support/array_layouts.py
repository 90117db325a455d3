"""Ways in which arrays that scores meet at their own row and key may lie in memory, and who reads such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Variant
from flashgen.tuner.cards.dtypes import BUFFER_DTYPES

from .scored_attention import assert_close, attend, built, is_legal
from .scorings import drawn_values

SCORINGS = {
    "f32": Scoring(bias="f32"),
    "f16": Scoring(bias="f16"),
    "bf16": Scoring(bias="bf16"),
    "u8": Scoring(bias="u8"),
    "of heads": Scoring(score="score + tanh(bias[h, q, k])", buffers=(("bias", "bf16"),)),
    "of batches": Scoring(mask="shown[q, b, k] != 0", buffers=(("shown", "u8"),), window=(40, 0)),
    "several": Scoring(
        score="where(shown[q, k] != 0, score, -3.0) + more[b, q, k] * other[h, q, k]",
        mask="shown[q, k] != 0 or k % 5 == q % 5",
        buffers=(("shown", "u8"), ("more", "f32"), ("other", "f16")),
    ),
}
#: How an array may lie: the bytes that its row stride is beyond a multiple of 16, those of the strides of
#: heads and batches, and the axes along which it repeats itself.
LAYOUTS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "whole pieces": (0, 0, ()),
    "words": (4, 4, ()),
    "elements": (1, 1, ()),
    "heads apart": (0, 1, ()),
    "rows alike": (0, 0, (2,)),
    "rows alike, heads apart": (0, 1, (2,)),
    "heads alike": (0, 0, (1,)),
    "batches alike": (4, 0, (0,)),
    "all alike": (0, 0, (0, 1, 2)),
}


def values_laid(problem: Problem, rows: int, keys: int, layout: str) -> dict[str, Any]:
    """What kernels of a problem read for so many rows and keys, its arrays lying in one of `LAYOUTS`."""
    values = dict(drawn_values(problem, rows, keys))
    for each in problem.scores.buffers:
        values[each.name] = laid(values[each.name], each.dtype, layout)
    return values


def laid(array: np.ndarray, dtype: str, layout: str) -> np.ndarray:
    """The same numbers, but those along repeated axes, lying so in memory."""
    beyond, apart, repeated = LAYOUTS[layout]
    item = np.dtype(BUFFER_DTYPES[dtype])
    axes = array.ndim - 1
    strides, step = [item.itemsize], array.shape[-1] * item.itemsize
    for axis in reversed(range(axes)):
        more = max(beyond if axis == axes - 1 else apart, 0)
        step = -(-step // 16) * 16 + -(-more // item.itemsize) * item.itemsize
        strides.insert(0, 0 if axis + 3 - axes in repeated else step)
        step *= 1 if strides[0] == 0 else array.shape[axis]
    memory = np.zeros(step // item.itemsize + array.shape[-1] + 16, item)
    view = np.lib.stride_tricks.as_strided(memory, array.shape, strides)
    view[...] = array
    return view


def problem_of(scoring: Scoring, dtype: str = "bf16", **more: Any) -> Problem:
    """A small problem of grouped heads."""
    sizes = {
        "batch": 2,
        "head_dim": 16,
        "seqlen_q": 300,
        "seqlen_k": 300,
        "num_q_heads": 4,
        "num_kv_heads": 2,
    }
    return Problem(dtype=dtype, scoring=scoring, **{**sizes, **more})


def in_all_ways(walks: Mapping[str, Variant], dtypes: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    """Legal settings, by the names of scoring, walk, type and layout, in which any two values of these stand
    together: a quarter of all there are."""
    return [
        (name, walk, dtype, layout)
        for i, name in enumerate(SCORINGS)
        for j, walk in enumerate(walks)
        for k, dtype in enumerate(dtypes)
        for n, layout in enumerate(LAYOUTS)
        if (i + j + k + n) % 4 == 0 and is_legal(walks[walk], problem_of(SCORINGS[name], dtype))
    ]


def assert_right(variant: Variant, problem: Problem, layout: str, tolerance: float) -> None:
    """A kernel is as near to float64 as that at ragged lengths, its arrays lying so."""
    build = built(variant, problem)
    for rows, keys in ((150, 173), (70, 320), (200, 75)):
        assert_close(*attend(build, rows, keys, values_laid(problem, rows, keys, layout)), tolerance)
