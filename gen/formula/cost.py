"""How many instructions a formula takes, and how often: for each pair of a row and a key, or less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from ..expression import Apply, Constant, Expression, Kind, Load, Name, distinct
from ..tree.functions import FUNCTIONS, Unit


class Place(IntEnum):
    """Of what a part of a formula depends, so that it is computed once for each of that."""

    SAME = 0
    ROW = 1
    COLUMN = 2
    PAIR = 3


_PLACES = {"q": Place.ROW, "row": Place.ROW, "k": Place.COLUMN, "score": Place.PAIR}
#: Instructions for the division of what is not negative by a constant: by a power of two, by another.
_SHIFTED, _MULTIPLIED = {Unit.ALU: 1}, {Unit.FMA: 1, Unit.ALU: 2}


@dataclass(frozen=True)
class Costs:
    """Instructions by unit, and the elements of buffers that are loaded, for each place.

    What is uniform (`Place.SAME`) is computed once for a batch and head; what depends on the row, or on the
    key, alone once for each of these; all else once for each pair.
    """

    units: Mapping[Place, Mapping[Unit, float]]
    loads: Mapping[Place, tuple[Load, ...]]

    def total(self, unit: Unit, rows: float, columns: float) -> float:
        """Returns the instructions for ``rows`` by ``columns`` pairs, but for what is uniform."""
        often = {Place.SAME: 0.0, Place.ROW: rows, Place.COLUMN: columns, Place.PAIR: rows * columns}
        return sum(units.get(unit, 0.0) * often[place] for place, units in self.units.items())


@lru_cache(maxsize=256)
def costs_of(*roots: Expression, approximate: bool = False) -> Costs:
    """Counts the instructions of expressions that are computed together: parts that they share once.

    ``approximate``: functions are those of 16-bit types. A product that is added goes with the sum.
    """
    nodes = distinct(*roots)
    places: dict[Expression, Place] = {}
    units: dict[Place, dict[Unit, float]] = {place: {} for place in Place}
    loads: dict[Place, list[Load]] = {place: [] for place in Place}
    for node in nodes:
        place = _PLACES.get(node.name, Place.SAME) if isinstance(node, Name) else Place.SAME
        for each in node.operands:
            place = Place(place | places[each])  # of a row and of a column: of a pair
        places[node] = place
    fused = _fused(nodes, places)
    for node in nodes:
        place = places[node]
        if isinstance(node, Load):
            loads[place].append(node)
            units[place][Unit.LOAD] = units[place].get(Unit.LOAD, 0.0) + 1
        elif isinstance(node, Apply) and node not in fused:
            for unit, number in _instructions(node, approximate=approximate).items():
                units[place][unit] = units[place].get(unit, 0.0) + number
    return Costs(units, {place: tuple(found) for place, found in loads.items()})


def _fused(nodes: list[Expression], places: Mapping[Expression, Place]) -> frozenset[Expression]:
    """Products that nothing but a sum uses: of two that one whose numbers are the more."""
    users: dict[Expression, list[Expression]] = {}
    for node in nodes:
        for each in node.operands:
            users.setdefault(each, []).append(node)
    sums = {
        node: node.operands for node in nodes if isinstance(node, Apply) and node.function in ("add", "sub")
    }
    found: set[Expression] = set()
    for operands in sums.values():
        products = [each for each in operands if isinstance(each, Apply) and each.function == "mul"]
        last = max(products, key=places.__getitem__, default=None)
        if last is not None and len(users[last]) == 1:
            found.add(last)
    return frozenset(found)


def _instructions(node: Apply, *, approximate: bool) -> Mapping[Unit, int]:
    row, last = FUNCTIONS[node.function], node.operands[-1]
    if node.function in ("floor_div", "floor_mod") and isinstance(last, Constant) and last.number > 0:
        is_power = int(last.number).bit_count() == 1
        return _SHIFTED if is_power else _MULTIPLIED
    if row.fast_costs is not None and approximate:
        return row.fast_costs
    return row.float_costs if row.float_costs is not None and last.kind is Kind.FLOAT else row.costs
