"""Tensors of PyTorch on the host as numpy's arrays, and back, without copies."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

#: Types that numpy has no name for: as which bits they are passed, and what these are.
_UNNAMED = {"bfloat16": ("int16", ml_dtypes.bfloat16), "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn)}


def as_arrays(torch: Any, value: Any) -> Any:
    """Returns tensors as arrays over the same memory, pairs of them too, and everything else as it is. Raises
    ValueError for tensors that are not on the host."""
    if isinstance(value, tuple | list):
        return type(value)(as_arrays(torch, each) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "cpu":
        raise ValueError(
            f"a tensor is on the device {str(value.device)!r}, which is no memory of an emulated card: pass "
            "tensor.cpu(), or leave device= out"
        )
    value = value.detach()
    name = str(value.dtype).removeprefix("torch.")
    if name in _UNNAMED:
        bits, dtype = _UNNAMED[name]
        return value.view(getattr(torch, bits)).numpy().view(dtype)
    return value.numpy()


def as_tensor(torch: Any, array: np.ndarray) -> Any:
    """Returns an array as a tensor over the same memory."""
    name = array.dtype.name
    if name in _UNNAMED:
        bits = torch.from_numpy(array.view(_UNNAMED[name][0]))
        return bits.view(getattr(torch, name))
    return torch.from_numpy(array)
