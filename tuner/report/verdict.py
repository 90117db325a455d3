"""Why the winner is as fast as it is, and how much faster than the others, in words and as a chart."""

from __future__ import annotations

from collections.abc import Sequence

from .charts.bars import Bar, bars
from .charts.chart import Chart, wide_and_narrow
from .charts.svg import HALF
from .charts.units import Unit
from .content import Winner
from .words import percent

#: A resource that takes this part of the time leaves little to gain; from the second on it is the limit.
NEARLY_FULL, LARGE = 0.85, 0.6


def speedup_of(times: Sequence[float], winner: Winner | None) -> float | None:
    """Returns how much faster the winner is than the median trial, or None for too few of them."""
    if winner is None or len(times) < 3:
        return None
    # Times of one kind: the search's own, where they are known.
    own = winner.search_us or winner.measurement.median_us
    return sorted(times)[len(times) // 2] / own


def verdict_of(winner: Winner, unit: Unit) -> tuple[str, ...]:
    """Says why the winner is as fast as it is, in sentences."""
    bounds = winner.bounds
    assert bounds is not None
    total = winner.measurement.median_us
    kind = "predicted" if winner.measurement.predicted else "measured"
    first, *rest = bounds.parts
    name = {"latency": "A block's own waits (latency)"}.get(first.name, first.name.capitalize())
    told = [
        f"{name} alone would take {unit.words(first.us)} of the {kind} {unit.words(total)} "
        f"({percent(first.share)}), by the cost model's count."
    ]
    if first.share > 1:
        told.append("That is more than the whole: the model counts too much here.")
    elif first.share >= NEARLY_FULL:
        told.append("Little is left to gain except by needing less of it.")
    elif first.share >= LARGE:
        told.append("It is the limit; the rest of the time is what does not overlap with it.")
    else:
        told.append(
            "Nothing is occupied all the time: what is lost is overlap, waits and the end of the grid."
        )
    if rest and rest[0].share > LARGE * first.share:
        told.append(f"Next comes {rest[0].name} ({percent(rest[0].share)}).")
    savings = [p for p in bounds.parts if p.typical_us and p.share > 0.1 and p.us < 0.9 * p.typical_us]
    if savings:
        most = sorted(savings, key=lambda p: p.us - (p.typical_us or 0.0))[:3]
        less = ", ".join(f"{p.name} ({percent(1 - p.us / (p.typical_us or p.us))} less)" for p in most)
        told.append(f"Beside the median trial of its family it saves on {less}.")
    return tuple(told)


def limits_chart(winner: Winner, unit: Unit) -> Chart:
    """Draws how long each resource alone would take of the winner's time."""
    bounds = winner.bounds
    assert bounds is not None
    total = winner.measurement.median_us
    kind = "predicted" if winner.measurement.predicted else "measured"
    rows = [
        Bar(
            part.name,
            part.us,
            f"{unit.words(part.us)} · {percent(part.share)}",
            other=part.typical_us,
            chosen=part is bounds.limiter,
        )
        for part in bounds.parts
    ]
    alt = f"How long each resource alone would take of {unit.words(total)}: " + "; ".join(
        f"{row.name} {row.words}" for row in rows
    )
    drawing = wide_and_narrow(lambda width: bars(rows, alt, width, full=total, fence=f"{kind} time"), HALF)
    return Chart(
        "Where the time goes",
        "How long each resource alone would be occupied, by the cost model's count, and its part of the "
        f"{kind} time. Resources work side by side, so parts do not add up.",
        *drawing,
        key=(
            ("chosen", "the winner's limit"),
            ("s0", "the winner"),
            ("other", "its family's median trial"),
        ),
    )
