"""Kernels to cubins: nvcc or NVRTC behind the Toolchain protocol, and a pool that keeps every core compiling.

Each compilation is a process of its own, so that a compiler that crashes or hangs costs one variant.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...gen.kernel import Kernel
from ..errors import BuildError, FlashgenError
from ..printable import without_colours
from ..processes import Programs, TookTooLong, run_program
from .cache import cache_folder, cache_unwritable, cached
from .object_file import check_object_file
from .protocol import Build, Toolchain
from .toolchain import (
    HostCompiler,
    Nvcc,
    Nvrtc,
    cuda_include_folders,
    find_host_compiler,
    find_nvcc,
    find_nvrtc,
)

#: ftz makes exp2f one instruction; the emitted header tells its reader to build with the same flags.
FLAGS = ("-std=c++17", "-O3", "-ftz=true")
COMPILE_TIMEOUT_S = 120.0
COMPILER_NICENESS = 10
#: cuda_pipeline.h, which kernels for sm_80 and later include.
ASYNC_COPY_ARCH = 80
#: How much of a compiler's output is worth showing.
MAX_ERROR_LINES = 12
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
#: What ptxas says of a kernel whose warpgroups would not run as written: products made to wait for each
#: other, waits put in, registers not handed over. It calls them information.
PIPELINE_REMARKS = re.compile(r"ptxas info\s*:\s*\((C75(?:0[89]|1\d))\) (.*)")
#: Where in the intermediate code: no help to who reads the remark.
REMARK_PLACES = re.compile(r" in around line \d+| in (the )?function '\w+'")
#: Flags that nvcc takes from the environment; conda and some clusters set them.
NVCC_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
STOP_POLL_S = 0.05


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel: registers per thread, bytes spilled (stores plus loads) and stack."""

    registers: int
    spill_bytes: int
    stack_bytes: int


def parse_resources(output: str, symbol: str) -> Resources:
    """Returns the resources of entry function ``symbol`` in what ``ptxas -v`` printed.

    Raises:
        BuildError: the output does not speak of that kernel.
    """
    start = output.find(f"Compiling entry function '{symbol}'")
    section = output[start:].split("Compiling entry function", 2)[1] if start >= 0 else ""
    used = re.search(r"Used (\d+) registers", section)
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", section)
    if used is None or memory is None:
        raise BuildError(f"ptxas reported no resources for {symbol}:\n{shorten(output)}")
    stack, stores, loads = map(int, memory.groups())
    return Resources(int(used[1]), stores + loads, stack)


def parse_remarks(output: str) -> list[str]:
    """Returns what ptxas found wrong with asynchronous products, each remark once, lost time first."""
    found: dict[str, None] = {}
    for code, text in PIPELINE_REMARKS.findall(output):
        found[f"ptxas {code}: {REMARK_PLACES.sub('', text).strip()}"] = None
    return sorted(found, key=lambda remark: "Potential Performance Loss" not in remark)


def shorten(output: str) -> str:
    """Returns the part of a compiler's output that says what is wrong: its errors, or its last lines."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if re.search(r"\b(error|fatal)\b", line)), None)
    if first is not None:
        return "\n".join(lines[first : first + MAX_ERROR_LINES])
    return "\n".join(lines[-MAX_ERROR_LINES:]) or "(no output)"


def run_compiler(
    command: Sequence[str],
    scratch: Path,
    *,
    makes: Path | None = None,
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> str:
    """Runs a compiler and returns what it printed. Its temporary files go to ``scratch``; it dies with all
    its children when it runs past ``timeout_s``, when its pool is closed and when this process dies.

    Raises:
        BuildError: it refused, crashed, ran out of time or left the file that it ``makes`` out.
        FlashgenError: its disk is full, or it is no program that can be run.
    """
    name = Path(command[0]).name
    environment = {**os.environ, "TMPDIR": str(scratch)}
    try:
        # The worker that times kernels comes first.
        done = run_program(command, timeout_s=timeout_s, environment=environment, niceness=COMPILER_NICENESS)
    except TookTooLong:
        raise BuildError(f"{name} did not finish within {timeout_s:.0f} s") from None
    except (FileNotFoundError, PermissionError) as error:
        raise FlashgenError(f"the compiler {command[0]} cannot be run: {error.strerror}") from error
    output = without_colours(done.output)
    if DISK_FULL.search(output):
        raise cache_unwritable(cache_folder(), "No space left on device")
    if done.status < 0:
        raise BuildError(f"{name} {done.ending()}\n{shorten(output)}")
    if done.status:
        raise BuildError(shorten(output))
    if makes is not None and not makes.exists():
        raise BuildError(f"{name} said that all is well and wrote no {makes.suffix} file: {shorten(output)}")
    return output


@dataclass(frozen=True)
class NvccToolchain:
    """nvcc and its host compiler."""

    nvcc: Nvcc
    host: HostCompiler
    timeout_s: float = COMPILE_TIMEOUT_S

    @property
    def version(self) -> str:
        return f"nvcc {self.nvcc.version}"

    def build(self, kernel: Kernel) -> Build:
        """Returns the kernel's cubin, from the cache where it is there. Raises `BuildError`."""
        flags = (*FLAGS, f"-arch={kernel.sm}")
        environment = tuple(f"{name}={os.environ.get(name, '')}" for name in NVCC_FLAG_VARIABLES)

        def command(source: Path, cubin: Path) -> list[str]:
            start = [str(self.nvcc.path), *flags, "-ccbin", str(self.host.path)]
            return [*start, "-cubin", "-Xptxas", "-v", "-o", str(cubin), str(source)]

        how = (self.version, self.host.version, *flags, *environment)
        return _build(kernel, how, command, self.timeout_s)


