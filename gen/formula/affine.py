"""Integers that are affine in a name: multiples of it beside what is free of it; and what bounds them."""

from __future__ import annotations

from dataclasses import dataclass

from ..expression import Apply, Constant, Expression, Name


@dataclass(frozen=True)
class Affine:
    """An integer ``rest + times * name``, where the rest is free of the name."""

    rest: Expression
    times: int

    def __neg__(self) -> Affine:
        return Affine(-self.rest, -self.times)

    def at(self, place: Expression) -> Expression:
        """Returns it with ``place`` where the name is."""
        if self.times == 0:
            return self.rest
        multiple = abs(self.times) * place if abs(self.times) > 1 else place
        return self.rest + multiple if self.times > 0 else self.rest - multiple


def affine_in(name: Name, integer: Expression) -> Affine | None:
    """Returns how an integer is affine in ``name``; None: it is not, as far as sums and differences tell."""
    if integer == name:
        return Affine(Constant(0), 1)
    if name.name not in integer.names():
        return Affine(integer, 0)
    if not isinstance(integer, Apply) or integer.function not in ("add", "sub", "neg", "mul"):
        return None
    parts = [affine_in(name, each) for each in integer.operands]
    first, last = parts[0], parts[-1]
    if first is None or last is None:
        return None
    match integer.function:
        case "neg":
            return -first
        case "add":
            return Affine(first.rest + last.rest, first.times + last.times)
        case "sub":
            rest = -last.rest if first.rest == Constant(0) else first.rest - last.rest
            return Affine(rest, first.times - last.times)
    for number, other in (integer.operands, reversed(integer.operands)):
        if isinstance(number, Constant) and number.is_plain:
            found = affine_in(name, other)
            return found and Affine(found.rest * int(number.number), found.times * int(number.number))
    return None


def least_value(integer: Expression) -> float:
    """Returns a lower bound of an integer, as tight as the ranges of the terms of its sum are when equal ones
    have met; -inf: it is not known."""
    number, multiples = _terms(integer)
    least = float(number)
    for term, times in multiples.items():
        if times:
            least += times * term.range[0 if times > 0 else 1]
    return least


def _terms(integer: Expression) -> tuple[int, dict[Expression, int]]:
    """The plain number of a sum, and how many times each other term is in it."""
    if isinstance(integer, Constant) and integer.is_plain:
        return int(integer.number), {}
    if isinstance(integer, Apply) and integer.function in ("add", "sub", "neg"):
        number, multiples = 0, dict[Expression, int]()
        signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[integer.function]
        for sign, operand in zip(signs, integer.operands, strict=True):
            own_number, own_multiples = _terms(operand)
            number += sign * own_number
            for term, times in own_multiples.items():
                multiples[term] = multiples.get(term, 0) + sign * times
        return number, multiples
    return 0, {integer: 1}
