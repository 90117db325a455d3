"""Legal choices of a value for each of many factors, found by looking where rules look.

Most variants are illegal: of what is drawn blindly and then checked, one in thousands may stay, and for a
pair of values that nothing legal has all draws are in vain. Here values are chosen one after the other, and a
rule is asked as soon as it may be. It is watched for what it reads: where it is broken, the last of these
choices is made anew, and where none is left to make, what was asked for is impossible. That is remembered, as
are verdicts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from typing import Any, TypeVar

from flashgen.gen.limits import DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Rule, Variant

T = TypeVar("T")
#: Puts the values of a factor in the order in which they are tried; it is told the factor's place and the
#: values chosen for those before it.
Order = Callable[[int, Sequence[int]], Sequence[int]]
#: The factors in front of a family's parameters, and the fields of a problem that they set.
IN_FRONT = ("numbers", "dims", "causal", "limits")
SET_BY = {
    "dtype": "numbers",
    "precision": "numbers",
    "head_dim": "dims",
    "head_dim_v": "dims",
    "causal": "causal",
}
#: Choices in the first search before it is given up for another one, by chance, of twice as many, and how
#: many searches there are. What those before found out each knows.
FIRST_CHOICES, SEARCHES = 250, 7
#: What stands where no value is chosen yet.
UNCHOSEN = -1
#: Whom a rule blames that is not broken.
FINE = frozenset({UNCHOSEN})


class _GaveUp(Exception):
    """Neither a legal assignment nor a proof that there is none was found in time."""


class LegalChoices:
    """The legal assignments of values to factors: those in `IN_FRONT`, then each parameter of a family.

    Values go by their numbers in ``values``, factors by their places in it.
    """

    def __init__(
        self,
        family: type[Variant],
        factors: Mapping[str, Sequence[Any]],
        rng: random.Random,
        problem: Problem | None = None,
    ) -> None:
        """``problem`` is what all are to compute, instead of what the factors in front make: those say what
        it is then, one value each."""
        self.names = (*IN_FRONT, *(p.name for p in family.parameters()))
        self.values = [tuple(factors[name]) for name in self.names]
        self._family, self._rng, self._of_all = family, rng, problem
        self._places = {name: place for place, name in enumerate(self.names)}
        self._read: set[int] = set()
        self._variants = _watched(family, {p.name: p.name for p in family.parameters()}, self._note)
        self._problems = _watched(Problem, SET_BY, self._note)
        self._limits = _watched(
            DeviceLimits, {each.name: "limits" for each in fields(DeviceLimits)}, self._note
        )
        self._known_problems: dict[tuple[int, ...], Problem] = {}
        self._rules: list[list[tuple[Rule, _ByValues]]] = [[] for _ in self.names]
        for rule in family.rules():
            if not rule.advisory:
                self._rules[self._places[rule.after]].append((rule, _ByValues()))
        self._dead_ends = [_ByValues() for _ in self.names]
        self._impossible: list[dict[int, int]] = []
        self._left = 0
        #: How many choices were made in all searches: what they took.
        self.num_choices = 0

    def is_impossible(self, asked: Mapping[int, int]) -> bool:
        """Whether an earlier search for these values, or for fewer of them, found nothing."""
        return any(known.items() <= asked.items() for known in self._impossible)

    def find(self, asked: Mapping[int, int], order: Order) -> list[int] | None:
        """Returns a legal assignment with the values ``asked`` for; None where there is none, or all searches
        were given up."""
        if self.is_impossible(asked):
            return None
        for search in range(SEARCHES):
            chosen = [asked.get(place, UNCHOSEN) for place in range(len(self.names))]
            self._left = FIRST_CHOICES << search
            try:
                blamed = self._search(0, chosen, asked, order)
            except _GaveUp:
                order = self.by_chance
                continue
            if blamed is None:
                return chosen
            self._impossible.append({place: asked[place] for place in blamed})
            return None
        self._impossible.append(dict(asked))
        return None

    def by_chance(self, place: int, chosen: Sequence[int]) -> Sequence[int]:
        """An `Order`."""
        return self._rng.sample(range(len(self.values[place])), len(self.values[place]))

    def assignment(self, chosen: Sequence[int]) -> dict[str, Any]:
        """The values by the names of the factors."""
        return {name: of_it[x] for name, of_it, x in zip(self.names, self.values, chosen, strict=True)}

    def _search(
        self, place: int, chosen: list[int], asked: Mapping[int, int], order: Order
    ) -> frozenset[int] | None:
        """Chooses values from the factor at ``place`` on. Returns None once all are chosen, else which
        earlier choices, or asked values, are to blame that there is none."""
        if place == len(chosen):
            return None
        if place in asked:
            return self._go_on(place, chosen, asked, order)
        blamed: set[int] = set()
        for value in order(place, chosen):
            chosen[place] = value
            found = self._go_on(place, chosen, asked, order)
            if found is None:
                return None
            if place not in found:
                chosen[place] = UNCHOSEN
                return found
            blamed |= found
        chosen[place] = UNCHOSEN
        blamed.discard(place)
        last = max(blamed.difference(asked), default=None)
        if last is not None:
            self._dead_ends[last].add(chosen, blamed, frozenset(blamed))
        return frozenset(blamed)

    def _go_on(
        self, place: int, chosen: list[int], asked: Mapping[int, int], order: Order
    ) -> frozenset[int] | None:
        """As `_search`, of one value of the factor."""
        self.num_choices += 1
        self._left -= 1
        if not self._left:
            raise _GaveUp
        found = self._dead_ends[place].get(chosen) or self._broken(place, chosen)
        return self._search(place + 1, chosen, asked, order) if found is None else found

    def _broken(self, place: int, chosen: Sequence[int]) -> frozenset[int] | None:
        """What the first broken rule read of those that wait for that factor."""
        for rule, verdicts in self._rules[place]:
            blamed = verdicts.get(chosen)
            if blamed is None:
                blamed = self._ask(rule, place, chosen)
                verdicts.add(chosen, self._read, blamed)
            if blamed is not FINE:
                return blamed
        return None

    def _ask(self, rule: Rule, place: int, chosen: Sequence[int]) -> frozenset[int]:
        first = len(IN_FRONT)
        values = {p.name: p.default for p in self._family.parameters()}
        values |= {self.names[i]: self.values[i][chosen[i]] for i in range(first, place + 1)}
        variant = object.__new__(self._variants)
        variant.__dict__.update(values)
        problem = self._problem(chosen)
        limits = object.__new__(self._limits)
        limits.__dict__.update(vars(self.values[first - 1][chosen[first - 1]]))
        self._read.clear()
        broken = rule.verdict(variant, problem, limits) is not None
        return frozenset(self._read) if broken else FINE

    def _problem(self, chosen: Sequence[int]) -> Problem:
        key = tuple(chosen[: len(IN_FRONT)])
        if key not in self._known_problems:
            made = object.__new__(self._problems)
            made.__dict__.update(vars(self._of_all or problem_of(self.assignment(chosen))))
            self._known_problems[key] = made
        return self._known_problems[key]

    def _note(self, name: str) -> None:
        self._read.add(self._places[name])


class _ByValues:
    """What is known of some choices, by the values that it depends on."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[Callable[[Sequence[int]], Any], dict[Any, Any]]] = {}

    def get(self, chosen: Sequence[int]) -> frozenset[int] | None:
        for values_of, known in self._known.values():
            found = known.get(values_of(chosen))
            if found is not None:
                return found
        return None

    def add(self, chosen: Sequence[int], places: Iterable[int], what: frozenset[int]) -> None:
        """Keeps what is known of all choices that have these values there."""
        key = tuple(sorted(places))
        if key not in self._known:
            self._known[key] = (itemgetter(*key) if key else lambda chosen: (), {})
        values_of, known = self._known[key]
        known[values_of(chosen)] = what


def problem_of(assignment: Mapping[str, Any]) -> Problem:
    """The problem that the factors in front make."""
    (dtype, precision), (d, dv) = assignment["numbers"], assignment["dims"]
    return Problem(dtype=dtype, precision=precision, head_dim=d, head_dim_v=dv, causal=assignment["causal"])


def _watched(kind: type[T], names: Mapping[str, str], note: Callable[[str], None]) -> type[T]:
    """The class, of which each reading of a field is noted as one of the factor that sets it. Hashes and
    comparisons read all fields: what is kept by an object counts as having read all of it."""

    def watched(field: str, factor: str) -> property:
        def read(self: Any) -> Any:
            note(factor)
            return self.__dict__[field]

        def write(self: Any, value: Any) -> None:
            self.__dict__[field] = value

        return property(read, write)

    members = {field: watched(field, factor) for field, factor in names.items()}
    return type(kind.__name__, (kind,), members)
