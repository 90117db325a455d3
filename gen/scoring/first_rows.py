"""Which rows see a key: bounds of what rows see of the keys, solved for the row.

A bound of a row's keys rises with the row, so that the rows which see a key are neighbours, between the first
whose keys end behind it and the first whose keys begin behind it. Where a bound is a row's number but for
what all rows share, as those of windows and of causal masks are, both follow by a subtraction; where it is a
multiple, as those of chunks are, by a division of the key. Where arrays tell of each row at which keys its
document begins and ends, those of the row at the key's own place say both, if documents lie one behind the
other as they ought to: two looks at bounds tell. Then nobody needs to search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..expression import Apply, Constant, Expression, Kind, Load, Name, apply, maximum, minimum
from ..formula.affine import affine_in
from .scores import BATCH, DIAGONAL, KEY, NUM_KEYS, NUM_ROWS, ROW, Bound, Scores

#: A flag, empty where a bound always holds, and the first row whose bound is behind `KEY`, in C++.
FirstRow = tuple[str, str]
#: The row whose place is the key's, or that is nearest to it.
OWN_ROW = Name("own", nonnegative=True)
#: What tells of each row where its document begins, and where it ends: the one's first row behind a key is
#: where the other says.
_DOCUMENTS = {"document_begin": "document_end", "document_end": "document_begin"}


class FirstRows(NamedTuple):
    """The first rows whose bounds are behind a key, of each of its ``limits`` one. ``are_certain``: whatever
    arrays hold; else they are made of `OWN_ROW`, too, and the bounds themselves have to bear them out."""

    limits: list[FirstRow]
    are_certain: bool


def first_rows_behind(scores: Scores, bounds: str) -> FirstRows | None:
    """Returns the first rows whose ``begins``, or whose ``ends``, are behind a key that there is. None where
    some bound is not solved, as those that arrays tell of each row."""
    found: Sequence[Bound] = scores.begins if bounds == "begins" else scores.ends[1:]
    by_documents = [_first_row_of_documents(each.key) for each in found]
    solved = [told or first_row_behind(each.key) for each, told in zip(found, by_documents, strict=True)]
    places = scores.places()
    limits = [(each.flag, row.c(places)) for each, row in zip(found, solved, strict=True) if row is not None]
    return FirstRows(limits, not any(by_documents)) if len(limits) == len(found) else None


def _first_row_of_documents(bound: Expression) -> Expression | None:
    """The same of where documents begin, or end, that lie one behind the other; None of other bounds."""
    if not isinstance(bound, Load) or bound.buffer not in _DOCUMENTS:
        return None
    return Load(_DOCUMENTS[bound.buffer], (BATCH, OWN_ROW), Kind.INT) - DIAGONAL


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
