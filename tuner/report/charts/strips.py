"""Strip plots: times by the value of one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from markupsafe import Markup

from .axes import padded
from .svg import CHAR, PANEL, dot, rule, svg, tag, text, thinned, y_grid
from .units import Unit

#: Dots of one strip plot drawn at most.
MOST_DOTS = 240


@dataclass(frozen=True)
class Column:
    """The points of one value in a strip plot."""

    name: str
    values: tuple[float, ...]
    chosen: bool = False


def strips(columns: Sequence[Column], axis_of: Sequence[float], unit: Unit, alt: str) -> Markup:
    """Draws times by the value of one parameter: a trial is a dot, the middle half a box, the median a line,
    both where there are enough trials.

    ``axis_of`` is all times of the family, so that panels share an axis.
    """
    width, height, left, right, top, bottom = PANEL, 214, 44, PANEL - 4, 10, 40
    y = padded(axis_of, height - bottom, top, log=True)
    parts = y_grid(y, left, right, unit.tick)
    pitch = (right - left) / len(columns)
    crowded = max(len(c.name) for c in columns) * CHAR > pitch - 2
    for i, column in enumerate(columns):
        middle = left + (i + 0.5) * pitch
        half = min(pitch * 0.36, 26.0)
        values = sorted(column.values)  # so that the fastest is drawn however many are left out
        shape = "chosen" if column.chosen else "s0"
        if len(values) >= 4:
            low, _, high = quantiles(values, n=4, method="inclusive")
            parts.append(
                tag(
                    "rect",
                    x=middle - half,
                    y=y(high),
                    width=2 * half,
                    height=max(y(low) - y(high), 1),
                    rx=3,
                    class_=f"box {shape}",
                )
            )
        for j in thinned(len(values), max(MOST_DOTS // len(columns), 2)):
            aside = ((j * 0.618034) % 1 - 0.5) * 2 * half * 0.8 if len(values) > 1 else 0.0
            parts.append(dot(middle + aside, y(values[j]), shape, radius=2.2))
        if len(values) >= 3:
            at = y(median(values))
            parts.append(rule(middle - half, at, middle + half, at, f"median {shape}"))
        name = "strong" if column.chosen else "tick"
        # Where names would touch, every other one stands lower.
        lower = 13 if crowded and i % 2 else 0
        fit = 0 if crowded and len(column.name) * CHAR < 2 * pitch else pitch
        parts.append(text(middle, height - bottom + 15 + lower, column.name, name, "middle", fit=fit))
        if not crowded:
            parts.append(text(middle, height - bottom + 30, f"{len(values)}", "count", "middle"))
    return svg(width, height, alt, parts)
