"""Parallel coordinates: every trial a line over all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from .labels import fitted, text_width
from .svg import NAME_SIZE, NARROW, TICK_SIZE, rule, svg, tag, text

#: Lines of parallel coordinates drawn at most.
MOST_LINES = 160


@dataclass(frozen=True)
class Line:
    """A trial in parallel coordinates: its value's place on each axis, 0..1; ``grade`` 0 is fastest."""

    places: tuple[float, ...]
    grade: int
    label: str
    chosen: bool = False


@dataclass(frozen=True)
class Stops:
    """An axis of parallel coordinates: its name and what stands where, 0..1; ``chosen`` is the winner's."""

    name: str
    stops: tuple[tuple[float, str], ...]
    chosen: int | None = None


def parallel(axes: Sequence[Stops], lines: Sequence[Line], alt: str, width: float) -> Markup:
    """Draws parallel coordinates, the axes below each other: words lie level, and an axis is as long as the
    page is wide. Names stand before the axes on wide pages, above them on narrow ones."""
    beside = width > NARROW
    gutter = max(text_width(axis.name, NAME_SIZE) for axis in axes) + 30 if beside else 20.0
    pitch, top = (44.0, 14.0) if beside else (52.0, 26.0)
    start, end = gutter, width - 20
    height = top + pitch * (len(axes) - 1) + 24

    def across(place: float) -> float:
        return start + place * (end - start)

    parts: list[str] = []
    for line in sorted(lines, key=lambda line: (line.chosen, -line.grade)):
        points = " ".join(f"{across(p):.0f},{top + i * pitch:.0f}" for i, p in enumerate(line.places))
        shape = "chosen" if line.chosen else f"grade{line.grade}"
        parts.append(tag("polyline", tag("title", escape(line.label)), points=points, class_=f"line {shape}"))
    for i, axis in enumerate(axes):
        parts += _axis(axis, top + i * pitch, start, end, beside)
    return svg(width, height, alt, parts)


def _axis(axis: Stops, at: float, start: float, end: float, beside: bool) -> list[str]:
    """One axis at height ``at`` from ``start`` to ``end``: a tick at every stop, and the words that fit."""
    parts = [rule(start - 10, at, end + 10, at, "axis")]
    parts.append(text(0, at + 4, axis.name, "name") if beside else text(2, at - 9, axis.name, "name halo"))
    stops = [(start + place * (end - start), words) for place, words in axis.stops]
    for x, words in stops:
        parts.append(tag("path", tag("title", escape(words)), d=f"M{x:.1f} {at - 3.5:.1f}v7", class_="stop"))
    chosen = None if axis.chosen is None else axis.stops[axis.chosen][1]
    size = TICK_SIZE if chosen is None else NAME_SIZE
    for label in fitted(stops, start - 20, end + 20, size, axis.chosen):
        shape = "strong halo" if label.words == chosen else "tick halo"
        parts.append(text(label.middle, at + 16, label.words, shape, "middle"))
    return parts
