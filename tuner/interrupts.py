"""Ctrl-C before and after there is anything to end softly: one line, and exit code 130.

An interrupt that is raised inside an import leaves modules half made, which tell of it in tracebacks or not
at all; nothing is lost by leaving at once. Anywhere else it is KeyboardInterrupt, and what holds files and
processes lets go of them.
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


def handle_interrupts(*, at_once: bool = False) -> None:
    """Makes Ctrl-C do from here on what the module's text says, or ``at_once`` end the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave if at_once else _interrupted)


def leave() -> NoReturn:
    """Ends the process at once, with a line that says why."""
    with contextlib.suppress(OSError):
        os.write(2, f"{WORD}\n".encode())
    os._exit(EXIT_CODE)


def _interrupted(signum: int, frame: FrameType | None) -> None:
    # Whoever asks again does not want to wait for what is being put away.
    signal.signal(signal.SIGINT, _leave)
    if any(each.f_code.co_filename == IMPORTS for each in _callers(frame)):
        leave()
    raise KeyboardInterrupt


def _leave(signum: int, frame: FrameType | None) -> None:
    leave()


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
