"""What contenders do not compute: why, and how that is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

#: The part of the free memory that one contender may take.
MEMORY_SHARE = 0.8

Call = Callable[[], Any]


class Unserved(Exception):
    """A contender does not compute that problem, or not here; the message says why."""


def check_memory(torch: Any, needed: int) -> None:
    """Raises `Unserved` where a contender needs more bytes of the card's memory than it may take."""
    allowed = MEMORY_SHARE * torch.cuda.mem_get_info()[0]
    if needed > allowed:
        raise Unserved(f"would need about {needed / 1e9:.0f} GB, {allowed / 1e9:.0f} GB are allowed")


def refusal(error: Exception, told: Sequence[str]) -> str:
    """Returns why a backend refused. PyTorch says so in warnings, among others about the backends left
    out."""
    words = [text.partition(" (Triggered internally")[0] for text in told]
    causes = [text for text in words if not text.endswith("because:") and "runtime disabled" not in text]
    text = (causes[-1] if causes else str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def tried(make: Callable[[], Call]) -> tuple[Call | None, Any, str]:
    """Returns the call that ``make`` makes, what it returned when called once and an empty text; None, None
    and the reason where something refuses."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            call = make()
            return call, call(), ""
        except Unserved as reason:
            return None, None, str(reason)
        except Exception as error:  # whatever a library raises is a reason, not the end
            return None, None, refusal(error, [str(each.message) for each in told])
