"""Random expressions over what scores and masks are made of, and values to compute them for."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from flashgen.gen.expression import Constant, Expression, Kind, Load, Name, apply

INDICES = ("b", "h", "q", "k", "seqlen_q", "seqlen_k")
MASK_NAMES = dict.fromkeys(INDICES, Kind.INT)
SCORE_NAMES = MASK_NAMES | {"score": Kind.FLOAT}
SCALARS = {"n": 3, "slope": 0.5}
BUFFERS = {"doc": "i32", "tree": "u8", "bias": "f32"}
SIZES = {"b": 2, "h": 3, "seqlen_q": 5, "seqlen_k": 7}

_NAMES: dict[Kind, list[Expression]] = {
    Kind.INT: [*(Name(each, nonnegative=True) for each in INDICES), Name("n")],
    Kind.FLOAT: [Name("score", Kind.FLOAT), Name("slope", Kind.FLOAT)],
}
#: The functions of one kind's operands and result, which are finite for what is finite.
_SMOOTH = ("tanh", "sin", "cos", "sigmoid")


def values(rng: np.random.Generator, count: int) -> dict[str, Any]:
    """Returns arrays of ``count`` values for all names, and the buffers."""
    found: dict[str, Any] = {name: np.full(count, size) for name, size in SIZES.items()}
    for name, end in (
        ("b", SIZES["b"]),
        ("h", SIZES["h"]),
        ("q", SIZES["seqlen_q"]),
        ("k", SIZES["seqlen_k"]),
    ):
        found[name] = rng.integers(0, end, count)
    found["score"], found["slope"] = rng.normal(size=count) * 3, rng.normal(size=count)
    found["n"] = rng.integers(-4, 5, count)
    found["doc"] = rng.integers(0, 4, (SIZES["b"], SIZES["seqlen_k"])).astype(np.int32)
    found["tree"] = rng.integers(0, 2, (SIZES["seqlen_q"], SIZES["seqlen_k"])).astype(np.uint8)
    found["bias"] = rng.normal(size=(SIZES["h"], 9)).astype(np.float32)
    return found


def drawn(rng: random.Random, kind: Kind, depth: int, *, smooth: bool = False) -> Expression:
    """Returns a random expression of a kind; a ``smooth`` float has no step in a float that it is made of."""
    if depth == 0:
        return _leaf(rng, kind)
    draw = {Kind.BOOL: _truth, Kind.INT: _integer, Kind.FLOAT: _smooth if smooth else _float}[kind]
    return draw(rng, depth - 1)


def _leaf(rng: random.Random, kind: Kind) -> Expression:
    if kind is Kind.BOOL:
        sign = rng.choice(["lt", "le", "gt", "ge", "eq", "ne"])
        return apply(sign, rng.choice(_NAMES[Kind.INT]), rng.choice(_NAMES[Kind.INT]))
    if kind is Kind.INT:
        loads = [_load(rng, "doc", 0), _load(rng, "tree", 0)]
        return rng.choice([*_NAMES[kind], *loads, Constant(rng.randint(-5, 9))])
    return rng.choice([*_NAMES[kind], _load(rng, "bias", 0), Constant(rng.randint(-24, 24) / 8)])


def _load(rng: random.Random, buffer: str, depth: int) -> Expression:
    first, last = {"doc": ("b", "k"), "tree": ("q", "k"), "bias": ("h", "k")}[buffer]
    index = drawn(rng, Kind.INT, depth) if depth else Name(last, nonnegative=True)
    return Load(buffer, (Name(first, nonnegative=True), index), Kind.FLOAT if buffer == "bias" else Kind.INT)


def _truth(rng: random.Random, depth: int) -> Expression:
    def some(kind: Kind) -> Expression:
        return drawn(rng, kind, depth)

    match rng.randrange(7):
        case 0:
            return apply("not", some(Kind.BOOL))
        case 1 | 2:
            return apply(rng.choice(["and", "or", "xor", "eq"]), some(Kind.BOOL), some(Kind.BOOL))
        case 3:
            return apply(rng.choice(["lt", "ge"]), some(Kind.FLOAT), some(rng.choice([Kind.FLOAT, Kind.INT])))
        case 4:
            return apply("where", some(Kind.BOOL), some(Kind.BOOL), some(Kind.BOOL))
    return apply(rng.choice(["lt", "le", "gt", "ge", "eq", "ne"]), some(Kind.INT), some(Kind.INT))


def _integer(rng: random.Random, depth: int) -> Expression:
    def some(kind: Kind = Kind.INT) -> Expression:
        return drawn(rng, kind, depth)

    number = rng.choice([*range(-5, 0), *range(1, 9)])
    match rng.randrange(11):
        case 0:
            return apply(rng.choice(["neg", "abs", "bit_not"]), some())
        case 1:
            return apply(rng.choice(["bit_and", "bit_or", "bit_xor"]), some(), some())
        case 2:
            return apply(rng.choice(["shift_left", "shift_right"]), some(), rng.randint(0, 3))
        case 3:
            return apply("where", some(Kind.BOOL), some(), some())
        case 4:
            return apply("int", apply("clamp", some(Kind.FLOAT), -90.0, 90.0))
        case 5:
            return apply(rng.choice(["floor_div", "floor_mod"]), some(), number)
        case 6:
            return apply(rng.choice(["floor_div", "floor_mod"]), some(), apply("max", some(), 1))
        case 7:
            return some() * number
        case 8:
            return _load(rng, rng.choice(["doc", "tree"]), depth)
        case 9:
            return apply("int", some(Kind.BOOL)) + some()
    return apply(rng.choice(["add", "sub", "min", "max"]), some(), some())


def _float(rng: random.Random, depth: int) -> Expression:
    def some(kind: Kind = Kind.FLOAT) -> Expression:
        return drawn(rng, kind, depth)

    match rng.randrange(9):
        case 0:
            return apply("floor", some())
        case 1:
            return apply("where", some(Kind.BOOL), some(), some())
        case 2:
            return apply(rng.choice(["min", "max"]), some(), some(rng.choice([Kind.FLOAT, Kind.INT])))
        case 3:
            return some() + rng.choice([some(Kind.INT), some(Kind.BOOL), Constant(float("-inf"))])
        case 4:
            return _load(rng, "bias", depth)
        case 5:
            return apply(rng.choice(["floor_div", "floor_mod"]), some(), rng.choice([0.5, 2.0, -1.5]))
        case 6:
            return apply("div", some(Kind.INT), apply("max", some(Kind.INT), 1))
    return _smooth(rng, depth)


def _smooth(rng: random.Random, depth: int) -> Expression:
    def some() -> Expression:
        return drawn(rng, Kind.FLOAT, depth, smooth=True)

    match rng.randrange(9):
        case 0 | 1:
            return apply(rng.choice(_SMOOTH), some())
        case 2:
            return apply(rng.choice(["exp", "exp2"]), apply("tanh", some()))
        case 3:
            return apply(rng.choice(["log", "log2", "sqrt", "rsqrt"]), some() * some() * 0.5 + 1.25)
        case 4:
            return some() / (some() * 0.0625 * some() + 3.5)
        case 5:
            return apply("power", some(), rng.choice([2, 3])) if rng.random() < 0.5 else -some()
        case 6:
            return apply("pow", apply("exp", apply("sin", some())), apply("tanh", some()))
    return apply(rng.choice(["add", "sub", "mul"]), some(), some())
