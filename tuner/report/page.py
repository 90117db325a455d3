"""A report as one HTML file that needs nothing else: charts, tables and the kernel's source."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...gen.limits import KIB, PRESETS
from ...gen.problem import Problem
from ...gen.render import TEMPLATES, shape_options
from ...gen.variant import Parameter, Value
from ..cards.slug import SIM_PREFIX, same_card
from ..search.importance import varied
from ..version import flashgen_version
from . import charts
from .charts import NO_BREAK, Bar, Chart, Column, Line, Mark, Stops, Unit, unit_for
from .content import FamilyPart, Report, Trial, Winner

#: Pygments' styles for light and dark pages.
LIGHT_STYLE, DARK_STYLE = "default", "github-dark"
#: Trials listed one by one.
LISTED_TRIALS = 30
#: The fastest part of the trials is grade 0 in parallel coordinates, half of them grade 1 or better.
GRADES = (0.1, 0.5)
#: A resource that takes this part of the time leaves little to gain; from the second on it is the limit.
NEARLY_FULL, LARGE = 0.85, 0.6
#: Values that cost less than this part are as good as the winner's: two runs differ by as much.
NOISE = 0.01


@dataclass(frozen=True)
class FamilyView:
    """What is shown of one family. ``same`` names parameters that had one value alone."""

    part: FamilyPart
    strips: tuple[Chart, ...]
    importance: Chart | None
    parallel: Chart | None
    same: tuple[str, ...]


def render_html(report: Report) -> str:
    """The whole file."""
    times = [t.median_us for t in report.timed if t.median_us is not None]
    unit = unit_for(min(times)) if times else Unit("µs", 1.0)
    if report.winner is not None:
        unit = unit_for(report.winner.measurement.median_us)
    order = {part.name: i for i, part in enumerate(report.families)}
    winner = report.winner
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["word"] = word
    environment.filters["percent"] = percent
    environment.filters["time"] = unit.words
    environment.filters["count"] = lambda number: f"{number:,}"
    return environment.get_template("report/report.html.jinja").render(
        report=report,
        title=f"{report.problem.name} on {report.device}",
        problem_words=problem_words(report.problem),
        kind="predicted" if report.predicted else "measured",
        unit=unit,
        order=order,
        winner=winner,
        speedup=_speedup(times, winner),
        verdict=_verdict(winner, unit) if winner and winner.bounds else (),
        emit=_emit_command(report),
        noise=0.0 if report.predicted else NOISE,
        limits_chart=_limits_chart(winner, unit) if winner and winner.bounds else None,
        history_chart=_history_chart(report, unit, order) if times else None,
        families=[_family_view(part, winner, unit) for part in report.families],
        resource_charts=_resource_charts(report, unit, order) if times else (),
        model_chart=_model_chart(report, unit, order),
        fastest=sorted(report.timed, key=lambda t: t.median_us or 0.0)[:LISTED_TRIALS],
        source=_highlighted(winner.source) if winner and winner.source else None,
        code_style=Markup(_code_style()),
        version=flashgen_version(),
    )


def word(value: Value) -> str:
    """A value as ``--set`` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def percent(part: float) -> str:
    if 0 < part < 0.0005:
        return f"<{NO_BREAK}0.1{NO_BREAK}%"
    digits = 0 if part >= 0.0995 or part == 0 else 1
    return f"{100 * part:.{digits}f}{NO_BREAK}%"


def problem_words(problem: Problem) -> str:
    heads = f"{problem.num_q_heads} heads"
    if problem.num_kv_heads != problem.num_q_heads:
        heads += f" ({problem.num_kv_heads} of keys and values)"
    lengths = f"{problem.seqlen_q} rows"
    if problem.seqlen_k != problem.seqlen_q:
        lengths = f"{problem.seqlen_q} queries, {problem.seqlen_k} keys"
    precision = "" if problem.precision == "auto" else f" ({problem.precision})"
    values = "" if problem.head_dim_v == problem.head_dim else f" (values {problem.head_dim_v})"
    mask = "causal mask" if problem.causal else "no mask"
    return (
        f"{problem.dtype}{precision}, batch {problem.batch}, {heads}, {lengths}, head dim {problem.head_dim}"
        f"{values}, {mask}"
    )


