"""Functions written for FlexAttention, traced: what comes of them, and what is said of others."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from math import exp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.expression import Kind
from flashgen.gen.formula.captured import TraceError
from flashgen.gen.formula.identifiers import is_identifier
from flashgen.gen.formula.intervals import split_mask
from flashgen.gen.formula.parse import parse
from flashgen.gen.formula.trace import Traced, trace_mask, trace_score

from ...support import flex_functions, formulas


def _like_torch(name: str) -> Callable[..., Any]:
    """A function that leaves its work to operands which offer that, as torch's do."""

    def function(*args: Any, **kwargs: Any) -> Any:
        for each in args:
            if hasattr(type(each), "__torch_function__"):
                return type(each).__torch_function__(function, (type(each),), args, kwargs or None)
        raise TypeError(f"{name} has no operand that it knows")

    function.__name__ = name
    return function


NAMES = (
    "where tanh exp exp2 log abs minimum maximum clamp sqrt rsqrt sigmoid floor logical_and logical_or "
    "logical_not floor_divide remainder div relu square pow zeros_like full_like erf stack any"
)
torch = SimpleNamespace(**{name: _like_torch(name) for name in NAMES.split()})
DOC = np.array([0, 0, 1, 1, 2])
BIAS = np.ones((4, 9), np.float32)
FLAGS = np.array([True, False, True])
CAP = np.array(30.0, np.float32)
SHIFT = np.array(3)
WIDTH = 5


def check(traced: Traced, function: Callable[..., Any], *, of_scores: bool) -> None:
    """What was traced computes what the function does, also as text that was read again."""
    places = flex_functions.places()
    arguments = (places.score, places.b, places.h, places.q, places.k)
    expected = function(*arguments[0 if of_scores else 1 :])
    values = vars(places) | traced.buffers | traced.scalars
    names, kind = (formulas.SCORE_NAMES, Kind.FLOAT) if of_scores else (formulas.MASK_NAMES, Kind.BOOL)
    text = traced.expression.python()
    again = parse(text, names=names, wanted=kind, buffers=traced.dtypes, scalars=traced.scalars)
    for each in (traced.expression, again):
        found = np.broadcast_to(each.value(values), places.score.shape)
        # Functions compute in the precision of their arrays, formulas in float64.
        np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", flex_functions.MASKS)
def test_well_known_masks(name: str) -> None:
    function = flex_functions.MASKS[name]
    traced = trace_mask(function)
    check(traced, function, of_scores=False)
    split, places = split_mask(traced.expression), flex_functions.places()
    values = vars(places) | traced.buffers | traced.scalars
    seen = np.ones(places.score.shape, bool) if split.rest is None else split.rest.value(values)
    for begin in split.begins:
        seen = seen & (places.k >= begin.value(values))
    for end in split.ends:
        seen = seen & (places.k < end.value(values))
    assert (
        np.broadcast_to(seen, places.score.shape) == function(places.b, places.h, places.q, places.k)
    ).all()


@pytest.mark.parametrize("name", flex_functions.SCORES)
def test_well_known_changes(name: str) -> None:
    function = flex_functions.SCORES[name]
    check(trace_score(function), function, of_scores=True)


