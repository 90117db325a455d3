"""Changes of scores as sums, whose terms the keys of a row share, or are affine in the key, or neither."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..expression import Apply, Constant, Expression, Kind, apply
from ..formula.affine import Affine, affine_in
from ..scoring.scores import KEY
from .gathering import product, varying_parts


@dataclass(frozen=True)
class Term:
    """A term of a sum: what varies from key to key, one where nothing does, times what is the same for all
    keys of a row."""

    varying: Expression
    factors: tuple[Expression, ...]
    negative: bool

    @property
    def coefficient(self) -> Expression:
        """What the varying part is multiplied by."""
        found = product(self.factors)
        return -found if self.negative else found

    @property
    def varies(self) -> bool:
        """Whether it is another for each key of a row."""
        return self.varying != Constant(1.0)

    @property
    def distance(self) -> tuple[Affine, bool] | None:
        """The integer that its varying part is, if that is affine in the key, and whether it is the absolute
        value of it."""
        if not isinstance(self.varying, Apply) or self.varying.function != "float":
            return None
        integer = self.varying.operands[0]
        is_absolute = isinstance(integer, Apply) and integer.function == "abs"
        found = affine_in(KEY, integer.operands[0] if is_absolute else integer)
        return None if found is None or found.times == 0 else (found, is_absolute)


def terms_of(change: Expression) -> tuple[Term, ...]:
    """Returns the terms of a change of scores, products of sums multiplied out where a factor is the same for
    all keys of a row."""
    return tuple(_terms(change, (), negative=False, varying=varying_parts(change)))


def _terms(
    node: Expression, factors: tuple[Expression, ...], *, negative: bool, varying: Collection[Expression]
) -> Iterator[Term]:
    if node not in varying:
        yield Term(Constant(1.0), (node, *factors), negative)
        return
    if isinstance(node, Apply) and node.kind is Kind.FLOAT:
        first, last = node.operands[0], node.operands[-1]
        if node.function in ("add", "sub", "neg"):
            turned = node.function != "add"
            if node.function != "neg":
                yield from _terms(first, factors, negative=negative, varying=varying)
            yield from _terms(last, factors, negative=negative != turned, varying=varying)
            return
        if node.function == "div" and last not in varying:
            factors = (apply("div", 1.0, last), *factors)
            yield from _terms(first, factors, negative=negative, varying=varying)
            return
        if node.function == "mul" and (first in varying) != (last in varying):
            inner, factor = (first, last) if first in varying else (last, first)
            yield from _terms(inner, (factor, *factors), negative=negative, varying=varying)
            return
    yield Term(node, factors, negative)
