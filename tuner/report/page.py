"""A report as one HTML file that needs nothing else: charts, tables and the kernel's source."""

from __future__ import annotations

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...gen.render import TEMPLATES
from ..option_words import word
from ..search.importance import FEWEST_OF_A_VALUE
from ..version import flashgen_version
from .charts.units import Unit, unit_for
from .content import Report
from .family_view import family_view
from .highlighting import code_style, highlighted
from .model_check import model_check
from .trial_charts import history_chart, model_chart, new_bests, resource_charts
from .verdict import limits_chart, speedup_of, verdict_of
from .words import command_words, emit_command, percent, problem_words

#: Trials listed one by one: the fastest, and those that were the best when they ended.
LISTED_TRIALS, LISTED_BESTS = 30, 8
#: Values that cost less than this part are as good as the winner's: two runs differ by as much.
NOISE = 0.01


def render_html(report: Report) -> str:
    """Renders the whole file."""
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
    environment.filters["trials"] = lambda number: f"{number:,} trial{'s' if number != 1 else ''}"
    environment.filters["count"] = lambda number: f"{number:,}"
    return environment.get_template("report/report.html.jinja").render(
        report=report,
        title=f"{report.problem.name} on {report.device}",
        problem_words=problem_words(report.problem),
        kind="predicted" if report.predicted else "measured",
        unit=unit,
        order=order,
        winner=winner,
        speedup=speedup_of(times, winner),
        verdict=verdict_of(winner, unit) if winner and winner.bounds else (),
        emit=command_words(emit_command(report)),
        fewest_of_a_value=FEWEST_OF_A_VALUE,
        noise=0.0 if report.predicted else NOISE,
        limits_chart=limits_chart(winner, unit) if winner and winner.bounds else None,
        history_chart=history_chart(report, unit, order) if times else None,
        new_bests=new_bests(report)[-LISTED_BESTS:],
        families=[family_view(part, winner, unit, len(report.families) == 1) for part in report.families],
        resource_charts=resource_charts(report, unit, order) if times else (),
        model_chart=model_chart(report, unit, order),
        model_checks=[check for part in report.families if (check := model_check(part))],
        fastest=sorted(report.timed, key=lambda t: t.median_us or 0.0)[:LISTED_TRIALS],
        source=highlighted(winner.source) if winner and winner.source else None,
        code_style=Markup(code_style()),
        version=flashgen_version(),
    )
