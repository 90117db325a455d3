"""Derivatives of formulas: what the gradients of scores, and of the arrays that they read, are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log

from ..expression import Apply, Constant, Expression, Kind, Load, Name, apply, folded, loads_of

#: What of a function's operands, its result and their derivatives makes the result's derivative.
_Rule = Callable[[Apply, list[Expression]], Expression]
_ZERO, _ONE = Constant(0.0), Constant(1.0)


def derivative(expression: Expression, wanted: str | Name | Load) -> Expression:
    """Returns the derivative of a float by a name, or by an element of a buffer, where that stands.

    Steps (``floor``, comparisons, integers) are flat. At a kink that of one side is taken: of ``max(x, 0.0)``
    and of ``abs(x)`` at 0 it is 0. Elements of one buffer with other indices are other variables. Raises
    ValueError for what is no float.
    """
    if expression.kind is not Kind.FLOAT:
        raise ValueError(f"a derivative is of a float, not of {expression.kind.with_article}")
    variable = Name(wanted, Kind.FLOAT) if isinstance(wanted, str) else wanted

    def of(node: Expression, operands: list[Expression]) -> Expression:
        if node == variable:
            return _ONE
        # What is known to be flat needs no rule: of a power whose exponent is, no logarithm is taken.
        if (
            node.kind is not Kind.FLOAT
            or not isinstance(node, Apply)
            or all(each == _ZERO for each in operands)
        ):
            return _ZERO
        return _RULES[node.function](node, operands)

    return folded(expression, of)


def gradients(expression: Expression) -> Mapping[Load, Expression]:
    """Returns the derivative by each element of buffers of floats that an expression takes, where it is not
    zero everywhere: what is added up to the gradient of that element."""
    found = {load: derivative(expression, load) for load in loads_of(expression) if load.kind is Kind.FLOAT}
    return {load: each for load, each in found.items() if each != _ZERO}


def _times(factor: Expression, rate: Expression) -> Expression:
    """A product that is not computed where it is zero or the other factor."""
    if _ZERO in (factor, rate):
        return _ZERO
    return factor if rate == _ONE else factor * rate


def _of_sub(node: Apply, rates: list[Expression]) -> Expression:
    return -rates[1] if rates[0] == _ZERO else rates[0] - rates[1]


def _of_mul(node: Apply, rates: list[Expression]) -> Expression:
    left, right = node.operands
    return _times(right, rates[0]) + _times(left, rates[1])


def _of_div(node: Apply, rates: list[Expression]) -> Expression:
    rest = _times(node, rates[1])
    return (-rest if rates[0] == _ZERO else rates[0] - rest) / node.operands[1]


def _of_extreme(node: Apply, rates: list[Expression]) -> Expression:
    # Of what is no number, minimum and maximum take the other.
    return apply("where", apply("eq", node, node.operands[1]), rates[1], rates[0])


def _of_abs(node: Apply, rates: list[Expression]) -> Expression:
    (x,), (rate,) = node.operands, rates
    falling = apply("where", apply("lt", x, 0.0), -rate, _ZERO)
    return apply("where", apply("gt", x, 0.0), rate, falling)


def _of_where(node: Apply, rates: list[Expression]) -> Expression:
    return apply("where", node.operands[0], rates[1], rates[2])


def _of_pow(node: Apply, rates: list[Expression]) -> Expression:
    base, exponent = node.operands
    by_base = _times(exponent * apply("power", base, exponent - 1.0), rates[0])
    return by_base + _times(node * apply("log", base), rates[1]) if rates[1] != _ZERO else by_base


def _chain(outer: Callable[[Apply, Expression], Expression]) -> _Rule:
    """The rule for a function of one operand, of whose result and operand its derivative is made."""
    return lambda node, rates: _times(outer(node, node.operands[0]), rates[0])


_RULES: Mapping[str, _Rule] = {
    "add": lambda _, rates: rates[0] + rates[1],
    "sub": _of_sub,
    "mul": _of_mul,
    "div": _of_div,
    "neg": lambda _, rates: -rates[0],
    "min": _of_extreme,
    "max": _of_extreme,
    "abs": _of_abs,
    "where": _of_where,
    "pow": _of_pow,
    "exp": _chain(lambda node, x: node),
    "exp2": _chain(lambda node, x: node * log(2)),
    "log": _chain(lambda node, x: 1.0 / x),
    "log2": _chain(lambda node, x: (1 / log(2)) / x),
    "sqrt": _chain(lambda node, x: 0.5 / node),
    "rsqrt": _chain(lambda node, x: -0.5 * (node * node * node)),
    "tanh": _chain(lambda node, x: 1.0 - node * node),
    "sigmoid": _chain(lambda node, x: node * (1.0 - node)),
    "sin": _chain(lambda node, x: apply("cos", x)),
    "cos": _chain(lambda node, x: -apply("sin", x)),
    "floor": lambda _, rates: _ZERO,
    "float": lambda _, rates: _ZERO,
}
