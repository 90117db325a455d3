"""Small expressions over named numbers: written once, printed as C++ or Python, computed by numpy.

Python's operators build them: ``minimum(KEYS, ROW + DIAGONAL + 1)``. What a row sees of the keys and how
many blocks a launch has are such expressions, so that the kernel, its host launcher, emitted modules, the
cost model and the reference cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: How tightly what an expression prints as is bound: the looser needs parentheses inside the tighter.
_LOOSEST, _SUM, _PRODUCT, _ATOM = range(4)
#: What a name may stand for in C++: a variable or member, or a sum of such.
_WORD = re.compile(r"[\w.]+(->\w+)?|\w+\([\w ,.+*/-]*\)")
_ARITHMETIC = re.compile(r"[\w.\s+*/%()-]+")


class Expression:
    """The base of an expression's nodes; integers stand for themselves wherever one is expected.

    Division is that of C++ and of Python's ``//`` alike: every expression divides what is not negative.
    """

    def __add__(self, other: Expression | int) -> Expression:
        return _sum(self, _lifted(other))

    def __radd__(self, other: int) -> Expression:
        return _sum(_lifted(other), self)

    def __sub__(self, other: Expression | int) -> Expression:
        return _sum(self, Constant(-other)) if isinstance(other, int) else _Binary("-", self, other)

    def __mul__(self, other: Expression | int) -> Expression:
        return self if other in (1, Constant(1)) else _Binary("*", self, _lifted(other))

    def __floordiv__(self, other: Expression | int) -> Expression:
        return self if other == 1 else _Binary("/", self, _lifted(other))

    def c(self, names: Mapping[str, str] | None = None) -> str:
        """Returns this expression in C++, each name as ``names`` has it, or as it is."""
        return self._print(names or {}, python=False)[0]

    def python(self, names: Mapping[str, str] | None = None) -> str:
        """Returns this expression in Python, each name as ``names`` has it, or as it is."""
        return self._print(names or {}, python=True)[0]

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the number that comes of the names' ``values``, which may be numpy's arrays. Raises
        KeyError."""
        raise NotImplementedError

    def with_names(self, replaced: Mapping[str, Expression]) -> Expression:
        """Returns this expression with other expressions in the place of names."""
        raise NotImplementedError

    def names(self) -> frozenset[str]:
        """Returns the names that must be known for this expression to be computed."""
        return frozenset()

    def _print(self, names: Mapping[str, str], *, python: bool) -> tuple[str, int]:
        """The text, and how tightly it binds."""
        raise NotImplementedError

    def _inside(self, level: int, names: Mapping[str, str], *, python: bool) -> str:
        text, own = self._print(names, python=python)
        return text if own >= level else f"({text})"


@dataclass(frozen=True)
class Name(Expression):
    """A number that is known by its name alone until the expression is computed."""

    name: str

    def value(self, values: Mapping[str, Any]) -> Any:
        return values[self.name]

    def names(self) -> frozenset[str]:
        return frozenset({self.name})

    def with_names(self, replaced: Mapping[str, Expression]) -> Expression:
        return replaced.get(self.name, self)

    def _print(self, names: Mapping[str, str], *, python: bool) -> tuple[str, int]:
        text = names.get(self.name, self.name)
        return text, _ATOM if _WORD.fullmatch(text) else _SUM if _ARITHMETIC.fullmatch(text) else _LOOSEST


@dataclass(frozen=True)
class Constant(Expression):
    """A number, which C++ may know by a name: ``kBr``."""

    number: int
    c_name: str = ""

    def value(self, values: Mapping[str, Any]) -> Any:
        return self.number

    def with_names(self, replaced: Mapping[str, Expression]) -> Expression:
        return self

    def _print(self, names: Mapping[str, str], *, python: bool) -> tuple[str, int]:
        return (str(self.number) if python or not self.c_name else self.c_name), _ATOM


@dataclass(frozen=True)
class _Binary(Expression):
    sign: str
    left: Expression
    right: Expression

    def value(self, values: Mapping[str, Any]) -> Any:
        left, right = self.left.value(values), self.right.value(values)
        match self.sign:
            case "+":
                return left + right
            case "-":
                return left - right
            case "*":
                return left * right
            case _:
                return left // right

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def with_names(self, replaced: Mapping[str, Expression]) -> Expression:
        left, right = self.left.with_names(replaced), self.right.with_names(replaced)
        return left + right if self.sign == "+" else _Binary(self.sign, left, right)

    def _print(self, names: Mapping[str, str], *, python: bool) -> tuple[str, int]:
        level = _SUM if self.sign in "+-" else _PRODUCT
        left = self.left._inside(level, names, python=python)
        # What stands behind a sign of its own level is grouped: integers divide in the order written.
        behind = level if self.sign == "+" else level + 1
        right = self.right._inside(behind, names, python=python)
        if self.sign == "+" and right.startswith("-"):
            return f"{left} - {right[1:]}", level
        return f"{left} {'//' if python and self.sign == '/' else self.sign} {right}", level


@dataclass(frozen=True)
class _Extreme(Expression):
    function: str
    left: Expression
    right: Expression

    def value(self, values: Mapping[str, Any]) -> Any:
        import numpy as np  # where arrays are: a problem alone needs none

        choose = np.minimum if self.function == "min" else np.maximum
        chosen = choose(self.left.value(values), self.right.value(values))
        return chosen if isinstance(chosen, np.ndarray) else int(chosen)

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def with_names(self, replaced: Mapping[str, Expression]) -> Expression:
        return _Extreme(self.function, self.left.with_names(replaced), self.right.with_names(replaced))

    def _print(self, names: Mapping[str, str], *, python: bool) -> tuple[str, int]:
        left, right = (each._print(names, python=python)[0] for each in (self.left, self.right))
        return f"{self.function}({left}, {right})", _ATOM


def minimum(left: Expression | int, right: Expression | int) -> Expression:
    """Returns the smaller of two expressions or numbers."""
    return _Extreme("min", _lifted(left), _lifted(right))


def maximum(left: Expression | int, right: Expression | int) -> Expression:
    """Returns the larger of two expressions or numbers."""
    return _Extreme("max", _lifted(left), _lifted(right))


def divided_up(left: Expression, right: Expression | int) -> Expression:
    """Returns the quotient of two expressions or numbers, rounded up."""
    return left if right == 1 else (left + right - 1) // right


def _lifted(value: Expression | int) -> Expression:
    return Constant(value) if isinstance(value, int) else value


def _sum(left: Expression, right: Expression) -> Expression:
    """A sum whose plain number stands alone, at the end: no ``+ 1 - 1`` is ever printed."""
    left_rest, left_number = _split(left)
    right_rest, right_number = _split(right)
    number = left_number + right_number
    if left_rest is None or right_rest is None:
        rest = left_rest or right_rest
    else:
        rest = _Binary("+", left_rest, right_rest)
    if rest is None:
        return Constant(number)
    return _Binary("+", rest, Constant(number)) if number else rest


def _split(node: Expression) -> tuple[Expression | None, int]:
    """A sum's named terms, and its plain number."""
    if isinstance(node, Constant) and not node.c_name:
        return None, node.number
    if isinstance(node, _Binary) and node.sign == "+" and isinstance(node.right, Constant):
        rest, number = _split(node.right)
        return (node.left, number) if rest is None else (node, 0)
    return node, 0
