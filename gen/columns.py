"""Rules asked about many variants at once: their code is run once for each way through it, not for each
variant.

To a rule a parameter is a number. Here it is a column of numbers, one of each variant, and so is what the
rule makes of it; where its code branches, the variants whose answer is the other one are set aside, and come
to a run of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def least(*values: Any) -> Any:
    """Returns the least of some numbers; of columns that of each variant, without the partings of `min`."""
    if Column not in map(type, values):
        return min(values)
    import numpy as np

    path = next(each for each in values if type(each) is Column).path
    return Column(path, reduce(np.minimum, [e.values if type(e) is Column else e for e in values]))


class Path:
    """One way through a rule's code, and the variants that take it: ``rows``, numbers of whoever asks. Those
    that take others are set ``aside``, together as far as they went together."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.aside: list[np.ndarray] = []
        self.stayed: list[np.ndarray] = []
        """Of each parting, which of those who were there stayed."""

    def answer(self, truths: np.ndarray) -> bool:
        """Returns what all answer who stay."""
        if truths.all():
            return True
        if truths.any():
            self._keep(truths)
            return True
        return False

    def one(self, values: np.ndarray) -> Any:
        """Returns the value of all who stay."""
        first = values[0]
        same = values == first
        if not same.all():
            self._keep(same)
        return first.item()

    def _keep(self, staying: np.ndarray) -> None:
        self.aside.append(self.rows[~staying])
        self.rows = self.rows[staying]
        self.stayed.append(staying)


class Column:
    """A number of each variant on a path, with the arithmetic of a number. Where Python wants to know one, or
    whether it is true, the path parts."""

    __slots__ = ("_path", "_since", "_values")
    #: Nothing remembers what it made of columns: they are of one path.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, path: Path, values: np.ndarray) -> None:
        self._path, self._values, self._since = path, values, len(path.stayed)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def values(self) -> np.ndarray:
        """The numbers of the variants that are still on the path."""
        stayed = self._path.stayed
        if self._since != len(stayed):
            for each in stayed[self._since :]:
                self._values = self._values[each]
            self._since = len(stayed)
        return self._values

    def __bool__(self) -> bool:
        return self._path.answer(self.values != 0)

    def __index__(self) -> int:
        return operator.index(self._path.one(self.values))

    def __int__(self) -> int:
        return int(self._path.one(self.values))

    def __float__(self) -> float:
        return float(self._path.one(self.values))

    def __floor__(self) -> Column:
        return Column(self._path, (self.values // 1).astype("int64"))

    def __ceil__(self) -> Column:
        return Column(self._path, -(-self.values // 1).astype("int64"))

    def __format__(self, spec: str) -> str:
        # In the words of a reason, of which nothing counts but that there is one.
        return "..."


def _of_two(apply: Callable[[Any, Any], Any], *, turned: bool = False) -> Callable[[Column, Any], Column]:
    def made(self: Column, other: Any) -> Column:
        if isinstance(other, Column):
            other = other.values
        elif not isinstance(other, int | float):
            return NotImplemented
        values = self.values
        return Column(self._path, apply(other, values) if turned else apply(values, other))

    return made


def _of_truth(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Truths that are numbers, as Python's are."""
    return lambda one, other: apply(one, other).astype("int64")


def _of_one(apply: Callable[[Any], Any]) -> Callable[[Column], Column]:
    return lambda self: Column(self._path, apply(self.values))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"):
    _apply, _plain = getattr(operator, _name), _name.strip("_")
    setattr(Column, f"__{_plain}__", _of_two(_apply))
    setattr(Column, f"__r{_plain}__", _of_two(_apply, turned=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Column, f"__{_name}__", _of_two(_of_truth(getattr(operator, _name))))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Column, f"__{_name}__", _of_one(getattr(operator, _name)))
