"""Which conditions of a mask bound the keys that a row sees, so that tiles beyond them are never walked.

``q - k <= 127 and k <= q and doc[b, q] == doc[b, k]`` is an interval of keys, ``[q - 127, q + 1)``, and a
condition that is tested key by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import reduce

from ..expression import (
    Apply,
    Constant,
    Expression,
    Kind,
    Load,
    Name,
    apply,
    conjuncts,
    distinct,
    folded,
    maximum,
    minimum,
)

#: Names of a key, of a row, and of what bounds may not depend on.
_KEY, _ROW, _HEAD = "k", "q", "h"
#: Numbers up to which positions beside them still fit into 32 bits.
_REACH = 2**30


@dataclass(frozen=True)
class SplitMask:
    """A mask as bounds of the keys and the ``rest``: it is true where the key is neither before one of
    ``begins`` nor at or behind one of ``ends``, and the rest is true; None: it always is.

    Bounds are integers in ``q``, ``b``, lengths, scalars and elements by ``b``, which never fall from one row
    to the next. They may lie outside of the keys there are.
    """

    begins: tuple[Expression, ...]
    ends: tuple[Expression, ...]
    rest: Expression | None


def split_mask(mask: Expression) -> SplitMask:
    """Returns a mask's bounds, and what else must hold.

    Of conditions that are no bounds, such as alternatives, those bounds are told that follow from them.
    Integers that a mask names must lie within ±2^30.
    """
    begins: dict[Expression, None] = {}
    ends: dict[Expression, None] = {}
    rest = []
    for condition in conjuncts(mask):
        found = _bounds(condition, negated=False)
        begins |= dict.fromkeys(found.begins)
        ends |= dict.fromkeys(found.ends)
        if not found.is_exact:
            rest.append(condition)
    both = reduce(lambda left, right: apply("and", left, right), rest) if rest else None
    later = tuple(each for each in begins if each.range[1] > 0)  # others hide no key
    return SplitMask(later, tuple(ends), None if both == Constant(True) else both)


@dataclass(frozen=True)
class _Bounds:
    """What follows from a condition; with ``is_exact`` also the other way round."""

    begins: tuple[Expression, ...] = ()
    ends: tuple[Expression, ...] = ()
    is_exact: bool = False

    def __and__(self, other: _Bounds) -> _Bounds:
        return _Bounds(
            (*self.begins, *other.begins), (*self.ends, *other.ends), self.is_exact and other.is_exact
        )

    def __or__(self, other: _Bounds) -> _Bounds:
        """The hull of both, which is exact where both are open to the same side."""
        begins = ends = ()
        if self.begins and other.begins:
            begins = (minimum(reduce(maximum, self.begins), reduce(maximum, other.begins)),)
        if self.ends and other.ends:
            ends = (maximum(reduce(minimum, self.ends), reduce(minimum, other.ends)),)
        one_sided = not (self.begins or other.begins) or not (self.ends or other.ends)
        return _Bounds(begins, ends, self.is_exact and other.is_exact and one_sided)


_NOTHING = _Bounds()
_OPPOSITES = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _bounds(condition: Expression, *, negated: bool) -> _Bounds:
    """The bounds that follow from a condition, or from its opposite."""
    if not isinstance(condition, Apply):
        return _Bounds(is_exact=condition == Constant(not negated))
    first, *others = condition.operands
    match condition.function:
        case "not":
            return _bounds(first, negated=not negated)
        case "and" | "or":
            left, right = (_bounds(each, negated=negated) for each in condition.operands)
            return left & right if (condition.function == "and") != negated else left | right
        case "where":
            return _of_choice(first, *others, negated=negated)
        case sign if sign in _OPPOSITES and first.kind is Kind.INT:
            sign = _OPPOSITES[sign] if negated else sign
            return _of_comparison(sign, first, others[0])
    return _NOTHING


def _of_choice(condition: Expression, yes: Expression, no: Expression, *, negated: bool) -> _Bounds:
    """Of ``where``: that the condition holds and the one, or does not hold and the other."""
    chosen = [
        _bounds(condition, negated=not holds) & _bounds(each, negated=negated)
        for each, holds in ((yes, True), (no, False))
        if each != Constant(negated)
    ]
    return reduce(lambda left, right: left | right, chosen) if chosen else _NOTHING


def _of_comparison(sign: str, left: Expression, right: Expression) -> _Bounds:
    difference = _Sum.of(left - right)
    match sign:
        case "le":
            return _at_most(difference, Constant(0))
        case "lt":
            return _at_most(difference, Constant(-1))
        case "ge":
            return _at_least(difference, Constant(0))
        case "gt":
            return _at_least(difference, Constant(1))
        case "eq":
            return _at_most(difference, Constant(0)) & _at_least(difference, Constant(0))
    return _NOTHING


@dataclass(frozen=True)
class _Sum:
    """A sum of terms, each so many times, of which some hold the key."""

    terms: Mapping[Expression, int]
    number: int

    @classmethod
    def of(cls, root: Expression) -> _Sum:
        """Returns an integer as a sum."""
        return folded(root, cls._of_node)

    @staticmethod
    def _of_node(node: Expression, parts: list[_Sum]) -> _Sum:
        if isinstance(node, Constant) and node.kind is Kind.INT:
            return _Sum({}, int(node.number))
        match node.function if isinstance(node, Apply) and node.kind is Kind.INT else None:
            case "add":
                return parts[0].plus(parts[1], 1)
            case "sub":
                return parts[0].plus(parts[1], -1)
            case "neg":
                return _Sum({}, 0).plus(parts[0], -1)
            case "mul" if not parts[0].terms:
                return _Sum({}, 0).plus(parts[1], parts[0].number)
            case "mul" if not parts[1].terms:
                return _Sum({}, 0).plus(parts[0], parts[1].number)
        return _Sum({node: 1}, 0)

    def plus(self, other: _Sum, times: int) -> _Sum:
        """Returns a sum and so many times another."""
        terms = dict(self.terms)
        for term, often in other.terms.items():
            terms[term] = terms.get(term, 0) + often * times
        return _Sum(
            {term: often for term, often in terms.items() if often}, self.number + other.number * times
        )

    def split(self) -> tuple[Expression | None, int, _Sum]:
        """Returns the one term with the key, how often it stands there, and the rest; no term if there are
        none or several."""
        with_key = [term for term in self.terms if _KEY in term.names()]
        if len(with_key) != 1:
            return None, 0, self
        (term,) = with_key
        rest = {each: often for each, often in self.terms.items() if each is not term}
        return term, self.terms[term], _Sum(rest, self.number)

    def expression(self) -> Expression:
        """Returns the sum written out, what is added before what is taken away."""
        found: Expression = Constant(0)
        for term, often in sorted(self.terms.items(), key=lambda each: each[1] < 0):
            found = found + term * often if often > 0 else found - term * -often
        return found + self.number


def _at_most(value: _Sum, limit: Expression) -> _Bounds:
    """The bounds that follow from ``value <= limit``, with a limit that has no key in it."""
    term, often, rest = value.split()
    if term is None:
        return _NOTHING
    if often < 0:
        return _at_least(_Sum({}, 0).plus(value, -1), -limit)
    limit = _Sum.of(-rest.expression() + limit).expression()
    return _term_at_most(term, limit if often == 1 else apply("floor_div", limit, often))


def _at_least(value: _Sum, limit: Expression) -> _Bounds:
    """The bounds that follow from ``value >= limit``."""
    term, often, rest = value.split()
    if term is None:
        return _NOTHING
    if often < 0:
        return _at_most(_Sum({}, 0).plus(value, -1), -limit)
    limit = _Sum.of(-rest.expression() + limit).expression()
    return _term_at_least(term, limit if often == 1 else apply("floor_div", limit + (often - 1), often))


def _term_at_most(term: Expression, limit: Expression) -> _Bounds:
    if term == Name(_KEY, nonnegative=True):
        end = limit + 1
        return _Bounds(ends=(end,), is_exact=True) if _can_bound(end) else _NOTHING
    match term:
        case Apply(function="abs", operands=(inner,)):
            return _at_most(_Sum.of(inner), limit) & _at_least(_Sum.of(inner), -limit)
        case Apply(function="max", operands=(one, other)):
            return _at_most(_Sum.of(one), limit) & _at_most(_Sum.of(other), limit)
        case Apply(function="min", operands=(one, other)):
            return _at_most(_Sum.of(one), limit) | _at_most(_Sum.of(other), limit)
        case Apply(function="floor_div", operands=(inner, Constant() as divisor)) if divisor.number > 0:
            return _at_most(_Sum.of(inner), (limit + 1) * divisor - 1)
    return _NOTHING


def _term_at_least(term: Expression, limit: Expression) -> _Bounds:
    if term == Name(_KEY, nonnegative=True):
        return _Bounds(begins=(limit,), is_exact=True) if _can_bound(limit) else _NOTHING
    match term:
        case Apply(function="min", operands=(one, other)):
            return _at_least(_Sum.of(one), limit) & _at_least(_Sum.of(other), limit)
        case Apply(function="max", operands=(one, other)):
            return _at_least(_Sum.of(one), limit) | _at_least(_Sum.of(other), limit)
        case Apply(function="floor_div", operands=(inner, Constant() as divisor)) if divisor.number > 0:
            return _at_least(_Sum.of(inner), limit * divisor)
    return _NOTHING


# -- what never falls from row to row ------------------------------------------------------------------------


class _Trend(Enum):
    """What becomes of a value from one row to the next."""

    SAME = 0
    RISES = 1
    FALLS = -1
    UNKNOWN = None

    def __neg__(self) -> _Trend:
        return self if self.value is None else _Trend(-self.value)

    def __and__(self, other: _Trend) -> _Trend:
        """Of a sum of both."""
        if self is other or other is _Trend.SAME:
            return self
        return other if self is _Trend.SAME else _Trend.UNKNOWN


def _can_bound(key: Expression) -> bool:
    """Whether a key is known without the head, never falls, and its numbers fit into 32 bits."""
    nodes = distinct(key)
    numbers = [each.number for each in nodes if isinstance(each, Constant) and each.kind is not Kind.BOOL]
    if any(abs(number) > _REACH for number in numbers) or _HEAD in key.names():
        return False
    return folded(key, _trend) in (_Trend.SAME, _Trend.RISES)


def _trend(node: Expression, operands: list[_Trend]) -> _Trend:
    if isinstance(node, Name):
        return _Trend.RISES if node.name == _ROW else _Trend.SAME
    if all(each is _Trend.SAME for each in operands):
        return _Trend.SAME
    if isinstance(node, Load) or not isinstance(node, Apply):
        return _Trend.UNKNOWN
    first, last = operands[0], operands[-1]
    match node.function:
        case "add" | "min" | "max":
            return first & last
        case "sub":
            return first & -last
        case "neg":
            return -first
        case "mul":
            return _trend_of_product(node.operands, operands)
        case "floor_div" if last is _Trend.SAME and node.operands[1].range[0] >= 0:
            return first
        case "where" if first is _Trend.SAME:
            return operands[1] & last
        case "int" | "float" | "floor" if node.operands[0].kind is not Kind.BOOL:
            return first
    return _Trend.UNKNOWN


def _trend_of_product(factors: tuple[Expression, ...], trends: list[_Trend]) -> _Trend:
    """Of a product with a factor that is the same for all rows and of a known sign."""
    for one, other in ((0, 1), (1, 0)):
        if trends[one] is _Trend.SAME and factors[one].range[0] >= 0:
            return trends[other]
        if trends[one] is _Trend.SAME and factors[one].range[1] <= 0:
            return -trends[other]
    return _Trend.UNKNOWN
