"""Enumeration of a family's legal variants, pruned as early as a rule can speak.

Spaces have up to some 10^6 members, of which rules tell few apart: most read a handful of parameters. So
variants are columns of small integers, and a rule is asked once for all variants that agree in what it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from .limits import DeviceLimits
from .problem import Problem
from .variant import Rule, Value, Variant
from .watched import watched

#: Combinations are numbered by a table where that has no more than so many entries for each variant.
_TABLE_ENTRIES = 8


@dataclass(frozen=True, eq=False)
class Space:
    """The legal variants of one family for one problem and card, and what each rule removed.

    ``choices`` are the values that each parameter was walked over, all or the one held; ``codes[p, i]`` is
    which of them parameter p has in legal variant i, shape (parameters, variants). ``waived`` names the
    advice that was not followed, since nothing would have been left.
    """

    family: type[Variant]
    problem: Problem
    limits: DeviceLimits
    choices: tuple[tuple[Value, ...], ...]
    codes: np.ndarray
    removed: Mapping[str, int]
    waived: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """How many variants there are, legal or not."""
        return prod(map(len, self.choices))

    def __len__(self) -> int:
        return self.codes.shape[1]

    @cached_property
    def legal(self) -> tuple[Variant, ...]:
        names = [p.name for p in self.family.parameters()]
        return tuple(
            self.family.with_values({n: c[code] for n, c, code in zip(names, self.choices, row, strict=True)})
            for row in self.codes.T.tolist()
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
    """Widens the space by one parameter after the other. A rule is asked once its last parameter is there,
    and a broken one removes all that would have followed; the counts are of variants all the same."""
    parameters = family.parameters()
    choices = tuple((fixed[p.name],) if p.name in fixed else p.choices for p in parameters)
    below = [prod(map(len, choices[depth + 1 :])) for depth in range(len(parameters))]
    removed: Counter[str] = Counter()
    table = _Table(family, {}, {})
    for depth, (parameter, values) in enumerate(zip(parameters, choices, strict=True)):
        table = table.widened(parameter.name, values)
        for rule in rules:
            if rule.after == parameter.name:
                broken = table.broken(rule, problem, limits)
                if broken.any():
                    removed[rule.name] += int(broken.sum()) * below[depth]
                    table = table.kept(~broken)
    codes = np.array(list(table.columns.values()), dtype=np.uint8).reshape(len(parameters), len(table))
    return Space(family, problem, limits, choices, codes, dict(removed))


@dataclass(frozen=True)
class _Table:
    """Variants as far as they have values: of each parameter its choices, and a column of which it has."""

    family: type[Variant]
    choices: Mapping[str, tuple[Value, ...]]
    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 1

    def widened(self, name: str, values: tuple[Value, ...]) -> _Table:
        """Returns each variant with each of a further parameter's values."""
        columns = {each: np.repeat(column, len(values)) for each, column in self.columns.items()}
        columns[name] = np.tile(np.arange(len(values), dtype=np.uint8), len(self))
        return replace(self, choices={**self.choices, name: values}, columns=columns)

    def kept(self, rows: np.ndarray) -> _Table:
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def broken(self, rule: Rule, problem: Problem, limits: DeviceLimits) -> np.ndarray:
        """Tells of each variant whether it breaks the rule.

        Variants that agree in what the rule read of one of them have its verdict. Which parameters these are
        shows as the rule is asked, and depends on their values: those of which it wanted to know more are
        told apart by that as well, and asked again.
        """
        broken = np.zeros(len(self), dtype=bool)
        rows, read = np.arange(len(self)), set[str]()
        while len(rows):
            alike, firsts = self._alike(rows, read)
            if len(firsts) == len(rows):  # each has a verdict of its own, whatever it is by
                variants = map(self.family.with_values, self._values(firsts))
                broken[firsts] = [rule.verdict(each, problem, limits) is not None for each in variants]
                break
            verdicts, undecided = np.zeros(len(firsts), dtype=bool), np.zeros(len(firsts), dtype=bool)
            wanted = set(read)
            for group, values in enumerate(self._values(firsts)):
                asked = set[str]()
                verdict = rule.verdict(watched(self.family, values, asked), problem, limits)
                asked &= self.columns.keys()  # those that have no value yet tell none apart
                verdicts[group], undecided[group] = verdict is not None, not asked <= read
                wanted |= asked
            broken[rows] = verdicts[alike]
            rows, read = rows[undecided[alike]], wanted
        return broken

    def _values(self, rows: np.ndarray) -> Iterator[dict[str, Value]]:
        """Yields what the parameters of some rows are; those without a value yet have their defaults."""
        defaults = {p.name: p.default for p in self.family.parameters()}
        columns = [
            [self.choices[name][code] for code in column[rows].tolist()]
            for name, column in self.columns.items()
        ]
        for values in zip(*columns, strict=True):
            yield defaults | dict(zip(self.columns, values, strict=True))

    def _alike(self, rows: np.ndarray, names: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Groups rows that agree in these parameters: the group of each, and the first row of each group."""
        keys, size = np.zeros(len(rows), dtype=np.int64), 1
        for name in names:
            keys = keys * len(self.choices[name]) + self.columns[name][rows]
            size *= len(self.choices[name])
        if size > _TABLE_ENTRIES * len(rows):
            _, first, alike = np.unique(keys, return_index=True, return_inverse=True)
            return alike, rows[first]
        first = np.full(size, -1, dtype=np.int64)
        first[keys[::-1]] = rows[::-1]
        present = first >= 0
        return (np.cumsum(present) - 1)[keys], first[present]
