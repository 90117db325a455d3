"""The functions that a call enters: what it costs, whatever the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


def functions_entered(call: Callable[[], object], files: Collection[str]) -> list[str]:
    """Returns the names of the Python functions of these files that a call enters, in order."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            entered.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered
