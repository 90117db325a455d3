"""What masks and changes of scores read, as a kernel takes it: arrays of its buffers' types, and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from ...gen.expression import Kind
from ...gen.problem import Problem
from ...gen.scoring.asked import FLOAT_DTYPES
from ...gen.scoring.buffer_gradients import buffer_gradients
from ...gen.scoring.scores import Buffer, Scalar, Scores
from .dtypes import BUFFER_DTYPES


@dataclass(frozen=True)
class ScoreValues:
    """The arrays that a kernel reads beside q, k and v, and its numbers, all by name.

    Arrays are of their buffers' types with a contiguous last axis; where others are repeated, their strides
    are 0.
    """

    scores: Scores
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, Any]:
        """Arrays and numbers together, as `Scores.visible` and its like take them."""
        return {**self.arrays, **self.numbers}

    def arguments(self, addresses: Mapping[str, int]) -> dict[str, float]:
        """Returns what `make_arguments` takes of them, the arrays lying at ``addresses`` by the strides that
        they have."""
        found: dict[str, float] = {**addresses, **self.numbers}
        for each in self.scores.buffers:
            array = self.arrays[each.name]
            found |= dict(zip(each.strides, _strides(array), strict=True))
            found |= {name: array.shape[axis] for axis, name in each.sizes}
        return found


def by_keyword(keywords: Mapping[str, Sequence[str]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `attention` of an emitted module is told of ``values``, ``keywords`` being what its
    kernels name each by: one value, or of several names a tuple."""
    return {
        keyword: values[names[0]] if len(names) == 1 else tuple(values[name] for name in names)
        for keyword, names in keywords.items()
    }


def stored(array: np.ndarray) -> np.ndarray:
    """Returns an array without what it repeats."""
    return array[tuple(slice(1) if step == 0 else slice(None) for step in array.strides)]


def gradient_arrays(scores: Scores, read: ScoreValues, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Returns arrays for the gradients of what ``scores`` read, float32 and unwritten, by the names of a
    kernel's arguments: of the lengths that are read, 1 along what ``read`` repeats."""
    found = {}
    for each in buffer_gradients(scores):
        array = read.arrays[each.buffer.name]
        repeated = [stride == 0 for stride in (*array.strides[:-1], array.itemsize)]
        lengths = [
            max((sizes[name] for name in names), default=array.shape[i])
            for i, names in enumerate(each.buffer.axes)
        ]
        shape = [1 if alike else length for alike, length in zip(repeated, lengths, strict=True)]
        found[each.name] = np.empty(shape, np.float32)
    return found


def gradient_strides(scores: Scores, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns the strides that a kernel is told of such ``arrays``, by the names of its arguments."""
    found: dict[str, int] = {}
    for each in buffer_gradients(scores):
        found |= dict(zip(each.strides, _strides(arrays[each.name]), strict=True))
    return found


def of_four_axes(array: np.ndarray) -> np.ndarray:
    """Returns the array with axes of length 1 in front, as guarded memory has arrays."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def values_as_read(problem: Problem, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the kernels of a problem make of ``values`` by rounding them to their types, by name.
    Raises ValueError as `score_values` does."""
    return score_values(problem.scores, values, sizes_of(problem)).named


def sizes_of(problem: Problem) -> dict[str, int]:
    """Returns the lengths that a problem's kernels are told."""
    return {name: getattr(problem, name) for name in problem.layout.sizes}


def score_values(scores: Scores, values: Mapping[str, Any] | None, sizes: Mapping[str, int]) -> ScoreValues:
    """Returns ``values`` as a kernel of ``scores`` reads them: rounded to the types of its buffers.

    ``values`` are arrays and numbers by name, what is not read being ignored, and ``sizes`` the problem's
    lengths: ``batch``, ``num_q_heads``, ``seqlen_q``, ``seqlen_k``.

    Raises:
        ValueError: what is read is missing, or has a shape or type that the kernel cannot read.
    """
    given = values or {}
    for each in (*scores.buffers, *scores.scalars):
        if given.get(each.name) is None:
            known = ", ".join(given) or "nothing"
            raise ValueError(
                f"the kernel reads {_described(each)}, the values are of {known}; give {each.name}"
            )
    arrays = {each.name: _read(each, np.asarray(given[each.name]), sizes) for each in scores.buffers}
    numbers = {each.name: _number(each, given[each.name]) for each in scores.scalars}
    return ScoreValues(scores, arrays, numbers)


def _described(what: Buffer | Scalar) -> str:
    """A buffer or scalar in words: ``doc, i32[batch, seqlen_q]``."""
    if isinstance(what, Scalar):
        return f"{what.name}, a number"
    return f"{what.name}, {what.dtype}[{', '.join(_axes(what))}]"


def _axes(buffer: Buffer) -> Iterator[str]:
    for names in buffer.axes:
        yield " or ".join(sorted(names)) if names else "any"


def _read(buffer: Buffer, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    least = [max((sizes[name] for name in names), default=1) for names in buffer.axes]
    if array.ndim != len(least) or any(n < wanted for n, wanted in zip(array.shape, least, strict=True)):
        raise ValueError(
            f"{buffer.name} has the shape {list(array.shape)}, the kernel reads {_described(buffer)}: "
            f"at least {least}; repeat an axis by numpy.broadcast_to"
        )
    dtype = BUFFER_DTYPES[buffer.dtype]
    is_float = array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
    holds_floats = buffer.dtype in FLOAT_DTYPES
    if is_float != holds_floats or not (is_float or array.dtype.kind in "iub"):
        kind = "floats" if holds_floats else "integers"
        raise ValueError(
            f"{buffer.name} is of {array.dtype}, the kernel reads {kind} ({buffer.dtype}); convert it, or "
            "render the kernel for another type"
        )
    return _laid(buffer, array, dtype)


def _laid(buffer: Buffer, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in a type, with a contiguous last axis; as it is if it is so, and without copying what is
    repeated."""
    contiguous = array.shape[-1] == 1 or array.strides[-1] == array.itemsize
    if array.dtype == dtype and contiguous and min(array.strides) >= 0:
        return array
    once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides[:-1])]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = int(once.min()), int(once.max())
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{buffer.name} reaches from {low} to {high}, its type {buffer.dtype} from {limits.min} to "
                f"{limits.max}; render the kernel for a wider type"
            )
    with np.errstate(over="ignore"):
        return np.broadcast_to(np.ascontiguousarray(once.astype(dtype)), array.shape)


def _number(scalar: Scalar, value: Any) -> float:
    """A number as the kernel has it: an int of 32 bits, or a float32."""
    if scalar.kind is Kind.FLOAT:
        return float(np.float32(value))
    if int(value) != value or not -(2**31) <= value < 2**31:
        raise ValueError(f"{scalar.name} is {value}, the kernel takes an integer of 32 bits")
    return int(value)


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """The strides of all axes but the last, in elements; that of an axis of length 1 counts for nothing."""
    outer = zip(array.shape[:-1], array.strides[:-1], strict=True)
    return tuple(0 if length == 1 else stride // array.itemsize for length, stride in outer)
