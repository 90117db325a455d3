"""What rounding does to a changed score: the error of each, as it comes through the expression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gen.expression import Apply, Constant, Expression, Kind, Name, folded
from ...gen.scoring.scores import SCORE

#: A float32 operation rounds by this much of its result at most.
UNIT = 2.0**-24
#: Functions that choose among their operands, or turn their sign, round nothing.
_EXACT = frozenset({"min", "max", "where", "neg", "abs"})


@dataclass(frozen=True)
class Rounded:
    """A value, by how much errors of the score may have moved it, and by how much its own operations.

    Of truths an error of 1 says that it may be the other one.
    """

    value: Any
    inherited: Any = 0.0
    own: Any = 0.0


def rounded_change(
    change: Expression,
    values: Mapping[str, Any],
    score_error: Any,
    *,
    unit: float = UNIT,
    tanh_error: float = 0.0,
) -> Rounded:
    """Returns a change of scores in float64 and what it may be off by where scores are by ``score_error``.

    ``values`` are the score and all else that the change reads. Each operation rounds by ``unit``,
    hyperbolic tangents by ``tanh_error`` of themselves. Errors are followed by moving one operand at a time.
    """

    def visit(node: Expression, operands: list[Rounded]) -> Rounded:
        with np.errstate(all="ignore"):
            return _rounded(node, operands, values, score_error, unit, tanh_error)

    return folded(change, visit)


def _rounded(
    node: Expression,
    operands: Sequence[Rounded],
    values: Mapping[str, Any],
    score_error: Any,
    unit: float,
    tanh_error: float,
) -> Rounded:
    numbers = [each.value for each in operands]
    value = node._compute(numbers, values)
    if isinstance(node, Name):
        return Rounded(value, score_error if node.name == SCORE.name else 0.0)
    inherited, own = 0.0, 0.0
    for i, each in enumerate(operands):
        inherited = inherited + _moved(node, numbers, i, each.inherited, value, values)
        own = own + _moved(node, numbers, i, each.own, value, values)
    if node.kind is Kind.FLOAT and isinstance(node, Apply | Constant):
        label = node.function if isinstance(node, Apply) else ""
        share = 0.0 if label in _EXACT else unit
        own = own + np.abs(np.nan_to_num(value)) * (share + (tanh_error if label == "tanh" else 0.0))
    if node.kind is Kind.BOOL:
        inherited, own = np.minimum(inherited, 1.0), np.minimum(own, 1.0)
    return Rounded(value, inherited, own)


def _moved(
    node: Expression, numbers: list[Any], which: int, error: Any, value: Any, values: Mapping[str, Any]
) -> Any:
    """By how much a node's value moves where one of its operands moves by ``error`` to either side."""
    if not np.any(error):
        return 0.0
    operand = node.operands[which]
    if operand.kind is Kind.BOOL:
        sides = [np.logical_xor(numbers[which], np.asarray(error) > 0)]
    elif operand.kind is Kind.INT:
        steps = np.ceil(np.minimum(error, 2**31)).astype(np.int64)
        sides = [numbers[which] + steps, numbers[which] - steps]
    else:
        sides = [numbers[which] + error, numbers[which] - error]
    largest = 0.0
    for side in sides:
        other = node._compute([*numbers[:which], side, *numbers[which + 1 :]], values)
        apart = np.abs(np.subtract(other, value, dtype=np.float64))
        # Of what is infinite on both sides nothing can be told, and nothing moves.
        largest = np.maximum(largest, np.where(np.isnan(apart), 0.0, apart))
    return largest
