"""`flashgen.explain`: which kernel a call would run, why, how fast it should be, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...gen.emit.options import shape_options, size_options
from ...gen.problem import Problem
from ...templates.runtime.arrays import _describe, _read, _torch_of
from ..cards.slug import same_card
from ..predict.peak import peak_of
from .attend import Call, call_of, served_by
from .bound import Bound, bound_of, workshop_of
from .candidates import Candidate
from .card import Card
from .table import MadeTable
from .whole_columns import filled_up
from .workshop import Chosen


@dataclass(frozen=True)
class Explanation:
    """Which kernel serves a call, and why; `str` and `print` say it in words.

    ``kernel`` names the variant, ``predicted_us`` the time it should take on this very shape,
    ``measured_us`` what it took where it was tuned for just this, ``limiter`` the resource of which it needs
    most, by the cost model, ``at_best_us`` the time at the card's peak. ``tuned_for`` is the problem of the
    record that it is known by, ``tuned_on`` the card of it where that is another, ``elsewhere`` says that it
    was tuned for just this there. ``built`` says whether this process has it ready. ``others`` are the next
    best, each with its predicted time.
    """

    problem: Problem
    card: str
    kernel: str
    family: str
    exact: bool
    tuned_for: str | None
    tuned_on: str | None
    elsewhere: bool
    predicted_us: float
    measured_us: float | None
    limiter: str
    at_best_us: float | None
    built: bool
    others: tuple[tuple[str, float], ...]

    @property
    def why(self) -> str:
        """Says what the kernel was chosen for."""
        if self.exact:
            return "tuned for just this"
        where = f" on {self.tuned_on}" if self.tuned_on is not None else ""
        if self.elsewhere:
            return f"tuned for just this{where}; nothing known is predicted to be clearly faster here"
        if self.tuned_for is not None:
            return f"tuned as {self.tuned_for}{where}, predicted to be the fastest of all known on this shape"
        return "untuned: the cost model's choice, predicted to be faster than all that were tuned"

    @property
    def tuning_may_bring(self) -> str:
        """Says what tuning might bring."""
        if self.exact and self.measured_us is not None:
            return "nothing is known to be faster"
        options = " ".join(_options(self.problem))
        here = " on this card" if self.elsewhere else ""
        return f"some percent, as for other kernels that were not tuned for just their call{here}: {options}"

    def __str__(self) -> str:
        times = [f"predicted {self.predicted_us:.1f} us"]
        times += [] if self.measured_us is None else [f"measured {self.measured_us:.1f} us"]
        times += [] if self.at_best_us is None else [f"{self.at_best_us:.1f} us at the card's peak"]
        others = [f"{name} ({us:.1f} us)" for name, us in self.others]
        lines = [
            f"{self.problem.name} on {self.card}",
            f"  kernel   {self.kernel}" + ("" if self.built else "; built by its first call"),
            f"  why      {self.why}",
            f"  time     {', '.join(times)}",
            f"  bound by {self.limiter}",
            f"  next     {'; '.join(others) or 'nothing else is known'}",
            f"  tuning   {self.tuning_may_bring}",
        ]
        return "\n".join(lines)


def explain(q: Any, k: Any, v: Any, *, device: str | None = None, **asked: Any) -> Explanation:
    """Says which kernel `flashgen.attention` would run on these arrays, and why. Nothing is built or run.

    What `flashgen.attention` is told by keyword is told here, too. Arrays of the host may be explained for a
    card that is not here, ``device`` being "sim:h200", or for the one that is. Raises as it does where
    nothing serves.
    """
    bound = bound_of(device)
    call = call_of(q, k, v, **asked)
    torch = _torch_of(q)
    if torch is not None and bound.card is None:
        call = filled_up(torch, call) or call
    problem, card = _problem_of(bound, call)
    workshop = workshop_of(card)
    chosen = next(workshop.fitting(problem))
    return _explained(problem, card, chosen, workshop.ranked(problem), workshop.is_ready(chosen))


def _problem_of(bound: Bound, call: Call) -> tuple[Problem, Card]:
    """The problem of a call and the card it would run on."""
    attention, _, _ = served_by(bound, call)
    table = attention._table
    assert isinstance(table, MadeTable)
    torch = _torch_of(call.q)
    views = []
    for name, array in (("q", call.q), ("k", call.k), ("v", call.v)):
        if torch is not None and bound.card is None:
            views.append(table.inspect(name, _describe(array), call.layout, torch))
            continue
        if hasattr(array, "__cuda_array_interface__"):
            described = _read(name, array)[1]
        else:
            dtype = str(array.dtype).removeprefix("torch.")
            described = (dtype, tuple(array.shape), None, None)
        views.append(table.inspect(name, described, call.layout, None))
    query, key, value = views
    table.check_shapes(query, key, value)
    return table.problem(query, key, value, call.causal), table.card_of(query)


def _explained(
    problem: Problem, card: Card, chosen: Chosen, ranked: list[Candidate], built: bool
) -> Explanation:
    candidate, limits = chosen.candidate, card.limits
    record = candidate.record
    of_card = record is not None and same_card(record.slug, limits.slug)
    here = record is not None and not record.predicted and of_card
    made_on = None
    if record is not None and not of_card:
        made_on = record.kernel.device + (", emulated" if record.predicted else "")
    peak = peak_of(problem, limits)
    others = [each for each in ranked if each.variant != candidate.variant][:2]
    return Explanation(
        problem=problem,
        card=limits.name + (", emulated" if card.predicted else ""),
        kernel=candidate.variant.name,
        family=candidate.variant.family,
        exact=candidate.exact,
        tuned_for=None if record is None else record.kernel.problem.name,
        tuned_on=made_on,
        elsewhere=candidate.elsewhere,
        predicted_us=candidate.predicted_us,
        measured_us=record.kernel.measurement.median_us if record and here and candidate.exact else None,
        limiter=candidate.limiter,
        at_best_us=None if peak is None else problem.flops / peak.tflops / 1e6,
        built=built,
        others=tuple((each.variant.name, each.predicted_us) for each in others),
    )


def _options(problem: Problem) -> list[str]:
    """The command that tunes for a problem."""
    return ["flashgen tune", *shape_options(problem), *size_options(problem)]
