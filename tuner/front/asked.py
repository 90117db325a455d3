"""What a call asks of masks and scores, by name, as text and by function, as kernels are made for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...gen.scoring.asked import PLAIN, Scoring
from ...gen.scoring.traced import traced_scoring
from ...templates.runtime.scored_kinds import _either
from ...templates.runtime.scored_values import _BUFFER_DTYPES, _BUFFER_TYPESTRS, _is_pair
from .legal import check_reach, numbers_of

#: What a kernel is chosen for where a call's arrays say how much there is, and may lie on a card: the keys
#: that all rows see, the documents.
_PREFIX, _DOCUMENTS = 1024, 8
#: Soft caps all take as long.
_SOFTCAP = 30.0
#: How exact numbers count in the choice of a kernel: by these steps of a doubling.
_STEPS = 2
#: What problems call the types of arrays.
_DTYPES = {name: dtype for dtype, names in _BUFFER_DTYPES.items() for name in names}
_TYPESTRS = {"<f4": "float32", "<f2": "float16", **_BUFFER_TYPESTRS}

#: Masks and changes of scores that have names, and no place in the signatures of packed sequences and caches.
_BY_VALUE = ("always", "chunk", "prefix", "lengths", "documents", "dilation", "tree", "bias")

#: The types of arrays that masks and changes of scores read, by their names.
_READ_DTYPES = {
    "sinks": ("float32",),
    "alibi_slopes": ("float32",),
    "prefix": ("int32",),
    "lengths": ("int32",),
    "tree": ("int64",),
    "bias": ("float32", "float16", "bfloat16", "bool", "uint8"),
    "documents": ("int32", "int64", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
}
#: Of documents that are told by where each row's begins and ends.
_BOUNDS_DTYPES = ("int32",)

#: A function as FlexAttention takes it, or its text.
Formula = Callable[..., Any] | str


class Asked(NamedTuple):
    """The scoring that kernels are made and chosen for, and what a call says by keyword."""

    scoring: Scoring
    told: Mapping[str, Any]


def asked_of(
    named: Mapping[str, Any],
    mask: Formula | None,
    score: Formula | None,
    values: Mapping[str, Any],
    bias_name: str = "bias",
) -> Asked:
    """Returns what a call asks: ``named`` are the masks and changes that have names, without those that are
    None, ``values`` what texts read. ``bias_name`` is what the caller calls the bias.

    Raises TypeError and ValueError for what has no meaning.
    """
    if not (named or values) and mask is None and score is None:
        return Asked(PLAIN, {})
    for name, formula in (("mask", mask), ("score", score)):
        if formula is not None and not (isinstance(formula, str) or callable(formula)):
            kind = type(formula).__name__
            raise TypeError(f"{name} is a {kind}; pass a function as FlexAttention takes it, or its text")
    functions = {"mask": mask, "score": score}
    texts = {name: each for name, each in functions.items() if isinstance(each, str)}
    if values and not texts:
        raise TypeError(
            f"{next(iter(values))}= is no argument of attention, and no text of mask= or score= reads it"
        )
    for name in named:
        if name in _READ_DTYPES:
            _check_read(name, bias_name if name == "bias" else name, named[name])
    traced = traced_scoring(**{name: each for name, each in functions.items() if callable(each)})
    told = {**named, **traced.values, **values}
    buffers, scalars = dict(traced.scoring.buffers), dict(traced.scoring.scalars)
    for name, value in values.items():
        if isinstance(value, bool | int | float):
            scalars[name] = value
        else:
            buffers[name] = _dtype_of(name, value)
    scoring = replace(
        _named_scoring(named),
        **{name: getattr(traced.scoring, name) for name in functions if getattr(traced.scoring, name)},
        **texts,
        buffers=tuple(buffers.items()),
        scalars=tuple(scalars.items()),
    )
    return Asked(scoring, told)


def named_apart(
    named: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """Returns the masks and changes that have names, without those that are None, what texts read, and what
    the caller calls the bias, of a call in whose signature some are ``named`` and others are among
    ``values``, the bias by either of its names. Raises TypeError for a bias that is passed twice, and as
    `numbers_of` does."""
    named, values = dict(named), dict(values)
    for name in _BY_VALUE:
        named[name] = values.pop(name, None)
    attn_mask = values.pop("attn_mask", None)
    named["bias"] = _either(named["bias"], attn_mask)
    named = {name: value for name, value in named.items() if value is not None}
    return *numbers_of(named, values), "bias" if attn_mask is None else "attn_mask"


def in_steps(scoring: Scoring) -> Scoring:
    """Returns what stands for a scoring and all that differ from it in numbers of no weight."""
    asked: dict[str, Any] = {
        name: _in_steps(getattr(scoring, name)) for name in ("always", "chunk", "dilation")
    }
    if scoring.window is not None:
        asked["window"] = tuple(map(_in_steps, scoring.window))
    usual = {"softcap": _SOFTCAP, "prefix": _PREFIX, "documents": _DOCUMENTS}
    asked |= {name: number for name, number in usual.items() if getattr(scoring, name)}
    return replace(scoring, **asked)


def _named_scoring(named: Mapping[str, Any]) -> Scoring:
    asked: dict[str, Any] = {}
    if "window" in named:
        asked["window"] = _window(named["window"])
    for name in ("always", "chunk", "dilation"):
        if name in named:
            asked[name] = _in_steps(check_reach(name, named[name]))
    if "softcap" in named:
        if not 0 < named["softcap"] < 3.4e38:
            raise ValueError(f"softcap is {named['softcap']!r}; it must be a positive number")
        asked["softcap"] = _SOFTCAP
    if "prefix" in named:
        asked["prefix"] = _PREFIX
    if "documents" in named:
        asked["documents"] = _DOCUMENTS
    asked |= {name: True for name in ("lengths", "tree", "sinks") if name in named}
    if "alibi_slopes" in named:
        asked["alibi"] = True
    if "bias" in named:
        asked["bias"] = _dtype_of("bias", named["bias"])
    return Scoring(**asked)


def _window(window: Any) -> tuple[int, int]:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window is {window!r}; pass (left, right), -1 or None for all keys on a side")
    sides = [-1 if side is None else check_reach("window", side, window) for side in window]
    return _in_steps(sides[0]), _in_steps(sides[1])


def _in_steps(number: int) -> int:
    """What stands for all numbers near one in the choice of a kernel; signs and nothing stay."""
    if number <= 1:
        return number
    return round(2 ** (round(math.log2(number + 1) * _STEPS) / _STEPS)) - 1


def _check_read(name: str, called: str, array: Any) -> None:
    """Raises TypeError unless it is an array of a type that a mask or change of that name reads."""
    if name == "documents" and _is_pair(array):
        for each in array:
            _type_of(called, each, _BOUNDS_DTYPES)
    else:
        _type_of(called, array, _READ_DTYPES[name])


def _dtype_of(name: str, array: Any) -> str:
    """What a kernel is told of the type of an array that it reads."""
    return _DTYPES[_type_of(name, array[0] if _is_pair(array) else array, tuple(_DTYPES))]


def _type_of(name: str, array: Any, served: tuple[str, ...]) -> str:
    """The type of an array, as libraries call it. Raises TypeError for what is none, or of another type."""
    told = str(getattr(array, "dtype", "")).removeprefix("torch.")
    if not told:
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            or_number = ", or a number" if served == tuple(_DTYPES) else f": {', '.join(served[:5])}"
            raise TypeError(f"{name} is a {type(array).__name__}; pass an array of q's library{or_number}")
        told = _TYPESTRS.get(interface["typestr"], interface["typestr"])
    if told not in served:
        raise TypeError(f"{name} is {told}; served are {', '.join(served)}")
    return told
