"""The nodes of small expressions: how they are made, simplified, computed and printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import isnan
from typing import Any

from .folding import SMALL, distinct, folded
from .functions import ATOM, FUNCTIONS, LOGIC, SUM, Function, Kind
from .kinds import check_truths, kinds_of
from .printing import Printed, call, number, operation, word
from .ranges import NOT_NEGATIVE, POSITIVE, UNKNOWN, Range, range_of
from .simplifying import check_constants, simplified

#: The most operations that are written out: what shares parts can come to any number of them.
LONGEST_TEXT = 100_000


class Expression:
    """The base of an expression's nodes; numbers stand for themselves wherever one is expected.

    ``kind`` is what it computes, ``operands`` what it is computed of, ``size`` how many nodes it has when
    written out.
    """

    kind: Kind
    operands: tuple[Expression, ...]
    size: int

    @property
    def range(self) -> Range:
        """The least and the greatest that an integer can be."""
        return UNKNOWN

    @property
    def known(self) -> int | float | None:
        """The number that a constant is."""
        return None

    @property
    def plain(self) -> int | float | None:
        """The number that a constant is which is known in C++ by its number."""
        return None

    def __add__(self, other: Expression | int | float) -> Expression:
        return apply("add", self, other)

    def __radd__(self, other: int | float) -> Expression:
        return apply("add", other, self)

    def __sub__(self, other: Expression | int | float) -> Expression:
        return apply("sub", self, other)

    def __rsub__(self, other: int | float) -> Expression:
        return apply("sub", other, self)

    def __mul__(self, other: Expression | int | float) -> Expression:
        return apply("mul", self, other)

    def __rmul__(self, other: int | float) -> Expression:
        return apply("mul", other, self)

    def __truediv__(self, other: Expression | int | float) -> Expression:
        return apply("div", self, other)

    def __rtruediv__(self, other: int | float) -> Expression:
        return apply("div", other, self)

    def __floordiv__(self, other: Expression | int) -> Expression:
        return apply("floor_div", self, other)

    def __mod__(self, other: Expression | int) -> Expression:
        return apply("floor_mod", self, other)

    def __neg__(self) -> Expression:
        return apply("neg", self)

    def __abs__(self) -> Expression:
        return apply("abs", self)

    def c(self, names: Mapping[str, str] | None = None) -> str:
        """Returns this expression in C++, each name, function and ``args`` as ``names`` has it, or as it is.

        A `Load` is a call of an accessor, ``doc_at(args, b, q)``. Division of what may be negative, or by
        what may be zero, calls ``floor_div`` and ``floor_mod``, which the kernel has. Raises ValueError for
        what is too long.
        """
        return _printed(self, names or {}, python=False)

    def python(self, names: Mapping[str, str] | None = None) -> str:
        """Returns this expression in Python, each name as ``names`` has it, or as it is. Raises ValueError
        for what is too long."""
        return _printed(self, names or {}, python=True)

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns what comes of the names' ``values``, numbers or numpy's arrays; floats are computed in
        float64. Raises KeyError, and ValueError for a buffer that has not an axis for each index."""
        numpy = sys.modules.get("numpy")  # without it there are no arrays: a problem alone needs none
        with numpy.errstate(all="ignore") if numpy else nullcontext():
            if self.size <= SMALL:
                return _evaluated(self, values)
            return folded(self, lambda node, operands: node._compute(operands, values))

    def with_names(self, replaced: Mapping[str, Expression]) -> Expression:
        """Returns this expression with other expressions in the place of names."""

        def rebuilt(node: Expression, operands: list[Expression]) -> Expression:
            return replaced.get(node.name, node) if isinstance(node, Name) else node.with_operands(operands)

        return folded(self, rebuilt)

    def names(self) -> frozenset[str]:
        """Returns the names that must be known for this expression to be computed, buffers not among them."""
        return frozenset(node.name for node in distinct(self) if isinstance(node, Name))

    def with_operands(self, operands: Sequence[Expression]) -> Expression:
        """Returns the same function of other operands; itself if they are its own."""
        return self

    def _compute(self, operands: Sequence[Any], values: Mapping[str, Any]) -> Any:
        """What comes of the operands' values."""
        raise NotImplementedError

    def _text(self, operands: Sequence[Printed], names: Mapping[str, str], *, python: bool) -> Printed:
        """What is printed, given what the operands are printed as."""
        raise NotImplementedError


