"""Hyperbolic tangents of what is small, by multiply-adds alone: a soft cap's of most scores.

The special-function unit takes a tangent no faster than an exponential, of which it has one for each score
already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from ..expression import Apply, Constant, Expression, Kind, Load, Name, apply, distinct
from ..scoring.scores import BATCH, HEAD, KEY, QUERY
from .gathering import RAW, local

#: Whether the arguments of a warp are small, as it is known when a kernel is compiled; and by what that is
#: found: the largest magnitude of a raw score.
IS_SMALL, LARGEST = local("is_small", Kind.BOOL), local("largest", Kind.FLOAT)
#: Coefficients of the odd powers of x, up to which |x| they make its tangent, and within which bounds a
#: factor of x has powers that are float32 numbers. Minimax in relative error, by Lawson's iteration: to
#: 2^-11.6, which `tanh.approx` has as well, and to 2^-23.5.
_COARSE = ((0.99969670, -0.32457365, 0.09357443), 0.8, (1e-7, 1e7))
_FINE = ((1.0, -0.33332597, 0.13313116, -0.0522118, 0.01561262), 0.6, None)
#: The same of two powers, to 2^-11.1.
_CUBIC = ((0.99956185, -0.31221090), 0.41, (1e-7, 1e7))
#: Those of float32 by three powers, to 2^-23.5, and by four, to 2^-23.8. By any, what float32 makes of the
#: argument's factor is within 2^-22.9.
_FINE_QUINTIC = ((0.99999994, -0.33329662, 0.1305036), 0.19, None)
_FINE_SEPTIC = ((0.99999994, -0.33331902, 0.13282467, -0.04815025), 0.38, None)
#: What tangents within exponents are made of by how many powers, approximate ones and others.
_IN_POWERS = {
    True: {2: _CUBIC, 3: _COARSE},
    False: {3: _FINE_QUINTIC, 4: _FINE_SEPTIC, 5: _FINE},
}
_OF_PLACES = frozenset(each.name for each in (BATCH, HEAD, QUERY, KEY))


@dataclass(frozen=True)
class SmallTangent:
    """A hyperbolic tangent of a multiple of the raw score: as it is written, by multiply-adds where a warp's
    arguments are small, and how that is told: an expression over `LARGEST`."""

    written: Expression
    by_parts: Expression
    is_small: Expression

    @property
    def either(self) -> Expression:
        """The one or the other by `IS_SMALL`."""
        return apply("where", IS_SMALL, self.by_parts, self.written)


@dataclass(frozen=True)
class TangentInPowers:
    """A hyperbolic tangent of the raw score times a factor, where that is small: what its odd powers are
    multiplied by, and up to which size it is small, as long as the factor is between bounds; without these,
    powers are to be had of the product alone."""

    factor: Expression
    coefficients: tuple[float, ...]
    largest: float
    bounds: tuple[float, float] | None


def tangent_in_powers(body: Expression, number: int, *, approximate: bool) -> TangentInPowers | None:
    """Returns an expression that is a hyperbolic tangent of a multiple of the raw score, and nothing else, in
    so many odd powers: three, two if ``approximate``, where an error of 2^-11 of it is borne, else also four
    or five. None: it is another."""
    if not isinstance(body, Apply) or body.function != "tanh":
        return None
    factor = _factor_of_raw(body.operands[0])
    if factor is None:
        return None
    return TangentInPowers(factor, *_IN_POWERS[approximate][number])


def small_tangent(body: Expression, *, approximate: bool) -> SmallTangent | None:
    """Returns the hyperbolic tangent that a gathered expression takes of a multiple of the raw score; None:
    there is none, or there are several. ``approximate``: an error of 2^-11 of it is borne."""
    tangents = [node for node in distinct(body) if isinstance(node, Apply) and node.function == "tanh"]
    factor = _factor_of_raw(tangents[0].operands[0]) if len(tangents) == 1 else None
    if factor is None:
        return None
    coefficients, largest, bounds = _COARSE if approximate else _FINE
    is_small = apply("le", LARGEST * abs(factor), largest)
    if bounds is None:
        return SmallTangent(tangents[0], _odd(RAW * factor, coefficients), is_small)
    square = factor * factor
    scaled: list[Expression] = [factor]
    for _ in coefficients[1:]:
        scaled.append(scaled[-1] * square)
    powers = tuple(number * power for number, power in zip(coefficients, scaled, strict=True))
    for bound, function in zip(bounds, ("ge", "le"), strict=True):
        is_small = apply("and", is_small, apply(function, abs(factor), bound))
    return SmallTangent(tangents[0], _odd(RAW, powers), is_small)


def _odd(x: Expression, coefficients: tuple[Expression | float, ...]) -> Expression:
    """The polynomial of x that has these coefficients of its odd powers."""
    first, *others = reversed(coefficients)
    square = x * x
    return x * reduce(lambda inner, number: number + square * inner, others, first)


def _factor_of_raw(argument: Expression) -> Expression | None:
    """What the raw score is multiplied by, if that is the same for all rows and keys."""
    if not isinstance(argument, Apply) or argument.function != "mul":
        return Constant(1.0) if argument == RAW else None
    rest, factor = argument.operands
    if rest != RAW or any(isinstance(node, Load) or _is_place(node) for node in distinct(factor)):
        return None
    return factor


def _is_place(node: Expression) -> bool:
    return isinstance(node, Name) and node.name in _OF_PLACES
