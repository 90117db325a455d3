"""Keys that rows see at every so many, told apart from the rest of a predicate.

Of neighbouring keys those that a row sees are bits of a pattern, the same for all rows but for where it
begins: one division for a row and a tile says that, where otherwise each pair takes one or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from ..expression import Apply, Constant, Expression, Kind, apply, conjuncts, loads_of
from ..formula.affine import affine_in
from ..scoring.scores import BATCH, HEAD, KEY, QUERY
from .change import TileExpression

_ZERO = Constant(0)


@dataclass(frozen=True)
class Period(TileExpression):
    """Keys as far beyond a multiple of ``steps`` as ``body`` says, the same for all keys of a row."""

    steps: Expression


def split_period(predicate: Expression | None) -> tuple[Period | None, Expression | None]:
    """Returns what a predicate says of every so many keys, and what else must hold; None: nothing."""
    conditions = [] if predicate is None else list(conjuncts(predicate))
    found = {condition: period for condition in conditions if (period := _period(condition)) is not None}
    if not found:
        return None, predicate
    first = next(iter(found))
    others = [each for each in conditions if each != first]
    both = reduce(lambda left, right: apply("and", left, right), others) if others else None
    return found[first], both


def _period(condition: Expression) -> Period | None:
    """The period that a condition is: ``place % steps == k % steps``, or ``(place - k) % steps == 0``."""
    if not isinstance(condition, Apply) or condition.function != "eq":
        return None
    for one, other in (condition.operands, reversed(condition.operands)):
        if not isinstance(one, Apply) or one.function != "floor_mod" or one.kind is not Kind.INT:
            continue
        number, steps = one.operands
        place = None
        if number == KEY and isinstance(other, Apply) and other.function == "floor_mod":
            place = other.operands[0] if other.operands[1] == steps else None
        elif other == _ZERO and number.range[0] < 0:  # so that the kernel has what rounds down
            affine = affine_in(KEY, number)
            if affine is not None and abs(affine.times) == 1:
                place = affine.rest if affine.times < 0 else -affine.rest
        if place is not None and _is_of_rows(place) and _is_for_all(steps):
            return Period(apply("floor_mod", place, steps), steps)
    return None


def _is_of_rows(place: Expression) -> bool:
    others = {BATCH.name, HEAD.name, KEY.name}
    return others.isdisjoint(place.names()) and not loads_of(place)


def _is_for_all(steps: Expression) -> bool:
    """Whether a number is the same for all pairs, and surely none to divide by in vain."""
    return steps.range[0] > 0 and QUERY.name not in steps.names() and _is_of_rows(steps)
