"""Kernels of emitted files, `best.py` or `best.cu`, read as data: nothing of a file is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...gen.emit.cuda import read_cuda
from ...gen.kernel import Kernel
from ..errors import FlashgenError, UsageError
from ..files import read_text
from .module_text import read_module

#: The largest emitted file that is read: a module may carry many kernels compiled.
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class EmittedKernel:
    """An emitted file as data: its kernel, under the mask it was tuned with, and the card it names."""

    path: Path
    kernel: Kernel
    device: str
    name: str = ""
    """The kernel's name in a module of several, else empty."""

    @property
    def is_module(self) -> bool:
        return self.path.suffix == ".py"


def read_emitted(path: Path) -> EmittedKernel:
    """Reads the one kernel of an emitted .py or .cu file as data: nothing of the file is run.

    Raises:
        FlashgenError: it cannot be read, flashgen did not write it, or it holds several kernels.
    """
    found = read_each(path)
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise FlashgenError(f"{path} holds {len(found)} kernels ({names}); name a file of one")
    return found[0]


def read_each(path: Path) -> list[EmittedKernel]:
    """Reads every kernel of an emitted file as `read_emitted` does one; a module may hold several."""
    if path.suffix not in (".py", ".cu"):
        raise UsageError(f"{path} is neither a .py nor a .cu file; name one that `flashgen emit` wrote")
    try:
        text = read_text(path, MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise FlashgenError(
            f"{path} cannot be read: {why}; name a file that `flashgen emit` wrote"
        ) from error
    try:
        if path.suffix == ".py":
            return [EmittedKernel(path, *each) for each in read_module(path, text)]
        return [EmittedKernel(path, *read_cuda(text))]
    except OSError as error:
        raise FlashgenError(
            f"{path} takes its source from {error.filename}, which cannot be read: {error.strerror}; emit "
            "it again"
        ) from error
    except (
        KeyError,
        TypeError,
        ValueError,
        SyntaxError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise FlashgenError(
            f"{path} does not read as a kernel of this flashgen ({_why_unread(error)}); name a file that "
            "`flashgen emit` wrote, or emit it again"
        ) from error


def _why_unread(error: Exception) -> str:
    match error:
        case KeyError():
            return f"it has no {error.args[0]}"
        case SyntaxError():
            return f"line {error.lineno}: {error.msg}"
        case ValueError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"
