"""How steep changes of scores are: by how much the error of a score may grow in one."""

from __future__ import annotations

from math import inf

from ..expression import Apply, Constant, Expression, Kind, Name, folded

#: Functions whose value moves no more than their operand, and the greatest share of it that others do.
_SHARES = {"neg": 1.0, "abs": 1.0, "tanh": 1.0, "sin": 1.0, "cos": 1.0, "sigmoid": 0.25}


def steepness(expression: Expression, variable: Name) -> float:
    """Returns the largest slope that a float has in a variable between its steps; infinite where the numbers
    in it do not tell."""

    def of(node: Expression, slopes: list[float]) -> float:
        if node == variable:
            return 1.0
        if node.kind is not Kind.FLOAT or not isinstance(node, Apply) or not any(slopes):
            return 0.0
        return _slope(node, slopes)

    return folded(expression, of)


def _slope(node: Apply, slopes: list[float]) -> float:
    match node.function:
        case "add" | "sub":
            return sum(slopes)
        case "min" | "max":
            return max(slopes)
        case "where":
            return max(slopes[1:])
        case "mul":
            for factor, slope in zip(node.operands, reversed(slopes), strict=True):
                if isinstance(factor, Constant):
                    return abs(factor.number) * slope if factor.number else 0.0
            return inf
        case "div":
            divisor = node.operands[1]
            return slopes[0] / abs(divisor.number) if isinstance(divisor, Constant) else inf
        case function:
            return _SHARES.get(function, inf) * slopes[0]
