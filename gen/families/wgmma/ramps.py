"""How a Hopper kernel changes scores, and whether products take a ramp along that is part of it."""

from __future__ import annotations

from ...problem import ITEM_BYTES, Problem
from ...scored_tiles.arrays import TileArray
from ...scored_tiles.change import TileChange, steady_change
from .parameters import MIXED, POLYNOMIAL, is_split

#: Columns of a ramp's factors, of 16 bits: the least that products take.
RAMP_COLUMNS = 16
#: Columns of 16 bits of keys and values together up to which a tile's products take no longer than what is
#: issued for its scores. A ramp takes as long as a multiply-add for each score does, but of the tensor cores.
FEW_COLUMNS = 144


def change_of_tiles(
    problem: Problem,
    arrays: tuple[TileArray, ...] = (),
    tangent: str = POLYNOMIAL,
    *,
    slides: bool = False,
) -> TileChange | None:
    """Returns a problem's change of scores as warpgroups make it, tiles of ``arrays`` at hand; None: there is
    none. ``tangent``: how it takes hyperbolic tangents, in float32 those that it cannot take within exponents
    as well as where it takes none there. ``slides``: values of arrays that slide past a tile are named."""
    small = tangent in (POLYNOMIAL, MIXED) or is_split(problem)
    ramp = _products_have_time(problem)
    return steady_change(problem, arrays, ramp=ramp, small_tangents=small, slides=slides)


def ramp_columns(problem: Problem) -> int:
    """Returns how many columns, of 16 bits, factors of scores have beside those of queries and keys."""
    change = change_of_tiles(problem)
    return RAMP_COLUMNS if change is not None and change.ramp else 0


def _products_have_time(problem: Problem) -> bool:
    """Tells whether tensor cores have time for a ramp. Float32 has scores in units of each eight keys."""
    columns = problem.head_dim * ITEM_BYTES[problem.dtype] / 2 + problem.head_dim_v
    return not is_split(problem) and columns <= FEW_COLUMNS
