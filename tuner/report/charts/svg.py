"""Inline SVG: elements, text, lines and grids.

Colours and fonts come from the page's style sheet by class, so that they follow light and dark; all text is
escaped. A chart is drawn in the units of its ``width``: at that width text has the size that the style sheet
gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from markupsafe import Markup

from .axes import Axis
from .labels import text_width

#: Widths of a drawing: for wide pages, for half of one, and for narrow ones.
WIDE, HALF, NARROW = 880, 530, 344
#: Panels of which three stand side by side on wide pages.
PANEL = 344
#: Room right of a level axis.
MARGIN = 12
#: Sizes of a chart's text, as the style sheet gives them.
TICK_SIZE, NAME_SIZE = 11.5, 12.0
#: Character width of a chart's text, to keep labels apart.
CHAR = 6.3


def tag(name: str, *children: str, **attributes: str | float | None) -> str:
    """Writes an element; attributes are escaped, children are markup. ``class_`` is class, ``a_b`` is a-b."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(children)
    return f"<{name}{told}>{inside}</{name}>" if inside else f"<{name}{told}/>"


def _number(value: str | float | None) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, class_: str = "", anchor: str | None = None, fit: float = 0) -> str:
    """Writes a text, escaped; what exceeds the width ``fit`` is cut off, and told to a pointer."""
    shown = words
    if fit and len(words) * CHAR > fit:
        shown = words[: max(1, int(fit / CHAR) - 1)] + "…"
    told = tag("title", escape(words)) if shown != words else ""
    return tag("text", escape(shown) + told, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def rule(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """Writes a straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def dot(x: float, y: float, class_: str, label: str = "", radius: float = 3.2) -> str:
    """Writes a disc, with a label that a pointer over it shows."""
    title = tag("title", escape(label)) if label else ""
    return tag("circle", title, cx=x, cy=y, r=radius, class_=class_)


def svg(width: float, height: float, alt: str, parts: Iterable[str]) -> Markup:
    """Puts a drawing together; ``alt`` tells it to those who cannot see it."""
    return Markup(
        tag(
            "svg",
            *parts,
            viewBox=f"0 0 {width:.0f} {height:.0f}",
            role="img",
            aria_label=alt,
            class_="drawing",
            style=f"max-width:{width * (1.25 if width > PANEL else 1.6):.0f}px",
        )
    )


def series_class(number: int) -> str:
    """Returns the class that colours a series."""
    return f"s{number % 4}"


def thinned(count: int, most: int) -> list[int]:
    """Returns at most so many of the indices below ``count``, spread evenly."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def y_grid(axis: Axis, left: float, right: float, words: Callable[[float], str]) -> list[str]:
    """Draws a line and its value for every tick of an upright axis."""
    parts = []
    for tick in axis.ticks():
        y = axis(tick)
        parts += [rule(left, y, right, y, "grid"), text(left - 6, y + 4, words(tick), "tick", "end")]
    return parts


def x_ticks(axis: Axis, y: float, words: Callable[[float], str]) -> list[str]:
    """Writes the values of a level axis's ticks at height ``y``, none further right than `MARGIN` beyond the
    axis; ticks without words are left out."""
    parts = []
    for tick in axis.ticks():
        if told := words(tick):
            x = min(axis(tick), axis.end + MARGIN - text_width(told, TICK_SIZE) / 2)
            parts.append(text(x, y, told, "tick", "middle"))
    return parts
