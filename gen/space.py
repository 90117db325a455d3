"""Enumeration of a family's legal variants, pruned as early as a rule can speak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from .limits import DeviceLimits
from .problem import Problem
from .variant import Rule, Value, Variant


@dataclass(frozen=True)
class Space:
    """The legal variants of one family for one problem and card, and what each rule removed.

    A legal variant is one of ``prefixes`` (values of the leading parameters, which rules read) followed by
    one value each of the ``free`` trailing parameters, which no rule reads. ``waived`` names the advice
    that was not followed, since nothing would have been left.
    """

    family: type[Variant]
    problem: Problem
    limits: DeviceLimits
    total: int
    prefixes: tuple[tuple[Value, ...], ...]
    free: tuple[tuple[Value, ...], ...]
    removed: Mapping[str, int]
    waived: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prefixes) * prod(map(len, self.free))

    @cached_property
    def legal(self) -> tuple[Variant, ...]:
        names = [p.name for p in self.family.parameters()]
        suffixes = list(product(*self.free))
        return tuple(
            self.family(**dict(zip(names, prefix + suffix, strict=True)))
            for prefix in self.prefixes
            for suffix in suffixes
        )


def enumerate_space(
    family: type[Variant],
    problem: Problem,
    limits: DeviceLimits,
    fixed: Mapping[str, Value] | None = None,
) -> Space:
    """Enumerates all legal variants, with ``fixed`` parameters held.

    Advice narrows a space that is too wide; where it leaves nothing (one query row feeds no wide micro-tile),
    the advice that removed least is waived, and all of it if that does not help.
    """
    fixed = fixed or {}
    rules = [r for r in family.rules() if not (r.advisory and r.after in fixed)]
    space = _walk(family, problem, limits, fixed, rules)
    if len(space):
        return space
    advice = {r.name for r in rules if r.advisory and r.name in space.removed}
    waivers = [{name} for name in sorted(advice, key=lambda name: (space.removed[name], name))]
    for waived in [*waivers, advice] if advice else []:
        kept = [r for r in rules if not (r.advisory and r.name in waived)]
        wider = _walk(family, problem, limits, fixed, kept)
        if len(wider):
            return replace(wider, waived=tuple(sorted(waived)))
    return space


def _walk(
    family: type[Variant],
    problem: Problem,
    limits: DeviceLimits,
    fixed: Mapping[str, Value],
    rules: Sequence[Rule],
) -> Space:
    """Walks the parameters as a tree. A rule is asked once its last parameter is set, and a broken one
    removes the whole subtree; the counts are of variants all the same."""
    parameters = family.parameters()
    choices = [(fixed[p.name],) if p.name in fixed else p.choices for p in parameters]
    below = [prod(len(c) for c in choices[depth + 1 :]) for depth in range(len(parameters))]
    rules_at = [[r for r in rules if r.after == p.name] for p in parameters]
    # Beyond the last parameter that a rule waits for, everything is legal.
    num_ruled = max((depth + 1 for depth, here in enumerate(rules_at) if here), default=0)
    prefixes: list[tuple[Value, ...]] = []
    removed: Counter[str] = Counter()
    # Those of the parameters that are not set yet stay at their defaults, which no rule reads.
    values: dict[str, Value] = {p.name: p.default for p in parameters}

    def walk(depth: int) -> None:
        name, default = parameters[depth].name, parameters[depth].default
        here = rules_at[depth]
        for choice in choices[depth]:
            values[name] = choice
            broken = _broken(here, family.with_values(values), problem, limits) if here else None
            if broken is not None:
                removed[broken.name] += below[depth]
            elif depth + 1 == num_ruled:
                prefixes.append(tuple(values.values())[:num_ruled])
            else:
                walk(depth + 1)
        values[name] = default

    if num_ruled:
        walk(0)
    else:
        prefixes.append(())
    return Space(
        family,
        problem,
        limits,
        total=prod(map(len, choices)),
        prefixes=tuple(prefixes),
        free=tuple(choices[num_ruled:]),
        removed=dict(removed),
    )


def _broken(rules: Sequence[Rule], variant: Variant, problem: Problem, limits: DeviceLimits) -> Rule | None:
    """The first of the rules that the variant breaks."""
    for rule in rules:
        if rule.verdict(variant, problem, limits) is not None:
            return rule
    return None
