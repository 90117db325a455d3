"""What is said on stderr while a call waits: once, and only where it takes long enough to wonder."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

#: Seconds of silence before somebody wonders.
PATIENCE_S = 0.5

_SAID: set[str] = set()
_LOCK = threading.Lock()


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Says what is waited for if it is not over soon."""
    timer = threading.Timer(PATIENCE_S, say_once, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say_once(text: str) -> None:
    """Writes a line to stderr that no call before has written."""
    with _LOCK:
        if text in _SAID:
            return
        _SAID.add(text)
    print(f"flashgen: {text}", file=sys.stderr, flush=True)
