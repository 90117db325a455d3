"""A card one does not have: kernels compiled for the host by an emulation of CUDA, times from a cost model.

``sim:gtx-1080`` compiles the generated source itself, unchanged, with g++ and the headers in ``emulation/``,
runs it for real on small problems, and predicts how long it would take on the card. Times are predictions,
always.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.append import ROTATED
from ...gen.arguments import (
    ADDRESS,
    LISTS_MADE,
    PLAN,
    TILE_LISTS,
    Arguments,
    Field,
    make_arguments,
    struct_of,
)
from ...gen.kernel import Kernel
from ...gen.limits import WARP, DeviceLimits
from ...gen.problem import Problem
from ...gen.workspace import WORKSPACE
from ..build.cache import cached
from ..build.compile import run_compiler, usable_cores
from ..build.object_file import check_object_file
from ..build.protocol import Build
from ..build.toolchain import HostCompiler, find_host_compiler
from ..errors import CorruptedMemory, LaunchError
from ..predict import cost_model
from ..processes import Done, TookTooLong, run_program
from .appended import append_numbers, new_arrays
from .device import Timing
from .dtypes import bits_dtype, inputs_of, numpy_dtype, require_inputs, unwritten_bits
from .key_scales import key_scales, scale_strides
from .score_values import score_values
from .sequences import index_arrays, index_strides, rows_of_sequences, sizes_of_call

PREFIX = "sim:"
EMULATION = Path(__file__).resolve().parents[1] / "emulation"
#: Bytes watched on either side of each array; CUDA aligns allocations to 256 bytes.
GUARD_BYTES = 4096
ALIGNMENT = 256
#: A kernel of a small problem that runs longer than this under the sanitizer hangs.
SANITIZE_TIMEOUT_S = 300.0
#: The sanitizer's runner exits with these: the launch was refused or failed; the sanitizer found something.
LAUNCH_FAILED_EXIT, SANITIZER_EXIT = 3, 99
#: The name under which compilers, and so the sanitizer, know the kernel's source.
SOURCE_NAME = "kernel.cu"

COMPILE_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-pthread",
    # Only what the source writes as fmaf is fused, so that results do not depend on the host.
    "-ffp-contract=off",
    # nvcc does not exploit aliasing either: kernels view floats as vectors.
    "-fno-strict-aliasing",
    "-fno-math-errno",
    # Fibers switch by longjmp to another stack, which fortified libraries take for a mistake.
    "-U_FORTIFY_SOURCE",
    "-w",  # the kernel is nvcc's to warn about
    "-Wno-psabi",  # notes that only matter between compilers
)
FAST_FLAGS = ("-O2",)
SANITIZE_FLAGS = (
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,alignment",
    "-fno-sanitize-recover=alignment",
)


class _Config(ctypes.Structure):
    """``emulation::Config``."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("shared_bytes_per_block", ctypes.c_int64),
        ("threads_per_block", ctypes.c_int32),
        ("host_threads", ctypes.c_int32),
    )


@dataclass(frozen=True)
class SimDevice:
    """An emulated card. ``sanitize`` runs kernels under AddressSanitizer, some ten times slower."""

    name: str
    limits: DeviceLimits
    sanitize: bool = False

    @property
    def spec(self) -> str:
        return PREFIX + self.name

    @property
    def predicted(self) -> bool:
        return True

    @property
    def driver(self) -> str:
        return "emulated"

    @property
    def lock_key(self) -> str:
        return ""

    def toolchain(self) -> SimToolchain:
        """Returns the host's compiler with the emulation. Raises FlashgenError when there is no C++
        compiler."""
        return SimToolchain(self.limits, find_host_compiler(), self.sanitize)

    def open(self) -> SimRunner:
        return SimRunner(self.limits, sanitize=self.sanitize)


