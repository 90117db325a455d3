"""Finding the CUDA compilers: nvcc with its host compiler, and NVRTC, which needs neither.

nvcc 13 no longer compiles for cards before sm_75; NVRTC 12.9, a library of its own on PyPI, still does.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import FlashgenError
from ..printable import printable, without_colours
from ..processes import TookTooLong, run_program

#: Until a compiler has said its version.
PROBE_TIMEOUT_S = 10
#: The first compute capability that CUDA 13 compiles for.
CUDA_13_MIN_ARCH = 75

GET_NVCC = (
    "install the CUDA toolkit, or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl` "
    "(nvidia-cuda-nvcc-cu12 holds no nvcc)"
)
GET_HOST_COMPILER = "install g++ (Debian, Ubuntu: `apt install g++`)"
GET_OLD_NVRTC = "`pip install nvidia-cuda-nvrtc-cu12` (NVRTC 12.9, the last for cards before sm_75)"


@dataclass(frozen=True)
class Nvcc:
    """An nvcc: its version ("13.0.88") and the compute capabilities times ten that it compiles for."""

    path: Path
    version: str
    archs: tuple[int, ...]


@dataclass(frozen=True)
class Nvrtc:
    """An NVRTC library: its version ("12.9") and the compute capabilities times ten it compiles for."""

    path: Path
    version: str
    archs: tuple[int, ...]


@dataclass(frozen=True)
class HostCompiler:
    """The C++ compiler that nvcc preprocesses with and emulated cards are built with."""

    path: Path
    version: str


def find_nvcc(arch: int | None = None) -> Nvcc:
    """Finds the first nvcc (for ``arch``, if given) of $CUDA_HOME, $CUDA_PATH, $PATH, /usr/local/cuda* and
    PyPI.

    Raises:
        FlashgenError: none, or none for that card; the message says how to get one.
    """
    found = [nvcc for path in _nvcc_paths() if (nvcc := _probe_nvcc(path)) is not None]
    if not found:
        raise FlashgenError(f"nvcc, the CUDA compiler, was not found; {GET_NVCC}")
    for nvcc in found:
        if arch is None or arch in nvcc.archs:
            return nvcc
    raise FlashgenError(_unsupported(f"nvcc {found[0].version} ({found[0].path})", found[0].archs, arch or 0))


def find_nvrtc(arch: int | None = None) -> Nvrtc:
    """Finds the first NVRTC library (for ``arch``, if given) among PyPI's packages and the CUDA toolkits.

    Raises:
        FlashgenError: none, or none for that card; the message says how to get one.
    """
    found = [nvrtc for path in _nvrtc_paths() if (nvrtc := _probe_nvrtc(path)) is not None]
    if not found:
        package = GET_OLD_NVRTC if arch and arch < CUDA_13_MIN_ARCH else "`pip install nvidia-cuda-nvrtc`"
        raise FlashgenError(f"NVRTC, the CUDA run-time compiler, was not found; {package}")
    for nvrtc in found:
        if arch is None or arch in nvrtc.archs:
            return nvrtc
    raise FlashgenError(
        _unsupported(f"NVRTC {found[0].version} ({found[0].path})", found[0].archs, arch or 0)
    )


def find_host_compiler() -> HostCompiler:
    """Finds a C++ compiler: $CXX, else g++, else clang++; raises FlashgenError when there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return HostCompiler(Path(path), _host_version(path))
    raise FlashgenError(f"no C++ compiler was found (g++ or clang++, or $CXX); {GET_HOST_COMPILER}")


