"""Ctrl-C at any moment of the program: one line, and exit code 130.

Before a command begins, and after it, nothing is lost by leaving at once. While it runs an interrupt is
KeyboardInterrupt, and what holds files and processes lets go of them; but inside an import it would leave
modules half made, which tell of it in tracebacks or not at all, so there too the process leaves at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

#: What shells expect of a program that Ctrl-C ended: 128 and the number of the signal.
EXIT_CODE = 130
WORD = "interrupted"
#: The code of import statements, as frames name it.
IMPORTS = "<frozen importlib._bootstrap>"


def leave_at_once() -> None:
    """Makes Ctrl-C end the process from here on."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt within it, in a program that is left at once elsewhere."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"{WORD}\n".encode())
    os._exit(EXIT_CODE)


def _interrupted(signum: int, frame: FrameType | None) -> None:
    # Whoever asks again does not want to wait for what is being put away.
    signal.signal(signal.SIGINT, _leave)
    if any(each.f_code.co_filename == IMPORTS for each in _callers(frame)):
        _leave(signum, frame)
    raise KeyboardInterrupt


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
