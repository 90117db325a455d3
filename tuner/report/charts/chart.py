"""A drawn chart with its title, how to read it, and its key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from .svg import NARROW, WIDE


@dataclass(frozen=True)
class Chart:
    """A chart with its title, how to read it, and its key: (class, words) pairs. ``narrow`` is None where the
    one drawing serves any page."""

    title: str
    note: str
    drawing: Markup
    narrow: Markup | None = None
    key: tuple[tuple[str, str], ...] = ()


def wide_and_narrow(draw: Callable[[float], Markup]) -> tuple[Markup, Markup]:
    """Returns the drawings for wide and for narrow pages, of which the page shows one."""
    return draw(WIDE), draw(NARROW)
