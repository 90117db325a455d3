"""What array libraries call the functions of expressions: ``torch.where``, ``numpy.exp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any

from ..expression import Constant, Expression, Kind, apply, maximum, minimum

#: A function of operands, and of those that are given by name.
Builder = Callable[..., Expression]
_ONE = Constant(1)


def _direct(function: str) -> Builder:
    def build(*operands: Expression) -> Expression:
        return apply(function, *operands)

    return build


def _truth(function: str) -> Builder:
    """A function of truths that takes numbers as true where they are not zero."""

    def build(*operands: Expression) -> Expression:
        return apply(function, *(apply("bool", each) for each in operands))

    return build


def _divided(left: Expression, right: Expression, *, rounding_mode: Any = None) -> Expression:
    quotient = apply("div", left, right)
    match rounding_mode:
        case None:
            return quotient
        case "floor":
            return apply("floor_div", left, right)
        case "trunc" if Kind.FLOAT in (left.kind, right.kind):
            return _truncated(quotient)
    raise ValueError(f"division is rounded by None or 'floor', not {rounding_mode!r}")


def _added(left: Expression, right: Expression, *, alpha: Expression = _ONE) -> Expression:
    return left + right * alpha


def _taken(left: Expression, right: Expression, *, alpha: Expression = _ONE) -> Expression:
    return left - right * alpha


def _clamped(
    x: Expression,
    min: Expression | None = None,
    max: Expression | None = None,
    *,
    a_min: Expression | None = None,
    a_max: Expression | None = None,
) -> Expression:
    low, high = min or a_min, max or a_max
    found = x if low is None else maximum(x, low)
    return found if high is None else minimum(found, high)


def _truncated(x: Expression) -> Expression:
    return (
        x if x.kind is not Kind.FLOAT else apply("where", apply("lt", x, 0.0), _ceiling(x), apply("floor", x))
    )


def _ceiling(x: Expression) -> Expression:
    return x if x.kind is not Kind.FLOAT else -apply("floor", -x)


def _floored(x: Expression) -> Expression:
    return x if x.kind is not Kind.FLOAT else apply("floor", x)


def _softplus(x: Expression) -> Expression:
    # exp overflows where the result is x itself.
    return maximum(x, 0.0) + apply("log", 1.0 + apply("exp", -abs(apply("float", x))))


def _sign(x: Expression) -> Expression:
    zero = Constant(0.0 if x.kind is Kind.FLOAT else 0)
    return apply("where", apply("gt", x, zero), 1, apply("where", apply("lt", x, zero), -1, 0)) + zero


def _fused(x: Expression, y: Expression, z: Expression) -> Expression:
    return x * y + z


_SAME = (
    *("where", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin", "cos", "sigmoid", "neg"),
    *("mul", "lt", "le", "gt", "ge", "eq", "ne", "min", "max"),
)
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "mul": ("multiply",),
    "floor_div": ("floor_divide", "floordiv"),
    "floor_mod": ("remainder", "mod"),
    "power": ("pow", "power", "float_power"),
    "neg": ("negative",),
    "abs": ("absolute", "fabs"),
    "lt": ("less",),
    "le": ("less_equal",),
    "gt": ("greater",),
    "ge": ("greater_equal",),
    "eq": ("equal",),
    "ne": ("not_equal",),
    "min": ("minimum", "fmin"),
    "max": ("maximum", "fmax"),
    "sigmoid": ("special_expit", "expit"),
    "bit_and": ("and", "bitwise_and"),
    "bit_or": ("or", "bitwise_or"),
    "bit_xor": ("xor", "bitwise_xor"),
    "bit_not": ("invert", "bitwise_not", "bitwise_invert"),
    "shift_left": ("lshift", "bitwise_left_shift", "left_shift"),
    "shift_right": ("rshift", "bitwise_right_shift", "right_shift"),
}
#: What builds an expression, by the function's name in the libraries.
COUNTERPARTS: Mapping[str, Builder] = {
    **{name: _direct(name) for name in _SAME},
    **{alias: _direct(name) for name, aliases in _ALIASES.items() for alias in aliases},
    **{f"logical_{name}": _truth(name) for name in ("and", "or", "xor", "not")},
    "add": _added,
    **dict.fromkeys(("sub", "subtract"), _taken),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _divided),
    **dict.fromkeys(("clamp", "clip"), _clamped),
    "clamp_min": maximum,
    "clamp_max": minimum,
    "floor": _floored,
    "ceil": _ceiling,
    **dict.fromkeys(("trunc", "fix"), _truncated),
    **dict.fromkeys(("positive", "pos", "clone", "detach", "contiguous", "asarray"), lambda x: x),
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "tan": lambda x: apply("sin", x) / apply("cos", x),
    "log10": lambda x: apply("log", x) * (1 / log(10)),
    **dict.fromkeys(("log1p", "special_log1p"), lambda x: apply("log", 1.0 + apply("float", x))),
    **dict.fromkeys(("expm1", "special_expm1"), lambda x: apply("exp", x) - 1.0),
    "special_exp2": _direct("exp2"),
    "relu": lambda x: maximum(x, 0),
    "silu": lambda x: x * apply("sigmoid", x),
    "softplus": _softplus,
    "sign": _sign,
    "addcmul": lambda x, y, z: _fused(y, z, x),
    "zeros_like": lambda x: Constant(0.0 if x.kind is Kind.FLOAT else 0),
    "ones_like": lambda x: Constant(1.0 if x.kind is Kind.FLOAT else 1),
    "full_like": lambda x, value: apply("float", value) if x.kind is Kind.FLOAT else value,
}