@dataclass(frozen=True)
class SimToolchain:
    """g++ or clang++ with the emulation headers. Artifacts are shared libraries, or programs to sanitize."""

    limits: DeviceLimits
    compiler: HostCompiler
    sanitize: bool = False

    @property
    def version(self) -> str:
        return f"{self.compiler.version}, emulating {self.limits.name}"

    def build(self, kernel: Kernel) -> Build:
        """Compiles a kernel for the host, or takes it from the cache where it is there. Raises
        `BuildError`."""
        started = time.monotonic()
        suffix, extra = ".so", ["-shared"]
        if self.sanitize:
            suffix, extra = (
                ".run",
                [
                    f"-DEMULATION_ENTRY={kernel.entry}",
                    f"-DEMULATION_ARGS_BYTES={struct_of(kernel.problem).num_bytes}",
                    f"-DEMULATION_ARRAYS={_array_list(kernel.problem)}",
                ],
            )
        alone = [kernel.symbol_of(each) for each in kernel.launches if each.blocks_per_cluster == 1]
        if alone and len(alone) < len(kernel.launches):
            extra += [f'-DEMULATION_ALONE=" {" ".join(alone)} "']
        runtime = self._runtime()

        def produce(artifact: Path) -> Mapping[str, Any]:
            source = artifact.with_name(SOURCE_NAME)
            source.write_text(kernel.source, encoding="utf-8")
            command = [*self._command(), *extra, "-x", "c++", str(source)]
            command += [str(EMULATION / "runner.cpp")] if self.sanitize else []
            command += ["-x", "none", str(runtime), "-o", str(artifact)]
            self._compile(command, artifact)
            artifact.chmod(0o755)
            return {}

        entry = cached([kernel.source, *self._how(), *extra], suffix, produce)
        return Build(
            kernel,
            entry.path,
            registers=kernel.variant.registers(kernel.problem, self.limits),
            spill_bytes=0,
            seconds=time.monotonic() - started,
            cached=entry.hit,
        )

    def _runtime(self) -> Path:
        """What all kernels share, compiled once."""

        def produce(artifact: Path) -> Mapping[str, Any]:
            command = [*self._command(), "-c", str(EMULATION / "runtime.cpp"), "-o", str(artifact)]
            self._compile(command, artifact)
            return {}

        return cached(["runtime", *self._how()], ".o", produce).path

    def _compile(self, command: Sequence[str], artifact: Path) -> None:
        run_compiler(command, artifact.parent, makes=artifact)
        if sys.platform == "linux":
            check_object_file(artifact, self.compiler.path.name)

    def _flags(self) -> tuple[str, ...]:
        return (*COMPILE_FLAGS, *(SANITIZE_FLAGS if self.sanitize else FAST_FLAGS), *_machine_flags())

    def _command(self) -> list[str]:
        header = str(EMULATION / "cuda_emulation.h")
        flags = (*self._flags(), "-DFLASHGEN_LIBRARY")  # of a program, only the kernel
        return [str(self.compiler.path), *flags, f"-I{EMULATION}", "-include", header]

    def _how(self) -> tuple[str, ...]:
        """All that determines an artifact beside the kernel's source."""
        return (self.compiler.version, *self._flags(), _emulation_source())


def _array_list(problem: Problem) -> str:
    """The arrays for ``runner.cpp``, in the order in which the arguments begin with their addresses."""
    arrays = [(each.name, each.array is not None and each.array.is_output) for each in _addressed(problem)]
    return ",".join(f'{{"{name}",{str(is_output).lower()}}}' for name, is_output in arrays)


def _addressed(problem: Problem) -> list[Field]:
    """The addresses among a kernel's arguments."""
    return [each for each in struct_of(problem).fields if each.code == ADDRESS]


@cache
def _emulation_source() -> str:
    return "\0".join(path.name + path.read_text() for path in sorted(EMULATION.glob("*.[hc]*")))


