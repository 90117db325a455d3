"""The CUDA driver: contexts, devices, streams and memory, through ctypes."""

import ctypes
import functools
import sys
import threading
from typing import Any

# PyCUDA, where it is installed, does not launch: it takes neither streams nor contexts that others made.

_POINTER_CONTEXT, _POINTER_DEVICE = 1, 9  # CUpointer_attribute
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SMEM_PER_BLOCK = 75, 76, 97  # CUdevice_attribute

_PRIMARY_CONTEXTS: dict[int, int] = {}
_LOCK = threading.RLock()


@functools.cache
def _driver() -> ctypes.CDLL:
    """libcuda, initialised, with the argument types of the functions used."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"an NVIDIA GPU and its driver are needed: {error}") from None
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    integer, unsigned = ctypes.c_int, ctypes.c_uint
    signatures: dict[str, list[Any]] = {
        "cuCtxGetCurrent": [pointer],
        "cuCtxGetDevice": [pointer],
        "cuCtxPushCurrent_v2": [pointer],
        "cuCtxPopCurrent_v2": [pointer],
        "cuDeviceGet": [pointer, integer],
        "cuDeviceGetAttribute": [pointer, integer, integer],
        "cuDeviceGetName": [pointer, integer, integer],
        "cuDevicePrimaryCtxRetain": [pointer, integer],
        "cuEventCreate": [pointer, unsigned],
        "cuEventDestroy_v2": [pointer],
        "cuEventElapsedTime": [pointer, pointer, pointer],
        "cuEventRecord": [pointer, pointer],
        "cuEventSynchronize": [pointer],
        "cuGetErrorName": [integer, pointer],
        "cuGetErrorString": [integer, pointer],
        "cuKernelGetFunction": [pointer, pointer],
        "cuKernelSetAttribute": [integer, integer, pointer, integer],
        "cuLaunchKernelEx": [pointer, pointer, pointer, pointer],
        "cuLibraryGetKernel": [pointer, pointer, text],
        "cuLibraryLoadData": [pointer, text, pointer, pointer, unsigned, pointer, pointer, unsigned],
        "cuMemAlloc_v2": [pointer, size],
        "cuMemFree_v2": [pointer],
        "cuMemcpyDtoHAsync_v2": [pointer, pointer, size, pointer],
        "cuMemcpyHtoDAsync_v2": [pointer, pointer, size, pointer],
        "cuMemsetD8Async": [pointer, ctypes.c_ubyte, size, pointer],
        "cuPointerGetAttribute": [pointer, integer, pointer],
        "cuStreamSynchronize": [pointer],
        "cuTensorMapEncodeTiled": [pointer, integer, unsigned, *[pointer] * 5, *[integer] * 4],
    }
    for function, arguments in signatures.items():
        try:
            getattr(driver, function).argtypes = arguments
        except AttributeError:
            raise RuntimeError(
                f"the NVIDIA driver has no {function}; install one for CUDA 12.0 or newer (525 or newer)"
            ) from None
    status = driver.cuInit(0)
    if status:
        _check(status, "starting CUDA", driver)
    return driver


def _asking(name: str) -> Any:
    """A function of libcuda that never waits: other threads are not let in meanwhile, which takes as long."""
    driver = _driver()
    return ctypes.PyDLL(driver._name, handle=driver._handle)[name]


def _check(status: int, action: str, driver: "ctypes.CDLL | None" = None) -> None:
    """Raises RuntimeError for what the driver returned, but for success."""
    if status == 0:
        return
    driver = driver or _driver()
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    driver.cuGetErrorString(status, ctypes.byref(text))
    code = (name.value or str(status).encode()).decode()
    raise RuntimeError(f"{action} failed: {code}, {(text.value or b'unknown error').decode()}")


def _device_of(name: str, pointer: int) -> int:
    device = ctypes.c_int()
    if _driver().cuPointerGetAttribute(ctypes.byref(device), _POINTER_DEVICE, pointer):
        raise ValueError(f"{name} points to {pointer:#x}, which is not memory of a CUDA device")
    return device.value


def _attribute(device: int, attribute: int) -> int:
    value = ctypes.c_int()
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, device), f"asking device {device}")
    return value.value


def _arch_of(device: int) -> int:
    """Compute capability, times ten."""
    return 10 * _attribute(device, _CAPABILITY_MAJOR) + _attribute(device, _CAPABILITY_MINOR)


def _push_context(driver: ctypes.CDLL, pointer: int, device: int) -> bool:
    """Makes the context of `pointer` current; whether that took a push, which is then to be popped.

    Memory of a pool belongs to no context: any of its device serves, failing one the primary.
    """
    current, context = ctypes.c_void_p(), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    if pointer:
        driver.cuPointerGetAttribute(ctypes.byref(context), _POINTER_CONTEXT, pointer)
    wanted = context.value
    if wanted is None:
        if current.value is not None:
            current_device = ctypes.c_int()
            _check(driver.cuCtxGetDevice(ctypes.byref(current_device)), "asking for the current device")
            if current_device.value == device:
                return False
        wanted = _retain_primary_context(device)
    if wanted == current.value:
        return False
    _check(driver.cuCtxPushCurrent_v2(wanted), f"entering the context of device {device}")
    return True


def _pop_context() -> None:
    _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _retain_primary_context(device: int) -> int:
    """Retained once and for the rest of the process."""
    with _LOCK:
        if device not in _PRIMARY_CONTEXTS:
            context = ctypes.c_void_p()
            status = _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            _check(status, f"creating a context on device {device}")
            assert context.value is not None
            _PRIMARY_CONTEXTS[device] = context.value
        return _PRIMARY_CONTEXTS[device]


# ---- streams -----------------------------------------------------------------------------------------------

#: CUDA's handles of the default stream: null, and the legacy one by name.
_DEFAULT_STREAMS = (0, 1)


def _stream_handle(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, PyCUDA
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(handle)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    kind = f"{type(stream).__module__}.{type(stream).__qualname__}"
    raise TypeError(f"stream is a {kind}; pass an integer handle or a torch, CuPy or PyCUDA stream")


def _wait_for_producers(streams: set[int | None], handle: int) -> None:
    """The CUDA array interface asks its readers to wait where data is ready on another stream than theirs."""
    for stream in streams - {None, handle}:
        if not (stream in _DEFAULT_STREAMS and handle in _DEFAULT_STREAMS):
            _check(_driver().cuStreamSynchronize(stream), f"waiting for stream {stream:#x}")
