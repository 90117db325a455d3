"""Arrays of every library: what they say of themselves, and more of their kind."""

import ctypes
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .driver import _DEFAULT_STREAMS, _check, _device_of, _driver


class Array(Protocol):
    """A torch tensor, a CuPy, PyCUDA, JAX or numpy array: a type checker knows results to be of q's type."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class _View(NamedTuple):
    """An array as (batch, heads, seqlen). Strides are in elements, 0 along dimensions of one entry."""

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    device: int | None
    dtype: str
    head_dim: int


#: As the CUDA array interface calls them. It has no name for others ('<V2' is any two bytes): the array's
#: dtype tells.
_TYPESTRS = {"<f4": "float32", "<f2": "float16"}
_UNNAMED_TYPES = ("bfloat16", "float8_e4m3fn")


def _torch_of(array: Any) -> Any:
    """The torch module where `array` is a tensor; importing it is left to who made the tensor."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def _describe(tensor: Any) -> tuple[Any, ...]:
    """A tensor's type, shape, strides and device, as `_read` tells them of others."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _read(name: str, array: Any) -> tuple[int, tuple[Any, ...], int | None]:
    """An array's address, its type, shape, strides and device, and the stream on which its data is ready, if
    any."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(
            f"{name} is a {_kind(array)}; pass torch tensors, CuPy arrays, PyCUDA GPUArrays, numpy arrays or "
            "others with __cuda_array_interface__ or, without out=, __dlpack__"
        )
    address, read_only = interface["data"]
    if read_only and name == "out":
        raise ValueError("out is read-only")
    typestr = interface["typestr"]
    type_name = _TYPESTRS.get(typestr)
    if type_name is None:
        type_name = getattr(getattr(array, "dtype", None), "name", typestr)
        type_name = type_name if type_name in _UNNAMED_TYPES else typestr
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    strides = None if strides is None else tuple(strides)
    device = _device_of(name, address) if address and 0 not in shape else None
    return address, (type_name, shape, strides, device), interface.get("stream")


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def _stepped(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """The strides without those that are never stepped, which may be anything."""
    (n0, n1, n2), (s0, s1, s2) = shape, strides
    return (s0 if n0 > 1 else 0, s1 if n1 > 1 else 0, s2 if n2 > 1 else 0)


def _kind(array: Any) -> str:
    kind = type(array)
    return f"{kind.__module__}.{kind.__qualname__}"


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _can_allocate(q: Any) -> bool:
    """Whether `_empty` knows how to make more of q's kind."""
    return isinstance(q, _Buffer) or _library(q) in ("cupy", "pycuda")


def _check_kinds(q: Any, others: tuple[tuple[str, Any], ...]) -> None:
    """torch tensors keep among themselves: what is mixed could neither be ordered nor returned clearly."""
    tensors = _torch_of(q) is not None
    for name, array in others:
        if array is None or type(array) is type(q):
            continue
        if (_torch_of(array) is not None) != tensors or isinstance(array, np.ndarray):
            raise TypeError(f"q is a {_kind(q)}, but {name} a {_kind(array)}; pass arrays of one library")


def _check_shapes(query: _View, key: _View, value: _View, key_dtype: str) -> tuple[int, int]:
    """The number of key/value heads and keys."""
    batch, heads, _ = query.shape
    kv_batch, kv_heads, seqlen_k = key.shape
    if value.shape != key.shape:
        raise ValueError(f"k and v differ in (batch, heads, seqlen): {key.shape} and {value.shape}")
    if not key_dtype == key.dtype == value.dtype:
        wanted = "of one type" if key_dtype == query.dtype else f"{query.dtype} beside {key_dtype}"
        raise TypeError(f"q is {query.dtype}, k {key.dtype}, v {value.dtype}; they must be {wanted}")
    if query.head_dim != key.head_dim:
        raise ValueError(f"q has the head dim {query.head_dim}, k has {key.head_dim}; they must be equal")
    if kv_batch != batch:
        raise ValueError(f"q has the batch {batch}, k and v have {kv_batch}; they must be equal")
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}; theirs must divide q's")
    return kv_heads, seqlen_k


