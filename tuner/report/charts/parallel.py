"""Parallel coordinates: every trial a line over all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from .svg import NARROW, rule, svg, tag, text

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
    """An axis of parallel coordinates: its name and what stands where, 0..1."""

    name: str
    stops: tuple[tuple[float, str], ...]


def parallel(axes: Sequence[Stops], lines: Sequence[Line], alt: str, width: float) -> Markup:
    """Draws parallel coordinates, axes side by side on wide pages, one below the other on narrow ones."""
    upright = width > NARROW
    pitch = max(62.0, (width - 60) / max(len(axes) - 1, 1)) if upright else 52.0
    if upright:
        width = 60 + pitch * (len(axes) - 1)
        height, start, end = 308.0, 288.0, 44.0
    else:
        height, start, end = 26 + pitch * len(axes), 20.0, width - 20

    def along(i: int) -> float:
        return 30 + i * pitch

    def across(place: float) -> float:
        return start + place * (end - start)

    parts: list[str] = []
    for line in sorted(lines, key=lambda line: (line.chosen, -line.grade)):
        steps = [(along(i), across(p)) for i, p in enumerate(line.places)]
        points = " ".join(f"{a:.0f},{b:.0f}" if upright else f"{b:.0f},{a:.0f}" for a, b in steps)
        shape = "chosen" if line.chosen else f"grade{line.grade}"
        parts.append(tag("polyline", tag("title", escape(line.label)), points=points, class_=f"line {shape}"))
    for i, axis in enumerate(axes):
        at = along(i)
        if upright:
            parts.append(rule(at, start + 10, at, end - 10, "axis"))
            # Names of neighbours would touch: every other one stands higher.
            parts.append(text(at, 12 if i % 2 else 26, axis.name, "name", "middle", fit=2 * pitch - 8))
            parts += [
                text(at, across(p) + 4, words, "tick halo", "middle", fit=pitch) for p, words in axis.stops
            ]
        else:
            parts.append(rule(start - 10, at, end + 10, at, "axis"))
            parts.append(text(2, at - 9, axis.name, "name halo"))
            room = (end - start) / max(len(axis.stops) - 1, 1) if len(axis.stops) > 1 else width
            for k, (p, words) in enumerate(axis.stops):
                anchor = "start" if across(p) < 34 else "end" if across(p) > width - 34 else "middle"
                aside = {"start": -16.0, "end": 16.0, "middle": 0.0}[anchor]
                fit = room * (1.6 if 0 < k < len(axis.stops) - 1 else 1.1)
                parts.append(text(across(p) + aside, at + 14, words, "tick halo", anchor, fit=max(fit, 20)))
    return svg(width, height, alt, parts)
