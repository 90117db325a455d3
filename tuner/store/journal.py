"""Optuna's journal file, made to survive what kills its writers: a half-written last line is cut off, and a
lock whose holder is dead is broken at once instead of after half a minute.

The lock stays Optuna's own, a symbolic link that other programs wait for too. It leads to a file whose name
says who holds it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from .liveness import is_dead, process_name

LOCK_SUFFIX, HOLDER_SUFFIX = ".lock", ".holder"
#: How often a lock is tried, and after how long it is left to Optuna, which breaks what does not move.
TRY_SECONDS, PATIENCE_SECONDS = 0.005, 10.0


class Journal(JournalFileBackend):
    """Optuna's storage in a journal file, with the file named in what goes wrong and nothing half written
    left behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._safe_lock = JournalLock(path)
        super().__init__(str(path), self._safe_lock)
        self._mend()

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            super().append_logs(logs)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._mend()
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _mend(self) -> None:
        """Cuts off a last line that a full disk or a crash left unfinished; the next one would be joined to
        it, and the journal unreadable from there on."""
        if self._is_whole():
            return
        # Seen without the lock it may be another's line under way; with it nobody writes.
        self._safe_lock.acquire()
        try:
            with self._path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        finally:
            self._safe_lock.release()

    def _is_whole(self) -> bool:
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


class JournalLock(JournalFileSymlinkLock):
    """A journal's lock, a link to a file named after this process, so that others of this host know when it
    died."""

    def __init__(self, path: Path) -> None:
        self._link = path.with_name(path.name + LOCK_SUFFIX)
        self._path = path
        self._pid = 0
        self._clean()
        super().__init__(str(path))

    def acquire(self) -> bool:
        if self._pid != os.getpid():
            # A forked child holds its locks in its own name.
            self._pid = os.getpid()
            holder = self._holder(process_name())
            holder.touch()
            atexit.register(holder.unlink, missing_ok=True)
            self._lock_target_file = str(holder.absolute())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(FileExistsError):
                self._link.symlink_to(self._lock_target_file)
                return True
            self._break_dead()
            time.sleep(TRY_SECONDS)
        return super().acquire()

    def _break_dead(self) -> None:
        """Removes the link of a process of this host that is gone."""
        if not self._holder_is_dead():
            return
        with _alone(self._path), contextlib.suppress(OSError):
            # Others of this host may have done so meanwhile, and hold it now.
            if self._holder_is_dead():
                self._link.unlink()

    def _holder_is_dead(self) -> bool:
        try:
            return is_dead(_named_by(Path(self._link.readlink()).name))
        except OSError:
            return False

    def _clean(self) -> None:
        """Removes what killed processes left."""
        for holder in self._path.parent.glob(self._holder("*").name):
            if is_dead(_named_by(holder.name)) and not self._holder_is_dead():
                holder.unlink(missing_ok=True)

    def _holder(self, process: str) -> Path:
        name = f".{self._path.name}@{process.replace('/', '+')}{HOLDER_SUFFIX}"
        return self._path.with_name(name)


def _named_by(file_name: str) -> str:
    """The process that a holder's file is named after."""
    return file_name.removesuffix(HOLDER_SUFFIX).rpartition("@")[2].replace("+", "/")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this host at a time."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
