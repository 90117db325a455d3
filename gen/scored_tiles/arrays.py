"""Arrays that masks and changes of scores read at each pair's own row and key, as biases are.

A tile of scores meets a tile of them, which a kernel can bring to shared memory ahead of the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from ..expression import Expression, Load, Name, apply, loads_of, replaced
from ..scoring.asked import BUFFER_BYTES
from ..scoring.scores import BATCH, HEAD, KEY, QUERY, Buffer, Scores
from .gathering import local

#: The types that are brought ahead: floats and boolean masks.
DTYPES = frozenset({"f32", "f16", "bf16", "u8"})
#: What batch and head of a tile are called in C++.
_PLACES: dict[Expression, str] = {BATCH: "batch", HEAD: "head"}


@dataclass(frozen=True)
class MetArray:
    """An array that an expression takes an element of for each pair, which can be named instead."""

    load: Load
    buffer: Buffer
    name: str
    """What it is called in C++."""

    @property
    def value(self) -> Name:
        """The element of a pair, as C++ calls it once it is there."""
        return local(f"{self.name}_value", self.load.kind)


Met = TypeVar("Met", bound=MetArray)


class TileArray(MetArray):
    """An array that is read at plain row and key, and batch and head if at all, by one of an expression's
    elements."""

    @property
    def item_bytes(self) -> int:
        """The bytes of an element."""
        return BUFFER_BYTES[self.buffer.dtype]

    @property
    def is_alone(self) -> bool:
        """Whether its buffer is read in no other way, so that each of its axes is that of one index."""
        return all(len(axis) == 1 for axis in self.buffer.axes) and self.name == self.buffer.name

    @property
    def places(self) -> tuple[str, ...]:
        """What the indices of all axes but the last are called in C++."""
        return tuple(_PLACES.get(each, "row") for each in self.load.indices[:-1])

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """Of all axes but the last, what C++ calls the index, and the name of the stride."""
        return tuple(zip(self.places, self.buffer.strides, strict=True))

    def stride_of(self, axis: str) -> str:
        """Returns the name of its stride along an axis that C++ calls so, ``batch``, ``head`` or ``row``;
        empty where it has no such axis."""
        return dict(self.steps).get(axis, "")

    @property
    def row_stride(self) -> str:
        """C++ for the elements from one row to the next."""
        return f"args.{self.buffer.strides[self.load.indices.index(QUERY)]}"

    @property
    def offset_of_head(self) -> str:
        """C++ for the elements from the first one to those of a tile's batch and head; empty for none."""
        strides = zip(self.load.indices, self.buffer.strides, strict=False)
        places = ((_PLACES.get(each), stride) for each, stride in strides)
        return " + ".join(f"tile.{place} * args.{stride}" for place, stride in places if place)


def name_beside(buffer: str, others: Sequence[MetArray]) -> str:
    """Returns what C++ calls an array of a buffer that others may be of, too."""
    before = sum(each.load.buffer == buffer for each in others)
    return f"{buffer}{before or ''}"


@cache
def tile_arrays(scores: Scores) -> tuple[TileArray, ...]:
    """Returns the arrays of which tiles can be brought ahead of the scores that meet them."""
    trees = [each for each in (scores.change, scores.predicate) if each is not None]
    buffers = {each.name: each for each in scores.buffers if each.dtype in DTYPES and all(each.axes)}
    loads = [each for each in loads_of(*trees) if each.buffer in buffers and _is_plain(each)]
    found: list[TileArray] = []
    for load in loads:
        found.append(TileArray(load, buffers[load.buffer], name_beside(load.buffer, found)))
    return tuple(found)


@cache
def bytes_that_say(predicate: Expression | None, arrays: tuple[TileArray, ...]) -> TileArray | None:
    """Returns the array of bytes of which a predicate asks whether the pair's is not zero, and nothing else;
    None where it asks for more, or for another."""
    of_bytes = [each for each in arrays if each.buffer.dtype == "u8"]
    return next((each for each in of_bytes if apply("ne", each.load, 0) == predicate), None)


@cache
def met_by(expression: Expression | None, arrays: tuple[TileArray, ...]) -> tuple[TileArray, ...]:
    """Returns those of some arrays that an expression takes elements of."""
    return () if expression is None else taken_by(expression, arrays)


def taken_by(expression: Expression, arrays: Sequence[Met]) -> tuple[Met, ...]:
    """Returns those of some arrays, of one kind, that an expression takes elements of."""
    loads = loads_of(expression)
    return tuple(each for each in arrays if each.load in loads)


def with_values(expression: Expression, arrays: Sequence[MetArray]) -> Expression:
    """Returns an expression that names the elements of pairs instead of loading them."""
    return replaced(expression, {each.load: each.value for each in arrays})


def _is_plain(load: Load) -> bool:
    """Tells whether an element is that of a pair's own row and key, in its last axis."""
    *outer, last = load.indices
    return last == KEY and len({*outer}) == len(outer) and {QUERY} <= {*outer} <= {QUERY, *_PLACES}