@dataclass(frozen=True)
class NvrtcToolchain:
    """NVRTC, in a process of its own per kernel: a crash in the library must not end the run."""

    nvrtc: Nvrtc
    includes: tuple[Path, ...] = ()
    timeout_s: float = COMPILE_TIMEOUT_S

    @property
    def version(self) -> str:
        return f"NVRTC {self.nvrtc.version}"

    def build(self, kernel: Kernel) -> Build:
        """Returns the kernel's cubin, from the cache where it is there. Raises `BuildError`."""
        # NVRTC optimizes by default and knows no -O3.
        # There lambdas whose parameters are `auto` are functions of the host, unless all are the device's.
        flags = ("-std=c++17", "-ftz=true", "-default-device", f"-arch={kernel.sm}")
        search = tuple(f"--include-path={folder}" for folder in self.includes)

        def command(source: Path, cubin: Path) -> list[str]:
            # Isolated: the script's folder must not hide modules of the standard library.
            script = [sys.executable, "-I", str(Path(__file__).with_name("nvrtc.py")), str(self.nvrtc.path)]
            return [*script, str(source), str(cubin), *flags, *search, "-Xptxas=-v"]

        return _build(kernel, (self.version, *flags, *search), command, self.timeout_s)


def cuda_toolchain(arch: int) -> NvccToolchain | NvrtcToolchain:
    """Returns what compiles for sm_``arch`` here: nvcc where one does, else NVRTC.

    Raises:
        FlashgenError: neither; the message says how to get one.
    """
    try:
        return NvccToolchain(find_nvcc(arch), find_host_compiler())
    except FlashgenError as no_nvcc:
        try:
            nvrtc = find_nvrtc(arch)
            return NvrtcToolchain(nvrtc, cuda_include_folders(arch) if arch >= ASYNC_COPY_ARCH else ())
        except FlashgenError:
            raise no_nvcc from None


def _build(
    kernel: Kernel, how: Sequence[str], command: Callable[[Path, Path], Sequence[str]], timeout_s: float
) -> Build:
    """The kernel as a cubin. ``command`` compiles a source to a cubin; ``how`` is all that determines the
    result beside the source. Raises `BuildError`, also for what ptxas builds with `PIPELINE_REMARKS`."""

    def produce(cubin: Path) -> Mapping[str, Any]:
        source = cubin.with_suffix(".cu")
        source.write_text(kernel.source, encoding="utf-8")
        compiler = command(source, cubin)
        output = run_compiler(compiler, cubin.parent, makes=cubin, timeout_s=timeout_s)
        check_object_file(cubin, Path(compiler[0]).name)
        return asdict(parse_resources(output, kernel.symbol)) | {"remarks": parse_remarks(output)}

    started = time.monotonic()
    entry = cached([kernel.source, *how], ".cubin", produce)
    # Entries of before there were such kernels hold no remarks.
    if entry.metadata.get("remarks"):
        raise BuildError("\n".join(entry.metadata["remarks"]))
    return Build(
        kernel,
        entry.path,
        registers=entry.metadata["registers"],
        # An array that the compiler could not keep in registers is as bad as what it spilled itself.
        spill_bytes=max(entry.metadata["spill_bytes"], entry.metadata["stack_bytes"]),
        seconds=time.monotonic() - started,
        cached=entry.hit,
    )


class CompilePool:
    """Builds kernels, ``size`` at a time (default: one per core).

    Each waits in a thread for a compiler that is a process of its own. Close it, or leave the ``with`` block,
    to drop what has not started and kill what has.
    """

    def __init__(self, toolchain: Toolchain, size: int | None = None) -> None:
        self.toolchain = toolchain
        self.size = size or usable_cores()
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="compile")
        self._compilers = Programs()
        self._unfinished: set[Future[Build | BuildError]] = set()

    def submit(self, kernel: Kernel) -> Future[Build | BuildError]:
        """Builds a kernel in the pool; the future's value is the build or the `BuildError`. It raises only
        what is no fault of the kernel: FlashgenError for a disk that is full."""
        future = self._threads.submit(self._build, kernel)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    @property
    def num_unfinished(self) -> int:
        """How many builds are under way or wait for a compiler."""
        return len(self._unfinished)

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Has compilers stand still inside, so that they disturb nothing; builds go on afterwards."""
        return self._compilers.still()

    def drop(self) -> None:
        """Drops what has not started and kills what has; others may be submitted afterwards."""
        for future in list(self._unfinished):
            future.cancel()
        # A build that has begun may yet start its compiler: asked again until none is left.
        while wait(list(self._unfinished), timeout=STOP_POLL_S).not_done:
            self._compilers.stop()

    def close(self) -> None:
        self.drop()
        self._threads.shutdown(wait=True)

    def _build(self, kernel: Kernel) -> Build | BuildError:
        try:
            with self._compilers.own():
                return self.toolchain.build(kernel)
        except BuildError as error:
            return error

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
