"""How a Hopper kernel takes hyperbolic tangents of scores, where these are small, as a soft cap's mostly are.

A polynomial leaves the special-function unit to the exponentials; by turns with that unit it takes fewer
issue slots. Where a tangent is all that becomes of a score, its polynomial is a factor within the
multiply-add that makes the exponent, and maxima are found among raw scores, whose order it keeps.
"""

from __future__ import annotations

from functools import lru_cache

from ...problem import Problem
from ...scored_tiles.change import steady_change
from ...scored_tiles.tangents import TangentInPowers, tangent_in_powers
from .parameters import CUBIC, NONIC, POLYNOMIAL, QUINTIC, SEPTIC, is_split
from .ramps import change_of_tiles

#: The odd powers that tangents within exponents have, of 16 bits and of float32.
_POWERS = {CUBIC: 2, QUINTIC: 3}
_FINE_POWERS = {QUINTIC: 3, SEPTIC: 4, NONIC: 5}
WITHIN_EXPONENTS = (*_POWERS, SEPTIC, NONIC)


@lru_cache(maxsize=256)
def cap_in_exponents(problem: Problem, tangent: str) -> TangentInPowers | None:
    """Returns the hyperbolic tangent that a kernel takes within exponents; None: it does not, or cannot."""
    powers = _FINE_POWERS if is_split(problem) else _POWERS
    change = steady_change(problem, small_tangents=False) if tangent in powers else None
    if change is None or change.row_values or change.bends:
        return None
    return tangent_in_powers(change.body, powers[tangent], approximate=not is_split(problem))


@lru_cache(maxsize=256)
def why_no_such_tangent(problem: Problem, tangent: str) -> str | None:
    """Says why a problem's kernels have no choice, or not this one; None where they have."""
    if tangent == POLYNOMIAL:
        return None
    change = change_of_tiles(problem)
    if change is None or change.tangent is None:
        return "no hyperbolic tangent of a multiple of scores"
    if is_split(problem) and tangent not in _FINE_POWERS:
        return f"{problem.dtype} has tangents of its own precision"
    if not is_split(problem) and tangent in (SEPTIC, NONIC):
        return f"{problem.dtype} bears tangents of fewer powers"
    if tangent in WITHIN_EXPONENTS and cap_in_exponents(problem, tangent) is None:
        return "not made for scores of which more becomes than a tangent"
    return None
