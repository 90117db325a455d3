"""Arrays whose elements slide past a tile's scores: those of a row lie side by side, as distances' biases do.

An index that is affine in row and key, as ``q - k`` in ``table[h, q - k]``, differs from score to score of a
thread by what is known when a kernel is compiled. So if all that a tile's scores read is within the array, as
in nearly all tiles, a thread finds one element's address and reads the others around it: no index is kept
within the array one by one, and rows that are eight apart share what they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..expression import Expression, loads_of
from ..formula.affine import affine_in
from ..scoring.scores import HEAD, KEY, QUERY, Scores
from .arrays import MetArray, name_beside


@dataclass(frozen=True)
class SlidingArray(MetArray):
    """An array of which ``load`` takes the element ``per_row`` further in the last axis for the next row, and
    ``per_key`` further for the next key, where its other axes are at the same place for all pairs."""

    per_row: int
    per_key: int

    @property
    def size(self) -> str:
        """C++ for how many elements there are in the last axis."""
        return f"args.{dict(self.buffer.sizes)[len(self.load.indices) - 1]}"

    def index(self, scores: Scores, **places: str) -> tuple[list[str], str]:
        """Returns the lines of C++ that find the last index of the element of a row and a key, and that;
        ``places`` are what these are called, by their names in expressions."""
        return scores.statements(self.load.indices[-1], f"{self.name}_i", **places)

    def place(self, scores: Scores, **places: str) -> tuple[list[str], str]:
        """Returns the lines of C++ that find where the element of a row and a key is, and that,
        likewise."""
        lines, element = scores.statements(self.load, f"{self.name}_p", **places)
        return lines, f"place_in_{element.replace('_at(', '(', 1)}"

    def behind(self, rows: str, columns: str) -> str:
        """Returns C++ for how far behind the element of a row and key the one is of so many ``rows`` and
        ``columns`` further."""
        first, *others = _signed(((self.per_row, rows), (self.per_key, columns)))
        sign, multiple = first
        return "".join((sign.strip(" +"), multiple, *(part for each in others for part in each)))

    def span(self, rows: str, columns: str) -> tuple[str, str]:
        """Returns what C++ for an element's index is followed by to be the least and the greatest index of
        those up to so many ``rows`` and ``columns`` further."""
        steps = _signed(((self.per_row, rows), (self.per_key, columns)))
        falls, rises = ("".join(sign + text for sign, text in steps if sign == own) for own in (" - ", " + "))
        return falls, rises


@cache
def sliding_arrays(scores: Scores) -> tuple[SlidingArray, ...]:
    """Returns the arrays that slide past the scores that they change."""
    if scores.change is None:
        return ()
    buffers = {each.name: each for each in scores.buffers if not each.axes[-1]}
    found: list[SlidingArray] = []
    for load in loads_of(scores.change):
        *outer, last = load.indices
        along_keys = affine_in(KEY, last)
        if load.buffer not in buffers or along_keys is None or along_keys.times == 0 or _are_of_pairs(outer):
            continue
        along_rows = affine_in(QUERY, along_keys.rest)
        if along_rows is not None:
            name = name_beside(load.buffer, found)
            steps = along_rows.times, along_keys.times
            found.append(SlidingArray(load, buffers[load.buffer], name, *steps))
    return tuple(found)


@cache
def sliding_past_tiles(scores: Scores) -> tuple[SlidingArray, ...]:
    """Returns those of which a tile's first row and key tell, whatever its head, whether all is within them
    that the change reads."""
    arrays = sliding_arrays(scores)
    if scores.change is None:
        return ()
    told = [each.load for each in arrays if HEAD.name not in each.load.indices[-1].names()]
    others = {each.buffer for each in loads_of(scores.change) if each not in told}
    return tuple(each for each in arrays if each.load.buffer not in others)


def _are_of_pairs(indices: list[Expression]) -> bool:
    """Whether some index is another for other rows or keys."""
    return any(not each.names().isdisjoint({QUERY.name, KEY.name}) for each in indices)


def _signed(steps: tuple[tuple[int, str], ...]) -> list[tuple[str, str]]:
    """The signs and the magnitudes of some multiples in C++, zeros left out."""
    return [
        (" - " if times < 0 else " + ", place if abs(times) == 1 else f"{abs(times)} * {place}")
        for times, place in steps
        if times
    ]
