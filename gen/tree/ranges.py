"""Between which integers the result of a function lies, given the ranges of its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

#: The least and the greatest value there can be; infinite where it is not known.
Range = tuple[float, float]
UNKNOWN: Range = (-inf, inf)
NOT_NEGATIVE: Range = (0, inf)
POSITIVE: Range = (1, inf)


def range_of(function: str, operands: tuple[Range, ...]) -> Range:
    """Returns the range of ``function`` over operands in these ranges; `UNKNOWN` where it takes others than
    integers."""
    rule = _RULES.get(function)
    return rule(*operands) if rule else UNKNOWN


def always(function: str, left: Range, right: Range) -> bool | None:
    """Returns what a comparison of integers always yields, or None where it can be both."""
    if function in ("gt", "ge"):
        function, left, right = {"gt": "lt", "ge": "le"}[function], right, left
    if function in ("eq", "ne"):
        apart = left[1] < right[0] or right[1] < left[0]
        same = left[0] == left[1] == right[0] == right[1]
        return (function == "ne") if apart else (function == "eq") if same else None
    if function == "lt":
        return True if left[1] < right[0] else False if left[0] >= right[1] else None
    return True if left[1] <= right[0] else False if left[0] > right[1] else None


def _product(left: float, right: float) -> float:
    return 0 if left == 0 or right == 0 else left * right


def _mul(left: Range, right: Range) -> Range:
    corners = [_product(one, other) for one in left for other in right]
    return min(corners), max(corners)


def _floor_div(left: Range, right: Range) -> Range:
    if right[0] < 0 or left[0] < 0:
        return UNKNOWN
    least = 0 if right[1] == inf else left[0] // max(right[1], 1)
    return least, left[1] if left[1] == inf else left[1] // max(right[0], 1)


def _floor_mod(left: Range, right: Range) -> Range:
    if right[0] < 0:
        return UNKNOWN
    greatest = max(right[1] - 1, 0)
    return 0, min(left[1], greatest) if left[0] >= 0 else greatest


def _abs(value: Range) -> Range:
    low, high = value
    return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _bit_and(left: Range, right: Range) -> Range:
    known = [each for each in (left, right) if each[0] >= 0]
    return (0, min(each[1] for each in known)) if known else UNKNOWN


def _not_negative(*operands: Range) -> Range:
    return NOT_NEGATIVE if all(low >= 0 for low, _ in operands) else UNKNOWN


_RULES: Mapping[str, Callable[..., Range]] = {
    "add": lambda left, right: (left[0] + right[0], left[1] + right[1]),
    "sub": lambda left, right: (left[0] - right[1], left[1] - right[0]),
    "mul": _mul,
    "neg": lambda value: (-value[1], -value[0]),
    "abs": _abs,
    "min": lambda left, right: (min(left[0], right[0]), min(left[1], right[1])),
    "max": lambda left, right: (max(left[0], right[0]), max(left[1], right[1])),
    "floor_div": _floor_div,
    "floor_mod": _floor_mod,
    "where": lambda _, yes, no: (min(yes[0], no[0]), max(yes[1], no[1])),
    "bit_and": _bit_and,
    "bit_or": _not_negative,
    "bit_xor": _not_negative,
    "shift_right": lambda left, _: (0, left[1]) if left[0] >= 0 else UNKNOWN,
}