@cache
def _machine_flags() -> tuple[str, ...]:
    """FMA where the host has it (aarch64 always does): fmaf is then an instruction instead of a call. AVX2
    makes products of warpgroups twice as fast."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        features = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    return tuple(
        f"-m{name}"
        for name in ("fma", "avx2")
        if re.search(rf"^flags\s*:.*\b{name}\b", features, re.MULTILINE)
    )


class SimRunner:
    """Runs kernels on the host and predicts their times. ``seed`` draws the order in which threads run."""

    def __init__(self, limits: DeviceLimits, *, sanitize: bool = False, seed: int = 0) -> None:
        self.limits = limits
        self.sanitize = sanitize
        self.seed = seed

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
        """Runs a kernel on guarded copies of arrays and returns o and, if wanted, the log-sum-exp, as
        `Runner.attend` says. With the sanitizer, a `LaunchError` also tells of accesses out of bounds or of
        what nobody wrote, with the line of the kernel's source."""
        problem = build.kernel.problem
        require_inputs(problem, q, k, v)
        batch, num_q_heads, seqlen_q, _ = q.shape
        # K order: a transposed view gives an output transposed alike, without the gaps of a packed one.
        outputs = {"o": np.empty_like(q, numpy_dtype(problem.output_dtype), shape=(*q.shape[:3], v.shape[3]))}
        if want_lse:
            outputs["lse"] = np.empty((batch, num_q_heads, seqlen_q), np.float32)
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
        """Runs a kernel of the backward pass on guarded copies of arrays and returns the gradients, as
        `Runner.differentiate` says."""
        require_inputs(build.kernel.problem, *(inputs[name] for name in "qkv"))
        outputs = {f"d{name}": np.empty_like(inputs[name]) for name in "qkv"}
        return self._compute(build, inputs, outputs, scale=scale, values=values)

    def _compute(
        self,
        build: Build,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
        *,
        scale: float,
        values: Mapping[str, Any] | None,
    ) -> dict[str, np.ndarray]:
        """Runs a kernel on guarded copies of arrays, and returns what it made of outputs like those; caches
        to which it appends are changed in place."""
        problem = build.kernel.problem
        caches = ("k", "v") if problem.append is not None else ()
        arrays = {name: _Array.like(array, grows=name in caches) for name, array in inputs.items()}
        arrays |= {name: _Array.like(array, copy=False) for name, array in outputs.items()}
        strides = {
            name: [stride // array.view.itemsize for stride in array.view.strides[:3]]
            for name, array in arrays.items()
        }
        sizes = sizes_of_call(problem, inputs["q"], inputs["k"], values)
        indices = index_arrays(problem, values)
        sequences = {name: _Array.like(array) for name, array in indices.items()}
        if build.kernel.launch.packed:
            ints = build.kernel.num_plan_ints(sizes)
            sequences[PLAN] = _Array.like(np.empty((1, ints), np.int32), copy=False)
        scales = key_scales(problem, values, sizes["batch"], sizes["num_kv_heads"])
        of_keys = {name: _Array.like(array) for name, array in scales.items()}
        read = score_values(problem.scores, values, sizes)
        buffers = {name: _Array.like(array) for name, array in read.arrays.items()}
        scoring = read.arguments(_addresses(buffers))
        if problem.scores.needs_lists:
            ints = build.kernel.num_list_ints(sizes)
            buffers[TILE_LISTS] = _Array.like(np.empty((1, max(1, ints)), np.int32), copy=False)
            scoring |= {**_addresses({TILE_LISTS: buffers[TILE_LISTS]}), LISTS_MADE: 0}
        new = new_arrays(problem, values)
        appended = {name: _Array.like(array) for name, array in new.items() if array.size}
        if problem.append is not None and problem.append.rotary:
            appended[ROTATED] = _Array.like(np.empty(inputs["q"].size, inputs["q"].dtype), copy=False)
        scratch = {}
        if num_bytes := build.kernel.workspace_bytes(sizes):
            scratch[WORKSPACE] = _Array.like(np.empty((1, num_bytes // 4), np.float32), copy=False)
        arguments = make_arguments(
            problem,
            _addresses(arrays),
            strides,
            scale=scale,
            sizes=sizes,
            scoring=scoring,
            sequences={**_addresses(sequences), **index_strides(indices)},
            append={**append_numbers(problem, new), **_addresses(appended)},
            key_scales={**_addresses(of_keys), **scale_strides(scales)},
            workspace=_addresses(scratch).get(WORKSPACE, 0),
        )
        buffers = {**sequences, **of_keys, **buffers, **appended, **scratch}
        launch = self._launch_sanitized if self.sanitize else self._launch
        launch(build, arrays, buffers, arguments)
        for name, array in (*arrays.items(), *buffers.items()):
            array.check(name, build.kernel)
        for name, array in outputs.items():
            rows = np.ones(array.shape[2], bool)
            if problem.operation.array(name).rows == "seqlen_q":
                rows = rows_of_sequences(problem, values, array.shape[2])
            arrays[name].check_written(name, build.kernel, rows)
        for name, array in (*outputs.items(), *((name, inputs[name]) for name in caches)):
            array[...] = arrays[name].view
        return dict(outputs)

    def _config(self) -> _Config:
        return _Config(
            self.seed, self.limits.smem_per_block, self.limits.max_threads_per_block, usable_cores()
        )

    def _launch(
        self,
        build: Build,
        arrays: Mapping[str, _Array],
        buffers: Mapping[str, _Array],
        arguments: Arguments,
    ) -> None:
        library = _load(build.artifact)
        library.emulation_configure(ctypes.byref(self._config()))
        status = library[build.kernel.entry](arguments.pack(), None)
        if status:
            raise _launch_error(build.kernel, status, library.emulation_message().decode())

    def _launch_sanitized(
        self,
        build: Build,
        arrays: Mapping[str, _Array],
        buffers: Mapping[str, _Array],
        arguments: Arguments,
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
            request, reply = Path(folder) / "request", Path(folder) / "reply"
            with request.open("wb") as file:
                file.write(bytes(self._config()) + arguments.pack())
                known = {**arrays, **buffers}
                for each in _addressed(build.kernel.problem):
                    file.write(known[each.name].serialized() if each.name in known else ABSENT)
            done = _run_sanitized([str(build.artifact), str(request), str(reply)])
            if done.status == LAUNCH_FAILED_EXIT:
                # Behind what the sanitizer warns of.
                told = re.search(r"^(\d+) (.*)", done.output, re.MULTILINE | re.DOTALL)
                status, message = (int(told[1]), told[2]) if told else (0, done.output)
                raise _launch_error(build.kernel, status, message.strip())
            if done.status:
                raise LaunchError(_explain_report(build.kernel, done))
            words = np.fromfile(reply, np.uint32)
        first = 0
        for each in _addressed(build.kernel.problem):
            if each.name in known and each.array is not None and each.array.is_output:
                first = known[each.name].receive(words, first)

    def measure(
        self, build: Build, problem: Problem, *, best_us: float | None = None, budget_ms: float = 200.0
    ) -> Timing:
        """Returns the time that the cost model predicts: one, always the same."""
        prediction = cost_model.predict(build.kernel.variant, problem, self.limits)
        return Timing((prediction.median_us,))

    def measure_interleaved(self, builds: list[Build], problem: Problem, *, rounds: int) -> list[Timing]:
        return [self.measure(build, problem) for build in builds]

    def occupancy(self, build: Build) -> float:
        launch = build.kernel.launch
        blocks = self.limits.blocks_per_sm(launch.threads, build.registers, launch.smem_bytes)
        return blocks * -(-launch.threads // WARP) * WARP / self.limits.max_threads_per_sm

    def close(self) -> None:
        pass


#: The axes of an array as ``runner.cpp`` knows it.
MAX_AXES = 4
#: An array that is not there, as `_Array.serialized` would write it.
ABSENT = bytes(8 * 10)


@dataclass(frozen=True)
class _Array:
    """A copy of an array with its strides: unwritten memory between its rows, and guards around it."""

    memory: np.ndarray
    """The memory of the copy, guard, extent and guard, as the bits of elements."""
    extent: slice
    view: np.ndarray
    """The array itself, in the extent."""
    pristine: np.ndarray = field(repr=False)
    """The memory before the launch."""
    is_output: bool = False
    grows: bool = False
    """Whether it is a cache, of which rows are written."""

    @classmethod
    def like(cls, array: np.ndarray, *, copy: bool = True, grows: bool = False) -> _Array:
        unwritten, size = unwritten_bits(array.dtype), array.itemsize
        if array.strides[-1] != size and array.shape[-1] != 1:
            raise ValueError(f"rows of contiguous {array.dtype} are needed, not by {array.strides} bytes")
        spans = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
        below, above = -sum(min(s, 0) for s in spans), sum(max(s, 0) for s in spans)
        items, guard, slack = (below + above) // size + 1, GUARD_BYTES // size, ALIGNMENT // size
        memory = np.full(guard + slack + items + guard, unwritten, bits_dtype(array.dtype))
        first = guard + -(memory.ctypes.data // size + guard) % slack
        view = np.ndarray(
            array.shape, array.dtype, memory.data, offset=size * first + below, strides=array.strides
        )
        if copy:
            view[...] = array
        return cls(memory, slice(first, first + items), view, memory.copy(), is_output=not copy, grows=grows)

    def check(self, name: str, kernel: Kernel) -> None:
        """Raises CorruptedMemory when the guards, or an input, are not as they were; of a cache, what is
        between its rows."""
        memory = self.memory
        if self.grows:
            memory = memory.copy()
            rows = np.ndarray(
                self.view.shape,
                self.view.dtype,
                memory.data,
                offset=self.view.ctypes.data - self.memory.ctypes.data,
                strides=self.view.strides,
            )
            rows.view(memory.dtype)[...] = self.before().view(memory.dtype)
        for place, part in (
            ("before", slice(0, self.extent.start)),
            ("in" if not self.is_output else "", self.extent),
            ("past", slice(self.extent.stop, None)),
        ):
            if not place:
                continue
            changed = np.flatnonzero(memory[part] != self.pristine[part])
            if changed.size:
                size = self.view.itemsize
                raise CorruptedMemory(
                    f"{kernel.symbol} overwrote {size * changed.size} bytes {place} {name}, "
                    f"the first of them byte {size * int(changed[0])} there"
                )

    def before(self) -> np.ndarray:
        """Returns the array as it was before the launch."""
        offset = self.view.ctypes.data - self.memory.ctypes.data
        data = self.pristine.data
        return np.ndarray(self.view.shape, self.view.dtype, data, offset=offset, strides=self.view.strides)

    def check_written(self, name: str, kernel: Kernel, rows: np.ndarray) -> None:
        """Raises CorruptedMemory when elements of ``rows``, a truth for each, still hold what they were
        poisoned with, or others no longer do."""
        bits = self.view.view(self.memory.dtype)
        untouched = bits == unwritten_bits(self.view.dtype)
        strayed = np.argwhere(~untouched[:, :, ~rows])
        if len(strayed):
            raise CorruptedMemory(
                f"{kernel.symbol} wrote {len(strayed)} elements of {name} that are of no sequence"
            )
        unwritten = np.argwhere(untouched[:, :, rows])
        if len(unwritten):
            raise CorruptedMemory(
                f"{kernel.symbol} left {len(unwritten)} of {self.view.size} elements of {name} unwritten, "
                f"the first at {tuple(int(i) for i in unwritten[0])}"
            )

    def serialized(self) -> bytes:
        """Returns the bytes from which ``runner.cpp`` makes the array: count, offset of the first element,
        shape and strides as 64-bit numbers, all in 32-bit words, then the data."""
        words = self.memory[self._whole_words()].view(np.uint32)
        offset_bytes = self.view.ctypes.data - words.ctypes.data
        missing = MAX_AXES - self.view.ndim
        *rows, columns = (1,) * missing + self.view.shape
        *strides, _ = (0,) * missing + self.view.strides
        # An axis of length 1 is not walked.
        strides = [0 if length == 1 else stride for length, stride in zip(rows, strides, strict=True)]
        row_words = -(-columns * self.view.itemsize // 4)
        if any(x % 4 for x in (offset_bytes, *strides)) or missing < 0:
            # Rows that begin in the middle of a word, or of more axes: the gaps between them go unwatched.
            offset_bytes, rows, strides, row_words = 0, [1, 1, 1], [0, 0, 0], len(words)
        header = [len(words), offset_bytes // 4, *rows, row_words, *(stride // 4 for stride in strides), 1]
        return np.array(header, np.int64).tobytes() + words.tobytes()

    def receive(self, words: np.ndarray, first: int) -> int:
        """Takes this array's extent out of the runner's reply; returns where the next one starts."""
        target = self.memory[self._whole_words()].view(np.uint32)
        target[...] = words[first : first + len(target)]
        return first + len(target)

    def _whole_words(self) -> slice:
        """The extent, to the end of its last 32-bit word."""
        size = self.view.itemsize
        num_bytes = -(-(self.extent.stop - self.extent.start) * size // 4) * 4
        return slice(self.extent.start, self.extent.start + num_bytes // size)


def _addresses(arrays: Mapping[str, _Array]) -> dict[str, int]:
    return {name: array.view.ctypes.data for name, array in arrays.items()}


@cache
def _load(artifact: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(artifact))
    except OSError as error:
        raise LaunchError(f"the compiled kernel cannot be loaded: {error}") from error
    library.emulation_message.restype = ctypes.c_char_p
    return library


def _launch_error(kernel: Kernel, status: int, message: str) -> LaunchError:
    return LaunchError(f"{kernel.symbol}: {message or f'its launcher returned CUDA error {status}'}")


# -- the sanitizer --------------------------------------------------------------------------------------


def _run_sanitized(command: list[str]) -> Done:
    options = f"exitcode={SANITIZER_EXIT}:detect_leaks=0:abort_on_error=0:detect_stack_use_after_return=0"
    environment = {**os.environ, "ASAN_OPTIONS": options, "UBSAN_OPTIONS": options + ":print_stacktrace=1"}
    try:
        return run_program(command, timeout_s=SANITIZE_TIMEOUT_S, environment=environment)
    except TookTooLong:
        raise LaunchError(
            f"the kernel did not finish within {SANITIZE_TIMEOUT_S:.0f} s under the sanitizer"
        ) from None


def _explain_report(kernel: Kernel, done: Done) -> str:
    """What AddressSanitizer found, in one or two lines: what, where in memory, which thread, which line."""
    report = done.output
    where = re.search(rf"{re.escape(SOURCE_NAME)}:(\d+)", report)
    line = ""
    if where:
        number = int(where[1])
        lines = kernel.source.splitlines()
        text = lines[number - 1].strip() if number <= len(lines) else ""
        line = f"\n  line {number}: {text}"
    found = re.search(r"^flashgen: (.*)$", report, re.MULTILINE)
    misaligned = re.search(r"runtime error: (.*)$", report, re.MULTILINE)
    if found or misaligned:
        return f"{kernel.symbol}: {(found or misaligned)[1]}{line}"  # type: ignore[index]
    return f"{kernel.symbol}: the sanitized kernel {done.ending()}{line}\n{report[-2000:]}"
