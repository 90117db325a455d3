"""Formulas as text: a small part of Python, read from its syntax tree and never evaluated.

``score + bias[h, k - q]`` and ``doc[b, q] == doc[b, k] and q >= k`` are such texts: arithmetic, comparisons,
``and``, ``or``, ``not``, bits, ``x if c else y``, a few functions, and elements of buffers.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from ..expression import LONGEST_TEXT, Constant, Expression, Kind, Load, Name, apply, loads_of
from .error import FormulaError
from .identifiers import is_identifier

#: The longest text that is read.
LONGEST_FORMULA = 100_000
#: The kinds of buffers' elements by their dtypes.
KINDS_OF_DTYPES: Mapping[str, Kind] = {
    **dict.fromkeys(("f32", "f16", "bf16"), Kind.FLOAT),
    **dict.fromkeys(("i16", "i32", "i64", "u8"), Kind.INT),
}
_SAME_NAMES = (
    *("where", "min", "max", "clamp", "abs", "exp", "exp2", "log", "log2", "pow", "sqrt", "rsqrt"),
    *("tanh", "sin", "cos", "sigmoid", "floor", "int", "float", "bool"),
)
#: What is called in a formula, and the function that it is.
CALLS: Mapping[str, str] = {
    **dict(zip(_SAME_NAMES, _SAME_NAMES, strict=True)),
    "minimum": "min",
    "maximum": "max",
    "pow": "power",
}
_BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floor_div",
    ast.Mod: "floor_mod",
    ast.Pow: "power",
    ast.BitAnd: "bit_and",
    ast.BitOr: "bit_or",
    ast.BitXor: "bit_xor",
    ast.LShift: "shift_left",
    ast.RShift: "shift_right",
}
_UNARY: Mapping[type[ast.unaryop], str] = {ast.USub: "neg", ast.Not: "not", ast.Invert: "bit_not"}
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
#: What a formula may not have, as users know it.
_REFUSED: Mapping[type[ast.AST], str] = {
    ast.Attribute: "no attributes",
    ast.Lambda: "no lambda",
    ast.Slice: "no slices: an index for each axis",
    ast.Starred: "no stars",
    ast.NamedExpr: "no `:=`",
    ast.Tuple: "no tuples",
    **dict.fromkeys((ast.List, ast.Set, ast.Dict), "no lists, sets or dictionaries"),
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), "no comprehensions"),
    **dict.fromkeys((ast.JoinedStr, ast.FormattedValue), "no strings"),
    **dict.fromkeys((ast.Await, ast.Yield, ast.YieldFrom), "no `await` or `yield`"),
}


def parse(
    text: str,
    *,
    names: Mapping[str, Kind],
    wanted: Kind,
    buffers: Mapping[str, str] | None = None,
    scalars: Mapping[str, float] | None = None,
) -> Expression:
    """Returns the expression that a formula's text means, which yields what is ``wanted``: a float of a
    score, a truth of a mask.

    ``names`` are those of the place: integers among them are never negative. What has indices is a buffer,
    of ``buffers``' dtype, else f32 in a score and i32 in a mask. ``scalars`` are numbers that the kernel
    takes at run time. Raises `FormulaError`, which says at which column.
    """
    reader = _Reader(text, names, wanted, buffers or {}, scalars or {})
    root = reader.tree()
    found = reader.read(root)
    if found.size > LONGEST_TEXT:
        raise reader.error(f"this comes to {found.size} operations, more than {LONGEST_TEXT}", root)
    if found.kind is not wanted:
        raise reader.error(_wrong_result(wanted, found.kind), root)
    if found == Constant(False):
        raise reader.error("this mask is never true: no row would see a key", root)
    return found


class _Reader:
    """One text that is read, without recursion: texts may be deep."""

    def __init__(
        self,
        text: str,
        names: Mapping[str, Kind],
        wanted: Kind,
        buffers: Mapping[str, str],
        scalars: Mapping[str, float],
    ) -> None:
        self.text = text
        self.start = len(text) - len(text.lstrip())
        self.names, self.buffers, self.scalars = names, buffers, scalars
        self.default = Kind.FLOAT if wanted is Kind.FLOAT else Kind.INT
        #: Of each buffer that was seen, how many indices it has.
        self.axes: dict[str, int] = {}

    def error(self, reason: str, where: ast.expr | int) -> FormulaError:
        column = where if isinstance(where, int) else self.start + where.col_offset + 1
        return FormulaError(reason, self.text, column)

    def tree(self) -> ast.expr:
        """Returns Python's tree of the text."""
        if not self.text.strip():
            raise self.error("the formula is empty", 1)
        if len(self.text) > LONGEST_FORMULA:
            raise self.error(f"the formula has {len(self.text)} characters, more than {LONGEST_FORMULA}", 1)
        # What emitted files show in a comment must not end it, nor go on behind it.
        if strange := re.search(r"[^\x20-\x7e]|[#\\]", self.text):
            raise self.error(f"a formula has no {strange.group()!r}", strange.start() + 1)
        try:
            with warnings.catch_warnings():  # Python warns of `2if`, which it reads all the same
                warnings.simplefilter("ignore", SyntaxWarning)
                return ast.parse(self.text[self.start :], mode="eval").body
        except SyntaxError as error:
            # Where Python misses something behind the last word, it says 0.
            column = self.start + error.offset if error.offset else len(self.text.rstrip()) + 1
            raise self.error(f"this cannot be read: {error.msg}", column) from None
        except (MemoryError, RecursionError):
            raise self.error("the formula is nested too deeply", 1) from None

    def read(self, root: ast.expr) -> Expression:
        """Returns what a tree means."""
        done: dict[ast.expr, Expression] = {}
        waiting: list[ast.expr] = [root]
        while waiting:
            node = waiting[-1]
            parts = self._parts(node)
            missing = [each for each in parts if each not in done]
            if missing:
                waiting.extend(reversed(missing))
                continue
            waiting.pop()
            done[node] = self._checked(node, [done.pop(each) for each in parts])
        return done[root]

    def _parts(self, node: ast.expr) -> Sequence[ast.expr]:
        match node:
            case ast.BinOp(left, _, right):
                return left, right
            case ast.UnaryOp(_, operand):
                return (operand,)
            case ast.BoolOp(_, values):
                return values
            case ast.Compare(left, _, comparators):
                return left, *comparators
            case ast.IfExp(test, body, orelse):
                return test, body, orelse
            case ast.Call(_, arguments):
                self._check_call(node)
                return arguments
            case ast.Subscript(_, ast.Tuple(indices)):
                return indices
            case ast.Subscript(_, index):
                return (index,)
        return ()

    def _checked(self, node: ast.expr, operands: Sequence[Expression]) -> Expression:
        try:
            found = self._made(node, operands)
        except FormulaError:
            raise
        except ValueError as error:
            raise self.error(str(error), node) from None
        if isinstance(found, Constant) and found.kind is Kind.INT and not -(2**31) <= found.number < 2**31:
            raise self.error("integers have 32 bits: this constant has more", node)
        return found

    def _made(self, node: ast.expr, operands: Sequence[Expression]) -> Expression:
        match node:
            case ast.Constant(bool() | int() | float() as number):
                return Constant(number)
            case ast.Constant(value):
                raise self.error(f"a formula has numbers and truths, no {type(value).__name__}", node)
            case ast.Name(name):
                return self._named(name, node)
            case ast.BinOp(_, operator, _) if type(operator) in _BINARY:
                return apply(_BINARY[type(operator)], *operands)
            case ast.UnaryOp(ast.UAdd(), _):
                return operands[0]
            case ast.UnaryOp(operator, _):
                return apply(_UNARY[type(operator)], *operands)
            case ast.BoolOp(operator, _):
                return _chained("and" if isinstance(operator, ast.And) else "or", operands)
            case ast.Compare():
                return self._compared(node, operands)
            case ast.IfExp():
                return apply("where", *operands)
            case ast.Call(ast.Name(name)) if name in ("min", "max") and len(operands) > 2:
                return _chained(name, operands)
            case ast.Call(ast.Name(name)):
                return apply(CALLS[name], *operands)
            case ast.Subscript():
                return self._loaded(node, operands)
        what = _REFUSED.get(type(node), "no such thing")
        raise self.error(f"a formula has {what}", node)

    def _named(self, name: str, node: ast.expr) -> Expression:
        if name in self.names:
            kind = self.names[name]
            return Name(name, kind, nonnegative=kind is Kind.INT)
        if name in self.scalars:
            self._check_identifier(name, node)
            return Name(name, Kind.FLOAT if isinstance(self.scalars[name], float) else Kind.INT)
        if name == "inf":
            return Constant(float("inf"))
        if name in self.buffers or name in self.axes:
            raise self.error(f"{name} is a buffer: it needs an index for each axis, as in {name}[b, q]", node)
        if name in CALLS:
            raise self.error(f"{name} is a function: call it", node)
        near = _near(name, [*self.names, *self.scalars]) or (
            f": there are {_listed(self.names)}, numbers of your own by --scalar {name}=1, and buffers, "
            f"which have indices: {name}[b, q]"
        )
        raise self.error(f"there is no {name}{near}", node)

    def _check_call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name):
            what = "attributes" if isinstance(node.func, ast.Attribute) else "calls but of its functions"
            raise self.error(f"a formula has no {what}: its functions are {_listed(CALLS)}", node.func)
        name = node.func.id
        if name not in CALLS:
            near = _near(name, CALLS) or f": there are {_listed(CALLS)}"
            raise self.error(f"there is no function {name}{near}", node.func)
        if node.keywords:
            raise self.error(f"{name} takes operands by their place, none by name", node)

    def _compared(self, node: ast.Compare, operands: Sequence[Expression]) -> Expression:
        for part in (node.left, *node.comparators):
            if _is_bare_bit(part, node, self.text[self.start :]):
                sign = {ast.BitAnd: "&", ast.BitOr: "|"}.get(type(part.op), "^")  # pyright: ignore
                raise self.error(f"{sign} binds tighter than comparisons: put these in parentheses", part)
        tests = []
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            if type(operator) not in _COMPARISONS:
                raise self.error("a formula compares by <, <=, >, >=, == and != alone", node)
            tests.append(apply(_COMPARISONS[type(operator)], left, right))
        return _chained("and", tests)

    def _loaded(self, node: ast.Subscript, operands: Sequence[Expression]) -> Expression:
        if not isinstance(node.value, ast.Name):
            raise self.error("only buffers have indices, all in one pair of brackets: doc[b, q]", node)
        name = node.value.id
        for taken, what in ((self.names, "number"), (self.scalars, "scalar"), (CALLS, "function")):
            if name in taken:
                raise self.error(f"{name} is a {what} and has no indices", node)
        self._check_identifier(name, node)
        axes = self.axes.setdefault(name, len(operands))
        if axes != len(operands):
            raise self.error(f"{name} has {axes} indices elsewhere, but {len(operands)} here", node)
        for operand, part in zip(operands, self._parts(node), strict=True):
            if operand.kind is Kind.FLOAT:
                loads = [each.buffer for each in loads_of(operand) if each.kind is Kind.FLOAT]
                way = f": say --buffer {loads[0]}=i32" if loads else ", as int(...) makes"
                raise self.error(f"an index of {name} must be an integer{way}", part)
        dtype = self.buffers.get(name)
        if dtype is not None and dtype not in KINDS_OF_DTYPES:
            raise self.error(f"{name} cannot be of {dtype}: there are {_listed(KINDS_OF_DTYPES)}", node)
        return Load(name, operands, self.default if dtype is None else KINDS_OF_DTYPES[dtype])

    def _check_identifier(self, name: str, node: ast.expr) -> None:
        if not is_identifier(name):
            raise self.error(f"{name[:50]} cannot be a name in a kernel: choose another", node)


def _wrong_result(wanted: Kind, found: Kind) -> str:
    if wanted is Kind.BOOL:
        return f"a mask must be true or false, but this is {found.with_article}: compare it, as in ... != 0"
    way = "where(..., score, -inf)" if found is Kind.BOOL else "float(...)"
    return f"a score must be a float, but this is {found.with_article}: write {way}"


def _is_bare_bit(part: ast.expr, whole: ast.Compare, text: str) -> bool:
    """Whether an operand of a comparison is a bit operation that has no parentheses of its own."""
    if not (isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitAnd | ast.BitOr | ast.BitXor)):
        return False
    if part is whole.left:
        return part.col_offset == whole.col_offset
    return not text[: part.col_offset].rstrip().endswith("(")


def _chained(function: str, operands: Sequence[Expression]) -> Expression:
    found = operands[0]
    for each in operands[1:]:
        found = apply(function, found, each)
    return found


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f": did you mean {near[0]}?" if near else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
