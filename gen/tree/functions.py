"""The functions that expressions are made of: how each is written in C++ and Python, computed and paid for.

A function stands here once, in `FUNCTIONS`; what all others know of it they read from its row. Those of
`gen.expression.COMPOSED` are put together from these and need no row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any


class Kind(IntEnum):
    """What an expression computes; an operand of a lesser kind can become one of a greater."""

    BOOL = 0
    INT = 1
    FLOAT = 2

    @property
    def c_type(self) -> str:
        """The type of such a value in C++."""
        return self.name.lower()

    @property
    def with_article(self) -> str:
        """What such a value is called in a sentence: ``an int``."""
        return f"an {self}" if self is Kind.INT else f"a {self}"

    def __str__(self) -> str:
        return self.name.lower()


class Unit(Enum):
    """What of a multiprocessor an instruction occupies."""

    ALU = "alu"
    FMA = "fma"
    SPECIAL = "special"
    LOAD = "load"


class Takes(Enum):
    """Of which kinds a function's operands must be, and what comes of them."""

    #: Integers or floats, which come as the greater of their kinds.
    NUMBERS = "numbers"
    #: Integers alone.
    INTEGERS = "integers"
    #: Floats alone: others become floats.
    FLOATS = "floats"
    #: Numbers of any kind, or truths: the result is a truth.
    COMPARED = "compared"
    #: Truths alone.
    TRUTHS = "truths"
    #: A truth, and two of any kind.
    CHOICE = "choice"
    #: Anything, which comes as an integer or a float.
    TO_INT = "to int"
    TO_FLOAT = "to float"


#: How tightly what an expression prints as is bound: the looser needs parentheses inside the tighter.
LOOSEST, LOGIC, NEGATION, COMPARISON, SUM, PRODUCT, UNARY, ATOM = range(8)


@dataclass(frozen=True)
class Text:
    """How a call is written: ``pattern`` with its operands in braces, how tightly that binds, and how
    tightly each operand must at least."""

    pattern: str
    level: int = ATOM
    operands: tuple[int, ...] = (LOOSEST, LOOSEST, LOOSEST)


@dataclass(frozen=True)
class Function:
    """A row of the table.

    ``c_float`` is the text for floats where it is another than for integers. ``costs`` are instructions by
    unit, ``fast_costs`` those of the approximate form that 16-bit kernels take (empty: the same); numbers
    for integers are ``costs``, and for floats ``float_costs`` where they are others.
    """

    name: str
    arity: int
    takes: Takes
    c: Text
    python: Text
    compute: Callable[..., Any]
    c_float: Text | None = None
    costs: Mapping[Unit, int] = field(default_factory=dict)
    float_costs: Mapping[Unit, int] | None = None
    fast_costs: Mapping[Unit, int] | None = None

    @property
    def is_call(self) -> bool:
        """Whether it is written as the call of a function, which can go by another name in C++."""
        return self.python.level == ATOM and self.name != "where"

    def c_text(self, kind: Kind) -> Text:
        """Returns the text in C++ for operands of ``kind``."""
        return self.c_float if kind is Kind.FLOAT and self.c_float else self.c


def _numpy(name: str) -> Callable[..., Any]:
    def compute(*operands: Any) -> Any:
        import numpy as np  # where arrays are: a problem alone needs none

        return getattr(np, name)(*operands)

    return compute


