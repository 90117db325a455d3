"""Kernels, compiled here or carried along, as the driver loads them."""

import base64
import ctypes
import zlib

from .compilers import _compile_source
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
        cubin = _built(tuned, arch, causal) or _compile(tuned, arch, causal)
        status = driver.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0)
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


def _compile(tuned: Tuned, arch: int, causal: bool) -> bytes:
    """The cubin for one compute capability (times ten) and mask."""
    macros = (f"-DFLASHGEN_CAUSAL={int(causal)}",)
    return _compile_source(tuned.source, f"sm_{arch}{tuned.arch_suffix}", arch, macros)
