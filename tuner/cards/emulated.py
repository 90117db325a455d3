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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.append import ROTATED
from ...gen.arguments import (
    ADDRESS,
    PLAN,
    TILE_LISTS,
    Arguments,
    Field,
)
from ...gen.handover.workspace import WORKSPACE
from ...gen.kernel import Kernel
from ...gen.limits import WARP, DeviceLimits
from ...gen.problem import Problem
from ..build.cache import cache_folder, cached
from ..build.compile import run_compiler, usable_cores
from ..build.object_file import check_object_file
from ..build.protocol import Build
from ..build.toolchain import HostCompiler, find_host_compiler
from ..errors import BuildError, LaunchError
from ..predict import cost_model
from ..processes import Done, TookTooLong, run_program
from .beside import Beside, read_beside
from .device import Timing
from .dtypes import inputs_of, numpy_dtype, require_inputs
from .guarded_arrays import ABSENT, GuardedArray
from .score_values import of_four_axes
from .sequences import rows_of_sequences

PREFIX = "sim:"
EMULATION = Path(__file__).resolve().parents[1] / "emulation"
#: What every kernel is compiled behind, and what g++ takes for it, already parsed, that lies beside it.
HEADER = "cuda_emulation.h"
PARSED_HEADER = f"{HEADER}.gch"
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
#: The emulation takes the place of ThreadSanitizer's library: kernels alone are compiled for it, nothing is
#: linked.
RACES_FLAGS = ("-O1", "-DEMULATION_RACES=1")
TELL_OF_ACCESSES = "-fsanitize=thread"


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
    """An emulated card. ``sanitize`` runs kernels under AddressSanitizer, some ten times slower; ``races``,
    instead, finds accesses to shared memory that nothing orders, slower still."""

    name: str
    limits: DeviceLimits
    sanitize: bool = False
    races: bool = False

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
        return SimToolchain(self.limits, find_host_compiler(), self.sanitize, self.races)

    def open(self) -> SimRunner:
        return SimRunner(self.limits, sanitize=self.sanitize)


