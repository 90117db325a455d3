"""What callers pass, looked at before anything is made of it: numbers, flags and arrays of the host.

What is kept of a call to serve the next is found by the numbers that it was told. So these are Python's own
from here on: an integer of numpy's is told from another by its value, as any is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.problem import EIGHT
from ...gen.scoring.asked import MAX_REACH
from ...templates.runtime.arrays import _kind
from ...templates.runtime.packed_values import SequencePlan
from ...templates.runtime.scored_values import TileLists, _is_pair

#: Masks and changes of scores that are integers, and the least of each.
_LEAST = {"chunk": 1, "dilation": 1, "always": 0}
#: The types of arrays that come without scales.
_WITHOUT_SCALES = ("float32", "float16", "bfloat16")
#: What needs no look: a number as it should be.
_PLAIN = (int, float)


def numbers_of(named: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns masks and changes of scores by name, and what texts read, with Python's own numbers for those
    of numpy and of arrays without axes; all else as it is.

    Raises TypeError and ValueError for what is no number where one is meant.
    """
    told = {name: _number(name, value) for name, value in named.items()}
    return told, {name: _own(value) for name, value in values.items()}


def _number(name: str, value: Any) -> Any:
    if name in _LEAST:
        return _integer(name, value, _LEAST[name])
    if name == "softcap":
        return value if type(value) in _PLAIN else _float(name, value)
    if name == "window" and isinstance(value, tuple | list):
        if all(side is None or type(side) is int for side in value):
            return value
        return tuple(side if side is None else _integer("window", side, -1) for side in value)
    return value


def _integer(name: str, value: Any, least: int) -> int:
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        what = "a side of window" if name == "window" else name
        raise TypeError(f"{what} is {value!r}; it must be an integer, {least} or more") from None


def check_reach(name: str, number: int, shown: Any = None) -> int:
    """Returns an integer that a mask is told. Raises ValueError for one out of range; ``shown`` is what it is
    part of."""
    least = _LEAST.get(name, -1)
    if not least <= number <= MAX_REACH:
        told = number if shown is None else shown
        of = "a side must lie" if shown is not None else "it must lie"
        no_limit = " (all keys)" if least == -1 else ""
        raise ValueError(f"{name} is {told}; {of} in {least}{no_limit}..{MAX_REACH}")
    return number


def _float(name: str, value: Any) -> float:
    """A number of any library's as Python's, and that of an array of one."""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; it must be a number") from None


def _own(value: Any) -> Any:
    """A number of numpy's as Python's, and everything else as it is."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    return value


def own_integer(value: Any) -> Any:
    """Returns an integer of numpy's as Python's, and everything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def scale_of(scale: Any) -> float | None:
    """Returns a scale as Python's number; None for none. Raises TypeError for what is none."""
    return scale if scale is None or type(scale) in _PLAIN else _float("scale", scale)


def flag(name: str, value: Any) -> bool:
    """Returns what is true or false. Raises TypeError for all else, of which who reads a call cannot tell."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name} is {value!r}; it must be True or False")


def check_scales(q: Any, scales: Any) -> None:
    """Raises TypeError for scales that are not three numbers, or are told of arrays that come without."""
    if scales is None:
        return
    if not isinstance(scales, tuple | list) or len(scales) != 3:
        raise TypeError(f"scales is {scales!r}; pass three numbers, (of_q, of_k, of_v)")
    for each in scales:
        _float("one of scales", each)
    dtype = str(getattr(q, "dtype", "")).removeprefix("torch.")
    if dtype in _WITHOUT_SCALES:
        raise TypeError(f"scales= is taken with float8_e4m3fn alone, and q is {dtype}: leave it out")


def check_precision(precision: Any, scales: Any) -> None:
    """Raises ValueError for a precision that no call has, or that is for arrays with scales."""
    if precision == "auto":
        return
    if precision != EIGHT:
        raise ValueError(f"precision is {precision!r}; pass {EIGHT!r}, or leave it out")
    if scales is None:
        raise ValueError(
            f"precision={EIGHT!r} is for float8_e4m3fn with scales=: leave it out, or pass what "
            "flashgen.quantize makes of q, k and v"
        )


def check_kept(lists: Any, plan: Any = None) -> None:
    """Raises TypeError for what cannot keep lists of tiles, or a plan of sequences, from call to call."""
    for name, value, kind in (("lists", lists, TileLists), ("plan", plan, SequencePlan)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is a {_kind(value)}; pass a {kind.__name__}(), or leave it out")


def check_told(named: Mapping[str, Any], out: Any) -> None:
    """Raises TypeError for arrays of numpy whose bytes stand in the order of other machines, by their names,
    which no kernel reads, and ValueError for an output some of whose elements are one."""
    for name, value in {**named, "out": out}.items():
        for each in value if _is_pair(value) else (value,):
            if isinstance(each, np.ndarray) and not each.dtype.isnative:
                own = each.dtype.newbyteorder("=").name
                raise TypeError(
                    f"{name} is {each.dtype.str}, whose bytes stand in another order than this machine's: "
                    f"pass {name}.astype({own!r})"
                )
    if isinstance(out, np.ndarray) and out.size:
        repeats = any(step == 0 < length - 1 for step, length in zip(out.strides, out.shape, strict=True))
        if repeats:
            raise ValueError(f"out overlaps itself, its strides are {out.strides}; pass a dense array")
