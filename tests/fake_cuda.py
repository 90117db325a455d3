"""A stand-in for ``pycuda.driver``: device memory is one host array, kernels are Python functions.

It does what the runner relies on and no more: addresses, copies, memsets, streams, events, errors that stick
to the context. ``KERNELS`` maps a symbol to what a launch does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
from flashgen.gen.abi import ARGS_FORMAT
from flashgen.gen.problem import Problem
from flashgen.tuner.dtypes import numpy_dtype

MEMORY_FLOATS = 2**22
BASE_ADDRESS = 0x7F00_0000_0000


class Error(Exception):
    pass


class MemoryError(Error):
    pass


class LogicError(Error):
    pass


class LaunchError(Error):
    pass


class State:
    """The one fake card, reset by each test."""

    def __init__(self) -> None:
        self.memory = np.full(4 * MEMORY_FLOATS, 0xFF, np.uint8)
        self.used = 0
        self.live: dict[int, int] = {}
        self.sticky: Error | None = None
        self.clock_ms = 0.0
        self.flushed_bytes = 0
        self.launches: list[str] = []
        self.durations_ms: dict[str, float] = {}
        self.l2_cold = False
        self.current = False

    def check(self) -> None:
        if self.sticky is not None:
            raise self.sticky
        if not self.current:
            raise LogicError("invalid device context")

    def raw(self, address: int, num_bytes: int, align: int = 1) -> np.ndarray:
        """Device memory as bytes."""
        self.check()
        first = address - BASE_ADDRESS
        if address % align or first < 0 or first + num_bytes > self.memory.size:
            self.sticky = LogicError("cuMemcpy failed: an illegal memory access was encountered")
            raise self.sticky
        return self.memory[first : first + num_bytes]

    def at(self, address: int, count: int, dtype: np.dtype | type = np.uint32) -> np.ndarray:
        """Device memory as so many elements."""
        size = np.dtype(dtype).itemsize
        return self.raw(address, size * count, align=size).view(dtype)


state = State()
KERNELS: dict[str, Callable[[Arguments], None]] = {}
#: What problem each kernel was made for: its columns and types.
PROBLEMS: dict[str, Problem] = {}


class Arguments:
    """AttentionArgs, unpacked, with the tensors as views of device memory."""

    def __init__(self, buffer: bytes, problem: Problem) -> None:
        values = struct.unpack(ARGS_FORMAT, buffer)
        self.pointers, self.strides = values[:5], [values[5 + 3 * i : 8 + 3 * i] for i in range(4)]
        self.batch, self.num_q_heads, self.num_kv_heads, self.seqlen_q, self.seqlen_k = values[17:22]
        self.scale = values[22]
        self.problem, self.dtype = problem, numpy_dtype(problem.dtype)
        self.columns = (problem.head_dim, problem.head_dim, problem.head_dim_v, problem.head_dim_v)

    def tensor(self, index: int) -> np.ndarray:
        """q, k, v or o, by index."""
        heads, rows = (
            (self.num_kv_heads, self.seqlen_k) if index in (1, 2) else (self.num_q_heads, self.seqlen_q)
        )
        shape = (self.batch, heads, rows, self.columns[index])
        strides = (*self.strides[index], 1)
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = state.at(self.pointers[index], extent, self.dtype)
        return np.lib.stride_tricks.as_strided(flat, shape, tuple(flat.itemsize * s for s in strides))

    def lse(self) -> np.ndarray | None:
        if not self.pointers[4]:
            return None
        shape = (self.batch, self.num_q_heads, self.seqlen_q)
        return state.at(self.pointers[4], int(np.prod(shape)), np.float32).reshape(shape)


# -- the module's face ----------------------------------------------------------------------------------


def init() -> None:
    pass


def get_driver_version() -> int:
    return 13000


class device_attribute:
    MULTIPROCESSOR_COUNT = 132
    MAX_SHARED_MEMORY_PER_BLOCK = 49152
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 232448
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 233472
    MAX_THREADS_PER_MULTIPROCESSOR = 2048
    MAX_THREADS_PER_BLOCK = 1024
    MAX_REGISTERS_PER_MULTIPROCESSOR = 65536
    L2_CACHE_SIZE = 1 << 20
    CLOCK_RATE = 1980000
    MEMORY_CLOCK_RATE = 3201000
    GLOBAL_MEMORY_BUS_WIDTH = 6144


class function_attribute:
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class Device:
    num_devices = 1

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    @staticmethod
    def count() -> int:
        return Device.num_devices

    def name(self) -> str:
        return "NVIDIA H200"

    def compute_capability(self) -> tuple[int, int]:
        return 9, 0

    def get_attribute(self, attribute: int) -> int:
        return attribute

    def pci_bus_id(self) -> str:
        return "0000:00:00.0"

    def total_memory(self) -> int:
        return 4 * MEMORY_FLOATS

    def retain_primary_context(self) -> Context:
        return Context()


class Context:
    def push(self) -> None:
        state.current = True

    @staticmethod
    def pop() -> None:
        state.current = False

    def detach(self) -> None:
        pass

    @staticmethod
    def synchronize() -> None:
        state.check()


class Stream:
    def synchronize(self) -> None:
        state.check()


class Event:
    def record(self, stream: Stream) -> Event:
        state.check()
        self.at_ms = state.clock_ms
        return self

    def time_since(self, start: Event) -> float:
        return self.at_ms - start.at_ms


class DeviceAllocation:
    def __init__(self, address: int, size: int) -> None:
        self.address = address
        state.live[address] = size

    def __int__(self) -> int:
        return self.address

    def __del__(self) -> None:
        state.live.pop(self.address, None)


def mem_alloc(num_bytes: int) -> DeviceAllocation:
    state.check()
    floats = -(-num_bytes // 256) * 64
    if not state.live:
        state.used = 0
    if state.used + floats > MEMORY_FLOATS:
        raise MemoryError("cuMemAlloc failed: out of memory")
    address = BASE_ADDRESS + 4 * state.used
    state.used += floats
    return DeviceAllocation(address, num_bytes)


def mem_get_info() -> tuple[int, int]:
    return 4 * (MEMORY_FLOATS - state.used), 4 * MEMORY_FLOATS


def memcpy_htod(address: int, array: np.ndarray) -> None:
    assert array.flags.c_contiguous and array.dtype.kind in "fiu", "PyCUDA takes the types of numpy alone"
    state.raw(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)


def memcpy_dtoh(array: np.ndarray, address: int) -> None:
    assert array.flags.c_contiguous and array.dtype.kind in "fiu", "PyCUDA takes the types of numpy alone"
    array.reshape(-1).view(np.uint8)[:] = state.raw(address, array.nbytes)


def memcpy_dtod(target: int, source: int, num_bytes: int) -> None:
    state.raw(target, num_bytes)[:] = state.raw(source, num_bytes)


def memset_d32(address: int, value: int, count: int) -> None:
    state.at(address, count)[:] = value


def memset_d8_async(address: int, value: int, count: int, stream: Stream) -> None:
    state.raw(address, count)[:] = value
    state.flushed_bytes = count
    state.l2_cold = True
    state.clock_ms += 0.05


class Function:
    num_regs = 128

    def __init__(self, symbol: str) -> None:
        self.symbol = symbol
        self.max_smem_bytes = 48 * 1024

    def set_attribute(self, attribute: int, value: int) -> None:
        assert attribute == function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.max_smem_bytes = value

    def _launch_kernel(
        self, grid: tuple, block: tuple, arguments: bytes, smem_bytes: int, stream: Stream
    ) -> None:
        state.check()
        assert isinstance(grid, tuple) and isinstance(block, tuple) and isinstance(arguments, bytes)
        if smem_bytes > self.max_smem_bytes:
            raise LogicError("cuLaunchKernel failed: invalid argument")
        state.launches.append(self.symbol)
        # A launch that finds its data in L2 looks ten times as fast.
        state.clock_ms += state.durations_ms.get(self.symbol, 1.0) * (1.0 if state.l2_cold else 0.1)
        state.l2_cold = False
        KERNELS[self.symbol](Arguments(arguments, PROBLEMS[self.symbol]))


class Module:
    def get_function(self, symbol: str) -> Function:
        if symbol not in KERNELS:
            raise LogicError("cuModuleGetFunction failed: named symbol not found")
        return Function(symbol)


def module_from_buffer(cubin: bytes) -> Module:
    state.check()
    if cubin[:4] != b"\x7fELF":
        raise LogicError("cuModuleLoadDataEx failed: device kernel image is invalid")
    return Module()
