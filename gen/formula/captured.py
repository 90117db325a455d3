"""The arrays and numbers that a traced function has captured and uses, as a kernel will know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..expression import Expression, Kind, Load, Name, apply
from .dtypes import BUFFER_DTYPES, dtype_name, kind_of
from .identifiers import fresh_identifier


class TraceError(TypeError, ValueError):
    """A function that does what no formula can."""


class Captured:
    """Names for what is captured, which come with its use."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}
        #: Arrays without axes, whose numbers the kernel takes at run time.
        self._numbers: dict[str, Any] = {}
        #: The values that have a name, which live as long: or their ids would be others'.
        self._named: dict[int, tuple[str, Any]] = {}

    def element(self, array: Any, hint: str, indices: tuple[Expression, ...]) -> Expression:
        """Returns an element of an array, which is one buffer wherever it is used."""
        dtype = dtype_name(array.dtype)
        if dtype not in BUFFER_DTYPES:
            raise TraceError(f"{hint} is {dtype}; formulas read {', '.join(BUFFER_DTYPES)}: convert it")
        name = self._name(array, hint, self._arrays)
        return _truth_or_number(kind_of(dtype), lambda kind: Load(name, indices, kind))

    def number(self, array: Any, hint: str) -> Expression:
        """Returns an array without axes."""
        name = self._name(array, hint, self._numbers)
        return _truth_or_number(kind_of(array.dtype), lambda kind: Name(name, kind))

    def buffers(self, used: frozenset[str]) -> Mapping[str, Any]:
        """Returns arrays by their names."""
        return {name: array for name, array in self._arrays.items() if name in used}

    def scalars(self, used: frozenset[str]) -> Mapping[str, float]:
        """Returns numbers by their names; those of a card are copied from it only here."""
        return {name: array.item() for name, array in self._numbers.items() if name in used}

    def _name(self, value: Any, hint: str, group: dict[str, Any]) -> str:
        if id(value) not in self._named:
            name = fresh_identifier(hint, (*self._arrays, *self._numbers))
            self._named[id(value)] = (name, value)
            group[name] = value
        return self._named[id(value)][0]


def _truth_or_number(kind: Kind, make: Any) -> Expression:
    """A value of a kernel, which has truths as integers."""
    return apply("ne", make(Kind.INT), 0) if kind is Kind.BOOL else make(kind)
