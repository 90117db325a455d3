"""Kernels, compiled by PyCUDA or carried along, as the driver loads them."""

import base64
import ctypes
import importlib
import os
import shutil
import sys
import zlib
from pathlib import Path

from .driver import _LOCK, _SMEM_PER_BLOCK, _arch_of, _attribute, _check, _driver
from .facts import Tuned

_MAX_DYNAMIC_SMEM, _LARGE_CLUSTERS = 8, 14  # CUfunction_attribute
_PORTABLE_CLUSTER = 8  # blocks, that larger ones must be asked for beyond

_LOADED: dict[tuple[Tuned, int, bool], tuple[int, ...]] = {}


def _load(tuned: Tuned, device: int, causal: bool) -> tuple[int, ...]:
    """The functions of its launches for that device and mask, compiled on the first call. Of a CUDA library,
    so valid in every context."""
    with _LOCK:
        if (tuned, device, causal) in _LOADED:
            return _LOADED[tuned, device, causal]
        driver = _driver()
        arch, allowed = _arch_of(device), _attribute(device, _SMEM_PER_BLOCK)
        if allowed < tuned.smem_bytes:
            raise RuntimeError(
                f"kernel {tuned.name} needs {tuned.smem_bytes} bytes of shared memory per block, device "
                f"{device} (sm_{arch}) allows {allowed}; it was made for sm_{tuned.device['arch']}: run "
                f"{tuned.command} --device {device}"
            )
        library = ctypes.c_void_p()
        status = 0
        # Another process may be writing the cubin that PyCUDA's cache just handed out: then compile afresh.
        for cached in (True, False):
            cubin = _built(tuned, arch, causal) or _compile(tuned, arch, causal, cached)
            status = driver.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0)
            if status == 0:
                break
        _check(status, f"loading the kernel for sm_{arch}")
        functions = []
        for launch in tuned.launches:
            function = ctypes.c_void_p()
            status = driver.cuLibraryGetKernel(ctypes.byref(function), library, launch.symbol.encode())
            _check(status, f"finding {launch.symbol}")
            status = driver.cuKernelSetAttribute(_MAX_DYNAMIC_SMEM, launch.smem_bytes, function, device)
            _check(status, f"reserving {launch.smem_bytes} bytes of shared memory per block")
            if launch.blocks_per_cluster > _PORTABLE_CLUSTER:
                status = driver.cuKernelSetAttribute(_LARGE_CLUSTERS, 1, function, device)
                action = (
                    f"allowing clusters of {launch.blocks_per_cluster} blocks, which sm_{arch} may not form"
                )
                _check(status, action)
            assert function.value is not None
            functions.append(function.value)
        loaded = _LOADED[tuned, device, causal] = tuple(functions)
        return loaded


def _built(tuned: Tuned, arch: int, causal: bool) -> bytes | None:
    """What the module carries for that compute capability and mask."""
    packed = tuned.cubins.get(causal) if arch == tuned.device["arch"] else None
    return None if packed is None else zlib.decompress(base64.b85decode(packed))


def _pack(cubin: bytes) -> str:
    """Returns a cubin as text, for a module to carry."""
    return base64.b85encode(zlib.compress(cubin, 9)).decode()


def _compile(tuned: Tuned, arch: int, causal: bool, cached: bool) -> bytes:
    """The cubin for one compute capability (times ten) and mask."""
    try:
        nvcc_compile = importlib.import_module("pycuda.compiler").compile
        compile_error = importlib.import_module("pycuda.driver").CompileError
    except ImportError as error:
        raise ImportError(f"attention() compiles through PyCUDA: pip install pycuda ({error})") from error
    options = ["-std=c++17", "-O3", "-ftz=true", f"-DFLASHGEN_CAUSAL={int(causal)}"]
    if arch < 75:
        options.append("-Wno-deprecated-gpu-targets")
    nvcc, sm = _find_nvcc(), f"sm_{arch}{tuned.arch_suffix}"
    try:
        cache_dir = None if cached else False
        cubin: bytes = nvcc_compile(
            tuned.source, nvcc, options, no_extern_c=True, arch=sm, cache_dir=cache_dir
        )
        return cubin
    except compile_error as error:
        # nvcc says "Unsupported gpu architecture" or "not defined for option 'gpu-architecture'".
        if "gpu architecture" in str(error) or "gpu-architecture" in str(error):
            needed = "CUDA 12.9 or older (13 dropped cards before sm_75)" if arch < 75 else "a newer CUDA"
            raise RuntimeError(
                f"{nvcc} does not compile for sm_{arch}; install {needed} and set CUDA_HOME to it"
            ) from error
        raise RuntimeError(f"{nvcc} failed:\n{error}") from error
    except OSError as error:
        if cached:  # a cache that cannot be written is done without
            return _compile(tuned, arch, causal, cached=False)
        raise RuntimeError(f"{nvcc} could not be run: {error}") from error


def _find_nvcc() -> str:
    """nvcc of $CUDA_HOME, $CUDA_PATH, $PATH, /usr/local/cuda, or of the PyPI package."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [Path(home, "bin", "nvcc") for home in homes]
    candidates += [Path(found) for found in (shutil.which("nvcc"),) if found]
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for folder in filter(None, sys.path):
        candidates += Path(folder, "nvidia").glob("*/bin/nvcc")
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    raise RuntimeError(
        "nvcc, the CUDA compiler, was not found; install the CUDA toolkit (and set CUDA_HOME where it is "
        "not on the PATH), or pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
    )
