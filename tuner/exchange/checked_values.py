"""Values of a parsed JSON file, each checked to be what it must be before it is used."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

#: Names of cards, drivers and compilers. A kernel's comments may tell them, so they hold no line break,
#: quote, backslash or end of a comment.
PLAIN_TEXT = re.compile(r"[A-Za-z0-9 ._,:;()+/~-]{0,120}")
#: Characters that no terminal and no comment should get from a file.
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Wrong(ValueError):
    """Something in a file is not as it must be."""


def located(place: str, check: Any, *arguments: Any) -> Any:
    """Returns what ``check`` makes of the arguments; where it raises, the error names the place."""
    try:
        return check(*arguments)
    except (ValueError, ArithmeticError) as error:
        raise Wrong(f"{place}: {error}") from error


def refuse_constant(text: str) -> NoReturn:
    """Raises `Wrong` for what JSON writes instead of a number, such as NaN."""
    raise Wrong(f"{text} is no figure")


def shown(value: Any) -> str:
    """Returns a value of the file as an error may quote it: cut off, without control characters."""
    return CONTROL.sub(" ", repr(value))[:80]


def json_object(value: Any, what: str) -> Mapping[str, Any]:
    """Returns a value that must be an object. Raises `Wrong`."""
    if not isinstance(value, dict):
        raise Wrong(f"{what} is {shown(value)}, not an object")
    return value


def json_array(value: Any, what: str) -> list[Any]:
    """Returns a value that must be an array. Raises `Wrong`."""
    if not isinstance(value, list):
        raise Wrong(f"{what} is {shown(value)}, not a list")
    return value


def short_text(value: Any, what: str, most: int = 200) -> str:
    """Returns a value that must be a text of at most so many characters. Raises `Wrong`."""
    if not isinstance(value, str) or len(value) > most:
        raise Wrong(f"{what} is {shown(value)}, not a text of at most {most} characters")
    return value


def plain_text(value: Any, what: str) -> str:
    """Returns a value that must be a text as `PLAIN_TEXT` has it. Raises `Wrong`."""
    if not PLAIN_TEXT.fullmatch(short_text(value, what)):
        raise Wrong(f"{what} is {shown(value)}; letters, digits, blanks and ._,:;()+/- are read")
    return str(value)


def whole_number(value: Any, what: str, most: int, least: int = 0) -> int:
    """Returns a value that must be a whole number from ``least`` to ``most``. Raises `Wrong`."""
    if type(value) is not int or not least <= value <= most:
        raise Wrong(f"{what} is {shown(value)}, not a whole number from {least} to {most}")
    return value


def number_up_to(value: Any, what: str, most: float, above: float | None = None) -> float:
    """Returns a value that must be a number from 0, or above ``above``, to ``most``. Raises `Wrong`."""
    # Whole numbers know no bound; one beyond a float's cannot be asked whether it is finite.
    if type(value) not in (int, float) or not 0 <= value <= most or not math.isfinite(value):
        raise Wrong(f"{what} is {shown(value)}, not a number from 0 to {most:g}")
    if above is not None and value <= above:
        raise Wrong(f"{what} is {shown(value)}; it must be above {above:g}")
    return float(value)


def point_in_time(value: Any) -> datetime.datetime:
    """Returns a value that must be an ISO 8601 time, in UTC. Raises `Wrong`."""
    try:
        when = datetime.datetime.fromisoformat(short_text(value, "timestamp"))
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        return when.astimezone(datetime.UTC)
    except (ValueError, OverflowError) as error:
        raise Wrong(f"timestamp {shown(value)} is no ISO 8601 time") from error
