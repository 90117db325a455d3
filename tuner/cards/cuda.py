"""A CUDA card behind the `Device` protocol, by PyCUDA where it is installed and, for kernels themselves and
without PyCUDA for all else, by the driver.

`CudaDevice` only describes a card. `CudaRunner` holds a context on it and lives in a worker process: after an
illegal address or a trap the context, and with it the process, is of no further use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ...gen.append import ROTATED
from ...gen.arguments import PLAN, TILE_LISTS, Arguments, describe_maps
from ...gen.handover.workspace import WORKSPACE
from ...gen.launch import LISTS_ROLE, MAIN_ROLE, PLAN_ROLE, Launch
from ...gen.limits import KIB, PRESETS, WARP, DeviceLimits
from ...gen.problem import MAX_GRID, Problem
from ..build.compile import NvccToolchain, NvrtcToolchain, cuda_toolchain
from ..build.protocol import Build
from ..errors import FlashgenError, LaunchError
from . import nvml
from .beside import read_beside
from .device import Timing
from .driver import DriverError, Function, Parameters, encode_maps
from .dtypes import inputs_of, numpy_dtype, require_inputs
from .guarded_memory import FLOAT32, GuardedImage, contiguous_strides, output_strides
from .score_values import of_four_axes
from .sequences import rows_of_sequences
from .timed_tensors import TimedTensors, draw_tensors

MIN_FLUSH_BYTES = 32 * 2**20
#: Device time spent warming up: clocks rise within it.
WARM_UP_MS = 10.0
MIN_REPEATS, MAX_REPEATS = 3, 200
#: A candidate slower than the best by this factor is stopped after the fewest launches.
BEATEN_FACTOR = 2.0
#: A candidate this far behind the best needs no finer figure than a few more launches give.
BEHIND_FACTOR, BEHIND_REPEATS = 1.25, 10
NO_GPU = (
    "no CUDA device was found{why}; check `nvidia-smi`, or emulate one, whose times are predictions: "
    '`--device sim:h200`, in Python device="sim:h200" (`flashgen devices` lists others)'
)


@cache
def _driver() -> Any:
    """PyCUDA's driver module, where it is not installed `plain_driver`, initialised. Raises FlashgenError
    when the driver is absent."""
    try:
        import pycuda.driver as cuda  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "pycuda":
            raise FlashgenError(f"PyCUDA cannot be imported: {error}; install what it needs") from error
        from . import plain_driver as cuda
    except ImportError as error:
        if "libcuda" in str(error):
            raise FlashgenError(NO_GPU.format(why=f" ({error})")) from error
        raise FlashgenError(
            f"PyCUDA cannot be imported: {error}; reinstall it against this machine's CUDA toolkit "
            "(`pip install --no-cache-dir --force-reinstall --no-binary pycuda pycuda`)"
        ) from error
    try:
        cuda.init()
    except (cuda.Error, OSError) as error:
        raise FlashgenError(NO_GPU.format(why=f" ({error})")) from error
    return cuda


@dataclass(frozen=True)
class CudaDevice:
    """One card of this machine, by its CUDA ordinal."""

    ordinal: int
    limits: DeviceLimits
    driver: str
    pci_bus_id: str
    memory_bytes: int

    @property
    def spec(self) -> str:
        return str(self.ordinal)

    @property
    def predicted(self) -> bool:
        return False

    @property
    def lock_key(self) -> str:
        return self.pci_bus_id

    def toolchain(self) -> NvccToolchain | NvrtcToolchain:
        return cuda_toolchain(self.limits.arch)

    def open(self) -> CudaRunner:
        return CudaRunner(self)


def count_devices() -> int:
    """Counts the CUDA devices of this machine. Raises FlashgenError when the driver is absent."""
    return _driver().Device.count()


def find_device(ordinal: int) -> CudaDevice:
    """Returns the card with that ordinal, its limits read from the driver.

    Raises:
        FlashgenError: the driver or that card is absent.
    """
    cuda = _driver()
    count = cuda.Device.count()
    if count == 0:
        raise FlashgenError(NO_GPU.format(why=""))
    if not 0 <= ordinal < count:
        devices = "device 0" if count == 1 else f"devices 0 to {count - 1}"
        raise FlashgenError(f"there is no CUDA device {ordinal}; this machine has {devices}")
    card = cuda.Device(ordinal)
    major, minor = card.compute_capability()
    attributes = cuda.device_attribute

    def read(name: str, default: int = 0) -> int:
        """Returns an attribute by name; the default where PyCUDA or the driver does not know it."""
        attribute = getattr(attributes, name, None)
        if attribute is None:
            return default
        try:
            return int(card.get_attribute(attribute)) or default
        except cuda.Error:
            return default

    arch = 10 * major + minor
    alike = next((p for p in PRESETS.values() if p.arch == arch), None)
    # Clocks in kHz, bus width in bits; memory moves data on both edges.
    bandwidth_gbps = 2 * read("MEMORY_CLOCK_RATE") * read("GLOBAL_MEMORY_BUS_WIDTH") / 8 / 1e6
    limits = DeviceLimits(
        name=card.name(),
        arch=arch,
        num_sms=read("MULTIPROCESSOR_COUNT"),
        smem_per_block=read(
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", read("MAX_SHARED_MEMORY_PER_BLOCK", 48 * KIB)
        ),
        smem_per_sm=read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", 48 * KIB),
        max_threads_per_sm=read("MAX_THREADS_PER_MULTIPROCESSOR", 1024),
        max_blocks_per_sm=read("MAX_BLOCKS_PER_MULTIPROCESSOR", alike.max_blocks_per_sm if alike else 16),
        l2_bytes=read("L2_CACHE_SIZE"),
        clock_mhz=read("CLOCK_RATE") // 1000,
        dram_gbps=round(bandwidth_gbps),
        registers_per_sm=read("MAX_REGISTERS_PER_MULTIPROCESSOR", 65536),
        max_threads_per_block=read("MAX_THREADS_PER_BLOCK", 1024),
    )
    return CudaDevice(ordinal, limits, _driver_version(cuda), card.pci_bus_id(), card.total_memory())


def _driver_version(cuda: Any) -> str:
    """The driver's own version and the CUDA it serves: "580.95.05 (CUDA 13.0)"."""
    number = cuda.get_driver_version()
    served = f"CUDA {number // 1000}.{number % 1000 // 10}"
    version = nvml.driver_version()
    return f"{version} ({served})" if version else served