def _extreme(name: str) -> Callable[..., Any]:
    def compute(left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            return min(left, right) if name == "fmin" else max(left, right)
        # A kernel's fminf and fmaxf pass over what is no number.
        return _numpy(name)(left, right)

    return compute


def _to_int(value: Any) -> Any:
    import numpy as np

    return np.trunc(np.asarray(value, np.float64)).astype(np.int64)[()]


def _to_float(value: Any) -> Any:
    import numpy as np

    return np.asarray(value, np.float64)[()]


def _rsqrt(value: Any) -> Any:
    return 1.0 / _numpy("sqrt")(value)


def _sigmoid(value: Any) -> Any:
    return 1.0 / (1.0 + _numpy("exp")(-value))


def _divide(left: Any, right: Any) -> Any:
    return _numpy("true_divide")(left, right)


def _infix(
    name: str,
    sign: str,
    level: int,
    compute: Callable[..., Any],
    takes: Takes = Takes.NUMBERS,
    *,
    python: str = "",
    operands: tuple[int, int] | None = None,
    costs: Mapping[Unit, int] | None = None,
    float_costs: Mapping[Unit, int] | None = None,
) -> Function:
    # What stands behind a sign of its own level is grouped: numbers are computed in the order written.
    levels = operands or (level, level + 1)
    return Function(
        name,
        2,
        takes,
        c=Text(f"{{0}} {sign} {{1}}", level, levels),
        python=Text(f"{{0}} {python or sign} {{1}}", level, levels),
        compute=compute,
        costs=costs or {Unit.ALU: 1},
        float_costs=float_costs,
    )


def _comparison(name: str, sign: str, compute: Callable[..., Any]) -> Function:
    operands = (COMPARISON + 1, COMPARISON + 1)
    return _infix(name, sign, COMPARISON, compute, Takes.COMPARED, operands=operands)


def _bits(name: str, sign: str, compute: Callable[..., Any]) -> Function:
    # C++ and Python bind these differently: inside others they are always in parentheses.
    return _infix(name, sign, LOOSEST, compute, Takes.INTEGERS, operands=(UNARY, UNARY))


def _call(
    name: str,
    c: str,
    compute: Callable[..., Any] | None = None,
    *,
    arity: int = 1,
    takes: Takes = Takes.FLOATS,
    c_float: str = "",
    costs: Mapping[Unit, int],
    **more: Any,
) -> Function:
    arguments = ", ".join(f"{{{i}}}" for i in range(arity))
    return Function(
        name,
        arity,
        takes,
        c=Text(f"{c}({arguments})"),
        c_float=Text(f"{c_float}({arguments})") if c_float else None,
        python=Text(f"{name}({arguments})"),
        compute=compute or _numpy(name),
        costs=costs,
        **more,
    )


_ALU, _FMA, _SPECIAL = {Unit.ALU: 1}, {Unit.FMA: 1}, {Unit.SPECIAL: 1}
#: Integers are divided by multiplying with what the compiler or a few instructions make of the divisor.
_DIVISION = {Unit.ALU: 14, Unit.SPECIAL: 2}

_ROWS = (
    _infix("add", "+", SUM, operator.add, float_costs=_FMA),
    _infix("sub", "-", SUM, operator.sub, float_costs=_FMA),
    _infix("mul", "*", PRODUCT, operator.mul, costs=_FMA),
    _infix("div", "/", PRODUCT, _divide, Takes.FLOATS, costs={Unit.SPECIAL: 1, Unit.FMA: 6, Unit.ALU: 2}),
    _infix("floor_div", "/", PRODUCT, operator.floordiv, Takes.INTEGERS, python="//", costs=_DIVISION),
    _infix("floor_mod", "%", PRODUCT, operator.mod, Takes.INTEGERS, costs=_DIVISION | {Unit.ALU: 16}),
    Function(
        *("neg", 1, Takes.NUMBERS),
        c=Text("-{0}", UNARY, (ATOM,)),
        python=Text("-{0}", UNARY, (ATOM,)),
        compute=operator.neg,
        costs=_ALU,
    ),
    _comparison("lt", "<", operator.lt),
    _comparison("le", "<=", operator.le),
    _comparison("gt", ">", operator.gt),
    _comparison("ge", ">=", operator.ge),
    _comparison("eq", "==", operator.eq),
    _comparison("ne", "!=", operator.ne),
    _infix(
        *("and", "&&", LOGIC, _numpy("logical_and"), Takes.TRUTHS),
        python="and",
        operands=(NEGATION, NEGATION),
    ),
    _infix(
        *("or", "||", LOGIC, _numpy("logical_or"), Takes.TRUTHS),
        python="or",
        operands=(NEGATION, NEGATION),
    ),
    Function(
        *("not", 1, Takes.TRUTHS),
        c=Text("!{0}", UNARY, (ATOM,)),
        python=Text("not {0}", NEGATION, (COMPARISON,)),
        compute=_numpy("logical_not"),
        costs=_ALU,
    ),
    _bits("bit_and", "&", operator.and_),
    _bits("bit_or", "|", operator.or_),
    _bits("bit_xor", "^", operator.xor),
    _bits("shift_left", "<<", operator.lshift),
    _bits("shift_right", ">>", operator.rshift),
    Function(
        *("bit_not", 1, Takes.INTEGERS),
        c=Text("~{0}", UNARY, (ATOM,)),
        python=Text("~{0}", UNARY, (ATOM,)),
        compute=operator.invert,
        costs=_ALU,
    ),
    Function(
        *("where", 3, Takes.CHOICE),
        c=Text("({0} ? {1} : {2})", ATOM, (LOGIC, LOGIC, LOGIC)),
        python=Text("where({0}, {1}, {2})"),
        compute=lambda *operands: _numpy("where")(*operands)[()],
        costs=_ALU,
    ),
    _call("min", "min", _extreme("fmin"), arity=2, takes=Takes.NUMBERS, c_float="fminf", costs=_ALU),
    _call("max", "max", _extreme("fmax"), arity=2, takes=Takes.NUMBERS, c_float="fmaxf", costs=_ALU),
    _call("abs", "abs", operator.abs, takes=Takes.NUMBERS, c_float="fabsf", costs=_ALU, float_costs={}),
    _call("exp", "expf", costs={Unit.SPECIAL: 1, Unit.FMA: 5, Unit.ALU: 2}, fast_costs=_SPECIAL | _FMA),
    _call("exp2", "exp2f", costs={Unit.SPECIAL: 1, Unit.FMA: 2, Unit.ALU: 1}, fast_costs=_SPECIAL),
    _call("log", "logf", costs={Unit.FMA: 12, Unit.ALU: 8}, fast_costs=_SPECIAL | _FMA),
    _call("log2", "log2f", costs={Unit.SPECIAL: 1, Unit.FMA: 2, Unit.ALU: 2}, fast_costs=_SPECIAL),
    _call("sqrt", "sqrtf", costs={Unit.SPECIAL: 1, Unit.FMA: 5, Unit.ALU: 2}, fast_costs=_SPECIAL | _FMA),
    _call("rsqrt", "rsqrtf", _rsqrt, costs={Unit.SPECIAL: 1, Unit.FMA: 1, Unit.ALU: 1}),
    _call("tanh", "tanhf", costs={Unit.SPECIAL: 2, Unit.FMA: 9, Unit.ALU: 5}, fast_costs=_SPECIAL),
    Function(
        *("sigmoid", 1, Takes.FLOATS),
        c=Text("1.0f / (1.0f + expf(-{0}))", PRODUCT, (ATOM,)),
        python=Text("sigmoid({0})"),
        compute=_sigmoid,
        costs={Unit.SPECIAL: 2, Unit.FMA: 12, Unit.ALU: 5},
        fast_costs={Unit.SPECIAL: 2, Unit.FMA: 2},
    ),
    _call("sin", "sinf", costs={Unit.FMA: 12, Unit.ALU: 12}, fast_costs=_SPECIAL | _FMA),
    _call("cos", "cosf", costs={Unit.FMA: 12, Unit.ALU: 12}, fast_costs=_SPECIAL | _FMA),
    _call("pow", "powf", _numpy("power"), arity=2, costs={Unit.SPECIAL: 2, Unit.FMA: 28, Unit.ALU: 20}),
    _call("floor", "floorf", costs=_SPECIAL),
    _call("int", "int", _to_int, takes=Takes.TO_INT, costs=_SPECIAL),
    _call("float", "float", _to_float, takes=Takes.TO_FLOAT, costs=_SPECIAL),
)

#: Every function by its name.
FUNCTIONS: Mapping[str, Function] = {row.name: row for row in _ROWS}
