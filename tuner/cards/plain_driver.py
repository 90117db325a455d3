"""What runners take of ``pycuda.driver``, by ctypes: the same names, for machines without PyCUDA.

Contexts are primary ones, as all libraries share them. What is allocated is freed when nothing refers to it
any more; the end of the process takes the rest.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from . import driver
from .driver import DriverError, OutOfMemory, call

Error, MemoryError = DriverError, OutOfMemory
NAME_BYTES = 256
#: CU_STREAM_NON_BLOCKING is not asked for: as PyCUDA's, streams wait for the legacy default stream.
DEFAULT_FLAGS = 0


class device_attribute:  # as PyCUDA calls it
    """CUdevice_attribute."""

    MAX_THREADS_PER_BLOCK = 1
    MAX_SHARED_MEMORY_PER_BLOCK = 8
    CLOCK_RATE = 13
    MULTIPROCESSOR_COUNT = 16
    MEMORY_CLOCK_RATE = 36
    GLOBAL_MEMORY_BUS_WIDTH = 37
    L2_CACHE_SIZE = 38
    MAX_THREADS_PER_MULTIPROCESSOR = 39
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81
    MAX_REGISTERS_PER_MULTIPROCESSOR = 82
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    MAX_BLOCKS_PER_MULTIPROCESSOR = 106


def init() -> None:
    """Starts CUDA. Raises `DriverError` where there is no card, OSError where there is no driver."""
    call("cuInit", 0)


def get_driver_version() -> int:
    """Returns the CUDA that the driver serves: 13000 for 13.0."""
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    return version.value


class Device:
    """A card by its ordinal."""

    def __init__(self, ordinal: int) -> None:
        handle = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(handle), ordinal)
        self._handle = handle.value

    @staticmethod
    def count() -> int:
        found = ctypes.c_int()
        call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def name(self) -> str:
        return self._text("cuDeviceGetName")

    def pci_bus_id(self) -> str:
        return self._text("cuDeviceGetPCIBusId")

    def _text(self, function: str) -> str:
        buffer = ctypes.create_string_buffer(NAME_BYTES)
        call(function, buffer, NAME_BYTES, self._handle)
        return buffer.value.decode()

    def compute_capability(self) -> tuple[int, int]:
        return (
            self.get_attribute(device_attribute.COMPUTE_CAPABILITY_MAJOR),
            self.get_attribute(device_attribute.COMPUTE_CAPABILITY_MINOR),
        )

    def get_attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._handle)
        return value.value

    def total_memory(self) -> int:
        size = ctypes.c_size_t()
        call("cuDeviceTotalMem_v2", ctypes.byref(size), self._handle)
        return size.value

    def retain_primary_context(self) -> Context:
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle)
        return Context(context.value, self._handle)


class Context:
    """The primary context of a card, retained until `detach`."""

    def __init__(self, handle: int | None, device: int) -> None:
        self._handle, self._device = handle, device

    def push(self) -> None:
        call("cuCtxPushCurrent_v2", self._handle)

    @staticmethod
    def pop() -> None:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @staticmethod
    def synchronize() -> None:
        call("cuCtxSynchronize")

    def detach(self) -> None:
        call("cuDevicePrimaryCtxRelease_v2", self._device)


class _Owned:
    """A handle that the driver made in the current context, and takes back when nothing refers to this."""

    def __init__(self, handle: int | None, giving_back: str) -> None:
        self.handle = handle or 0
        # A context that is lost refuses, and has taken it back already.
        self._give_back = weakref.finalize(self, getattr(driver.library(), giving_back), self.handle)
        self._give_back.atexit = False


class Stream(_Owned):
    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(handle), DEFAULT_FLAGS)
        super().__init__(handle.value, "cuStreamDestroy_v2")

    def synchronize(self) -> None:
        call("cuStreamSynchronize", self.handle)


class Event(_Owned):
    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(handle), DEFAULT_FLAGS)
        super().__init__(handle.value, "cuEventDestroy_v2")

    def record(self, stream: Stream) -> Event:
        call("cuEventRecord", self.handle, stream.handle)
        return self

    def time_since(self, start: Event) -> float:
        """Milliseconds between two events that have happened."""
        elapsed_ms = ctypes.c_float()
        call("cuEventElapsedTime", ctypes.byref(elapsed_ms), start.handle, self.handle)
        return elapsed_ms.value


class DeviceAllocation(_Owned):
    """Memory of the card; as an integer its address."""

    def __init__(self, num_bytes: int) -> None:
        address = ctypes.c_void_p()
        call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        super().__init__(address.value, "cuMemFree_v2")

    def __int__(self) -> int:
        return self.handle


def mem_alloc(num_bytes: int) -> DeviceAllocation:
    """Returns so much of the card's memory. Raises `OutOfMemory` where it has not that much."""
    return DeviceAllocation(num_bytes)


def mem_get_info() -> tuple[int, int]:
    """Returns the bytes that are free, and all there are."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def memcpy_htod(target: Any, source: np.ndarray) -> None:
    call("cuMemcpyHtoD_v2", int(target), source.ctypes.data, source.nbytes)


def memcpy_dtoh(target: np.ndarray, source: Any) -> None:
    call("cuMemcpyDtoH_v2", target.ctypes.data, int(source), target.nbytes)


def memcpy_dtod(target: Any, source: Any, num_bytes: int) -> None:
    call("cuMemcpyDtoD_v2", int(target), int(source), num_bytes)


def memset_d32(target: Any, value: int, count: int) -> None:
    call("cuMemsetD32_v2", int(target), value, count)


def memset_d8_async(target: Any, value: int, count: int, stream: Stream) -> None:
    call("cuMemsetD8Async", int(target), value, count, stream.handle)
