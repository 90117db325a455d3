"""The CUDA driver by ctypes, where PyCUDA does not reach: kernels whose arguments the driver puts in place
itself, and maps for the copy engine.

PyCUDA launches with one packed buffer, in which an argument's place depends on the toolkit that compiled the
kernel. Contexts, memory, streams and events are PyCUDA's or, without it, those of `plain_driver`; all here
works in the context that they made current.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from ...gen.arguments import MAP_ALIGNMENT, MAP_BYTES, MAP_STRIDE_END, MapDescription

#: CUfunction_attribute.
NUM_REGS, MAX_DYNAMIC_SMEM, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 4, 8, 14
#: CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion, the last two by bytes.
MAP_DTYPES = {"e4m3": 0, "u8": 0, "f16": 6, "f32": 7, "bf16": 9}
MAP_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}
MAP_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
#: CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: outside of the array zeros are read.
NO_INTERLEAVE, ZERO_FILL = 0, 0

#: CUDA_ERROR_OUT_OF_MEMORY.
OUT_OF_MEMORY = 2

_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_SIZE = ctypes.c_size_t
_SIGNATURES: dict[str, list[Any]] = {
    "cuCtxPopCurrent_v2": [_POINTER],
    "cuCtxPushCurrent_v2": [_POINTER],
    "cuCtxSynchronize": [],
    "cuDeviceGet": [_POINTER, _INT],
    "cuDeviceGetAttribute": [_POINTER, _INT, _INT],
    "cuDeviceGetCount": [_POINTER],
    "cuDeviceGetName": [_POINTER, _INT, _INT],
    "cuDeviceGetPCIBusId": [_POINTER, _INT, _INT],
    "cuDevicePrimaryCtxRelease_v2": [_INT],
    "cuDevicePrimaryCtxRetain": [_POINTER, _INT],
    "cuDeviceTotalMem_v2": [_POINTER, _INT],
    "cuDriverGetVersion": [_POINTER],
    "cuEventCreate": [_POINTER, _UINT],
    "cuEventDestroy_v2": [_POINTER],
    "cuEventElapsedTime": [_POINTER, _POINTER, _POINTER],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuFuncGetAttribute": [_POINTER, _INT, _POINTER],
    "cuFuncSetAttribute": [_POINTER, _INT, _INT],
    "cuGetErrorString": [_INT, _POINTER],
    "cuInit": [_UINT],
    "cuLaunchKernel": [_POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER],
    "cuLaunchKernelEx": [_POINTER, _POINTER, _POINTER, _POINTER],
    "cuMemAlloc_v2": [_POINTER, _SIZE],
    "cuMemFree_v2": [_POINTER],
    "cuMemGetInfo_v2": [_POINTER, _POINTER],
    "cuMemcpyDtoD_v2": [_POINTER, _POINTER, _SIZE],
    "cuMemcpyDtoH_v2": [_POINTER, _POINTER, _SIZE],
    "cuMemcpyHtoD_v2": [_POINTER, _POINTER, _SIZE],
    "cuMemsetD32_v2": [_POINTER, _UINT, _SIZE],
    "cuMemsetD8Async": [_POINTER, ctypes.c_ubyte, _SIZE, _POINTER],
    "cuModuleGetFunction": [_POINTER, _POINTER, ctypes.c_char_p],
    "cuModuleLoadData": [_POINTER, ctypes.c_char_p],
    "cuModuleUnload": [_POINTER],
    "cuStreamCreate": [_POINTER, _UINT],
    "cuStreamDestroy_v2": [_POINTER],
    "cuStreamSynchronize": [_POINTER],
    # map, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill
    "cuTensorMapEncodeTiled": [_POINTER, _INT, _UINT, *[_POINTER] * 5, *[_INT] * 4],
}


class DriverError(Exception):
    """A call that the driver refused, or an earlier launch that failed: ``cuLaunchKernel failed: ...``."""


class OutOfMemory(DriverError):
    """The card has not as much memory as was asked for."""


@cache
def library() -> Any:
    """Returns libcuda, which whoever made the context has initialised, with the argument types of the
    functions used. Raises OSError where there is none."""
    found = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        # Drivers before CUDA 12 know no maps, and need none: they are of cards that have no copy engine.
        function = getattr(found, name, None)
        if function is not None:
            function.argtypes = arguments
    return found


def call(name: str, *arguments: Any) -> None:
    """Calls the driver's function of that name. Raises `DriverError` where it fails or is not there."""
    driver = library()
    function = getattr(driver, name, None)
    if function is None:
        raise DriverError(f"the NVIDIA driver has no {name}; install one for CUDA 12.0 or newer")
    status = function(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        kind = OutOfMemory if status == OUT_OF_MEMORY else DriverError
        raise kind(f"{name} failed: {(text.value or b'error ' + str(status).encode()).decode()}")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a number for a value."""

    _fields_ = (("id", _INT), ("padding", _INT), ("value", _INT * 16))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", _UINT * 3),
        ("block", _UINT * 3),
        ("smem_bytes", _UINT),
        ("stream", _POINTER),
        ("attributes", _POINTER),
        ("num_attributes", _UINT),
    )


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_DEPENDENT = _Attribute(6, 0, (1,))


class Function:
    """A kernel of a cubin, loaded in the current context until nothing refers to it any more.

    Raises:
        DriverError: the image is damaged or for another card, or has no such kernel.
    """

    def __init__(self, image: bytes, symbol: str) -> None:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), image)
        self._unload = weakref.finalize(self, library().cuModuleUnload, module.value)
        # The end of the process takes the context, and the module with it.
        self._unload.atexit = False
        call("cuModuleGetFunction", ctypes.byref(function), module.value, symbol.encode())
        self.handle = function.value

    @property
    def registers(self) -> int:
        """The registers that a thread of the kernel takes, as the driver reports them. Raises
        `DriverError`."""
        value = ctypes.c_int()
        call("cuFuncGetAttribute", ctypes.byref(value), NUM_REGS, self.handle)
        return value.value

    def allow_smem(self, num_bytes: int) -> None:
        """Allows that much dynamic shared memory per block. Raises `DriverError`."""
        call("cuFuncSetAttribute", self.handle, MAX_DYNAMIC_SMEM, num_bytes)

    def allow_large_clusters(self) -> None:
        """Allows more blocks per cluster than every card forms. Raises `DriverError`."""
        call("cuFuncSetAttribute", self.handle, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

    def launch(
        self,
        blocks: int,
        threads: int,
        arguments: Parameters,
        smem_bytes: int,
        stream: int,
        *,
        dependent: bool = False,
    ) -> None:
        """Enqueues the kernel once; a ``dependent`` one may begin before the launch in front of it on the
        stream has ended, for which it waits itself. Raises `DriverError`."""
        if dependent:
            configuration = _Configuration(
                (blocks, 1, 1), (threads, 1, 1), smem_bytes, stream, ctypes.addressof(_DEPENDENT), 1
            )
            call("cuLaunchKernelEx", ctypes.byref(configuration), self.handle, arguments.addresses, None)
            return
        call(
            "cuLaunchKernel",
            self.handle,
            *(blocks, 1, 1),
            *(threads, 1, 1),
            *(smem_bytes, stream, arguments.addresses, None),
        )


class Parameters:
    """A kernel's arguments in host memory, each at an address that suits a map, and the array of their
    addresses that a launch takes. May be used for any number of launches."""

    def __init__(self, arguments: Sequence[bytes]) -> None:
        self._memory = [_Aligned(each) for each in arguments]
        self.addresses = (ctypes.c_void_p * len(arguments))(*(each.address for each in self._memory))


class _Aligned:
    """Bytes in host memory at a multiple of `MAP_ALIGNMENT`."""

    def __init__(self, content: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(len(content) + MAP_ALIGNMENT)
        start = ctypes.addressof(self._buffer)
        self.address = start + -start % MAP_ALIGNMENT
        self._size = len(content)
        ctypes.memmove(self.address, content, len(content))

    def content(self) -> bytes:
        return ctypes.string_at(self.address, self._size)


def encode_maps(maps: Sequence[MapDescription]) -> bytes:
    """Returns the maps' bytes one after the other, as a kernel takes them. Raises `DriverError` naming what
    was refused."""
    return b"".join(map(_encode_map, maps))


def _encode_map(described: MapDescription) -> bytes:
    if not all(0 <= stride < MAP_STRIDE_END for stride in described.strides):
        raise DriverError(f"no map can be made of {described}: strides must be from 0 to below 2^40 bytes")
    target = _Aligned(bytes(MAP_BYTES))
    rank = len(described.sizes)
    sizes = (ctypes.c_uint64 * rank)(*described.sizes)
    strides = (ctypes.c_uint64 * (rank - 1))(*described.strides)
    ones = [1] * rank
    box = (ctypes.c_uint32 * rank)(described.columns, described.rows, *ones[2:])
    steps = (ctypes.c_uint32 * rank)(*ones)
    try:
        call(
            "cuTensorMapEncodeTiled",
            target.address,
            MAP_DTYPES[described.dtype],
            rank,
            described.address,
            sizes,
            strides,
            box,
            steps,
            NO_INTERLEAVE,
            MAP_SWIZZLES[described.swizzle],
            MAP_PROMOTIONS[described.l2_promotion],
            ZERO_FILL,
        )
    except DriverError as error:
        raise DriverError(f"{error}, for a map of {described}") from None
    return target.content()
