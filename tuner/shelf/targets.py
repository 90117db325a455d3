"""The files that a person asks for: whether they can be written, and writing them."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from ...gen.emit.cuda import read_cuda
from ...gen.emit.native import library as library_files
from ...gen.emit.native import program
from ...gen.layout import DENSE
from ...gen.problem import Problem
from ..errors import FlashgenError, UsageError
from ..files import check_regular, read_text, write_text
from .emitting import Emitted

SUFFIXES = (".cu", ".py")
#: CMake's own targets and the example's; no library can be called so.
RESERVED_STEMS = ("all", "clean", "example", "help", "install", "test")


def check_target(target: Path, *, native: bool = False) -> None:
    """Raises UsageError unless the target is a .cu or .py file, and if ``native`` a .cu file."""
    if native and target.suffix != ".cu":
        raise UsageError(f"--main and --cmake are of CUDA C++, not of {target.name}: name a .cu file")
    if target.suffix not in SUFFIXES:
        raise UsageError(f"cannot emit {str(target)!r}; name the file .cu (CUDA C++) or .py (Python module)")
    if target.suffix == ".py" and (not target.stem.isidentifier() or keyword.iskeyword(target.stem)):
        raise UsageError(f"{target.name!r} could not be imported; name the module as Python names variables")
    try:
        check_regular(target)
    except IsADirectoryError:
        raise UsageError(f"{target} is a folder; name a file in it") from None
    except OSError as error:
        raise _unwritable(target, error) from error


def write_target(target: Path, text: str) -> None:
    """Writes the file whole or not at all. Raises FlashgenError."""
    try:
        write_text(target, text)
    except OSError as error:
        raise _unwritable(target, error) from error


def _unwritable(target: Path, error: OSError) -> FlashgenError:
    return FlashgenError(
        f"{target} cannot be written: {error.strerror or error}; free some space or name another file"
    )


def _has_program(problem: Problem) -> bool:
    """Whether there are programs of such gradients."""
    return problem.scoring.is_plain and problem.layout is DENSE


def with_program(emitted: Emitted, target: Path) -> str:
    """Returns the text of a .cu file that is a program, called as ``target`` is.

    Raises UsageError for kernels that it could not call.
    """
    _check_native(emitted.problem)
    if emitted.problem.backward and not _has_program(emitted.problem):
        raise UsageError(
            "--main makes programs of gradients that check themselves under the causal mask or none, of "
            f"sequences of one length; {emitted.problem.name} is called by the launcher in the plain .cu"
        )
    kernel, _ = read_cuda(emitted.text)
    return emitted.text + program(kernel, target.stem)


def files_beside(target: Path, emitted: Emitted) -> dict[Path, str]:
    """Returns the texts of files that make the .cu a library, by path. Raises UsageError where files of
    others are in the way, or for a name that no library can have."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", target.stem) or target.stem in RESERVED_STEMS:
        raise UsageError(
            f"{target.name!r} cannot name a library; choose letters, digits and _, as in best.cu"
        )
    _check_native(emitted.problem)
    if emitted.problem.backward:
        program_too = ", and --main makes a program of it" if _has_program(emitted.problem) else ""
        raise UsageError(
            f"--cmake makes no libraries of gradients; {emitted.problem.name} is called by the launcher in "
            f"the plain .cu{program_too}"
        )
    kernel, _ = read_cuda(emitted.text)
    files = library_files(kernel, target.stem)
    beside = {target.with_name(name): text for name, text in files.items()}
    for path in beside:
        # What was written for a file of that name before names it in its first line.
        if path.exists() and target.name not in _first_line(path):
            raise UsageError(f"{path} is another's; emit into an empty folder, as in lib/{target.name}")
    return beside


def _first_line(path: Path) -> str:
    try:
        return read_text(path).partition("\n")[0]
    except (OSError, ValueError):
        return ""


def _check_native(problem: Problem) -> None:
    if problem.has_scales:
        raise UsageError(
            f"--main and --cmake serve f32, f16 and bf16; tensors of {problem.dtype} come with scales, which "
            "callers of the launcher in the plain .cu pass"
        )
