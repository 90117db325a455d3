"""A call of an emitted module's ``gradients()`` or ``gradients_varlen()`` on arrays in guarded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ...gen.scoring.buffer_gradients import buffer_gradients
from ..cards.dtypes import require_inputs
from ..cards.guarded_memory import FLOAT32, GuardedImage, contiguous_strides
from ..cards.score_values import of_four_axes, score_values, stored
from ..cards.sequences import index_arrays, sizes_of_call

_OF_INPUTS = ("dq", "dk", "dv")


class GradientCall:
    """What a call takes and makes, all of it in one image of a card's memory.

    Gradients are dense there: the module allocates them, and lays them out as what they are of.
    """

    def __init__(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], values: Mapping[str, Any] | None
    ) -> None:
        """``inputs`` and ``values`` are as `Runner.differentiate` has them, whose errors this raises."""
        q = inputs["q"]
        require_inputs(problem, *(inputs[name] for name in "qkv"))
        self.problem, self.packed = problem, problem.layout.is_packed
        self.sizes = sizes_of_call(problem, q, inputs["k"], values)
        self.of_read = {each.name: each.buffer.name for each in buffer_gradients(problem.scores)}
        """The gradients of what masks and changes of scores read, and the names of that."""
        read = score_values(problem.scores, values, self.sizes)
        self.numbers = read.numbers
        # Of what repeats nothing: gradients are sums over what others would.
        arrays = {name: stored(x) if name in self.of_read.values() else x for name, x in read.arrays.items()}
        self.image, self._inputs, self._item_bytes = GuardedImage(q.dtype), inputs, q.itemsize
        self._placed = {name: self.image.add_input(x, x.dtype) for name, x in inputs.items()}
        made = {f"d{name}": (inputs[name].shape, q.dtype) for name in "qkv"}
        made |= {name: (of_four_axes(arrays[of]).shape, FLOAT32) for name, of in self.of_read.items()}
        self._made = {
            name: (
                dtype.itemsize * math.prod(shape),
                self.image.add_output(name, shape, contiguous_strides(shape), dtype)[0],
            )
            for name, (shape, dtype) in made.items()
        }
        self._indices = index_arrays(problem, values)
        self._beside = {**arrays, **self._indices}
        self._beside_at = {name: self.image.add_buffer(array) for name, array in self._beside.items()}

    def allocations(
        self, base: int, plan: Sequence[tuple[int, int]], workspace: tuple[int, int]
    ) -> list[tuple[int, int]]:
        """Returns what the module may ask for memory for, in its order: bytes, and where they are. The image
        lies at ``base``; a ``plan`` of packed sequences and the ``workspace`` lie elsewhere."""
        grads = (self._place(name, base) for name in _OF_INPUTS)
        return [*(self._place(name, base) for name in self.of_read), *plan, *grads, workspace]

    def arrays(self, base: int, kind: Any, allocate: Callable[[int], int]) -> dict[str, Any]:
        """Returns the arrays of the call by keyword, of that ``kind``, and what tells of sequences."""
        made = {}
        for name, (offset, strides) in self._placed.items():
            x = self._inputs[name]
            axes = tuple(range(x.ndim))
            if self.packed:  # (1, heads, all rows, columns) as (all rows, heads, columns)
                axes = (1, 2) if x.ndim == 3 else (2, 1, 3)
            made[name] = kind(
                tuple(x.shape[axis] for axis in axes),
                x.dtype,
                allocator=allocate,
                gpudata=base + self._item_bytes * offset,
                strides=tuple(x.itemsize * strides[axis] for axis in axes),
            )
        return made | {name: self._array(name, base, kind) for name in self._indices}

    def read(self, base: int, kind: Any) -> dict[str, Any]:
        """Returns the arrays and numbers that masks and changes of scores read, as kernels call them."""
        arrays = (name for name in self._beside if name not in self._indices)
        return {**{name: self._array(name, base, kind) for name in arrays}, **self.numbers}

    def strayed(self, base: int, found: Sequence[Any]) -> str:
        """Returns the name of a gradient that lies elsewhere than where it was allocated; empty where none
        does."""
        for name, array in zip(self._names, found, strict=True):
            size, address = self._place(name, base)
            if size and int(array.gpudata) != address:
                return name
        return ""

    def gradients(self, before: np.ndarray, after: np.ndarray, found: Sequence[Any]) -> dict[str, np.ndarray]:
        """Returns the gradients as `Runner.differentiate` does, of the image before and after the call, which
        returned ``found``. Raises `CorruptedMemory`."""
        grads = {}
        outputs = zip(self._made, self.image.outputs(before, after), strict=True)
        laid_out = dict(zip(self._names, found, strict=True))
        for name, dense in outputs:
            made = laid_out[name]
            grad = np.lib.stride_tricks.as_strided(dense.reshape(-1), made.shape, made.strides)
            grads[name] = grad.swapaxes(0, 1)[None] if self.packed and name in _OF_INPUTS else grad
        return grads

    @property
    def _names(self) -> tuple[str, ...]:
        """The gradients in the order in which they are returned."""
        return (*_OF_INPUTS, *self.of_read)

    def _place(self, name: str, base: int) -> tuple[int, int]:
        num_bytes, offset = self._made[name]
        return num_bytes, base + self._item_bytes * offset

    def _array(self, name: str, base: int, kind: Any) -> Any:
        x, at = self._beside[name], base + self._item_bytes * self._beside_at[name]
        return kind(x.shape, x.dtype, gpudata=at, strides=x.strides)
