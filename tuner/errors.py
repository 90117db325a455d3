"""What goes wrong in ways that a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class FlashgenError(Exception):
    """Something the user can mend: one message, the way out in it; the command exits 1."""


class BuildError(FlashgenError):
    """The compiler refused, crashed or ran out of time, or built something else than was written; the message
    is its own output."""


class LaunchError(FlashgenError):
    """The kernel could not be launched, or faulted. The runner that raised it must not be used again."""


class CorruptedMemory(FlashgenError):
    """The kernel wrote outside its outputs, or left part of them unwritten."""


class UsageError(FlashgenError):
    """The command was given something that does not exist or is out of range; it exits 2."""


class NotServed(FlashgenError):
    """Nothing computes this problem on this card; of several problems, others may go on.

    ``told`` says so and why, without the ``way_out``, which who calls from elsewhere than the command line
    knows by other names.
    """

    def __init__(self, told: str, way_out: str = "") -> None:
        super().__init__(f"{told}; {way_out}" if way_out else told)
        self.told = told


def checked(make: Callable[[], T]) -> T:
    """Returns what ``make`` returns; the ValueError of a value out of range becomes a UsageError."""
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def suggestion(name: str, known: Sequence[str]) -> str:
    """Returns ``did you mean ...?`` where something is near, else all there is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