class _Leaf(Expression):
    """A node without operands."""

    operands = ()
    size = 1


@dataclass(frozen=True)
class Name(_Leaf):
    """A value that is known by its name alone until the expression is computed.

    What is ``nonnegative`` is divided as C++ divides, by what is ``positive``.
    """

    name: str
    kind: Kind = Kind.INT
    nonnegative: bool = False
    positive: bool = False

    @property
    def range(self) -> Range:
        return POSITIVE if self.positive else NOT_NEGATIVE if self.nonnegative else UNKNOWN

    def _compute(self, operands: Sequence[Any], values: Mapping[str, Any]) -> Any:
        value = values[self.name]
        return _wide(value) if self.kind is Kind.FLOAT else value

    def _text(self, operands: Sequence[Printed], names: Mapping[str, str], *, python: bool) -> Printed:
        return word(names.get(self.name, self.name))


@dataclass(frozen=True)
class Constant(_Leaf):
    """A number or truth, which C++ may know by a name: ``kBr``."""

    number: int | float
    c_name: str = ""
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        number = self.number
        kind = Kind.BOOL if isinstance(number, bool) else Kind.INT if isinstance(number, int) else Kind.FLOAT
        object.__setattr__(self, "kind", kind)

    @property
    def range(self) -> Range:
        return UNKNOWN if self.kind is Kind.FLOAT else (int(self.number), int(self.number))

    @property
    def known(self) -> int | float | None:
        return self.number

    @property
    def plain(self) -> int | float | None:
        return None if self.c_name else self.number

    @property
    def is_plain(self) -> bool:
        """Whether it is known in C++ by its number."""
        return not self.c_name

    def _compute(self, operands: Sequence[Any], values: Mapping[str, Any]) -> Any:
        return self.number

    def _text(self, operands: Sequence[Printed], names: Mapping[str, str], *, python: bool) -> Printed:
        return (self.c_name, ATOM) if self.c_name and not python else number(self.number, python=python)


@dataclass(frozen=True, eq=False, repr=False)
class _Inner(Expression):
    """A node with operands. Its hash is computed once, from theirs: equal nodes need not be the same."""

    operands: tuple[Expression, ...]
    kind: Kind
    size: int = field(init=False)
    _hash: int = field(init=False)

    @property
    def label(self) -> str:
        """What it does with its operands."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 1 + sum(each.size for each in self.operands))
        object.__setattr__(self, "_hash", hash((type(self), self.label, self.kind, self.operands)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Inner) and hash(self) == hash(other) and _equal(self, other)
        )

    def __repr__(self) -> str:
        text = self.python() if self.size < LONGEST_TEXT else f"{self.size} operations"
        return f"<{self.kind}: {text}>"


@dataclass(frozen=True, eq=False, repr=False)
class Apply(_Inner):
    """A function of `FUNCTIONS` of operands that are of the right kinds: made by `apply`."""

    function: str
    _range: Range = field(init=False)

    @property
    def range(self) -> Range:
        return self._range

    @property
    def label(self) -> str:
        return self.function

    def __post_init__(self) -> None:
        super().__post_init__()
        found = UNKNOWN
        if self.kind is Kind.INT:
            is_truth = self.function == "int" and self.operands[0].kind is Kind.BOOL
            found = (
                (0, 1) if is_truth else range_of(self.function, tuple(each.range for each in self.operands))
            )
        object.__setattr__(self, "_range", found)

    def __reduce__(self) -> tuple[Any, ...]:
        return Apply, (self.operands, self.kind, self.function)  # hashes differ from process to process

    def with_operands(self, operands: Sequence[Expression]) -> Expression:
        same = all(one is other for one, other in zip(self.operands, operands, strict=True))
        return self if same else apply(self.function, *operands)

    def _compute(self, operands: Sequence[Any], values: Mapping[str, Any]) -> Any:
        return FUNCTIONS[self.function].compute(*operands)

    def _text(self, operands: Sequence[Printed], names: Mapping[str, str], *, python: bool) -> Printed:
        row = FUNCTIONS[self.function]
        if not python and (called := self._called(row, names)):
            return call(called, [text for text, _ in operands])
        how = row.python if python else row.c_text(self.operands[-1].kind)
        # Chains of one of these need no parentheses, and integers may be added in any order.
        chained = row.name in ("and", "or")
        levels = [
            LOGIC if chained and _is(each, row.name) else level
            for each, level in zip(self.operands, how.operands, strict=False)
        ]
        if row.name == "add" and self.kind is Kind.INT:
            levels[1] = SUM
        return operation(how, operands, levels)

    def _called(self, row: Function, names: Mapping[str, str]) -> str:
        """The C++ function that must be called where it is not the table's text."""
        if row.name in ("floor_div", "floor_mod"):
            divided, divisor = self.operands
            is_plain = divided.range[0] >= 0 and divisor.range[0] > 0
            return "" if is_plain else names.get(row.name, row.name)
        return names.get(row.name, "") if row.is_call else ""


