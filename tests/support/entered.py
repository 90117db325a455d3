"""The functions that a call enters: what it costs, whatever the machine."""

from __future__ import annotations

import gc
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

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what others left is not the call's to forget
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return entered
