"""A drawn chart with its title, how to read it, and its key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from .svg import NARROW, WIDE


@dataclass(frozen=True)
class Chart:
    """A chart with its title, how to read it, and its key: (class, words) pairs. ``narrow`` is None where the
    one drawing serves any page; ``caution`` says what the figures cannot bear."""

    title: str
    note: str
    drawing: Markup
    narrow: Markup | None = None
    key: tuple[tuple[str, str], ...] = ()
    caution: str = ""


def wide_and_narrow(draw: Callable[[float], Markup], wide: float = WIDE) -> tuple[Markup, Markup]:
    """Returns the drawings for wide and for narrow pages, of which the page shows one; ``wide`` is the width
    of the first."""
    return draw(wide), draw(NARROW)
