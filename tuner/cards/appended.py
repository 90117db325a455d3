"""New rows for caches, as kernels that append are told of them: arrays by name, and their strides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.append import NEW_ROWS, NEW_STARTS, TABLE_ROWS, TOTAL_NEW
from ...gen.problem import Problem
from .dtypes import numpy_dtype


def new_arrays(problem: Problem, values: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Returns the arrays that a problem's kernels append, (batch, kv_heads, rows, columns) or of packed
    sequences (1, kv_heads, all rows, columns), those that rotate, (positions, columns), and where the rows of
    packed sequences begin if it is told; none where nothing is appended. Raises ValueError for what is
    missing, or of another type or width."""
    append = problem.append
    if append is None:
        return {}
    given, dtype = values or {}, numpy_dtype(problem.dtype)
    widths = {each.name: getattr(problem, each.columns) for each in append.inputs}
    widths |= dict.fromkeys(append.tables, append.rotary_dim // 2)
    found: dict[str, np.ndarray] = {}
    for name, width in widths.items():
        array = given.get(name)
        if array is None:
            raise ValueError(f"the kernel appends and reads {name}; give it")
        array = np.asarray(array)
        if array.dtype != dtype or array.shape[-1] != width:
            raise ValueError(
                f"{name} is of {array.dtype} and {array.shape[-1]} columns, the kernel reads {dtype} and "
                f"{width}"
            )
        found[name] = array
    if found["k_new"].shape[:-1] != found["v_new"].shape[:-1]:
        shapes = " and ".join(f"{list(found[each].shape)}" for each in ("k_new", "v_new"))
        raise ValueError(f"k_new and v_new have the shapes {shapes}; give as many rows of as many heads")
    if problem.layout.is_packed and given.get(NEW_STARTS) is not None:
        found[NEW_STARTS] = np.ascontiguousarray(given[NEW_STARTS], np.int32)
    return found


def append_numbers(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns the strides and sizes that kernels are told of such arrays, by the names of their arguments;
    and addresses of nothing."""
    append, axes = problem.append, problem.layout.stride_axes
    if append is None:
        return {}
    told: dict[str, int] = dict.fromkeys((*arrays, NEW_STARTS), 0)  # addresses of what is not there
    for each in append.inputs:
        array = arrays[each.name]
        strides = [stride // array.itemsize for stride in array.strides[3 - len(axes) : 3]]
        told |= {f"{each.name}_stride_{axis}": n for axis, n in zip(axes, strides, strict=True)}
    for name in append.tables:
        told[f"{name}_stride"] = arrays[name].strides[0] // arrays[name].itemsize
        told[TABLE_ROWS] = len(arrays[name])
    told[TOTAL_NEW if problem.layout.is_packed else NEW_ROWS] = arrays["k_new"].shape[2]
    return told


def new_counts(problem: Problem, values: Mapping[str, Any] | None, batch: int) -> np.ndarray:
    """Returns how many new rows each of ``batch`` sequences has; none where nothing is appended."""
    if problem.append is None:
        return np.zeros(batch, np.int64)
    given = values or {}
    if not problem.layout.is_packed:
        return np.full(batch, np.asarray(given["k_new"]).shape[2], np.int64)
    if given.get(NEW_STARTS) is not None:
        return np.diff(np.asarray(given[NEW_STARTS]).astype(np.int64))
    counts = np.diff(np.asarray(given["cu_seqlens_q"]).astype(np.int64))
    used = given.get("seqused_q")
    return counts if used is None else np.minimum(counts, used)


def typical_new_arrays(problem: Problem) -> dict[str, np.ndarray]:
    """Returns what a problem's kernels are timed with: a new row for each query, and angles of any size; none
    where nothing is appended."""
    append = problem.append
    if append is None:
        return {}
    rng, dtype = np.random.default_rng(31), numpy_dtype(problem.dtype)
    batch, rows = problem.batch, problem.seqlen_new
    if problem.layout.is_packed:
        batch, rows = 1, problem.total_new
    found: dict[str, np.ndarray] = {}
    for each in append.inputs:
        shape = (batch, rows, problem.num_kv_heads, getattr(problem, each.columns))
        found[each.name] = rng.standard_normal(shape, np.float32).astype(dtype).swapaxes(1, 2)
    angles = rng.random((problem.seqlen_k, append.rotary_dim // 2), np.float32)
    tables = zip(append.tables, (np.cos(angles), np.sin(angles)), strict=False)
    return found | {name: table.astype(dtype) for name, table in tables}
