"""The problems' element types in numpy, which has no bfloat16 of its own, and bits of unwritten memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ...gen.problem import Problem

NUMPY_DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
#: What buffers that masks and changes of scores read are made of.
BUFFER_DTYPES: dict[str, np.dtype] = {
    **{name: NUMPY_DTYPES[name] for name in ("f32", "f16", "bf16")},
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8),
}
#: What marks memory that nobody wrote: a signalling NaN of the type, which no arithmetic yields. That of f32
#: is another one than what the emulation fills shared memory with (``kUninitialized``), which a kernel may
#: copy. e4m3 has one NaN of each sign, and is never written. Integers are far from every length.
_UNWRITTEN = {
    "f32": 0x7FA5A5A5,
    "f16": 0x7DA5,
    "bf16": 0x7FA5,
    "e4m3": 0x7F,
    "i16": 0x7DA5,
    "i32": 0x7DA5A5A5,
    "i64": 0x7DA5A5A57DA5A5A5,
    "u8": 0xA5,
}
_UNWRITTEN_BITS = {dtype: _UNWRITTEN[name] for name, dtype in {**NUMPY_DTYPES, **BUFFER_DTYPES}.items()}


def numpy_dtype(name: str) -> np.dtype:
    """Returns the numpy type of a problem's ``dtype``."""
    return NUMPY_DTYPES[name]


def largest(name: str) -> float:
    """Returns the largest finite number of a problem's ``dtype``."""
    return float(ml_dtypes.finfo(NUMPY_DTYPES[name]).max)


def smallest(name: str) -> float:
    """Returns the smallest positive number of a problem's ``dtype``, a subnormal one."""
    return float(ml_dtypes.finfo(NUMPY_DTYPES[name]).smallest_subnormal)


def smallest_normal(name: str) -> float:
    """Returns the smallest positive number of a problem's ``dtype`` that has all its bits."""
    return float(ml_dtypes.finfo(NUMPY_DTYPES[name]).smallest_normal)


def unwritten_bits(dtype: np.dtype) -> int:
    """Returns the bits of an element that nobody wrote. Raises ValueError for a type that no problem has."""
    try:
        return _UNWRITTEN_BITS[dtype]
    except KeyError:
        raise ValueError(f"arrays of {', '.join(NUMPY_DTYPES)} are needed, not of {dtype}") from None


def bits_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the type of unsigned integers that are as wide as an element."""
    return np.dtype(f"u{dtype.itemsize}")


def inputs_of(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
    """Returns those of q, k and v that kernels of a problem take, by name: of latent attention no values,
    which are columns of the keys."""
    given = {"q": q, "k": k, "v": v}
    return {each.name: given[each.name] for each in problem.operation.arrays if each.name in given}


def require_inputs(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Raises ValueError unless q, k, v have the type and the columns of the problem a kernel was made for."""
    columns = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v}
    for (name, width), array in zip(columns.items(), (q, k, v), strict=True):
        wanted = numpy_dtype(problem.dtype if name == "q" else problem.key_dtype)
        if array.dtype != wanted or array.shape[-1] != width:
            raise ValueError(
                f"{name} is {array.dtype} with {array.shape[-1]} columns, "
                f"the kernel takes {wanted} with {width}; render it for that problem"
            )
