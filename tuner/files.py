"""Reading and writing the files that a person names: whole or not at all, and regular files alone.

A device, a FIFO or a socket is neither read, which may never end, nor written, which would put a file in its
place. Through a symbolic link the file that it leads to is written. All raise OSError with the reason and the
file's name in it; what to do about it is for the caller to say.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .processes import is_gone, process_name

#: What the files that are being written are called, until they are whole.
SCRATCH_PREFIX = ".scratch-"
#: Scratch files older than this belong to a process of another host that was killed.
STALE_SECONDS = 24 * 3600
#: The largest file that is read where no other bound is given.
MAX_BYTES = 256 * 2**20
KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def read_text(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """Returns the text of a regular file. Raises OSError also for a larger one, ValueError where it is no
    UTF-8."""
    with open_regular(path, most_bytes) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:  # it has grown
        raise _too_large(path, len(data), most_bytes)
    return data.decode("utf-8")


def open_regular(path: Path, most_bytes: int = MAX_BYTES) -> IO[bytes]:
    """Opens a regular file for reading. Raises OSError for what is none, or has more than ``most_bytes``."""
    # A FIFO that nobody writes to would hold up the opening itself.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status)
        if status.st_size > most_bytes:
            raise _too_large(path, status.st_size, most_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text as `write_bytes` writes its UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes | bytearray) -> None:
    """Writes a file that is whole or not there, whatever happens meanwhile; its folder is made where it is
    missing. A link stays one, and a file keeps its permissions."""
    target = check_regular(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_beside(target) as scratch:
        # Not by mkstemp, whose files nobody else may read.
        with scratch.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            scratch.chmod(stat.S_IMODE(target.stat().st_mode))
        scratch.replace(target)


def check_regular(path: Path) -> Path:
    """Returns the file that a name leads to, which need not be there. Raises OSError for what is there and is
    no regular file."""
    with contextlib.suppress(FileNotFoundError):
        _require_regular(path, path.stat())
    # A link that leads nowhere is followed too: the file will be where it points.
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """Yields a name in a file's folder that nobody else uses, and removes what is left of it afterwards, as
    well as what killed processes left in that folder."""
    remove_left(target.parent)
    scratch = target.with_name(scratch_name())
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def scratch_name() -> str:
    """Returns a name for a file or a folder of this process that is not for long."""
    return f"{SCRATCH_PREFIX}{name_in_file(process_name())}@{uuid.uuid4().hex[:12]}"


def remove_left(folder: Path) -> None:
    """Removes the scratch files that processes which are no more have left in a folder."""
    with contextlib.suppress(OSError):
        for left in folder.glob(f"{SCRATCH_PREFIX}*"):
            old = time.time() - left.lstat().st_mtime > STALE_SECONDS
            if not left.is_dir() and (old or left_by_the_dead(left.name)):
                left.unlink(missing_ok=True)


def left_by_the_dead(file_name: str) -> bool:
    """Tells whether a scratch name is one of a process that is no more."""
    return is_gone(name_from_file(file_name.removeprefix(SCRATCH_PREFIX).rpartition("@")[0]))


def name_in_file(process: str) -> str:
    """Returns a process's name as the name of a file may hold it."""
    return process.replace("/", "+")


def name_from_file(text: str) -> str:
    """Returns the process's name that `name_in_file` wrote."""
    return text.replace("+", "/")


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(
            errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL,
            f"it is {kind}, no regular file",
            str(path),
        )


def _too_large(path: Path, size: int, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size} bytes, at most {most_bytes} are read", str(path))
