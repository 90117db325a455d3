"""Enumeration of a family's legal variants, pruned as early as a rule can speak.

Spaces have up to some 10^6 members, of which rules tell few apart: most read a handful of parameters. So
variants are columns of small integers, and a rule is asked once for all variants that agree in what it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from .columns import Column, Path
from .limits import DeviceLimits
from .problem import Problem
from .variant import Rule, Value, Variant
from .watched import asking, watched

#: A variant is a number of so many bits at most.
_KEY_BITS = 63
#: Combinations are numbered by a table where that has no more than so many entries for each variant.
_TABLE_ENTRIES, _LEAST_TABLE = 1, 1 << 12
#: Variants of which so many are asked first, to know what a rule reads; of others one is.
_LARGE, _ASKED_FIRST = 10_000, 8
#: So many variants are asked about one by one: sooner than all at once.
_FEW = 24


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
    rules = [r for r in family.rules() if not (r.advisory and r.waived_by in fixed)]
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
    choices = {p.name: (fixed[p.name],) if p.name in fixed else p.choices for p in parameters}
    removed: Counter[str] = Counter()
    table = _Table.of(family, choices)
    below = prod(map(len, choices.values()))
    for parameter in parameters:
        table = table.widened(parameter.name)
        below //= len(choices[parameter.name])
        for rule in rules:
            if rule.after == parameter.name:
                broken = table.broken(rule, problem, limits)
                if broken.any():
                    removed[rule.name] += int(broken.sum()) * below
                    table = table.kept(~broken)
    codes = np.empty((len(parameters), len(table)), dtype=np.uint8)
    for row, parameter in zip(codes, parameters, strict=True):
        row[:] = table.codes(parameter.name)
    return Space(family, problem, limits, tuple(choices.values()), codes, dict(removed))


class _Unread(Exception):
    """A rule wants to know a parameter by which the variants that it is asked about are not told apart."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Places:
    """Where in a number the bits lie that tell which of its choices each parameter has: the first one's are
    the highest."""

    def __init__(self, family: type[Variant], choices: Mapping[str, tuple[Value, ...]]) -> None:
        bits = {name: (len(each) - 1).bit_length() for name, each in choices.items()}
        if sum(bits.values()) > _KEY_BITS:
            raise ValueError(f"family {family.family!r} has more variants than {_KEY_BITS} bits can number")
        below = sum(bits.values())
        self.of: dict[str, tuple[int, int]] = {}
        for name, count in bits.items():
            below -= count
            self.of[name] = below, count

    def together(self, names: set[str]) -> list[tuple[int, int]]:
        """Returns the places of some parameters, of neighbours as one."""
        found: list[tuple[int, int]] = []
        for shift, bits in (place for name, place in self.of.items() if name in names):
            if found and found[-1][0] == shift + bits:
                shift, bits = shift, bits + found.pop()[1]
            found.append((shift, bits))
        return found