@dataclass(frozen=True)
class SimToolchain:
    """g++ or clang++ with the emulation headers. Artifacts are shared libraries, or programs to sanitize."""

    limits: DeviceLimits
    compiler: HostCompiler
    sanitize: bool = False
    races: bool = False

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
                    f"-DEMULATION_ARGS_BYTES={kernel.arguments.num_bytes}",
                    f"-DEMULATION_ARRAYS={_array_list(kernel)}",
                ],
            )
        clusters = {kernel.symbol_of(each): each.blocks_per_cluster for each in kernel.launches}
        if len({*clusters.values()}) > 1:
            told = " ".join(f"{symbol}={blocks}" for symbol, blocks in clusters.items())
            extra += [f'-DEMULATION_CLUSTERS=" {told} "']
        runtime = self._runtime()

        def produce(artifact: Path) -> Mapping[str, Any]:
            source = artifact.with_name(SOURCE_NAME)
            source.write_text(kernel.source, encoding="utf-8")
            if self.races:
                self._build_to_tell(source, extra, runtime, artifact)
                return {}
            header = self._header_in(artifact.parent)
            command = [*self._command(header), *extra, "-x", "c++", str(source)]
            command += [str(EMULATION / "runner.cpp")] if self.sanitize else []
            command += ["-x", "none", str(runtime), "-o", str(artifact)]
            self._compile(command, artifact)
            artifact.chmod(0o755)
            return {}

        how = [TELL_OF_ACCESSES] if self.races else []
        entry = cached([kernel.source, *self._how(), *how, *extra], suffix, produce)
        return Build(
            kernel,
            entry.path,
            registers=kernel.variant.registers(kernel.problem, self.limits),
            spill_bytes=0,
            seconds=time.monotonic() - started,
            cached=entry.hit,
        )

    def _build_to_tell(self, source: Path, extra: Sequence[str], runtime: Path, artifact: Path) -> None:
        """Compiles a kernel that tells of its accesses, and links it as any other."""
        told = artifact.with_suffix(".o")
        command = [
            *self._command(),
            TELL_OF_ACCESSES,
            *extra,
            "-c",
            "-x",
            "c++",
            str(source),
            "-o",
            str(told),
        ]
        run_compiler(command, artifact.parent, makes=told)
        link = [str(self.compiler.path), *self._flags(), *extra, str(told), str(runtime), "-o", str(artifact)]
        self._compile(link, artifact)

    def shared(self) -> list[Path]:
        """Returns what all kernels are built with, compiled into the cache where it is not there."""
        parsed = _parsed_header(self, cache_folder())
        return [self._runtime(), *([parsed] if parsed is not None else [])]

    def _runtime(self) -> Path:
        """What all kernels share, compiled once."""

        def produce(artifact: Path) -> Mapping[str, Any]:
            command = [*self._command(), "-c", str(EMULATION / "runtime.cpp")]
            command += ["-o", str(artifact)]
            self._compile(command, artifact)
            return {}

        return cached(["runtime", *self._how()], ".o", produce).path

    def _header_in(self, folder: Path) -> Path:
        """The header as a kernel in that folder includes it: with g++, half of the time that a small kernel
        takes goes by before its own first line, unless the header was parsed before."""
        parsed = _parsed_header(self, cache_folder())
        header = folder / HEADER
        if parsed is None:
            return EMULATION / HEADER
        header.symlink_to(EMULATION / HEADER)
        (folder / PARSED_HEADER).symlink_to(parsed)
        return header

    def _compile(self, command: Sequence[str], artifact: Path) -> None:
        run_compiler(command, artifact.parent, makes=artifact)
        if sys.platform == "linux":
            check_object_file(artifact, self.compiler.path.name)

    def _flags(self) -> tuple[str, ...]:
        chosen = SANITIZE_FLAGS if self.sanitize else RACES_FLAGS if self.races else FAST_FLAGS
        return (*COMPILE_FLAGS, *chosen, *_machine_flags())

    def _command(self, header: Path = EMULATION / HEADER) -> list[str]:
        return [*self._command_of_header(), "-include", str(header)]

    def _command_of_header(self) -> list[str]:
        flags = (*self._flags(), "-DFLASHGEN_LIBRARY")  # of a program, only the kernel
        return [str(self.compiler.path), *flags, f"-I{EMULATION}"]

    def _how(self) -> tuple[str, ...]:
        """All that determines an artifact beside the kernel's source."""
        return (self.compiler.version, *self._flags(), _emulation_source())


@cache
def _parsed_header(toolchain: SimToolchain, folder: Path) -> Path | None:
    """The header as g++ has parsed it for that toolchain, from the cache in that folder; None with others,
    and where g++ refuses. Looked for once: it is large, and where it is gone g++ takes the header itself."""
    version = toolchain.compiler.version
    if "clang" in version or not re.search(r"g\+\+|\bGCC\b", version):
        return None

    def produce(artifact: Path) -> Mapping[str, Any]:
        command = [*toolchain._command_of_header(), "-x", "c++-header", str(EMULATION / HEADER)]
        run_compiler([*command, "-o", str(artifact)], artifact.parent, makes=artifact)
        return {}

    try:
        return cached(["parsed header", *toolchain._how()], ".gch", produce).path
    except BuildError:
        return None


def _array_list(kernel: Kernel) -> str:
    """The arrays for ``runner.cpp``, in the order in which the arguments begin with their addresses."""
    arrays = [(each.name, each.array is not None and each.array.is_output) for each in _addressed(kernel)]
    return ",".join(f'{{"{name}",{str(is_output).lower()}}}' for name, is_output in arrays)


