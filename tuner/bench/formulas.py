"""A problem's masks and changes of scores as functions of torch's tensors, as its users would write them.

Numbers are constants there, which the compiler of FlexAttention makes the most of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...gen.expression import Apply, Constant, Expression, Kind, Load, Name, apply, folded
from ...gen.problem import Problem
from ...gen.scoring.scores import DIAGONAL, KEY, NUM_KEYS, NUM_ROWS, QUERY, ROW, SCORE
from ...gen.scoring.values import scalar_values

#: A formula of tensors by the names of expressions: score, b, h, q, k.
Formula = Callable[[Mapping[str, Any]], Any]
#: What Python's own operators compute of tensors as of numbers.
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floor_div": operator.floordiv,
    "floor_mod": operator.mod,
    "neg": operator.neg,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "bit_and": operator.and_,
    "bit_or": operator.or_,
    "bit_xor": operator.xor,
    "bit_not": operator.invert,
    "shift_left": operator.lshift,
    "shift_right": operator.rshift,
    "abs": operator.abs,
    "pow": operator.pow,
}


def visible(problem: Problem) -> Expression | None:
    """Returns the condition under which row q sees key k, in b, h, q and k; None where all rows see all."""
    scores = problem.scores
    held = [("ge", each) for each in scores.begins] + [("lt", each) for each in scores.ends[1:]]
    conditions = [
        apply(sign, KEY, each.key.with_names({ROW.name: QUERY}))
        for sign, each in held
        if not each.flag or each.flag in scores.flags
    ]
    if scores.predicate is not None:
        conditions.append(scores.predicate)
    found: Expression = Constant(True)
    for each in dict.fromkeys(_with_numbers(each, problem) for each in conditions):
        found = apply("and", found, each)
    return None if found == Constant(True) else found


def changed(problem: Problem) -> Expression | None:
    """Returns what becomes of a score, in score, b, h, q and k; None where it stays as it is."""
    change = problem.scores.change
    return None if change is None else _with_numbers(change, problem)


def added(problem: Problem) -> Expression | None:
    """Returns what is added to every score, in b, h, q and k; None where something else becomes of it."""
    change = changed(problem)
    return Constant(0.0) if change is None else _addend(change)


def _addend(node: Expression) -> Expression | None:
    if node == SCORE:
        return Constant(0.0)
    if not isinstance(node, Apply) or node.function not in ("add", "sub"):
        return None
    left, right = node.operands
    if SCORE.name not in right.names():
        inner = _addend(left)
        return None if inner is None else apply(node.function, inner, right)
    if node.function == "add" and SCORE.name not in left.names():
        inner = _addend(right)
        return None if inner is None else apply("add", left, inner)
    return None


def _with_numbers(expression: Expression, problem: Problem) -> Expression:
    """The expression with the problem's lengths and the numbers that it is tuned for."""
    numbers = {
        NUM_ROWS.name: problem.seqlen_q,
        NUM_KEYS.name: problem.seqlen_k,
        DIAGONAL.name: problem.seqlen_k - problem.seqlen_q,
        **scalar_values(problem.scoring),
    }
    known = {name: number for name, number in numbers.items() if name in expression.names()}
    return expression.with_names({name: Constant(number) for name, number in known.items()})


def formula(torch: Any, expression: Expression, arrays: Mapping[str, Any]) -> Formula:
    """Returns an expression as a function of tensors, made of calls that torch's compilers follow."""
    return folded(expression, lambda node, operands: _formula(torch, node, operands, arrays))


def _formula(torch: Any, node: Expression, operands: Sequence[Formula], arrays: Mapping[str, Any]) -> Formula:
    match node:
        case Constant(number=number):
            return lambda values: number
        case Name(name=name):
            return lambda values: values[name]
        case Load(buffer=buffer):
            array, indices = arrays[buffer], list(operands)
            return lambda values: array[tuple([index(values) for index in indices])]
        case Apply(function="where"):
            chosen, yes, no = operands
            return lambda values: torch.where(chosen(values), yes(values), no(values))
        case Apply(function="min" | "max" as name):
            left, right = operands
            first = operator.lt if name == "min" else operator.gt

            def extreme(values: Mapping[str, Any]) -> Any:
                a, b = left(values), right(values)
                return torch.where(first(a, b), a, b)

            return extreme
        case Apply(function="int" | "float", kind=kind):
            (operand,), dtype = operands, torch.int32 if kind is Kind.INT else torch.float32
            return lambda values: operand(values).to(dtype)
        case Apply(function=name):
            call = _OPERATORS[name] if name in _OPERATORS else getattr(torch, name)
            if len(operands) == 1:
                (operand,) = operands
                return lambda values: call(operand(values))
            left, right = operands
            return lambda values: call(left(values), right(values))
        case _:
            raise TypeError(f"{type(node).__name__} is no node of an expression")
