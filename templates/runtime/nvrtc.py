"""NVRTC, the CUDA compiler that is a library, through ctypes: PyTorch brings it, and no other is needed."""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: Headers by name, before any of a folder. NVRTC cannot read the driver's: it declares functions of the host.
_OWN_HEADERS = {b"cuda.h": b"struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };\n"}
#: What kernels include of CUDA's headers comes with these, but for what their folders hold of libcu++.
_CUDA_HEADERS = ("cuda_fp16.h", "cuda_pipeline.h")


def _nvrtc_compile(path: str, source: str, options: list[str]) -> tuple[bytes | None, str]:
    """Compiles a source by the library at that path to a cubin, None where it is refused; and the compiler's
    log. Raises RuntimeError where the library itself fails."""
    library = _nvrtc_library(path)
    program = ctypes.c_void_p()
    texts = ctypes.c_char_p * len(_OWN_HEADERS)
    headers = len(_OWN_HEADERS), texts(*_OWN_HEADERS.values()), texts(*_OWN_HEADERS)
    status = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", *headers)
    _nvrtc_check(library, status)
    try:
        encoded = [option.encode() for option in options]
        status = library.nvrtcCompileProgram(
            program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
        log = _nvrtc_output(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status == 0:
            return _nvrtc_output(library, program, "CUBIN"), log
        return None, log if log.strip() else f"error: {library.nvrtcGetErrorString(status).decode()}"
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_library(path: str) -> ctypes.CDLL:
    # Its own search for what it has built in does not look beside it where pip has put both.
    if Path(path).is_absolute():
        for built_in in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(built_in))
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _nvrtc_output(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """One of the program's outputs: NVRTC tells its size, then copies it."""
    size = ctypes.c_size_t()
    _nvrtc_check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _nvrtc_check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _nvrtc_check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"NVRTC failed: {library.nvrtcGetErrorString(status).decode()}")


def _nvrtc_archs(path: str) -> tuple[int, ...]:
    """The compute capabilities, times ten, that it compiles for; none where it cannot be loaded."""
    try:
        library, count = _nvrtc_library(path), ctypes.c_int()
        library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        library.nvrtcGetSupportedArchs(archs)
    except (OSError, AttributeError):
        return ()
    return tuple(archs)


def _nvrtc_paths() -> list[str]:
    """The NVRTC libraries there are, the newest first: of Python's packages, of toolkits, of conda, and by
    name, wherever the system's loader finds them."""
    folders = [folder for site in _site_folders() for folder in sorted((site / "nvidia").glob("*/lib"))]
    folders += [Path(home, name) for home in _cuda_homes() for name in ("lib64", "lib")]
    folders.append(Path(sys.prefix, "lib"))
    found = {path.resolve(): path for folder in folders for path in folder.glob("libnvrtc.so.*")}
    newest_first = sorted(found.values(), key=lambda path: -int(re.findall(r"\d+", path.name)[0]))
    return [*map(str, newest_first), "libnvrtc.so.13", "libnvrtc.so.12"]


def _cuda_includes(nvrtc: str) -> list[str]:
    """Folders with the CUDA headers and libcu++ for that library, those beside it before others; none where
    there are none, which kernels of float32 alone do without."""
    beside = Path(nvrtc).parent.parent
    roots = [beside, *sorted(beside.parent.glob("cuda_*"))] if Path(nvrtc).is_absolute() else []
    roots += _cuda_homes()
    roots += [root for site in _site_folders() for root in sorted((site / "nvidia").glob("*"))]
    # Triton, which PyTorch brings, has them too.
    roots += [site / "triton" / "backends" / "nvidia" for site in _site_folders()]
    folders = [root / name for root in roots for name in ("include", "targets/x86_64-linux/include")]
    headers = next((f for f in folders if all((f / name).is_file() for name in _CUDA_HEADERS)), None)
    if headers is None:
        return []
    places = (headers / "cccl", *folders, *(folder / "cccl" for folder in folders))
    libcuxx = next((place for place in places if (place / "nv" / "target").is_file()), None)
    return [str(headers)] + ([] if libcuxx in (None, headers) else [str(libcuxx)])


def _site_folders() -> Iterator[Path]:
    """Where this interpreter looks for packages."""
    return (Path(folder) for folder in sys.path if folder)


def _cuda_homes() -> list[Path]:
    """Where CUDA toolkits may be, those that the environment names first."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [*map(Path, named), Path("/usr/local/cuda")]
