"""A stand-in for ``pycuda.driver`` and for libcuda: device memory is one host array, kernels are Python
functions.

It does what the runner relies on and no more: addresses, copies, memsets, streams, events, modules, tensor
maps, errors that stick to the context. ``KERNELS`` maps a symbol to what a launch does.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flashgen.gen.arguments import MAP_BYTES, struct_of
from flashgen.gen.problem import Problem
from flashgen.tuner.cards.dtypes import BUFFER_DTYPES, numpy_dtype

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
        #: Of these, by place, those that may begin before the one in front of them ends.
        self.dependent: list[int] = []
        self.grids: list[tuple[int, int]] = []
        self.modules: set[int] = set()
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
#: How many maps each kernel takes, where it takes any.
NUM_MAPS: dict[str, int] = {}


class Arguments:
    """AttentionArgs, unpacked, with the tensors as views of device memory, and the maps beside them."""

    def __init__(self, buffer: bytes, problem: Problem, maps: list[Map]) -> None:
        values = struct_of(problem).unpack(buffer)
        self.maps, self.values = maps, values
        arrays = problem.operation.arrays
        self.pointers = [values[each.name] for each in arrays]
        self.strides = [
            [
                values.get(f"{each.name}_stride_{axis}", 0)
                for axis in ("page" if problem.layout.in_pages(each.rows) else "batch", "head", "row")
            ]
            for each in problem.operation.strided
        ]
        self.batch, self.num_q_heads, self.num_kv_heads, self.seqlen_q, self.seqlen_k = (
            values[name] for name in ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")
        )
        self.num_sequences = self.batch
        if problem.layout.is_packed:  # all rows in one batch
            self.batch = 1
            self.seqlen_q, self.seqlen_k = values["total_q"], values["total_k"]
        self.scale = values["scale"]
        self.problem, self.dtype = problem, numpy_dtype(problem.dtype)
        self.output_dtype = numpy_dtype(problem.output_dtype)
        self.columns = (problem.head_dim, problem.head_dim, problem.head_dim_v, problem.head_dim_v)

    def tensor(self, index: int) -> np.ndarray:
        """q, k, v or o, by index."""
        heads, rows = (
            (self.num_kv_heads, self.seqlen_k) if index in (1, 2) else (self.num_q_heads, self.seqlen_q)
        )
        shape = (self.batch, heads, rows, self.columns[index])
        if index in (1, 2) and self.problem.layout.is_paged:
            shape = (self.values["num_pages"], heads, self.values["page_size"], self.columns[index])
        strides = (*self.strides[index], 1)
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = state.at(self.pointers[index], extent, self.output_dtype if index == 3 else self.dtype)
        return np.lib.stride_tricks.as_strided(flat, shape, tuple(flat.itemsize * s for s in strides))

    def sequences(self) -> dict[str, np.ndarray]:
        """What tells where packed sequences are, by name: views of device memory."""
        counts = {"cu_": self.num_sequences + 1, "seq": self.num_sequences}
        return {
            name: state.at(self.values[name], counts[name[:3]], np.int32)
            for name, _ in self.problem.layout.lengths
            if self.values[name]
        }

    def page_table(self) -> np.ndarray:
        """Which pages each sequence has, without what lies between rows."""
        rows, width, stride = self.num_sequences, self.values["max_pages"], self.values["page_table_stride"]
        flat = state.at(self.values["page_table"], (rows - 1) * stride + width, np.int32)
        return np.lib.stride_tricks.as_strided(flat, (rows, width), (4 * stride, 4))

    def scoring(self) -> dict[str, Any]:
        """What masks and changes of scores read, by name: numbers, and views of device memory."""
        scores = self.problem.scores
        found: dict[str, Any] = {each.name: self.values[each.name] for each in scores.scalars}
        for each in scores.buffers:
            told = dict(each.sizes)
            shape = tuple(
                int(self.values[told[axis]]) if axis in told else max(getattr(self, name) for name in names)
                for axis, names in enumerate(each.axes)
            )
            strides = (*(int(self.values[name]) for name in each.strides), 1)
            extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            flat = state.at(int(self.values[each.name]), extent, BUFFER_DTYPES[each.dtype])
            steps = tuple(flat.itemsize * s for s in strides)
            found[each.name] = np.lib.stride_tricks.as_strided(flat, shape, steps)
        return found

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
    handle = 0x5EA

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


# -- libcuda ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """What a tensor map was made of, the innermost dimension first; strides in bytes."""

    dtype: int
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    promotion: int


class Libcuda:
    """The driver's own face, as ctypes calls it. Handles are positions in lists; a map holds its own."""

    TEXTS: dict[int, bytes] = {  # noqa: RUF012
        1: b"invalid argument",
        200: b"device kernel image is invalid",
        201: b"invalid device context",
        500: b"named symbol not found",
        700: b"an illegal memory access was encountered",
    }
    MAGIC = b"map "

    def __init__(self) -> None:
        self.symbols: list[str] = []
        self.smem_bytes: list[int] = []
        self.large_clusters: set[int] = set()
        self.maps: list[Map] = []

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = self.TEXTS[status]
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        if image[:4] != b"\x7fELF":
            return 200
        module._obj.value = 0x100 + len(self.symbols)
        state.modules.add(module._obj.value)
        return 0

    def cuModuleUnload(self, module: int) -> int:
        assert state.current
        state.modules.remove(module)
        return 0

    def cuModuleGetFunction(self, function: Any, module: int, symbol: bytes) -> int:
        assert module in state.modules
        if symbol.decode() not in KERNELS:
            return 500
        self.symbols.append(symbol.decode())
        self.smem_bytes.append(48 * 1024)
        function._obj.value = len(self.symbols)
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: int) -> int:
        value._obj.value = {4: 128}[attribute]
        return 0

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:
        if attribute == 14:
            self.large_clusters.add(function)
            return 0
        assert attribute == 8
        self.smem_bytes[function - 1] = value
        return 0

    def cuTensorMapEncodeTiled(
        self,
        target: int,
        dtype: int,
        rank: int,
        address: int,
        sizes: Any,
        strides: Any,
        box: Any,
        steps: Any,
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        assert (rank, list(steps), interleave, fill) == (4, [1, 1, 1, 1], 0, 0)
        made = Map(dtype, address, tuple(sizes), tuple(strides), tuple(box), swizzle, promotion)
        item = 4 if dtype == 7 else 2
        if (
            target % 64
            or address % 16
            or any(stride % 16 or stride >= 2**40 for stride in made.strides)
            or not all(1 <= size <= 2**32 for size in made.sizes)
            or not all(1 <= length <= 256 for length in made.box)
            or item * made.box[0] > 16 * 2**swizzle
        ):
            return 1
        self.maps.append(made)
        content = (self.MAGIC + struct.pack("<q", len(self.maps) - 1)).ljust(MAP_BYTES, b"\xee")
        ctypes.memmove(target, content, MAP_BYTES)
        return 0

    def cuLaunchKernelEx(self, configuration: Any, function: int, parameters: Any, extra: Any) -> int:
        asked = configuration._obj
        assert asked.num_attributes == 1
        identity, _, allowed = struct.unpack("iii", ctypes.string_at(asked.attributes, 12))
        assert (identity, allowed) == (6, 1)  # programmatic stream serialization
        status = self.cuLaunchKernel(
            function, *asked.grid, *asked.block, asked.smem_bytes, asked.stream, parameters, extra
        )
        if status == 0:
            state.dependent.append(len(state.launches) - 1)
        return status

    def cuLaunchKernel(self, function: int, *arguments: Any) -> int:
        blocks, gy, gz, threads, by, bz, smem_bytes, stream, parameters, extra = arguments
        assert (gy, gz, by, bz) == (1, 1, 1, 1) and extra is None and stream == Stream.handle
        if state.sticky is not None:
            return 700
        if not state.current:
            return 201
        if smem_bytes > self.smem_bytes[function - 1]:
            return 1
        symbol = self.symbols[function - 1]
        state.launches.append(symbol)
        state.grids.append((blocks, threads))
        # A launch that finds its data in L2 looks ten times as fast.
        state.clock_ms += state.durations_ms.get(symbol, 1.0) * (1.0 if state.l2_cold else 0.1)
        state.l2_cold = False
        maps = [] if len(parameters) == 1 else self._maps_at(parameters[1], NUM_MAPS[symbol])
        packed = ctypes.string_at(parameters[0], struct_of(PROBLEMS[symbol]).num_bytes)
        KERNELS[symbol](Arguments(packed, PROBLEMS[symbol], maps))
        return 0

    def _maps_at(self, address: int, count: int) -> list[Map]:
        """The maps in a parameter, which the launch copies."""
        assert address % 64 == 0
        found = []
        for i in range(count):
            content = ctypes.string_at(address + MAP_BYTES * i, MAP_BYTES)
            assert content.startswith(self.MAGIC)
            found.append(self.maps[struct.unpack_from("<q", content, len(self.MAGIC))[0]])
        return found
