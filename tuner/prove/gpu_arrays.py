"""Arrays in given memory of a card, as emitted modules take them: PyCUDA's, or without it their like.

Modules know an array by the library that its type is from, and make more of its kind: of PyCUDA's by the
array's own allocator, which is how a proof says where they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

#: Where modules look for the type of PyCUDA's arrays.
_PYCUDA = "pycuda.gpuarray"


class PlainArray:
    """What modules take of a ``pycuda.gpuarray.GPUArray``: memory of a card, in bytes by ``strides``, which
    ``allocator`` returns the address of where ``gpudata`` is not given."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        allocator: Callable[[int], int] | None = None,
        gpudata: int | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.shape, self.dtype, self.allocator = tuple(shape), np.dtype(dtype), allocator
        dense = np.empty(self.shape, self.dtype)  # for its strides and size
        self.strides = dense.strides if strides is None else tuple(strides)
        if gpudata is None:
            if allocator is None:
                raise ValueError("neither gpudata nor an allocator is given: an array needs memory")
            gpudata = allocator(dense.nbytes)
        self.gpudata = gpudata

    def reshape(self, shape: tuple[int, ...]) -> PlainArray:
        """Returns a view of a dense array as one of another shape."""
        return PlainArray(shape, self.dtype, self.allocator, self.gpudata)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = {"shape": self.shape, "strides": self.strides, "typestr": self.dtype.str}
        return {**told, "data": (self.gpudata, False), "stream": None, "version": 3}


PlainArray.__module__ = _PYCUDA  # by which modules know it


def array_kind() -> Any:
    """Returns the type of arrays on which modules are called. Where PyCUDA is not installed it is
    `PlainArray`, which is made known to this process's modules in its place."""
    try:
        from pycuda.gpuarray import GPUArray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "pycuda":
            raise
    else:
        return GPUArray
    stand_in = ModuleType(_PYCUDA, "What modules take of PyCUDA's arrays, where it is not installed.")
    stand_in.GPUArray = PlainArray  # type: ignore[attr-defined]
    # By its full name alone: PyCUDA itself is as missing as it was.
    sys.modules[_PYCUDA] = stand_in
    return PlainArray
