"""Parts of expressions that are the same for all keys of a row apart from those that vary from key to key.

A thread's columns are known when a kernel is compiled, all but where the tile begins: what is computed of the
key is taken apart into that and the column, so that integers are turned into floats once a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import reduce

from ..expression import Apply, Constant, Expression, Kind, Load, Name, apply, distinct, folded
from ..formula.affine import affine_in
from ..scoring.scores import KEY


def local(name: str, kind: Kind = Kind.INT, *, nonnegative: bool = False) -> Name:
    """Returns the name of a kernel's own variable, which no scalar of a problem can have: `Scores.statements`
    prints it without the sign before it."""
    return Name(f"_{name}", kind, nonnegative)


#: A score as the tensor cores leave it, and what is multiplied with it to be the scaled one.
RAW, SCORE_SCALE = local("raw", Kind.FLOAT), local("score_scale", Kind.FLOAT)
#: A thread's first key of a tile, and how far behind it another is.
FIRST_KEY, COLUMN = local("first_key", nonnegative=True), local("column", nonnegative=True)
#: Numbers that expressions name and that are positive.
POSITIVE = frozenset({"softcap", SCORE_SCALE.name})


def varying_parts(root: Expression) -> frozenset[Expression]:
    """Returns the parts of an expression that are others for each key of a row."""
    found: set[Expression] = set()
    for node in distinct(root):
        if node in (RAW, KEY) or any(each in found for each in node.operands):
            found.add(node)
    return frozenset(found)


def gathered(root: Expression) -> Expression:
    """Returns an expression whose products have what is the same for all keys of a row in one last factor."""
    varying = varying_parts(root)
    return folded(root, lambda node, operands: _gathered(node, operands, varying))


def product(factors: Iterable[Expression]) -> Expression:
    """Returns the product of some factors, one of none."""
    return reduce(lambda left, right: apply("mul", left, right), factors, Constant(1.0))


def is_positive(node: Expression) -> bool:
    """Returns whether a number is known to be positive."""
    if isinstance(node, Constant):
        return node.number > 0
    if isinstance(node, Name):
        return node.name in POSITIVE
    return (
        isinstance(node, Apply)
        and node.function in ("mul", "div")
        and all(is_positive(each) for each in node.operands)
    )


def _gathered(node: Expression, operands: list[Expression], varying: Collection[Expression]) -> Expression:
    """A node of operands that are gathered already."""
    if node not in varying or not isinstance(node, Apply | Load):
        return node
    if isinstance(node, Apply) and node.kind is Kind.FLOAT:
        if node.function in ("mul", "div"):
            return _regrouped(node, operands)
        if node.function == "float":
            return _as_float(operands[0])
    return node.with_operands(operands)


def _regrouped(node: Apply, operands: list[Expression]) -> Expression:
    """A product whose factors are in two groups, those that vary from key to key first."""
    left, right = operands
    if node.function == "div":
        if _varies(right):
            return node.with_operands(operands)
        right = apply("div", 1.0, right)
    factors = [*_factors(left), *_factors(right)]
    varying = [each for each in factors if _varies(each)]
    same = [each for each in factors if not _varies(each)]
    return apply("mul", product(varying), product(same)) if same else product(varying)


def _factors(node: Expression) -> list[Expression]:
    if isinstance(node, Apply) and node.function == "mul":
        return [*_factors(node.operands[0]), *_factors(node.operands[1])]
    return [node]


def _varies(node: Expression) -> bool:
    """Whether a gathered part is another for each key of a row."""
    return not node.names().isdisjoint({RAW.name, KEY.name, COLUMN.name})


def _as_float(node: Expression) -> Expression:
    """An integer as a float: a sum with the key as one of floats, of the tile's first key and the column.

    Exact near the diagonal, where the first sum is small, and as exact as floats are elsewhere.
    """
    if isinstance(node, Apply) and node.function == "abs":
        return apply("abs", _as_float(node.operands[0]))
    found = affine_in(KEY, node)
    if found is None or found.times == 0:
        return apply("float", node)
    sign = "add" if found.times > 0 else "sub"
    column = apply("float", apply("mul", abs(found.times), COLUMN))
    return apply(sign, apply("float", found.at(FIRST_KEY)), column)