@dataclass(frozen=True, eq=False, repr=False)
class Load(_Inner):
    """An element of a buffer, whose ``operands`` are the indices: of an integer for each axis.

    Negative indices count from the end; what is still outside is the nearest element there is.
    """

    buffer: str

    def __init__(self, buffer: str, indices: Sequence[Expression | int], kind: Kind = Kind.FLOAT) -> None:
        nodes = tuple(_cast(expression_of(each), Kind.INT) for each in indices)
        if not nodes:
            raise ValueError(f"an element of {buffer} has no index")
        if wrong := next((each for each in nodes if each.kind is not Kind.INT), None):
            raise ValueError(
                f"an index of {buffer} is {wrong.kind.with_article}, not an integer: {wrong.python()}"
            )
        object.__setattr__(self, "operands", nodes)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "buffer", buffer)
        self.__post_init__()

    @property
    def label(self) -> str:
        return self.buffer

    @property
    def indices(self) -> tuple[Expression, ...]:
        """The index of each axis."""
        return self.operands

    def __reduce__(self) -> tuple[Any, ...]:
        return Load, (self.buffer, self.operands, self.kind)

    def with_operands(self, operands: Sequence[Expression]) -> Expression:
        same = all(one is other for one, other in zip(self.operands, operands, strict=True))
        return self if same else Load(self.buffer, operands, self.kind)

    def _compute(self, operands: Sequence[Any], values: Mapping[str, Any]) -> Any:
        import numpy as np

        array = np.asarray(values[self.buffer])
        if array.ndim != len(operands):
            raise ValueError(
                f"{self.buffer} has {array.ndim} axes, but {len(operands)} indices: {self.python()}"
            )
        places = []
        for index, length in zip(operands, array.shape, strict=True):
            place = np.asarray(index)
            places.append(np.clip(np.where(place < 0, place + length, place), 0, length - 1))
        found = array[tuple(places)]
        return found.astype({Kind.BOOL: bool, Kind.INT: np.int64, Kind.FLOAT: np.float64}[self.kind])

    def _text(self, operands: Sequence[Printed], names: Mapping[str, str], *, python: bool) -> Printed:
        texts = [text for text, _ in operands]
        if python:
            return f"{names.get(self.buffer, self.buffer)}[{', '.join(texts)}]", ATOM
        accessor = f"{self.buffer}_at"
        return call(names.get(accessor, accessor), [names.get("args", "args"), *texts])


