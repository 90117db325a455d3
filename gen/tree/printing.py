"""Texts of expressions with how tightly they bind: as many parentheses as needed, and no more."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .functions import ATOM, LOOSEST, SUM, Text

#: A text, and how tightly it binds.
Printed = tuple[str, int]

#: What a name may stand for in C++: a variable or member, or a sum of such.
_WORD = re.compile(r"[\w.]+(->\w+)?|\w+\([\w ,.+*/-]*\)")
_ARITHMETIC = re.compile(r"[\w.\s+*/%()-]+")
_LARGEST_FLOAT = 3.4028234663852886e38


def word(text: str) -> Printed:
    """Returns what a name stands for."""
    return text, ATOM if _WORD.fullmatch(text) else SUM if _ARITHMETIC.fullmatch(text) else LOOSEST


def number(value: int | float, *, python: bool) -> Printed:
    """Returns a number or truth in Python or in C++, where floats are float32."""
    if python or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value), ATOM
    if isinstance(value, bool):
        return str(value).lower(), ATOM
    if abs(value) > _LARGEST_FLOAT:
        return ("INFINITY" if value > 0 else "-INFINITY"), ATOM
    return f"{value!r}f", ATOM


def call(function: str, arguments: Sequence[str]) -> Printed:
    """Returns a call in C++."""
    return f"{function}({', '.join(arguments)})", ATOM


def operation(how: Text, operands: Sequence[Printed], levels: Sequence[int]) -> Printed:
    """Returns an operation of operands, those in parentheses that bind less than ``levels``."""
    texts = [
        text if own >= level else f"({text})" for (text, own), level in zip(operands, levels, strict=True)
    ]
    if how.pattern == "{0} + {1}" and texts[1].startswith("-"):
        return f"{texts[0]} - {texts[1][1:]}", SUM
    return how.pattern.format(*texts), how.level
