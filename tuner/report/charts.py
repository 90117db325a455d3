"""Charts as inline SVG. Colours and fonts come from the page's style sheet by class, so that they follow
light and dark; all text is escaped.

A chart is drawn in the units of its ``width``: at that width text has the size that the style sheet gives it.
What needs room is drawn twice, for wide and for narrow pages, of which the page shows one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from statistics import median, quantiles

from markupsafe import Markup

#: Between a number and its unit.
NO_BREAK = "\u00a0"
WIDE, NARROW = 880, 344
#: Panels that stand side by side on wide pages.
PANEL = 344
#: Character width of a chart's text, to keep labels apart.
CHAR = 6.3
#: Marks and lines drawn at most, for the sake of the file's size.
MOST_MARKS, MOST_DOTS, MOST_LINES = 600, 240, 160
#: A logarithmic axis gets round numbers of these mantissas, the first that give enough.
MANTISSAS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
ENOUGH_TICKS, MOST_TICKS = 4, 7
#: Below this ratio of its ends a logarithmic axis is nearly linear, and so are its ticks.
NEARLY_LINEAR = 3.0


@dataclass(frozen=True)
class Chart:
    """A chart with its title, how to read it, and its key: (class, words) pairs. ``narrow`` is None where the
    one drawing serves any page."""

    title: str
    note: str
    drawing: Markup
    narrow: Markup | None = None
    key: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Mark:
    """A point: where, of which series (the number of its colour), what a pointer over it says. ``chosen``:
    the winner."""

    x: float
    y: float
    series: int
    label: str
    chosen: bool = False


@dataclass(frozen=True)
class Bar:
    """A length with its name and its value in words; ``other`` is what it is compared with."""

    name: str
    value: float
    words: str
    other: float | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Column:
    """The points of one value in a strip plot."""

    name: str
    values: tuple[float, ...]
    chosen: bool = False


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


@dataclass(frozen=True)
class Unit:
    """A unit to tell times in."""

    name: str
    us: float

    def number(self, us: float) -> str:
        value = us / self.us
        return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")

    def words(self, us: float) -> str:
        return f"{self.number(us)}{NO_BREAK}{self.name}"

    def tick(self, us: float) -> str:
        value = us / self.us
        return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def unit_for(us: float) -> Unit:
    """The unit in which a time reads best."""
    if us >= 1e6:
        return Unit("s", 1e6)
    return Unit("ms", 1e3) if us >= 1e3 / 2 else Unit("µs", 1.0)


@dataclass(frozen=True)
class Axis:
    """Maps ``low..high`` to ``start..end`` of a drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            part = log10(value / self.low) / log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """A handful of round numbers within the axis."""
        if self.log and self.high / self.low >= NEARLY_LINEAR:
            found: list[float] = []
            for mantissas in MANTISSAS:
                finer = _log_ticks(self.low, self.high, mantissas)
                if len(finer) > MOST_TICKS and len(found) > 1:
                    break
                found = finer
                if len(found) >= ENOUGH_TICKS:
                    break
            if len(found) > 1:
                return found[:: ceil(len(found) / MOST_TICKS)]
        return _linear_ticks(self.low, self.high)


def padded(
    values: Iterable[float], start: float, end: float, *, log: bool = False, zero: bool = False
) -> Axis:
    """An axis that holds all values with some air; from zero where that is asked for."""
    known = list(values)
    low, high = min(known), max(known)
    if log:
        air = max((high / low) ** 0.05, 1.01)
        return Axis(low / air, high * air, start, end, log=True)
    if zero:
        return Axis(0.0, high * 1.05 or 1.0, start, end)
    air = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return Axis(low - air, high + air, start, end)


def _log_ticks(low: float, high: float, mantissas: Sequence[float]) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    every = [m * 10.0**decade for decade in decades for m in mantissas]
    return [tick for tick in every if low <= tick <= high]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    scale = 10.0 ** floor(log10(rough))
    step = next(step for step in (1, 2, 2.5, 5, 10) if step * scale >= rough) * scale
    first = ceil(low / step)
    return [round(i * step, 12) for i in range(first, floor(high / step + 1e-9) + 1)]


# -- drawing ---------------------------------------------------------------------------------------------