class Layer:
    """An object that is called, with an array and a function of arrays among its attributes."""

    def __init__(self) -> None:
        self.bias, self.tables, self.parts = BIAS, {"slopes": BIAS[:, 0]}, [DOC, 2]

    def change(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + self.bias[h, q] * self.tables["slopes"][h] + self.parts[0][k] * self.parts[1]

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.change(score, b, h, q, k)


def with_default(score: Any, b: Any, h: Any, q: Any, k: Any, table: Any = BIAS, *, factor: Any = CAP) -> Any:
    return score + factor * table[h, q]


def of_table(table: Any, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + table[h][q]


def recursive(score: Any, b: Any, h: Any, q: Any, k: Any, times: int = 3) -> Any:
    return recursive(score + BIAS[h, q], b, h, q, k, times - 1) if times else score


@pytest.mark.parametrize(
    ("function", "text", "dtypes", "scalars"),
    [
        (lambda s, b, h, q, k: s + BIAS[h, k - q], "score + BIAS[h, k - q]", {"BIAS": "f32"}, {}),
        (lambda s, b, h, q, k: s + BIAS[h][k - q], "score + BIAS[h, k - q]", {"BIAS": "f32"}, {}),
        (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), "CAP * tanh(score / CAP)", {}, {"CAP": 30.0}),
        (lambda s, b, h, q, k: s + (k - q + SHIFT), "score + float(k - q + SHIFT)", {}, {"SHIFT": 3}),
        (lambda s, b, h, q, k: s * WIDTH, "score * 5.0", {}, {}),
        (lambda s, b, h, q, k: s + DOC[DOC[q]], "score + float(DOC[DOC[q]])", {"DOC": "i64"}, {}),
        (Layer(), "score + bias[h, q] * slopes[h] + float(parts_0[k] * 2)", None, {}),
        (Layer().change, "score + bias[h, q] * slopes[h] + float(parts_0[k] * 2)", None, {}),
        (with_default, "score + factor * table[h, q]", {"table": "f32"}, {"factor": 30.0}),
        (functools.partial(of_table, BIAS), "score + table[h, q]", {"table": "f32"}, {}),
        (recursive, "score + BIAS[h, q] + BIAS[h, q] + BIAS[h, q]", {"BIAS": "f32"}, {}),
        (
            lambda s, b, h, q, k: torch.where(FLAGS[q] | ~FLAGS[k], s, -float("inf")),
            "where(FLAGS[q] != 0 or not FLAGS[k] != 0, score, -inf)",
            {"FLAGS": "u8"},
            {},
        ),
        (
            lambda s, b, h, q, k: torch.clamp(s, min=-1) + s.clamp(0, 1).tanh() + abs(k - q).to(s.dtype),
            "max(score, -1.0) + tanh(min(max(score, 0.0), 1.0)) + float(abs(k - q))",
            {},
            {},
        ),
        (
            lambda s, b, h, q, k: torch.div(q, 4, rounding_mode="floor") * s.new_tensor(2) - 1 / s,
            "float(q // 4 * 2) - 1.0 / score",
            {},
            {},
        ),
        (lambda s, b, h, q, k: torch.relu(-s) ** 2, "max(-score, 0.0) * max(-score, 0.0)", {}, {}),
        (lambda s, b, h, q, k: s.float().half() + s.exp().log().sqrt(), None, {}, {}),
        (lambda s, b, h, q, k: s.to("cuda", non_blocking=True).to(np.float32), "score", {}, {}),
        (lambda s, b, h, q, k: torch.where(q >= k, s, torch.full_like(s, -9)), None, {}, {}),
        (lambda s, b, h, q, k: np.float32(2) * s + np.where(q > k, 1, 0), None, {}, {}),
        (
            lambda s, b, h, q, k: math.sqrt(4) * math.tanh(s) + exp(s),
            "2.0 * tanh(score) + exp(score)",
            {},
            {},
        ),
        (lambda s, b, h, q, k: 7, "7.0", {}, {}),
        (lambda *args: args[0] + 2**0.5, "score + 1.4142135623730951", {}, {}),
    ],
)
def test_changes(
    function: Callable[..., Any], text: str | None, dtypes: dict[str, str] | None, scalars: dict[str, float]
) -> None:
    traced = trace_score(function)
    assert traced.expression.kind is Kind.FLOAT and traced.scalars == scalars
    assert text is None or traced.expression.python() == text
    assert dtypes is None or traced.dtypes == dtypes
    assert traced.buffers.keys() == traced.dtypes.keys()
    names = formulas.SCORE_NAMES
    again = parse(
        traced.expression.python(), names=names, wanted=Kind.FLOAT, buffers=traced.dtypes, scalars=scalars
    )
    assert again.python() == traced.expression.python()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda b, h, q, k: (q >= k) & (DOC[q] == DOC[k]), "q >= k and DOC[q] == DOC[k]"),
        (lambda b, h, q, k: torch.logical_and(q >= k, k), "q >= k and k != 0"),
        (lambda b, h, q, k: (q >= k) ^ (k > 1), "(q >= k) != (k > 1)"),
        (lambda b, h, q, k: q & 1 == 0, "(q & 1) == 0"),
        (lambda b, h, q, k: ((q & 1) | (k >> 2)) << 1 == 2, "(((q & 1) | (k >> 2)) << 1) == 2"),
        (lambda b, h, q, k: 4 - q <= ~k, "4 - q <= ~k"),
        (lambda b, h, q, k: 9 // (q + 1) + 9 % (q + 1) > -k, "9 // (q + 1) + 9 % (q + 1) > -k"),
        (lambda b, h, q, k: FLAGS[q], "FLAGS[q] != 0"),
        (lambda b, h, q, k: b.new_ones((), dtype=bool) & (q > k), "q > k"),
        (lambda b, h, q, k: np.logical_or(q > k, np.equal(h, 1)), "q > k or h == 1"),
        (lambda b, h, q, k: True, "True"),
        (lambda b, h, q, k: (q > k).to(int) == 1, "int(q > k) == 1"),
        (lambda b, h, q, k: functools.reduce(lambda x, y: x | y, [k == each for each in range(2)]), None),
    ],
)
def test_masks(function: Callable[..., Any], text: str | None) -> None:
    traced = trace_mask(function)
    assert text is None or traced.expression.python() == text


