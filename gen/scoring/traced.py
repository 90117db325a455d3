"""What is asked of masks and scores by functions as FlexAttention takes them, instead of by text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..expression import Expression, Name, names_of, with_buffers
from ..formula.trace import Traced, trace_mask, trace_score
from .asked import Scoring


@dataclass(frozen=True)
class TracedScoring:
    """What functions ask, and the ``values`` of the arrays and numbers that they have captured, by name."""

    scoring: Scoring
    values: Mapping[str, Any]


def traced_scoring(
    *, score: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None, **named: Any
) -> TracedScoring:
    """Returns what ``score_mod(score, b, h, q_idx, kv_idx)`` and ``mask_mod(b, h, q_idx, kv_idx)`` ask beside
    the ``named`` fields of a `Scoring`.

    Arrays and numbers keep the names under which functions have captured them, as far as these are free.
    Raises ValueError for what no expression can say.
    """
    values: dict[str, Any] = {}
    buffers: dict[str, str] = {}
    scalars: dict[str, float] = {}
    texts = {}
    for field, function, trace in (("score", score, trace_score), ("mask", mask, trace_mask)):
        if function is None:
            continue
        traced = trace(function)
        found = {**traced.buffers, **traced.scalars}
        names = {name: _free_name(name, value, values) for name, value in found.items()}
        texts[field] = _renamed(traced, names).python()
        values |= {names[name]: value for name, value in found.items()}
        buffers |= {names[name]: dtype for name, dtype in traced.dtypes.items()}
        scalars |= {names[name]: value for name, value in traced.scalars.items()}
    scoring = Scoring(**texts, buffers=tuple(buffers.items()), scalars=tuple(scalars.items()), **named)
    return TracedScoring(scoring, values)


def _free_name(name: str, value: Any, values: Mapping[str, Any]) -> str:
    """The name, or what is free of it and a number; one value of both functions keeps one name."""
    number, free = 0, name
    while free in values and values[free] is not value:
        number += 1
        free = f"{name[:36]}_{number}"
    return free


def _renamed(traced: Traced, names: Mapping[str, str]) -> Expression:
    """The function's expression with other names of arrays and numbers."""
    expression = traced.expression
    numbers = {
        each.name: Name(names[each.name], each.kind) for each in names_of(expression) if each.name in names
    }
    return with_buffers(expression.with_names(numbers), names)
