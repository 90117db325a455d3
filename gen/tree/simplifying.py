"""What functions of operands are without them: an operand, a number, or nothing simpler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from math import isfinite, isnan
from typing import Protocol

from .functions import Function, Kind
from .kinds import Words, sign_of
from .ranges import Range, always


class Operand(Protocol):
    """What is known of an operand: its kind, where an integer lies, and the number that a constant is, which
    is ``plain`` if C++ has no name for it."""

    @property
    def kind(self) -> Kind: ...

    @property
    def range(self) -> Range: ...

    @property
    def known(self) -> int | float | None: ...

    @property
    def plain(self) -> int | float | None: ...


def simplified(row: Function, operands: Sequence[Operand], kind: Kind) -> Operand | int | float | None:
    """Returns the operand or the number that a function of operands is; None: it must be computed."""
    numbers = [each.plain for each in operands if each.plain is not None]
    if len(numbers) == len(operands):
        return _computed(row, numbers, kind)
    first, last = operands[0], operands[-1]
    match row.name:
        case "add" | "sub" if last.plain == 0:
            return first
        case "add" if first.plain == 0:
            return last
        case "mul" if first.plain == 1:
            return last
        case "mul" if kind is Kind.INT and 0 in (first.plain, last.plain):
            return 0
        case "mul" | "div" | "floor_div" if last.plain == 1:
            return first
        case "floor_mod" if last.plain == 1:
            return 0
        case "int" | "float" if first.kind is kind:
            return first
        case "and" | "or" | "min" | "max" if first == last:
            return first
        case "and" | "or":
            return _without_truths(row.name, first, last)
        case "where":
            chosen, yes, no = operands
            if chosen.known is not None:
                return yes if chosen.known else no
            return yes if yes == no else None
        case "lt" | "le" | "gt" | "ge" | "eq" | "ne" if first.kind is Kind.INT:
            same = row.name in ("le", "ge", "eq") if first == last else None
            return always(row.name, first.range, last.range) if same is None else same
        case "min" | "max" if kind is Kind.INT and numbers:
            less = "le" if row.name == "min" else "ge"
            for one, other in ((first, last), (last, first)):
                if always(less, one.range, other.range):
                    return one
    return None


def check_constants(row: Function, operands: Sequence[Operand], words: Words) -> None:
    """Raises ValueError for a division by zero and for shifts by more bits than there are."""
    last = operands[-1].known
    if last is None:
        return
    if row.name in ("div", "floor_div", "floor_mod") and last == 0:
        raise ValueError(f"division by zero: {words(0)} {sign_of(row)} 0")
    if row.name in ("shift_left", "shift_right") and not 0 <= last < 32:
        raise ValueError(f"integers have 32 bits: {sign_of(row)} {last} is not in 0 to 31")


def _computed(row: Function, numbers: Sequence[int | float], kind: Kind) -> int | float | None:
    numpy = sys.modules.get("numpy")
    with numpy.errstate(all="ignore") if numpy else nullcontext():
        number = row.compute(*numbers)
    match kind:
        case Kind.BOOL:
            return bool(number)
        case Kind.INT:
            return int(number) if isfinite(number) else None
        case Kind.FLOAT:
            return None if isnan(number) else float(number)


def _without_truths(function: str, left: Operand, right: Operand) -> Operand | None:
    for one, other in ((left, right), (right, left)):
        if one.known is not None:
            return other if bool(one.known) == (function == "and") else one
    return None