def _tag(name: str, *children: str, **attributes: str | float | None) -> str:
    """An element; attributes are escaped, children are markup. ``class_`` is class, ``a_b`` is a-b."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(children)
    return f"<{name}{told}>{inside}</{name}>" if inside else f"<{name}{told}/>"


def _number(value: str | float | None) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, words: str, class_: str = "", anchor: str | None = None, fit: float = 0) -> str:
    """``fit``: the width it must keep to; the rest is cut off, and told to a pointer."""
    shown = words
    if fit and len(words) * CHAR > fit:
        shown = words[: max(1, int(fit / CHAR) - 1)] + "…"
    told = _tag("title", escape(words)) if shown != words else ""
    return _tag("text", escape(shown) + told, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def _rule(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return _tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def _dot(x: float, y: float, class_: str, label: str = "", radius: float = 3.2) -> str:
    title = _tag("title", escape(label)) if label else ""
    return _tag("circle", title, cx=x, cy=y, r=radius, class_=class_)


def _svg(width: float, height: float, alt: str, parts: Iterable[str]) -> Markup:
    return Markup(
        _tag(
            "svg",
            *parts,
            viewBox=f"0 0 {width:.0f} {height:.0f}",
            role="img",
            aria_label=alt,
            class_="drawing",
            style=f"max-width:{width * (1.25 if width > PANEL else 1.6):.0f}px",
        )
    )


def _series(number: int) -> str:
    return f"s{number % 4}"


def thinned(count: int, most: int) -> list[int]:
    """At most so many of the indices below ``count``, spread evenly."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _y_grid(axis: Axis, left: float, right: float, words: Callable[[float], str]) -> list[str]:
    parts = []
    for tick in axis.ticks():
        y = axis(tick)
        parts += [_rule(left, y, right, y, "grid"), _text(left - 6, y + 4, words(tick), "tick", "end")]
    return parts


def _x_ticks(axis: Axis, y: float, words: Callable[[float], str]) -> list[str]:
    return [_text(axis(tick), y, words(tick), "tick", "middle") for tick in axis.ticks()]


def history(
    marks: Sequence[Mark], failed: Sequence[int], trials: int, unit: Unit, alt: str, width: float
) -> Markup:
    """Times against the trial's number, failures in a lane above, and the line of the best so far."""
    height, left, right, top, bottom = (330 if width > NARROW else 270), 46, width - 14, 52, 36
    x = Axis(0, max(trials, 2), left, right)
    # Below the best there is room for its label.
    y = padded([m.y for m in marks], height - bottom - 14, top, log=True)
    parts = _y_grid(y, left, right, unit.tick)
    parts.append(_rule(left, height - bottom, right, height - bottom, "axis"))
    parts.append(_text(2, 12, f"time, {unit.name}", "title"))
    parts += [_text(x(t), height - 18, f"{t:g}", "tick", "middle") for t in x.ticks() if t == int(t)]
    parts.append(_text(right, height - 2, "trial", "title", "end"))
    if failed:
        parts.append(_text(2, 34, "failed", "tick"))
        for number in [failed[i] for i in thinned(len(failed), MOST_MARKS)]:
            at = x(number)
            path = f"M{at - 2.5:.1f} 27.5l5 5m0-5l-5 5"
            parts.append(_tag("path", _tag("title", f"trial {number} failed"), d=path, class_="failed"))
    best = float("inf")
    steps: list[tuple[float, float]] = []
    for mark in marks:
        if mark.y < best:
            best = mark.y
            steps.append((x(mark.x), y(best)))
    kept = [marks[i] for i in thinned(len(marks), MOST_MARKS)]
    parts += [_dot(x(m.x), y(m.y), _series(m.series), m.label, 2.8) for m in kept]
    path = f"M{steps[0][0]:.1f} {steps[0][1]:.1f}"
    path += "".join(f"H{at:.1f}V{to:.1f}" for at, to in steps[1:]) + f"H{right}"
    parts.append(_tag("path", d=path, class_="best"))
    parts += [_dot(at, to, "step", radius=3.4) for at, to in steps]
    parts += [_dot(x(m.x), y(m.y), "chosen", m.label, 5) for m in marks if m.chosen]
    parts.append(_text(right, steps[-1][1] + 16, f"best {unit.words(best)}", "loud halo", "end"))
    return _svg(width, height, alt, parts)


