"""Of which kinds a function's operands must be, and of which its result is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .functions import ATOM, Function, Kind, Takes

#: What an operand is called in messages, by its place.
Words = Callable[[int], str]


def kinds_of(row: Function, given: Sequence[Kind], words: Words) -> tuple[tuple[Kind, ...], Kind]:
    """Returns the kinds that operands of given ones must become, and the result's. Raises ValueError, which
    tells of a wrong operand by its ``words``."""
    greatest, count = max(given), len(given)
    match row.takes:
        case Takes.NUMBERS:
            kind = max(greatest, Kind.INT)
            return (kind,) * count, kind
        case Takes.INTEGERS:
            if greatest is Kind.FLOAT:
                raise ValueError(
                    f"{sign_of(row)} takes integers, not a float: int(x) drops what is behind the point"
                )
            return (Kind.INT,) * count, Kind.INT
        case Takes.FLOATS:
            return (Kind.FLOAT,) * count, Kind.FLOAT
        case Takes.COMPARED:
            truths = greatest is Kind.BOOL and row.name in ("eq", "ne")
            return (Kind.BOOL if truths else max(greatest, Kind.INT),) * count, Kind.BOOL
        case Takes.TRUTHS:
            check_truths(row, given, words)
            return tuple(given), Kind.BOOL
        case Takes.CHOICE:
            check_truths(row, given[:1], words)
            kind = max(given[1:])
            return (given[0], *(kind,) * (count - 1)), kind
        case Takes.TO_INT:
            return tuple(given), Kind.INT
        case Takes.TO_FLOAT:
            return tuple(given), Kind.FLOAT


def check_truths(row: Function, given: Sequence[Kind], words: Words) -> None:
    """Raises ValueError for an operand that is no truth."""
    wrong = next((place for place, kind in enumerate(given) if kind is not Kind.BOOL), None)
    if wrong is None:
        return
    what = "the condition of where" if row.name == "where" else sign_of(row)
    found = given[wrong].with_article
    raise ValueError(f"{what} takes truths, such as comparisons, not {found}: write {words(wrong)} != 0")


def sign_of(row: Function) -> str:
    """Returns what a function is called in Python."""
    return (
        row.name
        if row.python.level == ATOM
        else row.python.pattern.replace("{0}", "").replace("{1}", "").strip()
    )
