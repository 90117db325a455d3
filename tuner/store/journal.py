"""Optuna's journal file, made to survive what kills its writers: a half-written last line is cut off, and a
lock whose holder is dead is broken at once instead of after half a minute.

The lock stays Optuna's own, a symbolic link that other programs wait for too. It leads to a file whose name
says who holds it, and which is there for as long as the lock is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from optuna.distributions import json_to_distribution
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock, _storage
from optuna.storages.journal._storage import JournalOperation

from ..files import check_regular, name_from_file, name_in_file
from ..processes import is_gone, process_name

LOCK_SUFFIX, HOLDER_SUFFIX = ".lock", ".holder"
#: How often a lock is tried, and after how long it is left to Optuna, which breaks what does not move.
TRY_SECONDS, PATIENCE_SECONDS = 0.005, 10.0
#: A holder's file that is older belongs to a process of another host that was killed: none holds a lock for
#: longer than Optuna lets it.
STALE_HOLDER_SECONDS = 600.0
#: What a line of a journal may be.
OPERATIONS = frozenset(int(operation) for operation in JournalOperation)
#: What each line begins with.
FIRST_KEY = b'{"op_code":'
#: The longest first line of a journal that is looked at.
MAX_LINE = 2**20
#: Of every trial Optuna reads what each parameter is drawn from: a few texts, hundreds of thousands of times,
#: which take more time and memory than all the rest. Nobody changes what it makes of one.
setattr(_storage, "json_to_distribution", functools.cache(json_to_distribution))  # noqa: B010 - not exported


class NoJournal(ValueError):
    """A file that is another program's, or a journal with something in it that Optuna never wrote."""


class Journal(JournalFileBackend):
    """Optuna's storage in a journal file, with the file named in what goes wrong and nothing half written
    left behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        check_regular(path)
        self._require_journal()
        self._safe_lock = JournalLock(path)
        super().__init__(str(path), self._safe_lock)
        self._mend()

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        number = log_number_from
        logs = super().read_logs(log_number_from)
        while True:
            number += 1
            try:
                log = next(logs)
            except StopIteration:
                return
            except RecursionError:
                raise NoJournal(f"line {number} of it is nested too deeply") from None
            if not _is_log(log):
                raise NoJournal(f"line {number} of it is nothing that Optuna writes")
            yield _with_shared_words(log)

    def _require_journal(self) -> None:
        """Raises NoJournal for a file that is not Optuna's, before its end is taken for half a line."""
        try:
            with self._path.open("rb") as file:
                line = file.readline(MAX_LINE)
        except FileNotFoundError:
            return
        try:
            torn = not line.endswith(b"\n") and line[: len(FIRST_KEY)] == FIRST_KEY[: len(line)]
            ours = torn or _is_log(json.loads(line))
        except (ValueError, RecursionError):
            ours = False
        if line and not ours:
            raise NoJournal("it is no journal of Optuna's")

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


def _with_shared_words(value: Any) -> Any:
    """The same with one string for all equal ones: every line names the same parameters and attributes, which
    a parser makes anew each time, and trials keep."""
    if isinstance(value, dict):
        return {sys.intern(name): _with_shared_words(each) for name, each in value.items()}
    return sys.intern(value) if isinstance(value, str) else value


class JournalLock(JournalFileSymlinkLock):
    """A journal's lock, a link to a file named after this process, so that others of this host know when it
    died."""

    def __init__(self, path: Path) -> None:
        self._link = path.with_name(path.name + LOCK_SUFFIX)
        self._path = path
        self._clean()
        super().__init__(str(path))

    def acquire(self) -> bool:
        holder = self._own_holder()
        holder.touch()
        # A forked child holds its locks in its own name.
        self._lock_target_file = str(holder.absolute())
        try:
            return self._wait(holder)
        except BaseException:
            if not self._leads_to(holder):
                holder.unlink(missing_ok=True)
            raise

    def release(self) -> None:
        super().release()
        self._own_holder().unlink(missing_ok=True)

    def _wait(self, holder: Path) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(FileExistsError):
                self._link.symlink_to(holder.absolute())
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
                holder = self._link.readlink()
                self._link.unlink()
                holder.unlink(missing_ok=True)

    def _holder_is_dead(self) -> bool:
        try:
            return is_gone(_named_by(self._link.readlink().name))
        except OSError:
            return False

    def _clean(self) -> None:
        """Removes what killed processes left."""
        with contextlib.suppress(OSError):
            for holder in self._path.parent.glob(f".{glob.escape(self._path.name)}@*{HOLDER_SUFFIX}"):
                stale = time.time() - holder.stat().st_mtime > STALE_HOLDER_SECONDS
                if (stale or is_gone(_named_by(holder.name))) and not self._leads_to(holder):
                    holder.unlink(missing_ok=True)
        self._break_dead()

    def _leads_to(self, holder: Path) -> bool:
        try:
            return self._link.readlink().name == holder.name
        except OSError:
            return False

    def _own_holder(self) -> Path:
        """A file of this thread alone: another must not take it away when it lets go."""
        return self._holder(f"{process_name()}/{threading.get_ident()}")

    def _holder(self, process: str) -> Path:
        return self._path.with_name(f".{self._path.name}@{name_in_file(process)}{HOLDER_SUFFIX}")


def _named_by(file_name: str) -> str:
    """The process, and its thread, that a holder's file is named after."""
    return name_from_file(file_name.removesuffix(HOLDER_SUFFIX).rpartition("@")[2])


def _is_log(log: object) -> bool:
    """Whether Optuna may have written that line; an operation that it does not know ends its reading."""
    return isinstance(log, dict) and log.get("op_code") in OPERATIONS


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this host at a time."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
