"""What commands share of the terminal: JSON, where people read, and ending on a signal."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_json(data: Any) -> None:
    """Prints ``data`` to stdout as JSON; raises OSError where stdout cannot be written."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
    sys.stdout.flush()  # what cannot be written is told here, not while Python exits


def console_for(as_json: bool) -> Console:
    """Returns where people read: stdout, or stderr when stdout is for JSON alone."""
    from ..view.console import SafeConsole

    return SafeConsole(stderr=as_json)


@contextlib.contextmanager
def waiting(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is waited for, and for how long: ``text``, and then what the function that it
    yields is given. Nothing of it stays."""
    if not console.is_terminal:
        yield lambda text: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda text: progress.update(task, description=text)


@contextlib.contextmanager
def ends_softly(note: Callable[[str], None]) -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C or SIGTERM sets; the second ends the program at once."""
    stop = threading.Event()

    def handle(signum: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        note(f"{signal.Signals(signum).name}: ending with the best so far (again to drop it)")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