def apply(function: str, *operands: Expression | int | float) -> Expression:
    """Returns a function of operands: one of `FUNCTIONS`, or one that is put together from them.

    Truths become integers and integers floats where the others are; constants are computed. Raises
    ValueError for unknown functions, operands of a wrong number or kind, and division by zero.
    """
    nodes = tuple(expression_of(each) for each in operands)
    if function in COMPOSED:
        arity, compose = COMPOSED[function]
        _check_arity(function, arity, nodes)
        return compose(*nodes)
    row = FUNCTIONS.get(function)
    if row is None:
        raise ValueError(f"there is no function {function}; there are {', '.join([*FUNCTIONS, *COMPOSED])}")
    _check_arity(function, row.arity, nodes)
    check_constants(row, nodes, _words(nodes))
    if rewritten := _rewritten(function, nodes):
        return rewritten
    kinds, kind = kinds_of(row, [each.kind for each in nodes], _words(nodes))
    nodes = tuple(_cast(each, wanted) for each, wanted in zip(nodes, kinds, strict=True))
    found = _regrouped(function, nodes, kind)
    found = simplified(row, nodes, kind) if found is None else found
    return Apply(nodes, kind, function) if found is None else expression_of(found)


def minimum(left: Expression | int | float, right: Expression | int | float) -> Expression:
    """Returns the smaller of two expressions or numbers."""
    return apply("min", left, right)


def maximum(left: Expression | int | float, right: Expression | int | float) -> Expression:
    """Returns the larger of two expressions or numbers."""
    return apply("max", left, right)


def divided_up(left: Expression, right: Expression | int) -> Expression:
    """Returns the quotient of two expressions or numbers, rounded up."""
    return left if right == 1 else (left + right - 1) // right


def expression_of(value: Any) -> Expression:
    """Returns a number or truth, numpy's also, as a `Constant`, and an expression as it is. Raises
    ValueError."""
    if isinstance(value, Expression):
        return value
    if not isinstance(value, bool | int | float) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise ValueError(
            f"an expression has no {type(value).__name__} in it, but numbers and truths: {value!r}"
        )
    if isinstance(value, float):
        value = float(value)  # numpy's float64 is one
        if isnan(value):
            raise ValueError("an expression has no NaN in it")
    return Constant(value)


def _evaluated(node: Expression, values: Mapping[str, Any]) -> Any:
    return node._compute([_evaluated(each, values) for each in node.operands], values)


def _printed(root: Expression, names: Mapping[str, str], *, python: bool) -> str:
    if root.size > LONGEST_TEXT:
        raise ValueError(
            f"an expression of {root.size} operations is too long to write: at most {LONGEST_TEXT}"
        )
    return folded(root, lambda node, operands: node._text(operands, names, python=python))[0]


def _equal(left: _Inner, right: _Inner) -> bool:
    """Whether nodes of one hash are equal, which is looked up without recursion: they may be deep."""
    waiting: list[tuple[Expression, Expression]] = [(left, right)]
    seen: set[tuple[int, int]] = set()
    while waiting:
        one, other = waiting.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        if not (isinstance(one, _Inner) and isinstance(other, _Inner)):
            if one != other:
                return False
            continue
        same = type(one) is type(other) and one.kind is other.kind and one.label == other.label
        if not same or len(one.operands) != len(other.operands):
            return False
        waiting.extend(zip(one.operands, other.operands, strict=True))
    return True


def _wide(value: Any) -> Any:
    """A number or array as float64."""
    if isinstance(value, bool | int | float):
        return float(value)
    import numpy as np

    return np.asarray(value, dtype=np.float64)


# -- how nodes are made --------------------------------------------------------------------------------------


def _is(node: Expression, function: str) -> bool:
    return isinstance(node, Apply) and node.function == function


def _check_arity(function: str, arity: int, nodes: Sequence[Expression]) -> None:
    if len(nodes) != arity:
        raise ValueError(f"{function} takes {arity} operand{'s' * (arity > 1)}, not {len(nodes)}")


