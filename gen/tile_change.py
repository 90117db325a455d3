"""Changes of scores as a thread makes them of many keys of a few rows: what these share is computed once.

A thread's columns are known when a kernel is compiled, all but where the tile begins: what a change computes
of the key is taken apart into that and the column, so that integers are turned into floats once a row. What
scores are multiplied by becomes one factor, and the last one is left to who takes their exponentials.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from .expression import (
    Apply,
    Constant,
    Expression,
    Kind,
    Load,
    Name,
    apply,
    distinct,
    folded,
    loads_of,
    replaced,
)
from .scores import KEY, QUERY, SCORE

#: A score as the tensor cores leave it, and what is multiplied with it to be the scaled one.
RAW, SCORE_SCALE = Name("raw", Kind.FLOAT), Name("score_scale", Kind.FLOAT)
#: A thread's first key of a tile, and how far behind it another is.
FIRST_KEY, COLUMN = (Name(each, nonnegative=True) for each in ("first_key", "column"))
#: The key at which an array is read and how far behind it, as an accessor takes them: so that the columns of
#: a thread share an address.
READ_KEY = Name("read_key", nonnegative=True)
#: Numbers that expressions name and that are positive.
POSITIVE = frozenset({"softcap"})


@dataclass(frozen=True)
class TileExpression:
    """An expression of pairs over `FIRST_KEY`, `COLUMN`, `READ_KEY` and the names of pairs; of a change also
    over `RAW` and `SCORE_SCALE`."""

    body: Expression

    def names_one_of(self, *names: str) -> bool:
        """Tells whether it needs any of some names."""
        return not self.body.names().isdisjoint(names)

    @property
    def reads_rows(self) -> bool:
        """Whether arrays are read at the row itself, which must be one that exists."""
        return _reads_at(self.body, QUERY)

    @property
    def reads_keys(self) -> bool:
        """Whether arrays are read at the key itself, which must be one that exists."""
        return _reads_at(self.body, KEY) or _reads_at(self.body, READ_KEY)


@dataclass(frozen=True)
class TileChange(TileExpression):
    """A change of scores as ``factor * body``: ``factor`` is positive and the same for all rows and keys."""

    factor: Expression

    @property
    def has_factor(self) -> bool:
        """Whether the factor is not one."""
        return self.factor != Constant(1.0)

    @property
    def in_names_of_pairs(self) -> Expression:
        """The body over the score and the names of pairs, to be counted: columns are numbers, which cost
        nothing as floats."""
        column = replaced(self.body, {apply("float", COLUMN): Name(KEY.name, Kind.FLOAT)})
        return column.with_names({RAW.name: SCORE, COLUMN.name: KEY, READ_KEY.name: KEY})


def tile_predicate(predicate: Expression, along_keys: frozenset[str] = frozenset()) -> TileExpression:
    """Returns what rows see as it is best computed for many keys of a row."""
    return TileExpression(_with_read_keys(predicate, along_keys))


def tile_change(change: Expression, along_keys: frozenset[str] = frozenset()) -> TileChange:
    """Returns a change of scores as it is best computed for many keys of a row.

    Arrays ``along_keys`` are read so far behind a key.
    """
    scaled = change.with_names({SCORE.name: apply("mul", RAW, SCORE_SCALE)})
    varying = _varying(scaled)
    gathered = folded(scaled, lambda node, operands: _gathered(node, operands, varying))
    factors: list[Expression] = [Constant(1.0)]
    rest = gathered
    if isinstance(gathered, Apply) and gathered.function == "mul" and _is_positive(gathered.operands[1]):
        rest, factor = gathered.operands
        factors.append(factor)
    return TileChange(_with_read_keys(rest, along_keys), _product(factors))


def _reads_at(expression: Expression, name: Name) -> bool:
    """Tells whether ``expression`` takes elements of arrays at ``name`` itself."""
    return any(name in load.indices for load in loads_of(expression))


def _with_read_keys(expression: Expression, along_keys: frozenset[str]) -> Expression:
    """Returns ``expression`` with arrays read at `READ_KEY` where they are at the key in the last axis."""

    def rebuilt(node: Expression, operands: list[Expression]) -> Expression:
        if isinstance(node, Load) and node.buffer in along_keys and operands[-1] == KEY:
            operands = [*operands[:-1], READ_KEY]
        return node.with_operands(operands)

    return folded(expression, rebuilt)


def _varying(root: Expression) -> frozenset[Expression]:
    """The parts of an expression that are others for each key of a row."""
    found: set[Expression] = set()
    for node in distinct(root):
        if node in (RAW, KEY) or any(each in found for each in node.operands):
            found.add(node)
    return frozenset(found)


def _gathered(node: Expression, operands: list[Expression], varying: frozenset[Expression]) -> Expression:
    """A node of operands that are gathered already, with what is the same for all keys apart."""
    if node not in varying or not isinstance(node, Apply | Load):
        return node
    if isinstance(node, Apply) and node.kind is Kind.FLOAT:
        if node.function in ("mul", "div"):
            return _regrouped(node, operands)
        if node.function == "float":
            return _as_float(operands[0])
    return node.with_operands(operands)


def _regrouped(node: Apply, operands: list[Expression]) -> Expression:
    """A product whose factors are in two groups, those that vary from key to key first."""
    left, right = operands
    if node.function == "div":
        if _varies(right):
            return node.with_operands(operands)
        right = apply("div", 1.0, right)
    factors = [*_factors(left), *_factors(right)]
    varying = [each for each in factors if _varies(each)]
    same = [each for each in factors if not _varies(each)]
    return apply("mul", _product(varying), _product(same)) if same else _product(varying)


def _factors(node: Expression) -> list[Expression]:
    if isinstance(node, Apply) and node.function == "mul":
        return [*_factors(node.operands[0]), *_factors(node.operands[1])]
    return [node]


def _product(factors: Iterable[Expression]) -> Expression:
    return reduce(lambda left, right: apply("mul", left, right), factors)


def _varies(node: Expression) -> bool:
    """Whether a gathered part is another for each key of a row."""
    return not node.names().isdisjoint({RAW.name, KEY.name, COLUMN.name})


def _as_float(node: Expression) -> Expression:
    """An integer as a float: a sum with the key as one of floats, of the tile's first key and the column.

    Exact near the diagonal, where the first sum is small, and as exact as floats are elsewhere.
    """
    if isinstance(node, Apply) and node.function == "abs":
        return apply("abs", _as_float(node.operands[0]))
    found = _by_key(node)
    if found is None:
        return apply("float", node)
    rest, times = found
    sign = "add" if times > 0 else "sub"
    first, column = (apply("mul", abs(times), each) for each in (FIRST_KEY, COLUMN))
    return apply(sign, apply("float", apply(sign, rest, first)), apply("float", column))


def _by_key(node: Expression) -> tuple[Expression, int] | None:
    """What is added to how many times the key, where an integer is such a sum."""
    if node == KEY:
        return Constant(0), 1
    if KEY.name not in node.names():
        return node, 0
    if not isinstance(node, Apply):
        return None
    parts = [_by_key(each) for each in node.operands]
    if any(each is None for each in parts):
        return None
    rests, times = zip(*(each for each in parts if each), strict=True)
    match node.function:
        case "add":
            return rests[0] + rests[1], times[0] + times[1]
        case "sub":
            return rests[0] - rests[1], times[0] - times[1]
        case "neg":
            return -rests[0], -times[0]
    return None


def _is_positive(node: Expression) -> bool:
    if isinstance(node, Constant):
        return node.number > 0
    if isinstance(node, Name):
        return node.name in POSITIVE
    return (
        isinstance(node, Apply)
        and node.function in ("mul", "div")
        and all(_is_positive(each) for each in node.operands)
    )
