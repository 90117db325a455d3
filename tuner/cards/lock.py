"""One lock per card and host: two tuners never time over each other, they take turns.

The lock is held for one request, a fraction of a second to a few minutes, by a file that the system unlocks
when its holders are gone. The worker process inherits it: a coordinator that is killed leaves the card locked
until its kernel is off it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import FlashgenError

FOLDER = "flashgen-locks"
#: How often a lock is tried, and after how long the wait is told.
TRY_SECONDS, TELL_SECONDS = 0.02, 1.0


class GaveUp(FlashgenError):
    """The wait for the card was ended before it was free."""


class CardLock:
    """The lock of the card ``key`` (its PCI bus id), taken in turns.

    Who wants the card first queues for a second file: whoever has just put the card down must queue behind
    those who wait.
    """

    def __init__(self, key: str, folder: Path | None = None) -> None:
        name = re.sub(r"[^a-z0-9]+", "_", key.lower())
        folder = folder or Path(tempfile.gettempdir()) / FOLDER
        self._paths = (folder / f"{name}.next", folder / f"{name}.card")
        self._files: list[int] = []

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors to pass on to the process that uses the card."""
        return tuple(self._files[1:])

    def open(self) -> None:
        """Opens the files. Raises FlashgenError where that cannot be."""
        if self._files:
            return
        try:
            self._files = [_open_shared(path) for path in self._paths]
        except OSError as error:
            raise FlashgenError(
                f"the card's lock {self._paths[1]} cannot be opened: {error.strerror}; mend its permissions, "
                "or set TMPDIR to a folder that all who share the card can write"
            ) from error

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []

    @contextlib.contextmanager
    def held(
        self, *, tell: Callable[[str], None] = lambda holder: None, over: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Waits for the card and holds it. ``tell`` is given the holder's name once the wait takes long.

        Raises:
            GaveUp: ``over`` said so while it waited.
        """
        self.open()
        turn, card = self._files
        began, told = time.monotonic(), False
        taken: list[int] = []
        try:
            for file in (turn, card):
                while not _try(file):
                    if over():
                        raise GaveUp("the run ended while it waited for the card")
                    if not told and time.monotonic() - began > TELL_SECONDS:
                        told = True
                        tell(self._holder())
                    time.sleep(TRY_SECONDS)
                taken.append(file)
            fcntl.flock(turn, fcntl.LOCK_UN)
            taken.remove(turn)
            os.ftruncate(card, 0)
            os.pwrite(card, f"process {os.getpid()}".encode(), 0)
            yield
        finally:
            for file in taken:
                fcntl.flock(file, fcntl.LOCK_UN)

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            name = os.pread(self._files[1], 80, 0).decode(errors="replace")
            if re.fullmatch(r"process \d+", name):
                return name
        return "another process"


def _try(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_shared(path: Path) -> int:
    """A file that every user may lock. In a sticky folder others' files open, but not with O_CREAT."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            path.parent.chmod(0o1777)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags)
    os.fchmod(file, 0o666)  # whatever the umask says
    return file