def _words(nodes: Sequence[Expression]) -> Callable[[int], str]:
    """What operands are called in messages."""
    return lambda place: nodes[place].python() if nodes[place].size < 30 else "x"


def _cast(node: Expression, kind: Kind) -> Expression:
    """The same value of a greater kind."""
    return apply(str(kind), node) if node.kind < kind else node


def _rewritten(function: str, nodes: tuple[Expression, ...]) -> Expression | None:
    """What other functions do instead for operands of these kinds."""
    kind = max(each.kind for each in nodes)
    if kind is Kind.BOOL and function in _ON_TRUTHS:
        return apply(_ON_TRUTHS[function], *nodes)
    if kind is Kind.FLOAT and function == "floor_div":
        return apply("floor", apply("div", *nodes))
    if kind is Kind.FLOAT and function == "floor_mod":
        return nodes[0] - apply("floor", apply("div", *nodes)) * nodes[1]
    return None


_ON_TRUTHS = {"bit_and": "and", "bit_or": "or", "bit_xor": "ne", "bit_not": "not"}

#: Functions that are put together from others: the number of operands, and how.
COMPOSED: Mapping[str, tuple[int, Callable[..., Expression]]] = {
    "bool": (1, lambda x: x if x.kind is Kind.BOOL else apply("ne", x, 0)),
    "clamp": (3, lambda x, low, high: minimum(maximum(x, low), high)),
    "xor": (2, lambda left, right: _xor(left, right)),
    "power": (2, lambda base, exponent: _power(base, exponent)),
}
#: Up to which exponent a power is a product.
_LARGEST_PRODUCT = 16


def _xor(left: Expression, right: Expression) -> Expression:
    check_truths(FUNCTIONS["or"], (left.kind, right.kind), _words((left, right)))
    return apply("ne", left, right)


def _power(base: Expression, exponent: Expression) -> Expression:
    """A power as products, where its exponent is a small number, or as a root."""
    number = exponent.plain
    if number == 0.5:
        return apply("sqrt", base)
    if number is None or abs(number) > _LARGEST_PRODUCT or number != int(number):
        return apply("pow", base, exponent)
    if number < 0:
        return 1.0 / _power(base, Constant(-number))
    found: Expression = Constant(1) if exponent.kind is Kind.INT else Constant(1.0)
    square, bits = base, int(number)
    while bits:
        found = found * square if bits & 1 else found
        bits >>= 1
        square = square * square if bits else square
    return found


def _regrouped(function: str, nodes: tuple[Expression, ...], kind: Kind) -> Expression | None:
    """What the parts of operands make of a function: sums of integers, and what is undone."""
    first, last = nodes[0], nodes[-1]
    if kind is Kind.INT and function == "add":
        return _sum(first, last)
    if kind is Kind.INT and function == "sub" and last.plain is not None:
        return _sum(first, Constant(-last.plain))
    if function in ("neg", "not", "bit_not") and _is(first, function):
        return first.operands[0]
    return None


def _sum(left: Expression, right: Expression) -> Expression:
    """A sum of integers whose plain number stands alone, at the end: no ``+ 1 - 1`` is ever printed."""
    left_rest, left_number = _split(left)
    right_rest, right_number = _split(right)
    number = left_number + right_number
    if left_rest is None or right_rest is None:
        rest = left_rest or right_rest
    else:
        rest = Apply((left_rest, right_rest), Kind.INT, "add")
    if rest is None:
        return Constant(number)
    return Apply((rest, Constant(number)), Kind.INT, "add") if number else rest


def _split(node: Expression) -> tuple[Expression | None, int]:
    """A sum's named terms, and its plain number."""
    if node.plain is not None:
        return None, int(node.plain)
    if _is(node, "add") and isinstance(node.operands[1], Constant):
        rest, number = _split(node.operands[1])
        return (node.operands[0], number) if rest is None else (node, 0)
    return node, 0
