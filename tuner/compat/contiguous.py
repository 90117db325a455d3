"""Arrays whose rows kernels can read: those of other strides in their last axis are copied."""

from __future__ import annotations

from typing import Any

from ...templates.runtime.arrays import _torch_of
from ..front.libraries import library_of


def has_contiguous_rows(array: Any) -> bool:
    """Tells whether numbers of the last axis lie side by side; of what says nothing of strides they do."""
    shape = tuple(getattr(array, "shape", ()))
    if not shape or 0 in shape or shape[-1] == 1:
        return True
    if _torch_of(array) is not None:
        return bool(array.stride(-1) == 1)
    strides = getattr(array, "strides", None)
    return not strides or bool(strides[-1] == array.dtype.itemsize)


def with_contiguous_rows(name: str, array: Any) -> Any:
    """Returns an array with such rows: itself, or a copy, as flash-attn and PyTorch make one."""
    if has_contiguous_rows(array):
        return array
    if _torch_of(array) is not None:
        return array.contiguous()
    return library_of(name, array).ascontiguousarray(array)