def refusals() -> dict[str, tuple[Callable[..., Any], str]]:
    doc, bias = DOC, BIAS
    return {
        "and": (lambda b, h, q, k: q >= k and k > 2, r"torch.where.*`&`, `\|` and `~`"),
        "chain": (lambda b, h, q, k: 0 <= q - k <= 3, r"\(a <= b\) & \(b <= c\)"),
        "if": (lambda b, h, q, k: k if q > 1 else q, r"torch.where\(c, x, y\) for `if`"),
        "min": (lambda b, h, q, k: min(q, k) > 1, "torch.minimum"),
        "range": (lambda b, h, q, k: sum(range(q)) > 1, "loop over ranges that do not depend"),
        "list": (lambda b, h, q, k: [1, 2, 3][q] > 1, "index arrays that the function has captured"),
        "int": (lambda b, h, q, k: int(q) > 1, r"x.int\(\)"),
        "float": (lambda b, h, q, k: float(q) > 1, "torch.exp"),
        "len": (lambda b, h, q, k: len(q) > 1, "no length"),
        "iter": (lambda b, h, q, k: list(q), "nothing in it"),
        "slice": (lambda b, h, q, k: doc[q:] == 1, "doc: a formula takes elements.*no slices"),
        "whole": (lambda b, h, q, k: doc == q, "doc of 1 axes is used whole"),
        "returned": (lambda b, h, q, k: doc, "returns no number or truth"),
        "few": (lambda b, h, q, k: bias[h] > q, "bias has 2 axes, but 1 indices"),
        "many": (lambda b, h, q, k: bias[h, q, k] > 1, "bias has 2 axes, but 3 indices"),
        "float index": (lambda b, h, q, k: doc[q * 0.5] > 1, "an index of doc is a float.*x.int"),
        "unknown": (lambda b, h, q, k: torch.erf(q) > 1, "a formula has no erf: it has arithmetic"),
        "any": (lambda b, h, q, k: torch.any(q > k), "a formula has no any"),
        "stack": (lambda b, h, q, k: torch.stack(q, k), "a formula has no stack"),
        "attribute": (lambda b, h, q, k: q.grad > 1, "has no .grad"),
        "in place": (lambda b, h, q, k: q.add_(1) > k, "in place.*add, not add_"),
        "out": (lambda b, h, q, k: np.add(q, 1, out=doc) > k, "add without out="),
        "reduced": (lambda b, h, q, k: np.add.reduce(q), "add.reduce"),
        "indexed": (lambda b, h, q, k: q[0] > 1, "q is a single number and has no indices"),
        "arity": (lambda b, h, q: q > 1, "a function of 4 arguments is traced, mask_mod"),
        "none": (lambda b, h, q, k: None, "returns no number or truth"),
        "never": (lambda b, h, q, k: q < q, "never true"),
        "mask of floats": (lambda b, h, q, k: q * 0.5, "a mask must be true or false, but this is a float"),
        "zero": (lambda b, h, q, k: q / 0 > 1, "division by zero: q / 0"),
        "truths": (lambda b, h, q, k: torch.where(q, 1, 0) > 0, "the condition of where takes truths"),
        "operands": (lambda b, h, q, k: torch.tanh(q, k, k) > 0, "tanh takes 1 operand"),
        "named": (lambda b, h, q, k: torch.tanh(q, base=k) > 0, "tanh cannot be traced with these operands"),
        "rounding": (
            lambda b, h, q, k: torch.div(q, k, rounding_mode="up") > 0,
            "rounded by None or 'floor'",
        ),
        "text": (lambda b, h, q, k: q == "a", "no str"),
        "long": (lambda b, h, q, k: functools.reduce(lambda x, _: x * x, range(30), q) > 1, "more than"),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_no_formula_can_do_is_said(name: str) -> None:
    function, message = refusals()[name]
    with pytest.raises(TraceError, match=message):
        trace_mask(function)


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint16", "complex64"])
def test_arrays_of_other_types_are_refused_where_they_are_used(dtype: str) -> None:
    array = np.ones(3, dtype)
    with pytest.raises((TraceError, ValueError), match=f"{dtype}|no type"):
        trace_mask(lambda b, h, q, k: array[q] > 1)
    assert trace_mask(lambda b, h, q, k: (q > k) | (array is None)).buffers == {}


def test_arrays_and_functions_of_modules_are_found() -> None:
    module = types.ModuleType("of_a_user")
    module.bias, module.math = BIAS, math  # pyright: ignore
    module.near = lambda q, k: module.bias[q, k] + module.math.exp(k)  # pyright: ignore
    traced = trace_score(lambda s, b, h, q, k: s + module.near(h, q) + module.bias[h, k])
    assert traced.expression.python() == "score + (bias[h, q] + exp(float(q))) + bias[h, k]"
    assert traced.buffers == {"bias": BIAS} and module.bias is BIAS


def test_what_a_function_raises_comes_through() -> None:
    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        raise LookupError("of its own")

    with pytest.raises(LookupError, match="of its own"):
        trace_mask(function)


def test_what_is_traced_is_left_as_it_was() -> None:
    layer = Layer()
    trace_score(layer)
    assert layer.bias is BIAS and layer.parts[0] is DOC and with_default.__defaults__ == (BIAS,)
    assert type(recursive.__globals__["BIAS"]) is np.ndarray


def test_names_of_buffers_are_unlike_and_a_kernel_can_have_them() -> None:
    q, args, table = np.ones(3, np.float32), np.ones(4, np.float32), np.ones((2, 2), np.float32)

    def other() -> Callable[..., Any]:
        table = np.zeros((2, 2), np.float32)
        return lambda k: table[k, k]

    inner = other()
    traced = trace_score(lambda s, b, h, i, j: s + q[i] + args[i] + table[i, j] + inner(j) + table[j, i])
    assert len(traced.buffers) == 4 and all(map(is_identifier, traced.buffers))
    assert not traced.buffers.keys() & formulas.SCORE_NAMES.keys()
    assert sum(array is table for array in traced.buffers.values()) == 1


def test_arrays_of_arrays_are_computed_at_once() -> None:
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    traced = trace_score(lambda s, b, h, q, k: s + table.shape[1] + len(table) + [row[q] for row in table][1])
    assert traced.expression.python() == "score + 3.0 + 2.0 + table[1, q]"
