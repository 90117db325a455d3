"""Horizontal bars, a name and a value above each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .axes import Axis
from .svg import rule, svg, tag, text


@dataclass(frozen=True)
class Bar:
    """A length with its name and its value in words; ``other`` is what it is compared with."""

    name: str
    value: float
    words: str
    other: float | None = None
    chosen: bool = False


def bars(
    rows: Sequence[Bar], alt: str, width: float, *, full: float | None = None, fence: str = ""
) -> Markup:
    """Draws horizontal bars, a name and a value above each.

    ``full`` is the length of the whole width, named by ``fence``, and the longest bar's otherwise; ``other``
    of a bar is a tick on it.
    """
    pitch, top = 34, 18 if fence else 2
    height = top + pitch * len(rows) + 2
    longest = max([*(row.value for row in rows), *(row.other or 0 for row in rows), full or 0]) or 1.0
    x = Axis(0, longest, 0, width - 2)
    parts = []
    for i, row in enumerate(rows):
        y = top + i * pitch
        parts.append(text(0, y + 13, row.name, "strong" if row.chosen else "name", fit=width - 130))
        parts.append(text(width - 2, y + 13, row.words, "value", "end"))
        parts.append(tag("rect", x=0, y=y + 18, width=width - 2, height=9, rx=2, class_="track"))
        length = max(x(row.value), 1.5)
        shape = "chosen" if row.chosen else "s0"
        parts.append(tag("rect", x=0, y=y + 18, width=length, height=9, rx=2, class_=shape))
        if row.other is not None:
            at = x(row.other)
            parts.append(rule(at, y + 15, at, y + 30, "other"))
    if full is not None and fence:
        at = x(full)
        parts.append(rule(at, top - 4, at, height, "fence"))
        parts.append(text(at, 10, fence, "tick", "end"))
    return svg(width, height, alt, parts)
