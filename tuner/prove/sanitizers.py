"""The quick suite under AddressSanitizer, on an emulated card, or compute-sanitizer, on a real one."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...gen.kernel import Kernel
from ..cards.cuda import CudaDevice
from ..cards.device import Build
from ..cards.emulated import SimDevice, SimRunner
from ..errors import FlashgenError, LaunchError
from ..evaluate.validate import validate
from ..processes import TookTooLong, run_program

#: What compute-sanitizer looks for, tool by tool.
SANITIZER_TOOLS = {
    "memcheck": "out-of-bounds and misaligned accesses",
    "racecheck": "races in shared memory",
    "initcheck": "reads of memory nobody wrote",
    "synccheck": "barriers that threads miss",
}
SANITIZER_EXIT = 86
SANITIZER_TIMEOUT_S = 1800


def sanitize_emulated(kernel: Kernel, target: SimDevice, seed: int) -> float:
    """Runs the quick suite under AddressSanitizer on an emulated card and returns the largest error. Each
    launch is a program of its own, so nothing here can crash."""
    build = replace(target, sanitize=True).toolchain().build(kernel)
    return validate(SimRunner(target.limits, sanitize=True, seed=seed), build, seed=seed, depth="quick")


def for_sanitizer(kernel: Kernel, tool: str) -> Kernel:
    """Returns the kernel as that tool of compute-sanitizer understands it.

    racecheck takes an arrival at a barrier in shared memory for the arriving lane's alone: what other lanes
    of its warp did before a ``__syncwarp`` looks unordered to it. Under ``FLASHGEN_RACECHECK`` all of them
    arrive. Nor does it see all that is ordered by coming to a named barrier without waiting there: where
    data pass by ordinary stores, both sides wait.
    """
    if tool != "racecheck":
        return kernel
    return replace(kernel, source=f"#define FLASHGEN_RACECHECK\n{kernel.source}")


def sanitize_on_card(kernel: Kernel, target: CudaDevice, seed: int) -> float:
    """Runs the quick suite in a process under each tool of compute-sanitizer and returns the largest
    error."""
    tool = find_compute_sanitizer()
    error = 0.0
    for name, finds in SANITIZER_TOOLS.items():
        build = target.toolchain().build(for_sanitizer(kernel, name))
        command = [str(tool), "--tool", name, "--error-exitcode", str(SANITIZER_EXIT), "--print-limit", "3"]
        script = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from {__name__} import run_quick_suite; run_quick_suite(sys.stdin.buffer)"
        )
        try:
            done = run_program(
                [*command, sys.executable, "-c", script],
                given=_pickled(target, build, seed),
                timeout_s=SANITIZER_TIMEOUT_S,
            )
        except TookTooLong:
            raise LaunchError(f"no end within {SANITIZER_TIMEOUT_S} s under {name}") from None
        told = done.output
        result = re.search(r"^largest error (\S+)$", told, re.MULTILINE)
        if done.status or result is None:
            raise LaunchError(f"compute-sanitizer {name} ({finds}):\n{told.strip()[-2000:]}")
        error = max(error, float(result[1]))
    return error


def find_compute_sanitizer() -> Path:
    """Finds compute-sanitizer in $PATH, /usr/local/cuda* or PyPI's packages. Raises FlashgenError where there
    is none."""
    found = shutil.which("compute-sanitizer")
    places = [Path(found)] if found else sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    for folder in filter(None, sys.path):
        places += sorted(Path(folder, "nvidia").glob("*/bin/compute-sanitizer"))
    if not places:
        raise FlashgenError(
            "compute-sanitizer was not found; it comes with the CUDA toolkit (or `pip install "
            "nvidia-cuda-sanitizer-api`). Or sanitize on an emulated card: --device sim:<preset>"
        )
    return places[0]


def _pickled(target: CudaDevice, build: Build, seed: int) -> bytes:
    import pickle

    return pickle.dumps((target, build, seed))


def run_quick_suite(stream: Any) -> None:
    """Validates the build that comes in by ``stream``: what the process under compute-sanitizer does."""
    import pickle

    target, build, seed = pickle.load(stream)
    runner = target.open()
    try:
        error = validate(runner, build, seed=seed, depth="quick")
    except FlashgenError as failure:
        print(failure)
        sys.exit(1)
    finally:
        runner.close()
    print(f"largest error {error:.9g}")