def _addressed(kernel: Kernel) -> list[Field]:
    """The addresses among a kernel's arguments."""
    return [each for each in kernel.arguments.fields if each.code == ADDRESS]


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
        outputs = {"o": _output_like(q, numpy_dtype(problem.output_dtype), (*q.shape[:3], v.shape[3]))}
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
        arrays = {name: inputs[name] for name in "qkv"}
        outputs = {f"d{name}": _output_like(x, x.dtype, x.shape) for name, x in arrays.items()}
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
        arrays = {name: GuardedArray.like(array, grows=name in caches) for name, array in inputs.items()}
        arrays |= {name: GuardedArray.like(array, copy=False) for name, array in outputs.items()}
        strides = {
            name: [stride // array.view.itemsize for stride in array.view.strides[:3]]
            for name, array in arrays.items()
        }
        beside = read_beside(problem, inputs["q"], inputs["k"], values)
        buffers = {name: GuardedArray.like(array) for name, array in beside.arrays.items()}
        memory = _memory(build.kernel, beside, inputs["q"])
        buffers |= {name: GuardedArray.like(array, copy=False) for name, array in memory.items()}
        made = {
            name: GuardedArray.like(of_four_axes(array), copy=False)
            for name, array in beside.gradients.items()
        }
        buffers |= made
        arguments = beside.arguments(_addresses({**arrays, **buffers}), strides, scale)
        launch = self._launch_sanitized if self.sanitize else self._launch
        launch(build, arrays, buffers, arguments)
        for name, array in (*arrays.items(), *buffers.items()):
            array.check(name, build.kernel)
        for name, array in outputs.items():
            of = problem.operation.array(name).rows[-1]
            rows = rows_of_sequences(problem, values, array.shape[2], of)
            arrays[name].check_written(name, build.kernel, rows)
        for name, array in made.items():
            array.check_written(name, build.kernel, np.ones(array.view.shape[2], bool))
            beside.gradients[name][...] = array.view.reshape(beside.gradients[name].shape)
        for name, array in (*outputs.items(), *((name, inputs[name]) for name in caches)):
            array[...] = arrays[name].view
        return {**outputs, **beside.gradients}

    def _config(self) -> _Config:
        return _Config(
            self.seed, self.limits.smem_per_block, self.limits.max_threads_per_block, usable_cores()
        )

    def _launch(
        self,
        build: Build,
        arrays: Mapping[str, GuardedArray],
        buffers: Mapping[str, GuardedArray],
        arguments: Arguments,
    ) -> None:
        library = _load(build.artifact)
        library.emulation_configure(ctypes.byref(self._config()))
        for each in (*arrays.values(), *buffers.values()):
            extent = each.memory[each.extent]
            library.emulation_add_memory(extent.ctypes.data, extent.nbytes)
        status = library[build.kernel.entry](arguments.pack(), None)
        if status:
            raise _launch_error(build.kernel, status, library.emulation_message().decode())

    def _launch_sanitized(
        self,
        build: Build,
        arrays: Mapping[str, GuardedArray],
        buffers: Mapping[str, GuardedArray],
        arguments: Arguments,
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
            request, reply = Path(folder) / "request", Path(folder) / "reply"
            with request.open("wb") as file:
                file.write(bytes(self._config()) + arguments.pack())
                known = {**arrays, **buffers}
                for each in _addressed(build.kernel):
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
        for each in _addressed(build.kernel):
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


def _output_like(array: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An output whose axes are in the order of another array's: a transposed view gives one transposed alike,
    without the gaps of a packed one. Its rows are contiguous, also where other axes are repeated, which numpy
    would make the innermost."""
    made = np.empty_like(array, dtype, shape=shape)
    return made if made.strides[-1] == made.itemsize else np.empty(shape, dtype)


def _memory(kernel: Kernel, beside: Beside, q: np.ndarray) -> dict[str, np.ndarray]:
    """What a kernel's launches fill for each other, by the names of the arguments, where it is called with
    what it reads ``beside``."""
    memory: dict[str, np.ndarray] = {}
    sizes = beside.sizes
    if kernel.launch.packed:
        memory[PLAN] = np.empty((1, kernel.num_plan_ints(sizes)), np.int32)
    if kernel.has_tile_lists:
        ints = kernel.num_list_ints(sizes, beside.scoring.arguments({}))
        memory[TILE_LISTS] = np.empty((1, max(1, ints)), np.int32)
    if any(launch.rotates for launch in kernel.launches):
        memory[ROTATED] = np.empty(q.size, q.dtype)
    if kernel.workspace is not None:
        memory[WORKSPACE] = np.empty((1, kernel.workspace_bytes(sizes) // 4), np.float32)
    return memory


def _addresses(arrays: Mapping[str, GuardedArray]) -> dict[str, int]:
    return {name: array.view.ctypes.data for name, array in arrays.items()}


@cache
def _load(artifact: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(artifact))
    except OSError as error:
        raise LaunchError(f"the compiled kernel cannot be loaded: {error}") from error
    library.emulation_message.restype = ctypes.c_char_p
    library.emulation_add_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
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