def cuda_include_folders(arch: int) -> tuple[Path, ...]:
    """Folders with the CUDA headers, for NVRTC: those beside it, beside an nvcc, or from PyPI.

    Raises:
        FlashgenError: there are none; the message names the packages.
    """
    roots = [nvcc.parent.parent for nvcc in _nvcc_paths()]
    roots += [folder for site in _site_folders() for folder in sorted((site / "nvidia").glob("*"))]
    for root in roots:
        for include in (root / "include", root / "targets" / "x86_64-linux" / "include"):
            if (include / "cuda_pipeline.h").exists():
                return (include, *(p for p in (include / "cccl",) if p.exists()))
    raise FlashgenError(
        f"NVRTC needs the CUDA headers for sm_{arch} (cuda_pipeline.h); "
        "`pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl`"
    )


def _unsupported(tool: str, archs: tuple[int, ...], arch: int) -> str:
    served = f"sm_{archs[0]} to sm_{archs[-1]}" if archs else "nothing known"
    way_out = GET_OLD_NVRTC if arch < min(archs, default=0) else f"a newer one is needed: {GET_NVCC}"
    return f"{tool} compiles for {served}, not for sm_{arch}; {way_out}"


def _nvcc_paths() -> Iterator[Path]:
    """Every nvcc there is, in the order of preference, each once."""
    name = "nvcc.exe" if sys.platform == "win32" else "nvcc"
    candidates = [Path(os.environ[v]) / "bin" / name for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    candidates.extend(sorted(Path("/usr/local").glob(f"cuda*/bin/{name}"), reverse=True))
    for site in _site_folders():
        candidates.extend(sorted((site / "nvidia").glob(f"*/bin/{name}"), reverse=True))
    yield from _existing(candidates)


def _nvrtc_paths() -> Iterator[Path]:
    candidates: list[Path] = []
    for site in _site_folders():
        # nvidia-cuda-nvrtc-cu12 installs nvidia/cuda_nvrtc, nvidia-cuda-nvrtc (CUDA 13) nvidia/cu13.
        candidates.extend(sorted((site / "nvidia").glob("*/lib/libnvrtc.so.*"), reverse=True))
    for nvcc in _nvcc_paths():
        for lib in ("lib64", "lib"):
            candidates.extend(sorted((nvcc.resolve().parent.parent / lib).glob("libnvrtc.so.*")))
    yield from _existing(candidates)


def _existing(candidates: list[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in candidates:
        if path.is_file() and path.resolve() not in seen:
            seen.add(path.resolve())
            yield path


def _site_folders() -> list[Path]:
    """Where this interpreter finds installed packages."""
    folders = [Path(p) for p in sys.path if p] + [Path(sysconfig.get_paths()["purelib"])]
    return [p for p in dict.fromkeys(folders) if (p / "nvidia").is_dir()]


@cache
def _probe_nvcc(path: Path) -> Nvcc | None:
    """What nvcc says about itself; None when it does not run."""
    try:
        version = _output(path, "--version")
        archs = _output(path, "--list-gpu-arch")
    except (OSError, TookTooLong):
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", version)
    return Nvcc(path, match[1] if match else "unknown", _arch_numbers(archs))


def _arch_numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(n) for n in re.findall(r"compute_(\d+)\b", text)}))


@cache
def _probe_nvrtc(path: Path) -> Nvrtc | None:
    """What the library says about itself; None when it cannot be loaded."""
    try:
        library = ctypes.CDLL(str(path))
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        library.nvrtcGetSupportedArchs(archs)
    except (OSError, AttributeError):
        return None
    return Nvrtc(path, f"{major.value}.{minor.value}", tuple(sorted(archs)))


@cache
def _host_version(path: str) -> str:
    try:
        return _output(Path(path), "--version").splitlines()[0].strip()
    except (OSError, IndexError):
        return "unknown"
    except TookTooLong:
        raise FlashgenError(
            f"{path} --version did not answer within {PROBE_TIMEOUT_S} s; see what that program is, or name "
            "another compiler with CXX"
        ) from None


def _output(path: Path, *arguments: str) -> str:
    done = run_program([str(path), *arguments], timeout_s=PROBE_TIMEOUT_S)
    if done.status:
        raise OSError(f"{path} {done.ending()}")
    return printable(without_colours(done.output))