def _speedup(times: Sequence[float], winner: Winner | None) -> float | None:
    """How much faster the winner is than the middle one of all that ran."""
    if winner is None or len(times) < 3:
        return None
    # Times of one kind: the search's own, where they are known.
    own = winner.search_us or winner.measurement.median_us
    return sorted(times)[len(times) // 2] / own


def _emit_command(report: Report) -> str:
    problem, default = report.problem, Problem()
    options = shape_options(problem)
    if problem.batch != default.batch:
        options.append(f"--batch {problem.batch}")
    if problem.num_q_heads != default.num_q_heads:
        options.append(f"--heads {problem.num_q_heads}")
    if problem.num_kv_heads != problem.num_q_heads:
        options.append(f"--kv-heads {problem.num_kv_heads}")
    if problem.seqlen_q == problem.seqlen_k != default.seqlen_q:
        options.append(f"--seqlen {problem.seqlen_q}")
    elif problem.seqlen_q != problem.seqlen_k:
        options.append(f"--seqlen-q {problem.seqlen_q} --seqlen-k {problem.seqlen_k}")
    emulated = report.slug.startswith(SIM_PREFIX)
    card = next((name for name, limits in PRESETS.items() if same_card(limits.slug, report.slug)), None)
    if card is not None:
        options.insert(0, f"--device sim:{card}" if emulated else f"--preset {card}")
    return " ".join(["flashgen emit best.cu", *options])


def _verdict(winner: Winner, unit: Unit) -> tuple[str, ...]:
    """Why it is as fast as it is, in sentences."""
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


# -- charts ----------------------------------------------------------------------------------------------


def _both(draw: Callable[[float], Markup]) -> tuple[Markup, Markup]:
    return draw(charts.WIDE), draw(charts.NARROW)


def _limits_chart(winner: Winner, unit: Unit) -> Chart:
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
    drawing = _both(lambda width: charts.bars(rows, alt, width, full=total, fence=f"{kind} time"))
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


def _history_chart(report: Report, unit: Unit, order: dict[str, int]) -> Chart:
    marks = [_mark(t, t.number, report, unit, order) for t in report.timed]
    failed = [t.number for t in report.failed]
    best = min(m.y for m in marks)
    alt = (
        f"Time of each of {len(report.trials)} trials in order, on a logarithmic axis. The best, "
        f"{unit.words(best)}, was found at trial {min(m.x for m in marks if m.y == best):.0f}; "
        f"{len(failed)} failed."
    )
    count = len(report.trials)
    drawing = _both(lambda width: charts.history(marks, failed, count, unit, alt, width))
    key = (*_family_key(report), ("chosen", "winner"), ("best-line", "best so far"))
    note = "Every trial in the order in which it ended; the scale is logarithmic."
    return Chart("Best so far", note, *drawing, key=key)


def _family_key(report: Report) -> tuple[tuple[str, str], ...]:
    return tuple((f"s{i % 4}", part.name) for i, part in enumerate(report.families) if part.timed)


def _mark(trial: Trial, x: float, report: Report, unit: Unit, order: dict[str, int]) -> Mark:
    us = trial.median_us
    assert us is not None
    chosen = report.winner is not None and trial.number == report.winner.number
    label = f"trial {trial.number}, {trial.variant.family}: {unit.words(us)}"
    return Mark(x, us, order[trial.variant.family], label, chosen)


def _resource_charts(report: Report, unit: Unit, order: dict[str, int]) -> tuple[Chart, ...]:
    limits = report.limits
    smem, registers = [], []
    for trial in report.timed:
        measured = trial.outcome.measurement
        assert measured is not None
        smem.append(_mark(trial, measured.smem_bytes / KIB, report, unit, order))
        registers.append(_mark(trial, measured.registers, report, unit, order))
    reserved = limits.smem_reserved_per_block
    fences = [(limits.smem_per_block / KIB, "limit")]
    most = max(m.x for m in smem)
    for blocks in (2, 3, 4):
        at = (limits.smem_per_sm / blocks - reserved) / KIB
        if at < most * 1.3 and at < 0.9 * fences[-1][0]:
            fences.append((at, f"{blocks} fit"))
    if fences[0][0] > 2 * most:
        del fences[0]
    alt = "Time against {}: {} trials, from {:g} to {:g}."
    key = (*_family_key(report), ("chosen", "winner"))
    x_words = "{:g}".format
    return (
        Chart(
            "Shared memory",
            f"Upright lines: how many blocks' shared memory fits an SM, and what a block may have "
            f"({limits.smem_per_block / KIB:g} KiB).",
            charts.scatter(
                smem,
                alt.format("shared memory per block", len(smem), min(m.x for m in smem), most),
                x_name="shared memory per block, KiB",
                y_name=f"time, {unit.name}",
                x_words=x_words,
                y_words=unit.tick,
                fences=fences,
            ),
            key=key,
        ),
        Chart(
            "Registers",
            "As compiled; kernels that share registers out among warpgroups show what a launch gives each "
            f"thread. At most {limits.max_registers_per_thread}.",
            charts.scatter(
                registers,
                alt.format(
                    "registers per thread",
                    len(registers),
                    min(m.x for m in registers),
                    max(m.x for m in registers),
                ),
                x_name="registers per thread",
                y_name=f"time, {unit.name}",
                x_words=x_words,
                y_words=unit.tick,
                fences=[(limits.max_registers_per_thread, "limit")],
            ),
            key=key,
        ),
    )


def _model_chart(report: Report, unit: Unit, order: dict[str, int]) -> Chart | None:
    if report.predicted:
        return None
    marks = [
        _mark(t, t.prediction.median_us, report, unit, order)
        for t in report.timed
        if t.prediction is not None
    ]
    if len(marks) < 3:
        return None
    rhos = "; ".join(f"{p.name} {p.rho:.2f}" for p in report.families if p.rho is not None)
    drawing = charts.scatter(
        marks,
        f"Measured against predicted time of {len(marks)} trials. Spearman's rho: {rhos or 'none'}.",
        x_name=f"predicted, {unit.name}",
        y_name=f"measured, {unit.name}",
        x_words=unit.tick,
        y_words=unit.tick,
        square=True,
    )
    note = "On the dashed line both agree; above it the card was slower than predicted."
    key = (*_family_key(report), ("chosen", "winner"))
    return Chart("Predicted and measured", note, drawing, key=key)


def _family_view(part: FamilyPart, winner: Winner | None, unit: Unit) -> FamilyView:
    variants = [t.variant for t in part.timed]
    names = varied(variants)
    shares = part.importance.shares if part.importance else {}
    chosen = winner.variant.to_dict() if winner and type(winner.variant) is part.family else {}
    parameters = {p.name: p for p in part.family.parameters()}
    by_share = sorted(names, key=lambda name: -shares.get(name, 0.0))
    return FamilyView(
        part,
        tuple(_strip(part, parameters[name], chosen.get(name), unit) for name in by_share),
        _importance_chart(part) if part.importance else None,
        _parallel_chart(part, [parameters[n] for n in names], winner, unit) if names else None,
        tuple(name for name in parameters if name not in names) if variants else (),
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
        f"{c.name}: {len(c.values)} trials, best {unit.words(min(c.values))}" for c in columns
    )
    return Chart(parameter.name, parameter.doc, charts.strips(columns, every, unit, alt))


def ordered(parameter: Parameter) -> list[Value]:
    """The choices of a parameter, numbers by size."""
    numbers = [c for c in parameter.choices if isinstance(c, int)]
    return sorted(numbers) if len(numbers) == len(parameter.choices) else list(parameter.choices)


def _importance_chart(part: FamilyPart) -> Chart:
    assert part.importance is not None
    shares = part.importance.shares
    rows = [Bar(name, share, percent(share)) for name, share in shares.items() if share >= 0.0005]
    alt = "Importance of parameters: " + "; ".join(f"{row.name} {row.words}" for row in rows)
    rest = 1 - sum(shares.values())
    note = "The part of the variance of log times that each parameter explains alone (fANOVA)."
    if rest > 0.005:
        note += f" The remaining {percent(rest)} lie in how parameters work together."
    drawing = _both(lambda width: charts.bars(rows, alt, width))
    return Chart(f"What matters in {part.name}", note, *drawing)


def _parallel_chart(
    part: FamilyPart, parameters: Sequence[Parameter], winner: Winner | None, unit: Unit
) -> Chart:
    """All parameters that vary and, last, the rank in time: ranks spread the fast ones, which matter."""
    trials = sorted(part.timed, key=lambda t: t.median_us or 0.0)
    count = len(trials)
    axes, places_by = [], {}
    for parameter in parameters:
        seen = {getattr(t.variant, parameter.name) for t in trials}
        values = [v for v in ordered(parameter) if v in seen]
        places = {v: i / (len(values) - 1) for i, v in enumerate(values)}
        places_by[parameter.name] = places
        axes.append(Stops(parameter.name, tuple((places[v], word(v)) for v in values)))
    last = max(count - 1, 1)
    stops = [0, last // 2, last] if count > 4 else [0, last]
    axes.append(
        Stops(
            f"time, {unit.name}",
            tuple((1 - i / last, unit.number(trials[min(i, count - 1)].median_us or 0.0)) for i in stops),
        )
    )
    # The fastest half of what is drawn, and an even choice of the rest.
    most = charts.MOST_LINES
    kept = list(range(min(count, most // 2)))
    kept += [len(kept) + i for i in charts.thinned(count - len(kept), most - len(kept))]
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
    drawing = _both(lambda width: charts.parallel(axes, lines, alt, width))
    left_out = f" {count - len(lines)} slower ones are left out." if count > len(lines) else ""
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


# -- source ----------------------------------------------------------------------------------------------


def _highlighted(source: str) -> Markup:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import CudaLexer  # pyright: ignore[reportAttributeAccessIssue]

    return Markup(highlight(source, CudaLexer(), HtmlFormatter(nowrap=True)))


def _code_style() -> str:
    """Pygments' rules for light pages, and for dark ones. The page's own background stays."""
    from pygments.formatters import HtmlFormatter

    def rules(style: str) -> str:
        text = HtmlFormatter(style=style).get_style_defs(".code")
        lines = [line for line in text.splitlines() if re.match(r"\.code \.\w+ {", line)]
        return "\n".join(
            re.sub(r"/\*.*?\*/|background-color: [^;}]+;?|border: [^;}]+;?", "", x) for x in lines
        )

    dark = "(prefers-color-scheme: dark)"
    return (
        f"@media not all and {dark} {{\n{rules(LIGHT_STYLE)}\n}}\n@media {dark} {{\n{rules(DARK_STYLE)}\n}}"
    )
