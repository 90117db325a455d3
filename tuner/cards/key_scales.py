"""Scales of keys and values of a type of their own: a float32 for each of their heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.arguments import KEY_SCALES, key_scale_strides
from ...gen.problem import Problem

_FLOAT32 = np.dtype(np.float32)


def key_scales(
    problem: Problem, values: Mapping[str, Any] | None, batch: int, num_kv_heads: int
) -> dict[str, np.ndarray]:
    """Returns the scales that ``values`` has for a problem's kernels, by name and shaped (batch, heads), or
    (1, heads) where all batches have the same; none where they are absent. Raises ValueError for others."""
    found: dict[str, np.ndarray] = {}
    for name in KEY_SCALES if problem.has_key_scales else ():
        given = (values or {}).get(name)
        if given is None:
            continue
        scales = np.atleast_2d(np.asarray(given, _FLOAT32))
        if scales.ndim != 2 or scales.shape[0] not in (1, batch) or scales.shape[1] != num_kv_heads:
            raise ValueError(
                f"{name} is of the shape {np.shape(given)}, one of each head of keys is wanted; "
                f"give ({batch}, {num_kv_heads}) or ({num_kv_heads},)"
            )
        found[name] = np.ascontiguousarray(scales)
    return found


def scale_strides(scales: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns the strides that a kernel is told of such arrays, in elements."""
    told: dict[str, int] = {}
    for name, array in scales.items():
        of_batch, of_head = (stride // array.itemsize for stride in array.strides)
        steps = (of_batch if len(array) > 1 else 0, of_head)
        told |= dict(zip(key_scale_strides(name), steps, strict=True))
    return told


def typical_scales(problem: Problem) -> dict[str, np.ndarray]:
    """Returns scales to time a problem's kernels with."""
    names = KEY_SCALES if problem.has_key_scales else ()
    return {name: np.ones((problem.batch, problem.num_kv_heads), _FLOAT32) for name in names}


def draw_scales(
    problem: Problem, batch: int, num_kv_heads: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Returns scales to try a problem's kernels with: one of each head and batch, or of each head of all
    batches. Those of keys are at most 1, so that scores stay of the size that they have without."""
    if not problem.has_key_scales:
        return {}
    shape = (batch, num_kv_heads) if rng.integers(3) else (num_kv_heads,)
    return {
        name: rng.uniform(0.25, most, shape).astype(_FLOAT32)
        for name, most in zip(KEY_SCALES, (1.0, 3.0), strict=True)
    }


def scaled_keys(
    problem: Problem,
    k: np.ndarray,
    v: np.ndarray,
    values: Mapping[str, Any] | None,
    first: tuple[int, int] = (0, 0),
) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and values, arrays (batches, heads, rows, columns), times the scales that ``values`` has
    for them, their first batch and head being those numbered ``first`` there: in float64, which holds the
    products. Where a problem has no scales they are returned as they are."""
    if not problem.has_key_scales:
        return k, v
    scales = [(values or {}).get(name) for name in KEY_SCALES]
    scaled_k, scaled_v = (_times(x, its, *first) for x, its in zip((k, v), scales, strict=True))
    return scaled_k, scaled_v


def _times(array: np.ndarray, scales: np.ndarray | None, batch: int, head: int) -> np.ndarray:
    array = array.astype(np.float64)
    if scales is None:
        return array
    own = np.atleast_2d(scales)[:, head : head + array.shape[1], None, None].astype(np.float64)
    return array * (own if len(own) == 1 else own[batch : batch + len(array)])
