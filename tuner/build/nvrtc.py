"""Compiles one CUDA source to a cubin by NVRTC: run as a script, with nothing of flashgen imported.

    python nvrtc.py LIBRARY SOURCE CUBIN OPTION...

Prints the compiler's log; exits 1 when it refuses.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

#: Headers by name, before any of a folder. NVRTC cannot read the driver's: it declares functions of the host.
HEADERS = {b"cuda.h": b"struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };\n"}


def compile_nvrtc(library_path: str, source: str, options: list[str]) -> tuple[bytes | None, str]:
    """Compiles with NVRTC; returns the cubin, None where the compiler refused, and its log."""
    library = ctypes.CDLL(library_path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()
    strings = ctypes.c_char_p * len(HEADERS)
    headers = len(HEADERS), strings(*HEADERS.values()), strings(*HEADERS)
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", *headers),
    )
    encoded = [option.encode() for option in options]
    status = library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
    log = _read(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
    cubin = _read(library, program, "CUBIN") if status == 0 else None
    if status != 0 and not log.strip():
        log = f"error: {library.nvrtcGetErrorString(status).decode()}"
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """One of the program's outputs: NVRTC tells its size, then copies it."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise SystemExit(f"error: NVRTC: {library.nvrtcGetErrorString(status).decode()}")


def main() -> int:
    library, source, target, *options = sys.argv[1:]
    cubin, log = compile_nvrtc(library, Path(source).read_text(encoding="utf-8"), options)
    print(log)
    if cubin is None:
        return 1
    Path(target).write_bytes(cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
