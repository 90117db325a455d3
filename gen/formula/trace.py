"""Functions of scores and masks, written for FlexAttention, as formulas: traced, not compiled.

``lambda score, b, h, q_idx, kv_idx: score + bias[h, kv_idx - q_idx]`` is called once, with what stands for a
score and for indices. Arrays that it has captured become buffers, arrays without axes scalars, and Python's
numbers parts of the formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..expression import LONGEST_TEXT, Constant, Expression, Kind, Name, apply, expression_of, loads_of
from .capture import Replaced
from .captured import Captured, TraceError
from .dtypes import BUFFER_DTYPES, dtype_name
from .proxy import Proxy

_SCORE = Name("score", Kind.FLOAT)
_INDICES = tuple(Name(each, nonnegative=True) for each in "bhqk")


@dataclass(frozen=True)
class Traced:
    """A traced function: its ``expression``, the arrays that this reads by their names in it, their
    ``dtypes`` as buffers have them, and the numbers that a kernel takes at run time."""

    expression: Expression
    buffers: Mapping[str, Any]
    dtypes: Mapping[str, str]
    scalars: Mapping[str, float]


def trace_score(function: Callable[..., Any]) -> Traced:
    """Returns what ``score_mod(score, b, h, q_idx, kv_idx)`` makes of a scaled score.

    Raises ValueError (`TraceError`) where it does what no formula can, and what the function itself raises.
    """
    found, captured = _called(function, (_SCORE, *_INDICES), "score_mod(score, b, h, q_idx, kv_idx)")
    return _traced(apply("float", found), captured)


def trace_mask(function: Callable[..., Any]) -> Traced:
    """Returns where ``mask_mod(b, h, q_idx, kv_idx)`` is true: where a row sees a key.

    Raises ValueError (`TraceError`) where it does what no formula can, or is never true, and what the
    function itself raises.
    """
    found, captured = _called(function, _INDICES, "mask_mod(b, h, q_idx, kv_idx)")
    if found.kind is Kind.FLOAT:
        raise TraceError("a mask must be true or false, but this is a float: compare it")
    found = apply("bool", found)
    if found == Constant(False):
        raise TraceError("this mask is never true: no row would see a key")
    return _traced(found, captured)


def _called(
    function: Callable[..., Any], names: tuple[Name, ...], signature: str
) -> tuple[Expression, Captured]:
    if not callable(function):
        raise TraceError(f"{signature} is a function, not {type(function).__name__}")
    captured = Captured()
    arguments = [Proxy(captured, each) for each in names]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TraceError(f"a function of {len(names)} arguments is traced, {signature}: {error}") from None
    except ValueError:
        pass  # one that has no signature to look at
    result = Replaced(captured).value(function, "captured")(*arguments)
    if isinstance(result, Proxy):
        return result.expression, captured
    try:
        return expression_of(result), captured
    except ValueError as error:
        raise TraceError(f"{signature} returns no number or truth: {error}") from None


def _traced(expression: Expression, captured: Captured) -> Traced:
    if expression.size > LONGEST_TEXT:
        raise TraceError(f"this comes to {expression.size} operations, more than {LONGEST_TEXT}")
    buffers = captured.buffers(frozenset(each.buffer for each in loads_of(expression)))
    dtypes = {name: BUFFER_DTYPES[dtype_name(array.dtype)] for name, array in buffers.items()}
    return Traced(expression, buffers, dtypes, captured.scalars(expression.names()))