def _check_output(output: _View, query: _View, dtype: str) -> None:
    if output.shape != query.shape:
        raise ValueError(
            f"out has (batch, heads, seqlen) {output.shape}, q has {query.shape}; they must be equal"
        )
    if output.dtype != dtype:
        raise TypeError(f"out is {output.dtype}, q {query.dtype}; out must be {dtype}")
    if 0 in output.shape:  # nothing to write
        return
    if any(n > 1 and stride == 0 for n, stride in zip(output.shape, output.strides, strict=True)):
        raise ValueError(f"out overlaps itself, its strides are {output.strides}; pass a dense array")


def _dense_like(query: _View, head_dim: int, bshd: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a dense array with q's order of dimensions and v's head dim."""
    lengths, steps = list(query.shape), list(query.strides)
    if bshd:
        lengths[1:], steps[1:] = lengths[:0:-1], steps[:0:-1]
    # Outermost first: dimensions without a stride, then by falling stride.
    order = sorted(range(3), key=lambda i: (bool(steps[i] != 0), -abs(steps[i])))
    strides, step = [0, 0, 0, 1], head_dim
    for i in reversed(order):
        strides[i] = step
        step *= max(lengths[i], 1)
    return (*lengths, head_dim), tuple(strides)


def _empty(
    q: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], side_stream: int | None
) -> Any:
    """An array of that type and q's kind on q's device; strides in elements.

    CuPy hands out memory in the order of its current stream; `side_stream` is the launch's where that is
    another."""
    if isinstance(q, _Buffer):
        return _Buffer(shape, q.host_type if dtype == q.dtype_name else np.dtype(dtype), dtype)
    library = _library(q)
    if library == "cupy":
        cupy = importlib.import_module("cupy")
        order = sorted(range(len(shape)), key=lambda i: -strides[i])
        dense = tuple(shape[i] for i in order)
        with q.device:
            if side_stream is None:
                memory = cupy.empty(dense, dtype=dtype)
            else:
                default = side_stream in _DEFAULT_STREAMS
                with cupy.cuda.Stream.null if default else cupy.cuda.ExternalStream(side_stream):
                    memory = cupy.empty(dense, dtype=dtype)
        return memory.transpose([order.index(i) for i in range(len(shape))])
    if library == "pycuda":
        gpu_array = importlib.import_module("pycuda.gpuarray").GPUArray
        steps = tuple(np.dtype(dtype).itemsize * s for s in strides)
        return gpu_array(shape, np.dtype(dtype), allocator=q.allocator, strides=steps)
    raise TypeError(
        f"q is a {_kind(q)}, which this module cannot allocate: pass out= and leave return_lse, or pass "
        "torch, CuPy, PyCUDA or numpy arrays"
    )


class _Buffer:
    """Device memory of its own, dense, freed by `free`; `host_type` is what numpy holds such elements as,
    `dtype` what they are."""

    def __init__(self, shape: tuple[int, ...], host_type: np.dtype[Any], dtype: str) -> None:
        if not host_type.isnative:
            raise TypeError(
                f"an array is {host_type.str}, whose bytes stand in another order than the GPU's: pass "
                f"x.astype({host_type.newbyteorder('=').name!r})"
            )
        self.shape, self.host_type, self.dtype_name = shape, host_type, dtype
        self.nbytes = host_type.itemsize * math.prod(shape)
        address = ctypes.c_void_p()
        if self.nbytes:
            status = _driver().cuMemAlloc_v2(ctypes.byref(address), self.nbytes)
            _check(status, f"allocating {self.nbytes} bytes on the GPU")
        self.address = address.value or 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": self.shape, "typestr": self.dtype_name, "data": data, "version": 3}

    def write(self, array: NDArray[Any], stream: int) -> None:
        """Copies a contiguous array in; it must live until the stream has got there."""
        if self.nbytes:
            status = _driver().cuMemcpyHtoDAsync_v2(self.address, array.ctypes.data, self.nbytes, stream)
            _check(status, "copying to the GPU")

    def read(self, stream: int) -> NDArray[Any]:
        array: NDArray[Any] = np.empty(self.shape, self.host_type)
        if self.nbytes:
            status = _driver().cuMemcpyDtoHAsync_v2(array.ctypes.data, self.address, self.nbytes, stream)
            _check(status, "copying from the GPU")
        _check(_driver().cuStreamSynchronize(stream), "running the kernel")
        return array

    def free(self) -> None:
        if self.address:
            _driver().cuMemFree_v2(self.address)
            self.address = 0