def scatter(
    marks: Sequence[Mark],
    alt: str,
    *,
    x_name: str,
    y_name: str,
    x_words: Callable[[float], str],
    y_words: Callable[[float], str],
    log_x: bool = False,
    square: bool = False,
    fences: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Points on a logarithmic y axis. ``square``: both axes are one, and the diagonal says equal; ``fences``
    are upright lines with a word each."""
    width, left, right, top, bottom = PANEL, 46, PANEL - 12, 26, 40
    height = 344 if square else 270
    fences = [(at, words) for at, words in fences if at > 0]
    if square:
        both = [value for m in marks for value in (m.x, m.y)]
        x = padded(both, left, right, log=True)
        y = padded(both, height - bottom, top, log=True)
    else:
        x = padded([*(m.x for m in marks), *(at for at, _ in fences)], left, right, log=log_x, zero=not log_x)
        y = padded([m.y for m in marks], height - bottom, top, log=True)
    parts = _y_grid(y, left, right, y_words)
    parts += [_text(2, 12, y_name, "title"), _text(right, height - 2, x_name, "title", "end")]
    parts.append(_rule(left, height - bottom, right, height - bottom, "axis"))
    parts += _x_ticks(x, height - bottom + 16, x_words)
    if square:
        parts.append(_rule(x(x.low), y(y.low), x(x.high), y(y.high), "diagonal"))
        parts.append(_text(right - 4, top + 28, "equal", "tick halo", "end"))
    taken = float(left)
    for at, words in sorted(fences):
        parts.append(_rule(x(at), top, x(at), height - bottom, "fence"))
        # A word that would touch its neighbour's is left out: the line says where.
        if x(at) - taken > len(words) * CHAR:
            parts.append(_text(x(at) - 3, top + 9, words, "tick halo", "end"))
            taken = x(at)
    kept = [marks[i] for i in thinned(len(marks), MOST_MARKS)]
    kept = [m for m in kept if not m.chosen] + [m for m in marks if m.chosen]
    for mark in kept:
        shape = "chosen" if mark.chosen else _series(mark.series)
        parts.append(_dot(x(mark.x), y(mark.y), shape, mark.label, 5 if mark.chosen else 3.2))
    return _svg(width, height, alt, parts)


def bars(
    rows: Sequence[Bar], alt: str, width: float, *, full: float | None = None, fence: str = ""
) -> Markup:
    """Horizontal bars, a name and a value above each. ``full`` is the length of the whole width, named by
    ``fence``, and the longest bar's otherwise; ``other`` of a bar is a tick on it."""
    pitch, top = 34, 18 if fence else 2
    height = top + pitch * len(rows) + 2
    longest = max([*(row.value for row in rows), *(row.other or 0 for row in rows), full or 0]) or 1.0
    x = Axis(0, longest, 0, width - 2)
    parts = []
    for i, row in enumerate(rows):
        y = top + i * pitch
        parts.append(_text(0, y + 13, row.name, "strong" if row.chosen else "name", fit=width - 130))
        parts.append(_text(width - 2, y + 13, row.words, "value", "end"))
        parts.append(_tag("rect", x=0, y=y + 18, width=width - 2, height=9, rx=2, class_="track"))
        length = max(x(row.value), 1.5)
        shape = "chosen" if row.chosen else "s0"
        parts.append(_tag("rect", x=0, y=y + 18, width=length, height=9, rx=2, class_=shape))
        if row.other is not None:
            at = x(row.other)
            parts.append(_rule(at, y + 15, at, y + 30, "other"))
    if full is not None and fence:
        at = x(full)
        parts.append(_rule(at, top - 4, at, height, "fence"))
        parts.append(_text(at, 10, fence, "tick", "end"))
    return _svg(width, height, alt, parts)


def strips(columns: Sequence[Column], axis_of: Sequence[float], unit: Unit, alt: str) -> Markup:
    """Times by the value of one parameter: every trial a dot, the middle half a box, the median a line.
    ``axis_of`` is all times of the family, so that panels share an axis."""
    width, height, left, right, top, bottom = PANEL, 214, 44, PANEL - 4, 10, 40
    y = padded(axis_of, height - bottom, top, log=True)
    parts = _y_grid(y, left, right, unit.tick)
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
                _tag(
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
            parts.append(_dot(middle + aside, y(values[j]), shape, radius=2.2))
        if values:
            at = y(median(values))
            parts.append(_rule(middle - half, at, middle + half, at, f"median {shape}"))
        name = "strong" if column.chosen else "tick"
        # Where names would touch, every other one stands lower.
        lower = 13 if crowded and i % 2 else 0
        fit = 0 if crowded and len(column.name) * CHAR < 2 * pitch else pitch
        parts.append(_text(middle, height - bottom + 15 + lower, column.name, name, "middle", fit=fit))
        if not crowded:
            parts.append(_text(middle, height - bottom + 30, f"{len(values)}", "count", "middle"))
    return _svg(width, height, alt, parts)


def parallel(axes: Sequence[Stops], lines: Sequence[Line], alt: str, width: float) -> Markup:
    """Parallel coordinates: axes side by side on wide pages, one below the other on narrow ones."""
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
        parts.append(
            _tag("polyline", _tag("title", escape(line.label)), points=points, class_=f"line {shape}")
        )
    for i, axis in enumerate(axes):
        at = along(i)
        if upright:
            parts.append(_rule(at, start + 10, at, end - 10, "axis"))
            # Names of neighbours would touch: every other one stands higher.
            parts.append(_text(at, 12 if i % 2 else 26, axis.name, "name", "middle", fit=2 * pitch - 8))
            parts += [
                _text(at, across(p) + 4, words, "tick halo", "middle", fit=pitch) for p, words in axis.stops
            ]
        else:
            parts.append(_rule(start - 10, at, end + 10, at, "axis"))
            parts.append(_text(2, at - 9, axis.name, "name halo"))
            room = (end - start) / max(len(axis.stops) - 1, 1) if len(axis.stops) > 1 else width
            for k, (p, words) in enumerate(axis.stops):
                anchor = "start" if across(p) < 34 else "end" if across(p) > width - 34 else "middle"
                aside = {"start": -16.0, "end": 16.0, "middle": 0.0}[anchor]
                fit = room * (1.6 if 0 < k < len(axis.stops) - 1 else 1.1)
                parts.append(_text(across(p) + aside, at + 14, words, "tick halo", anchor, fit=max(fit, 20)))
    return _svg(width, height, alt, parts)
