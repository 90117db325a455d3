"""Sources to cubins, by nvcc where there is one that serves the card, else by NVRTC."""

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .kept import _kept
from .nvrtc import _cuda_homes, _cuda_includes, _nvrtc_archs, _nvrtc_compile, _nvrtc_paths, _site_folders

#: Denormals are zeros: exp2 is one instruction then.
_FLAGS = ("-std=c++17", "-ftz=true")
_GET_COMPILER = (
    "no CUDA compiler was found: neither nvcc nor NVRTC, which PyTorch brings; pip install "
    "nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl, or install the CUDA toolkit "
    "(and set CUDA_HOME where it is not on the PATH)"
)


class _NotCompiled(Exception):
    """A compiler that cannot run, does not serve the card, or refused."""


def _compile_source(source: str, sm: str, arch: int, macros: tuple[str, ...]) -> bytes:
    """The cubin of a source for one architecture, from the cache where it was compiled before. Raises
    RuntimeError with what each compiler said."""
    refused = []
    for compiler, compiled in _compilers(source, arch, [*_FLAGS, f"-arch={sm}", *macros]):
        try:
            return _kept((source, sm, *macros, *_FLAGS, compiler), compiled)
        except _NotCompiled as error:
            refused.append(str(error))
    raise RuntimeError("\n".join(refused) or _GET_COMPILER)


def _compilers(source: str, arch: int, options: list[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The compilers to try, one after the other: which it is, and what makes a cubin of the source."""
    if (nvcc := _find_nvcc()) is not None:
        yield _identity(nvcc), functools.partial(_run_nvcc, nvcc, source, arch, options)
    for path in _nvrtc_paths():
        if arch in _nvrtc_archs(path):
            yield _identity(path), functools.partial(_run_nvrtc, path, source, options)
            return


def _identity(path: str) -> str:
    """A compiler, as long as it is not replaced."""
    try:
        told = Path(path).stat()
    except OSError:  # a library that the system's loader finds
        return path
    return f"{path} {told.st_size} {told.st_mtime_ns}"


def _run_nvcc(nvcc: str, source: str, arch: int, options: list[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        file, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        file.write_text(source, encoding="utf-8")
        old = ["-Wno-deprecated-gpu-targets"] if arch < 75 else []
        command = [nvcc, *options, "-O3", *old, "-cubin", "-o", str(cubin), str(file)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            if done.returncode == 0:
                return cubin.read_bytes()
        except OSError as error:
            raise _NotCompiled(f"{nvcc} could not be run: {error}") from error
    said = done.stdout.decode(errors="replace")
    # nvcc says "Unsupported gpu architecture" or "not defined for option 'gpu-architecture'".
    if "gpu architecture" in said or "gpu-architecture" in said:
        needed = "CUDA 12.9 or older (13 dropped cards before sm_75)" if arch < 75 else "a newer CUDA"
        raise _NotCompiled(f"{nvcc} does not compile for sm_{arch}; install {needed} and set CUDA_HOME to it")
    raise _NotCompiled(f"{nvcc} failed:\n{said}")


def _run_nvrtc(path: str, source: str, options: list[str]) -> bytes:
    # There lambdas whose parameters are `auto` are functions of the host, unless all are the device's.
    options = [*options, "-default-device"]
    includes = [f"--include-path={folder}" for folder in _cuda_includes(path)]
    try:
        cubin, log = _nvrtc_compile(path, source, [*options, *includes])
    except (OSError, RuntimeError) as error:
        raise _NotCompiled(f"{path} cannot compile: {error}") from error
    if cubin is not None:
        return cubin
    missing = "" if includes else "; its headers come by pip install nvidia-cuda-runtime nvidia-cuda-cccl"
    raise _NotCompiled(f"{path} failed{missing}:\n{log}")


def _find_nvcc() -> str | None:
    """nvcc of $CUDA_HOME, $CUDA_PATH, $PATH, /usr/local/cuda, or of the PyPI package."""
    candidates = [home / "bin" / "nvcc" for home in _cuda_homes()]
    if found := shutil.which("nvcc"):
        candidates.insert(-1, Path(found))
    for site in _site_folders():
        candidates += (site / "nvidia").glob("*/bin/nvcc")
    return next((str(candidate) for candidate in candidates if candidate.exists()), None)