@dataclass(frozen=True)
class _Table:
    """Variants as far as they have values, of the parameters ``known``. Each is a number, which has in its
    ``places`` which of their ``choices`` its parameters have."""

    family: type[Variant]
    choices: Mapping[str, tuple[Value, ...]]
    places: _Places
    keys: np.ndarray
    known: tuple[str, ...] = ()

    @classmethod
    def of(cls, family: type[Variant], choices: Mapping[str, tuple[Value, ...]]) -> _Table:
        """Returns one variant without any value."""
        return cls(family, choices, _Places(family, choices), np.zeros(1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.keys)

    def widened(self, name: str) -> _Table:
        """Returns each variant with each value of a further parameter."""
        shift, _ = self.places.of[name]
        added = np.arange(len(self.choices[name]), dtype=np.int64) << shift
        return replace(self, keys=(self.keys[:, None] + added).ravel(), known=(*self.known, name))

    def kept(self, rows: np.ndarray) -> _Table:
        return replace(self, keys=self.keys[rows])

    def codes(self, name: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Returns which of its choices some variants have of a parameter."""
        shift, bits = self.places.of[name]
        return self.keys[rows] >> shift & (1 << bits) - 1

    def broken(self, rule: Rule, problem: Problem, limits: DeviceLimits) -> np.ndarray:
        """Tells of each variant whether it breaks the rule.

        Variants that agree in what the rule read of one of them have its verdict. Which parameters these are
        shows as the rule is asked, and depends on their values: those of which it wanted to know more are
        told apart by that as well, and asked again. Of a large table several are asked first, since telling
        all apart takes longer.
        """
        broken = np.zeros(len(self), dtype=bool)
        if not len(self):
            return broken
        some = np.linspace(0, len(self) - 1, _ASKED_FIRST if len(self) > _LARGE else 1, dtype=np.intp)
        first = _Asking(self, some, set())
        first.ask(rule, problem, limits)
        rows, read = np.arange(len(self)), first.wanted
        while len(rows):
            groups, one_of_each = self._alike(rows, read)
            there_are = np.flatnonzero(one_of_each >= 0)
            # Where none are alike, each has a verdict of its own, whatever it is by.
            told = set(self.known) if len(there_are) == len(rows) else read
            asking = _Asking(self, one_of_each[there_are], told)
            asking.ask(rule, problem, limits)
            of_group = np.zeros(len(one_of_each), dtype=bool)
            if asking.verdicts.any():
                of_group[there_are] = asking.verdicts
                if len(rows) == len(self):
                    broken = of_group[groups]
                else:
                    broken[rows] = of_group[groups]
            if not asking.undecided.any():
                break
            of_group[there_are] = asking.undecided
            rows, read = rows[of_group[groups]], read | asking.wanted
        return broken

    def values(self, rows: np.ndarray) -> Iterator[dict[str, Value]]:
        """Yields what the parameters of some rows are; those without a value yet have their defaults."""
        defaults = {p.name: p.default for p in self.family.parameters()}
        columns = [
            [self.choices[name][code] for code in self.codes(name, rows).tolist()] for name in self.known
        ]
        for values in zip(*columns, strict=True):
            yield defaults | dict(zip(self.known, values, strict=True))

    def _alike(self, rows: np.ndarray, names: set[str]) -> tuple[np.ndarray, np.ndarray]:
        """Groups rows that agree in these parameters: returns the group of each, and of each group one row,
        -1 where it has none."""
        keys = self.keys if len(rows) == len(self) else self.keys[rows]
        groups, size = np.zeros(1, dtype=np.int64), 1
        for shift, bits in self.places.together(names):
            if size << bits > _TABLE_ENTRIES * len(rows) + _LEAST_TABLE:
                groups, size = _renumbered(groups, size)
            more = keys >> shift & (1 << bits) - 1
            groups, size = more if size == 1 else groups << bits | more, size << bits
        if size == 1:
            return np.zeros(len(rows), dtype=np.intp), rows[:1]
        if size > _TABLE_ENTRIES * len(rows) + _LEAST_TABLE:
            groups, size = _renumbered(groups, size)
        one_of_each = np.full(size, -1, dtype=np.intp)
        one_of_each[groups] = rows
        return groups, one_of_each


def _renumbered(numbers: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """Numbers below ``size``, by which of those that there are they are, and how many there are."""
    if size > _TABLE_ENTRIES * len(numbers) + _LEAST_TABLE:
        present, numbers = np.unique(numbers, return_inverse=True)
        return numbers, len(present)
    present = np.zeros(size, dtype=bool)
    present[numbers] = True
    order = np.cumsum(present) - 1
    return order[numbers], int(order[-1]) + 1


class _Asking:
    """What a rule says of some rows of a table, each of which stands for others: they agree in the parameters
    ``told``. ``undecided`` are those of whom it reads more, which is ``wanted``."""

    def __init__(self, table: _Table, rows: np.ndarray, told: set[str]) -> None:
        self.table, self.rows, self.told = table, rows, told
        self.verdicts = np.zeros(len(rows), dtype=bool)
        self.undecided = np.zeros(len(rows), dtype=bool)
        self.wanted: set[str] = set()

    def ask(self, rule: Rule, problem: Problem, limits: DeviceLimits) -> None:
        """Asks a rule: about few one by one, about many along each path through it."""
        left = [np.arange(len(self.rows))]
        while left:
            some = left.pop()
            if len(some) <= _FEW:
                self._one_by_one(some, rule, problem, limits)
                continue
            path = Path(some)
            try:
                reason = rule.verdict(asking(self.table.family, self._tell_on(path)), problem, limits)
            except _Unread as unread:
                self.undecided[path.rows] = True
                self.wanted.add(unread.name)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                # It does more with numbers than arithmetic; what is wrong with it a single variant shows.
                self._one_by_one(path.rows, rule, problem, limits)
            else:
                self.verdicts[path.rows] = reason is not None
            left += path.aside

    def _one_by_one(self, some: np.ndarray, rule: Rule, problem: Problem, limits: DeviceLimits) -> None:
        for each, values in zip(some.tolist(), self.table.values(self.rows[some]), strict=True):
            asked = set[str]()
            verdict = rule.verdict(watched(self.table.family, values, asked), problem, limits)
            more = asked.intersection(self.table.known) - self.told  # what has no value yet tells none apart
            self.verdicts[each], self.undecided[each] = verdict is not None, bool(more)
            self.wanted |= more

    def _tell_on(self, path: Path) -> Callable[[str], Column | Value]:
        table = self.table

        def tell(name: str) -> Column | Value:
            choices = table.choices[name]
            if name not in table.known:
                return next(p.default for p in table.family.parameters() if p.name == name)
            if name not in self.told:
                raise _Unread(name)
            if len(choices) == 1:
                return choices[0]
            codes = table.codes(name, self.rows[path.rows])
            if all(isinstance(each, int) for each in choices):
                return Column(path, np.array(choices, dtype=np.int64)[codes])
            return choices[path.one(codes)]

        return tell
