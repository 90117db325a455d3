"""Which families serve a problem on a card and, where none does, why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..gen.families import searched_families
from ..gen.limits import DeviceLimits
from ..gen.problem import Problem
from ..gen.variant import Variant
from .errors import NotServed, UsageError
from .option_words import parse_settings


def serving_families(
    problem: Problem, limits: DeviceLimits, settings: Sequence[str] = ()
) -> tuple[type[Variant], ...]:
    """Returns the families that are searched where none is named: all that compute the problem on the card
    and, with settings, know those.

    Raises:
        UsageError: no family has such settings.
        NotServed: no family computes the problem there; the message says why each does not.
    """
    families = searched_families(problem.operation)
    reasons = {family: why_not(family, problem, limits) for family in families}
    serving = [family for family, reason in reasons.items() if reason is None]
    if not serving:
        told = {family.family: reason for family, reason in reasons.items() if reason is not None}
        raise none_serves(problem, limits, told)
    knowing, refusals = [], {}
    for family in serving:
        try:
            parse_settings(family, settings)
            knowing.append(family)
        except UsageError as error:
            refusals[family.family] = str(error)
    if not knowing:
        alike = set(refusals.values())
        raise UsageError(alike.pop() if len(alike) == 1 else _told_by_family(refusals))
    return tuple(knowing)


def why_not(family: type[Variant], problem: Problem, limits: DeviceLimits) -> str | None:
    """Says why nothing of the family computes that problem on that card: what its rules on arithmetic say. Of
    the choices of the parameter that they wait for, they speak of those that the most rules let through."""
    rules = [rule for rule in family.rules() if rule.name == "arithmetic"]
    if not rules:
        return None
    awaited = next(parameter for parameter in family.parameters() if parameter.name == rules[0].after)
    refusals: list[tuple[int, str]] = []
    for choice in awaited.choices:
        variant = replace(family(), **{awaited.name: choice})
        verdicts = (rule.verdict(variant, problem, limits) for rule in rules)
        refusal = next(((i, reason) for i, reason in enumerate(verdicts) if reason is not None), None)
        if refusal is None:
            return None
        refusals.append(refusal)
    most = max(passed for passed, _ in refusals)
    return "; ".join(dict.fromkeys(reason for passed, reason in refusals if passed == most))


def none_serves(problem: Problem, limits: DeviceLimits, reasons: Mapping[str, str]) -> NotServed:
    """Returns the error that says that no family serves a problem; ``reasons`` tells of each family why."""
    return NotServed(
        f"no kernel family serves {problem.name} on {limits.name} ({limits.sm}): {_told_by_family(reasons)}",
        "choose another --dtype, --precision or card",
    )


def _told_by_family(reasons: Mapping[str, str]) -> str:
    """Returns what each family says, and which does."""
    return "; ".join(
        reason if re.search(f"family '?{family}'? ", reason) else f"family {family}: {reason}"
        for family, reason in reasons.items()
    )
