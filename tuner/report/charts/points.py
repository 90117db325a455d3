"""Trials as points: in the order in which they ended, or against another quantity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .axes import Axis, padded
from .svg import CHAR, MARGIN, NARROW, dot, rule, series_class, svg, tag, text, thinned, x_ticks, y_grid
from .units import Unit

#: Points drawn at most, for the sake of the file's size.
MOST_MARKS = 600


@dataclass(frozen=True)
class Mark:
    """A point of a series, which colours it, and the label that a pointer over it shows.

    ``chosen`` marks the winner.
    """

    x: float
    y: float
    series: int
    label: str
    chosen: bool = False


def history(
    marks: Sequence[Mark], failed: Sequence[int], trials: int, unit: Unit, alt: str, width: float
) -> Markup:
    """Draws times against the trial's number, failures in a lane above, and the line of the best so far."""
    height, left, right, top, bottom = (330 if width > NARROW else 270), 46, width - MARGIN, 52, 36
    x = Axis(0, max(trials, 2), left, right)
    # Below the best there is room for its label.
    y = padded([m.y for m in marks], height - bottom - 14, top, log=True)
    parts = y_grid(y, left, right, unit.tick)
    parts.append(rule(left, height - bottom, right, height - bottom, "axis"))
    parts.append(text(2, 12, f"time, {unit.name}", "title"))
    parts += x_ticks(x, height - 18, lambda number: f"{number:,.0f}" if number == int(number) else "")
    parts.append(text(right, height - 4, "trial", "title", "end"))
    if failed:
        parts.append(text(2, 34, "failed", "tick"))
        for number in [failed[i] for i in thinned(len(failed), MOST_MARKS)]:
            at = x(number)
            path = f"M{at - 2.5:.1f} 27.5l5 5m0-5l-5 5"
            parts.append(tag("path", tag("title", f"trial {number} failed"), d=path, class_="failed"))
    best = float("inf")
    steps: list[tuple[float, float]] = []
    for mark in marks:
        if mark.y < best:
            best = mark.y
            steps.append((x(mark.x), y(best)))
    kept = [marks[i] for i in thinned(len(marks), MOST_MARKS)]
    parts += [dot(x(m.x), y(m.y), series_class(m.series), m.label, 2.8) for m in kept]
    path = f"M{steps[0][0]:.1f} {steps[0][1]:.1f}"
    path += "".join(f"H{at:.1f}V{to:.1f}" for at, to in steps[1:]) + f"H{right}"
    parts.append(tag("path", d=path, class_="best"))
    parts += [dot(at, to, "step", radius=3.4) for at, to in steps]
    parts += [dot(x(m.x), y(m.y), "chosen", m.label, 5) for m in marks if m.chosen]
    parts.append(text(right, steps[-1][1] + 16, f"best {unit.words(best)}", "loud halo", "end"))
    return svg(width, height, alt, parts)


def scatter(
    marks: Sequence[Mark],
    alt: str,
    width: float,
    *,
    x_name: str,
    y_name: str,
    x_words: Callable[[float], str],
    y_words: Callable[[float], str],
    log_x: bool = False,
    square: bool = False,
    fences: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Draws points on a logarithmic y axis.

    With ``square`` both axes are one, and the diagonal says equal; ``fences`` are upright lines with a word
    each.
    """
    left, right, top, bottom = 46, width - MARGIN, 26, 40
    height = min(width, 430) if square else 270
    fences = [(at, words) for at, words in fences if at > 0]
    if square:
        both = [value for m in marks for value in (m.x, m.y)]
        x = padded(both, left, right, log=True)
        y = padded(both, height - bottom, top, log=True)
    else:
        x = padded([*(m.x for m in marks), *(at for at, _ in fences)], left, right, log=log_x, zero=not log_x)
        y = padded([m.y for m in marks], height - bottom, top, log=True)
    parts = y_grid(y, left, right, y_words)
    parts += [text(2, 12, y_name, "title"), text(right, height - 4, x_name, "title", "end")]
    parts.append(rule(left, height - bottom, right, height - bottom, "axis"))
    parts += x_ticks(x, height - bottom + 16, x_words)
    if square:
        parts.append(rule(x(x.low), y(y.low), x(x.high), y(y.high), "diagonal"))
        parts.append(text(right - 4, top + 28, "equal", "tick halo", "end"))
    taken = float(left)
    for at, words in sorted(fences):
        parts.append(rule(x(at), top, x(at), height - bottom, "fence"))
        # A word that would touch its neighbour's is left out: the line says where.
        if x(at) - taken > len(words) * CHAR:
            parts.append(text(x(at) - 3, top + 9, words, "tick halo", "end"))
            taken = x(at)
    kept = [marks[i] for i in thinned(len(marks), MOST_MARKS)]
    kept = [m for m in kept if not m.chosen] + [m for m in marks if m.chosen]
    for mark in kept:
        shape = "chosen" if mark.chosen else series_class(mark.series)
        parts.append(dot(x(mark.x), y(mark.y), shape, mark.label, 5 if mark.chosen else 3.2))
    return svg(width, height, alt, parts)
