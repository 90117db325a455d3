"""Which rows see a key: bounds of what rows see of the keys, solved for the row.

A bound of a row's keys rises with the row, so that the rows which see a key are neighbours, between the first
whose keys end behind it and the first whose keys begin behind it. Where a bound is a row's number but for
what all rows share, as those of windows and of causal masks are, both follow by a subtraction; where it is a
multiple, as those of chunks are, by a division of the key. Then nobody needs to search.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..expression import Apply, Constant, Expression, apply, maximum, minimum
from ..formula.affine import affine_in
from .scores import KEY, NUM_KEYS, NUM_ROWS, ROW, Bound, Scores

#: A flag, empty where a bound always holds, and the first row whose bound is behind `KEY`, in C++.
FirstRow = tuple[str, str]


def first_rows_behind(scores: Scores, bounds: str) -> list[FirstRow] | None:
    """Returns the first rows whose ``begins``, or whose ``ends``, are behind a key that there is: of each of
    these limits one. None where some is not solved, as those that arrays tell of each row."""
    found: Sequence[Bound] = scores.begins if bounds == "begins" else scores.ends[1:]
    solved = [(each.flag, first_row_behind(each.key)) for each in found]
    places = scores.places()
    told = [(flag, row.c(places)) for flag, row in solved if row is not None]
    return told if len(told) == len(solved) else None


def first_row_behind(bound: Expression) -> Expression | None:
    """Returns the first row whose bound is behind `KEY`, a key that there is, as an expression of that and of
    what all rows share; before the first row and behind the last one where all rows' are, or none's. None
    where the bound is not solved for `ROW`."""
    if bound == NUM_KEYS:
        return Constant(0)
    if bound == Constant(0):
        return NUM_ROWS
    if ROW.name not in bound.names():
        return apply("where", apply("lt", KEY, bound), Constant(0), NUM_ROWS)
    affine = affine_in(ROW, bound)
    if affine is not None:
        return KEY + 1 - affine.rest if affine.times == 1 else None
    if isinstance(bound, Apply) and bound.function == "mul":
        return _first_row_of_multiples(*bound.operands) or _first_row_of_multiples(*reversed(bound.operands))
    if not isinstance(bound, Apply) or bound.function not in ("where", "max", "min"):
        return None
    *condition, first, last = bound.operands
    row, other = first_row_behind(first), first_row_behind(last)
    if row is None or other is None:
        return None
    if bound.function == "where":
        return None if ROW.name in condition[0].names() else apply("where", condition[0], row, other)
    # The greater of two is behind a key as soon as either is.
    return minimum(row, other) if bound.function == "max" else maximum(row, other)


def _first_row_of_multiples(number: Expression, steps: Expression) -> Expression | None:
    """The same of a bound ``steps * number``, where the number is a row divided by as many steps, or so much
    more: it is behind the key once the number is greater than the key divided by them."""
    more: Expression = Constant(0)
    if isinstance(number, Apply) and number.function == "add":
        number, more = number.operands if ROW.name in number.operands[0].names() else number.operands[::-1]
    if not isinstance(number, Apply) or number.function != "floor_div" or number.operands[1] != steps:
        return None
    affine = affine_in(ROW, number.operands[0])
    if affine is None or affine.times != 1 or ROW.name in steps.names() | more.names() or steps.range[0] < 0:
        return None
    return steps * (apply("floor_div", KEY, steps) + 1 - more) - affine.rest
