"""The legal variants of each family that competes, or why there is none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...gen.variant import Illegal, Value
from ..errors import NotServed, UsageError
from ..predict.catalogue import Catalogue, build_catalogue
from ..serving import none_serves, why_not
from .events import Doing, Report
from .options import TuneOptions


class NoneLegal(NotServed, UsageError):
    """The parameters held allow no variant for the problem."""


@dataclass(frozen=True)
class Space:
    """A family's legal variants, and how long it took to find them.

    ``predicted`` has by row the microseconds that the cost model gives those that were looked at.
    """

    catalogue: Catalogue
    seconds: float
    predicted: dict[int, float] = field(default_factory=dict)


def legal_spaces(options: TuneOptions, report: Report = lambda event: None) -> list[Space]:
    """Enumerates the families and returns those with a legal variant. ``report`` hears which is next.

    Raises:
        NotServed: there is none; the message names the reasons.
    """
    spaces = []
    for family in options.families:
        report(Doing(f"{family.family}: enumerating the legal variants"))
        started = time.monotonic()
        catalogue = build_catalogue(family, options.problem, options.limits, options.held)
        spaces.append(Space(catalogue, time.monotonic() - started))
    legal = [space for space in spaces if len(space.catalogue)]
    if legal:
        return legal
    if len(spaces) == 1:
        raise _nothing_legal(spaces[0].catalogue, options.held)
    reasons = {space.catalogue.family.family: _why_empty(space.catalogue) for space in spaces}
    raise none_serves(options.problem, options.limits, reasons)


def _nothing_legal(catalogue: Catalogue, held: Mapping[str, Value]) -> NotServed:
    problem, limits = catalogue.problem, catalogue.limits
    what = f"no variant of {catalogue.family.family!r}"
    where = f"is legal for {problem.name} on {limits.name}"
    why = _why_empty(catalogue)
    if not held or why_not(catalogue.family, problem, limits):
        return NotServed(f"{what} {where} ({why}); `flashgen space` shows more")
    settings = " ".join(f"{name}={value}" for name, value in held.items())
    example = ""
    try:
        catalogue.family(**held).check(problem, limits)
    except Illegal as error:
        example = f"; with defaults elsewhere: {error}"
    return NoneLegal(f"{what} with {settings} {where} ({why}{example}); hold fewer or others")


def _why_empty(catalogue: Catalogue) -> str:
    """Why a family has no legal variant: it computes something else, or rules left none."""
    counts = ", ".join(f"{name} {count}" for name, count in catalogue.removed.items())
    return why_not(catalogue.family, catalogue.problem, catalogue.limits) or f"removed by rule: {counts}"
