"""Where the program begins: what must be in order before anything that takes long is imported."""

from __future__ import annotations

import io
import os
import sys

from .interrupts import leave_at_once


def main() -> None:
    """Runs the ``flashgen`` program."""
    leave_at_once()
    _open_streams()
    from .cli import main as run

    run()


def _open_streams() -> None:
    """Makes stdout and stderr take every text, and opens what the caller has closed: the next file that is
    opened would be taken for it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        # Nobody reads what is printed there. That it is lost is told for stdout alone.
        if descriptor == 1:
            os.close(descriptor)
            os.open(os.devnull, os.O_RDONLY)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        elif descriptor == 2:
            sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        # A name of a file may hold what is no character of the terminal's.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