# -- the runner -----------------------------------------------------------------------------------------


class CudaRunner:
    """Runs cubins in the device's primary context, from the thread that created it."""

    def __init__(self, device: CudaDevice) -> None:
        self._cuda = _driver()
        self._device = device
        try:
            card = self._cuda.Device(device.ordinal)
            if card.pci_bus_id() != device.pci_bus_id:
                raise FlashgenError(
                    f"CUDA device {device.ordinal} was {device.limits.name} at {device.pci_bus_id} and is "
                    f"now {card.name()} at {card.pci_bus_id()}; set CUDA_VISIBLE_DEVICES before CUDA is used"
                )
            self._context = card.retain_primary_context()
            self._context.push()
        except self._cuda.Error as error:
            raise FlashgenError(
                f"CUDA device {device.ordinal} ({device.limits.name}) cannot be used: {error}"
            ) from error
        self._stream: Any = self._cuda.Stream()
        self._monitor = nvml.CardMonitor(device.pci_bus_id)
        self._loaded: dict[tuple[str, str], Function] = {}
        self._tensors: TimedTensors | None = None
        self._flush: Any = None
        self._arena: Any = None
        self._arena_floats = 0
        self._broken = False

    @property
    def alive(self) -> bool:
        """Whether the context still works; after a sticky error it does not."""
        return not self._broken

    def close(self) -> None:
        """Frees everything that the runner holds. After a sticky error nothing can be freed: end the
        process."""
        if self._broken:
            return
        self._loaded.clear()
        self._tensors = self._flush = self._arena = self._stream = None
        self._context.pop()
        self._context.detach()
        self._broken = True

    # -- validation --------------------------------------------------------------------------------------

    def attend(
        self,
        build: Build,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        scale: float,
        want_lse: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Runs a kernel on copies of arrays and returns o and, if wanted, the log-sum-exp, as `Runner.attend`
        says. Every tensor stands alone between poisoned guards, so that a stray read that matters yields NaN
        and a stray write is seen."""
        problem = build.kernel.problem
        require_inputs(problem, q, k, v)
        o_shape, lse_shape = (*q.shape[:3], v.shape[3]), q.shape[:3]
        outputs = {"o": (o_shape, output_strides(q, v.shape[3]), numpy_dtype(problem.output_dtype))}
        if want_lse:
            outputs["lse"] = (lse_shape, contiguous_strides(lse_shape), FLOAT32)
        given = inputs_of(problem, q, k, v)
        found = self._compute(build, given, outputs, scale=scale, values=values)
        return found["o"], found.get("lse")

    def differentiate(
        self,
        build: Build,
        inputs: Mapping[str, np.ndarray],
        *,
        scale: float,
        values: Mapping[str, Any] | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs a kernel of the backward pass on copies of arrays and returns the gradients, as
        `Runner.differentiate` says; between guards as `attend` does."""
        require_inputs(build.kernel.problem, *(inputs[name] for name in "qkv"))
        outputs = {
            f"d{name}": (inputs[name].shape, output_strides(inputs[name]), inputs[name].dtype)
            for name in "qkv"
        }
        return self._compute(build, inputs, outputs, scale=scale, values=values)

    def _compute(
        self,
        build: Build,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], np.dtype]],
        *,
        scale: float,
        values: Mapping[str, Any] | None,
    ) -> dict[str, np.ndarray]:
        """Runs a kernel on guarded copies of arrays, and returns what it made of outputs of such shapes,
        strides in elements, and types; caches to which it appends are changed in place."""
        problem, q = build.kernel.problem, inputs["q"]
        if self._tensors is not None and self._tensors.problem != problem:
            # Another problem's turn: the largest ones would not fit beside each other.
            self._tensors = None
        image = GuardedImage(q.dtype)
        caches = ("k", "v") if problem.append is not None else ()  # which are written
        placed = {
            name: image.add_cache(name, x) if name in caches else image.add_input(x, x.dtype)
            for name, x in inputs.items()
        }
        for name, (shape, strides, dtype) in outputs.items():
            of = problem.operation.array(name).rows[-1]
            rows = rows_of_sequences(problem, values, shape[2], of)
            word = "the log-sum-exp" if name == "lse" else name
            placed[name] = image.add_output(word, shape, strides, dtype, rows)
        beside = read_beside(problem, q, inputs["k"], values)
        buffers = {name: image.add_buffer(array) for name, array in beside.arrays.items()}
        for name, array in beside.gradients.items():
            whole = of_four_axes(array)
            strides = tuple(stride // array.itemsize for stride in whole.strides)
            placed[name] = image.add_output(name, whole.shape, strides, array.dtype)
        if problem.append is not None and problem.append.rotary:
            buffers[ROTATED], _ = image.add_cache("rotated queries", np.zeros(q.size, q.dtype))
        before = image.before()
        after = np.empty_like(before)
        with self._launch_errors(build):
            base = self._arena_of(image.floats)
            places = {**{name: at for name, (at, _) in placed.items()}, **buffers}
            arguments = beside.arguments(
                {name: base + q.itemsize * at for name, at in places.items()},
                {name: strides for name, (_, strides) in placed.items()},
                scale,
            )
            launch = self._launcher(build, problem.name, arguments)
            self._cuda.memcpy_htod(base, before)
            launch()
            self._stream.synchronize()
            self._cuda.memcpy_dtoh(after, base)
        found = image.outputs(before, after)
        for name, grown in zip(caches, image.caches(after), strict=False):
            inputs[name][...] = grown
        shapes = {name: array.shape for name, array in beside.gradients.items()}
        names = (*outputs, *beside.gradients)
        return {
            name: array.reshape(shapes.get(name, array.shape))
            for name, array in zip(names, found, strict=True)
        }

    def _arena_of(self, floats: int) -> int:
        """The address of device memory for at least so many floats, kept between calls, until another problem
        is measured."""
        if self._arena is None or self._arena_floats < floats:
            self._arena = None
            size = max(floats, 2**20)
            self._arena = self._allocate(4 * size, "the tensors of a validation")
            self._arena_floats = size
        return int(self._arena)

    # -- timing ------------------------------------------------------------------------------------------

    def measure(
        self, build: Build, problem: Problem, *, best_us: float | None = None, budget_ms: float = 200.0
    ) -> Timing:
        """Times launches of a kernel on random inputs, as `Runner.measure` says. L2 is flushed before each
        launch; a pair of CUDA events times it."""
        interval = self._monitor.begin()
        with self._launch_errors(build):
            launch = self._launcher(build, problem.name, self._tensors_of(problem).arguments)
            estimate_ms = self._warm_up(launch)
            if best_us is not None and 1000 * estimate_ms > 2 * BEATEN_FACTOR * best_us:
                return Timing((1000 * estimate_ms,), True, interval.disturbance())
            times_us = self._time([launch] * MIN_REPEATS)
            typical_us = float(np.median(times_us))
            if best_us is not None and typical_us > BEATEN_FACTOR * best_us:
                return Timing(tuple(times_us), True, interval.disturbance())
            affordable = int(budget_ms / max(estimate_ms + self._flush_ms(), 1e-3))
            repeats = min(MAX_REPEATS, max(MIN_REPEATS, affordable))
            if best_us is not None and typical_us > BEHIND_FACTOR * best_us:
                repeats = min(repeats, BEHIND_REPEATS)
            times_us += self._time([launch] * (repeats - MIN_REPEATS))
        return Timing(tuple(times_us), False, interval.disturbance())

    def measure_interleaved(self, builds: list[Build], problem: Problem, *, rounds: int) -> list[Timing]:
        """Times several kernels in turns, as `Runner.measure_interleaved` says. Every other round goes
        backwards, so that no kernel always follows the same one."""
        interval = self._monitor.begin()
        times: list[list[float]] = [[] for _ in builds]
        launches: list[Callable[[], None]] = []
        for build in builds:
            with self._launch_errors(build):
                launches.append(self._launcher(build, problem.name, self._tensors_of(problem).arguments))
                self._warm_up(launches[-1])
        order = list(range(len(builds)))
        for _ in range(rounds):
            with self._launch_errors(builds[0]):
                for index, time_us in zip(order, self._time([launches[i] for i in order]), strict=True):
                    times[index].append(time_us)
            order.reverse()
        busy = interval.disturbance()
        return [Timing(tuple(each), False, busy) for each in times]

    def _warm_up(self, launch: Callable[[], None]) -> float:
        """Launches until the clocks have risen; milliseconds of the last launch."""
        spent_ms = 0.0
        while True:
            last_ms = self._time([launch])[0] / 1000
            # The first launch loads the kernel: only a slow one may serve as the estimate.
            if last_ms >= WARM_UP_MS or spent_ms >= WARM_UP_MS:
                return last_ms
            spent_ms += last_ms + self._flush_ms()

    def _time(self, launches: list[Callable[[], None]]) -> list[float]:
        """Microseconds of each launch with a cold L2. All are enqueued at once: while the card flushes, the
        host gets ahead, and no launch latency enters the times."""
        cuda = self._cuda
        flush = self._flush_buffer()
        events = []
        for launch in launches:
            start, end = cuda.Event(), cuda.Event()
            cuda.memset_d8_async(flush, 0, self._flush_bytes(), self._stream)
            start.record(self._stream)
            launch()
            end.record(self._stream)
            events.append((start, end))
        self._stream.synchronize()
        return [1000.0 * end.time_since(start) for start, end in events]

    def _flush_bytes(self) -> int:
        return max(2 * self._device.limits.l2_bytes, MIN_FLUSH_BYTES)

    def _flush_buffer(self) -> int:
        if self._flush is None:
            self._flush = self._allocate(self._flush_bytes(), "the buffer that flushes L2")
        return int(self._flush)

    def _flush_ms(self) -> float:
        """About what one flush takes."""
        return self._flush_bytes() / max(self._device.limits.dram_gbps, 100) / 1e6

    def _tensors_of(self, problem: Problem) -> TimedTensors:
        """What the problem's kernels are timed on, kept until another problem is measured or computed."""
        if self._tensors is None or self._tensors.problem != problem:
            self._tensors = self._arena = None
            self._tensors = draw_tensors(self._cuda, self._allocate, problem)
        return self._tensors

    # -- kernels -----------------------------------------------------------------------------------------

    def occupancy(self, build: Build) -> float:
        """Returns the warps that are resident over the most that the card allows, 0 to 1, by the registers
        that the driver reports."""
        with self._launch_errors(build):
            launch, limits = build.kernel.launch, self._device.limits
            registers = self._load(build, launch).registers
            blocks = limits.blocks_per_sm(launch.threads, registers, launch.smem_bytes)
        warps = -(-launch.threads // WARP)
        return blocks * warps * WARP / limits.max_threads_per_sm

    def _launcher(self, build: Build, name: str, arguments: Arguments) -> Callable[[], None]:
        """What makes all the kernel's launches once, asynchronously, on the runner's stream; ``name`` is what
        messages call the problem.

        Lists of tiles of keys and the plan of packed sequences are made the first time: callers keep them
        for as long as masks or lengths stand, for all layers of a model."""
        kernel, stream = build.kernel, self._stream
        sizes, kept = arguments.sizes, {}
        if kernel.has_tile_lists:
            num_bytes = 4 * max(1, kernel.num_list_ints(sizes, arguments.values))
            kept[TILE_LISTS] = self._allocate(num_bytes, f"the lists of tiles of {name}")
        if kernel.launch.packed:
            kept[PLAN] = self._allocate(4 * kernel.num_plan_ints(sizes), f"the plan of {name}")
        if kernel.workspace is not None:
            kept[WORKSPACE] = self._allocate(kernel.workspace_bytes(sizes), f"the workspace of {name}")
        addresses = {field: int(memory) for field, memory in kept.items()}
        arguments = replace(arguments, struct=kernel.arguments, values={**arguments.values, **addresses})
        once, prepared = [], []
        for each in kernel.launches:
            if each.role == MAIN_ROLE and any(other.rotates for other in kernel.launches):
                arguments = arguments.with_rotated_queries(kernel.problem.head_dim)
            grid = each.grid_of(sizes)
            if grid == 0:  # nothing is new
                continue
            if grid > MAX_GRID:
                raise LaunchError(f"{name} needs {grid} blocks, CUDA allows {MAX_GRID}")
            parameters = [arguments.pack()]
            if each.tensor_maps:
                parameters.append(encode_maps(describe_maps(each, kernel.problem, arguments)))
            function = self._load(build, each)
            made = once if each.role in (LISTS_ROLE, PLAN_ROLE) else prepared
            made.append((function, grid, each, Parameters(parameters)))

        def launch(_keeps: object = tuple(kept.values())) -> None:
            # The first waits for whatever is on the stream.
            for place, (function, grid, each, packed) in enumerate((*once, *prepared)):
                dependent = each.dependent and place > 0
                function.launch(
                    grid, each.threads, packed, each.smem_bytes, stream.handle, dependent=dependent
                )
            once.clear()

        return launch

    def _load(self, build: Build, launch: Launch) -> Function:
        key = (str(build.artifact), launch.role)
        if key not in self._loaded:
            # Dozens of finalists at most are in use at once; a run has thousands of candidates.
            while len(self._loaded) >= 32:
                del self._loaded[next(iter(self._loaded))]
            function = Function(build.artifact.read_bytes(), build.kernel.symbol_of(launch))
            function.allow_smem(launch.smem_bytes)
            if launch.exceeds_portable_cluster:
                function.allow_large_clusters()
            self._loaded[key] = function
        return self._loaded[key]

    def _allocate(self, num_bytes: int, what: str) -> Any:
        """Device memory; raises FlashgenError naming what it was for and both numbers."""
        free, total = self._cuda.mem_get_info()
        try:
            return self._cuda.mem_alloc(num_bytes)
        except self._cuda.MemoryError:
            raise FlashgenError(
                f"{what} take {num_bytes / 2**30:.2f} GiB, device {self._device.ordinal} has "
                f"{free / 2**30:.2f} GiB free of {total / 2**30:.2f}; choose a smaller batch or shorter "
                "sequences, or free the device's memory"
            ) from None

    @contextlib.contextmanager
    def _launch_errors(self, build: Build) -> Iterator[None]:
        """Turns CUDA's errors into `LaunchError`, and finds out whether the context survived them."""
        if self._broken:
            raise LaunchError("the device's context was lost to an earlier error")
        try:
            yield
        except (self._cuda.Error, DriverError) as error:
            try:
                self._cuda.Context.synchronize()
            except self._cuda.Error:
                self._broken = True
            raise LaunchError(f"{build.kernel.symbol}: {error}") from error
