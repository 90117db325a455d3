"""What is shown of one family: its parameters one by one, which of them matter, and all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...gen.variant import Parameter, Value
from ..option_words import word
from ..search.importance import ENOUGH_TRIALS, varied
from .charts.bars import Bar, bars
from .charts.chart import Chart, wide_and_narrow
from .charts.parallel import MOST_LINES, Line, Stops, parallel
from .charts.strips import MOST_DOTS, Column, strips
from .charts.svg import HALF, WIDE, thinned
from .charts.units import Unit
from .content import FamilyPart, Winner
from .words import percent

#: The fastest part of the trials is grade 0 in parallel coordinates, half of them grade 1 or better.
GRADES = (0.1, 0.5)


@dataclass(frozen=True)
class FamilyView:
    """The charts that show one family. ``same`` names parameters that had one value alone, ``left_out`` says
    which trials the strips do not draw."""

    part: FamilyPart
    strips: tuple[Chart, ...]
    importance: Chart | None
    parallel: Chart | None
    same: tuple[str, ...]
    left_out: str


def family_view(part: FamilyPart, winner: Winner | None, unit: Unit, alone: bool) -> FamilyView:
    """Draws what is shown of one family, the parameters that matter most first. ``alone``: no other shares
    the page's width."""
    variants = [t.variant for t in part.timed]
    names = varied(variants)
    shares = part.importance.shares if part.importance else {}
    chosen = winner.variant.to_dict() if winner and type(winner.variant) is part.family else {}
    parameters = {p.name: p for p in part.family.parameters()}
    by_share = sorted(names, key=lambda name: -shares.get(name, 0.0))
    return FamilyView(
        part,
        tuple(_strip(part, parameters[name], chosen.get(name), unit) for name in by_share),
        _importance_chart(part, WIDE if alone else HALF) if part.importance else None,
        _parallel_chart(part, [parameters[n] for n in names], winner, unit) if names else None,
        tuple(name for name in parameters if name not in names) if variants else (),
        _left_out(len(variants)),
    )


def _left_out(count: int) -> str:
    """Says how many of so many trials a panel draws; nothing where each draws all."""
    if count <= MOST_DOTS:
        return ""
    return (
        f"Of {count:,} trials a panel draws {MOST_DOTS} at most, as many of each value, evenly chosen from "
        "its fastest to its slowest; boxes, medians and numbers are of all."
    )


def _strip(part: FamilyPart, parameter: Parameter, chosen: Value | None, unit: Unit) -> Chart:
    by_value: dict[Value, list[float]] = {}
    for trial in part.timed:
        assert trial.median_us is not None
        by_value.setdefault(getattr(trial.variant, parameter.name), []).append(trial.median_us)
    columns = [
        Column(word(value), tuple(by_value[value]), value == chosen)
        for value in ordered(parameter)
        if value in by_value
    ]
    every = [us for times in by_value.values() for us in times]
    alt = f"Time by {parameter.name}: " + "; ".join(
        f"{c.name}: {len(c.values):,} trials, best {unit.words(min(c.values))}" for c in columns
    )
    return Chart(parameter.name, parameter.doc, strips(columns, every, unit, alt))


def ordered(parameter: Parameter) -> list[Value]:
    """Returns the choices of a parameter, numbers by size."""
    numbers = [c for c in parameter.choices if isinstance(c, int)]
    return sorted(numbers) if len(numbers) == len(parameter.choices) else list(parameter.choices)


def _importance_chart(part: FamilyPart, width: float) -> Chart:
    found = part.importance
    assert found is not None
    shares = found.shares
    rows = [Bar(name, share, percent(share)) for name, share in shares.items() if share >= 0.0005]
    alt = "Importance of parameters: " + "; ".join(f"{row.name} {row.words}" for row in rows)
    note = (
        "How much each parameter's value decides whether a kernel is among the fastest tenth of those "
        "timed, as a part of what all parameters decide (PED-ANOVA)."
    )
    caution = (
        f"From {found.trials} timed trials alone, of which the fastest tenth is {found.trials // 10}: a "
        f"hint. The order can be relied on from about {ENOUGH_TRIALS} trials on."
    )
    drawing = wide_and_narrow(lambda width: bars(rows, alt, width), width)
    return Chart(f"What matters in {part.name}", note, *drawing, caution=caution if found.is_rough else "")


def _parallel_chart(
    part: FamilyPart, parameters: Sequence[Parameter], winner: Winner | None, unit: Unit
) -> Chart:
    """All parameters that vary and, last, the rank in time: ranks spread the fast ones, which matter."""
    trials = sorted(part.timed, key=lambda t: t.median_us or 0.0)
    count = len(trials)
    axes, places_by = [], {}
    wins = winner is not None and type(winner.variant) is part.family
    for parameter in parameters:
        seen = {getattr(t.variant, parameter.name) for t in trials}
        values = [v for v in ordered(parameter) if v in seen]
        places = {v: i / (len(values) - 1) for i, v in enumerate(values)}
        places_by[parameter.name] = places
        chosen = getattr(winner.variant, parameter.name) if winner and wins else None
        at = values.index(chosen) if chosen in values else None
        axes.append(Stops(parameter.name, tuple((places[v], word(v)) for v in values), at))
    last = max(count - 1, 1)
    stops = [0, last // 2, last] if count > 4 else [0, last]
    axes.append(
        Stops(
            f"time, {unit.name}",
            tuple((1 - i / last, unit.number(trials[min(i, count - 1)].median_us or 0.0)) for i in stops),
        )
    )
    # The fastest half of what is drawn, and an even choice of the rest.
    most = MOST_LINES
    kept = list(range(min(count, most // 2)))
    kept += [len(kept) + i for i in thinned(count - len(kept), most - len(kept))]
    lines = []
    for i in kept:
        trial = trials[i]
        assert trial.median_us is not None
        aside = ((trial.number * 0.618034) % 1 - 0.5) * 0.05
        places = [places_by[p.name][getattr(trial.variant, p.name)] + aside for p in parameters]
        grade = sum(i >= part_of * count for part_of in GRADES)
        chosen = winner is not None and trial.number == winner.number
        label = f"trial {trial.number}: {unit.words(trial.median_us)}"
        lines.append(Line((*places, 1 - i / last), grade, label, chosen))
    alt = f"Parallel coordinates of {len(lines)} trials of {part.name} over {len(parameters)} parameters."
    drawing = wide_and_narrow(lambda width: parallel(axes, lines, alt, width))
    left_out = f" {count - len(lines):,} slower ones are left out." if count > len(lines) else ""
    return Chart(
        "Trials over all parameters",
        f"A line is a trial; the last axis has them in order of time, the fastest at its end.{left_out}",
        *drawing,
        key=(
            ("chosen", "winner"),
            ("grade0", "fastest tenth"),
            ("grade1", "faster half"),
            ("grade2", "slower half"),
        ),
    )
