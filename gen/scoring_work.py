"""What masks and changes of scores make a warp do beside its products, counted from their expressions."""

from __future__ import annotations

from .formula.cost import Place, costs_of
from .functions import Unit
from .limits import WARP
from .problem import Problem
from .scoring import BUFFER_BYTES
from .work import Counts

#: A score is masked by two comparisons and a selection.
ALU_PER_MASKED = 3.0


def pair_counts(
    problem: Problem, rows: float, columns: float, *, warp_rows: int, approximate: bool = False
) -> Counts:
    """Counts what one warp does to change the scores of a tile and to ask the predicate of each, where a lane
    has ``rows`` by ``columns`` of them.

    What depends on the row or the key alone is computed once for each of the lane's. A warp's access to a
    buffer touches ``warp_rows`` rows of it. ``approximate``: functions are those of 16-bit types.
    """
    scores = problem.scores
    pairs = rows * columns
    trees = [each for each in (scores.change, scores.predicate) if each is not None]
    costs = costs_of(*trees, approximate=approximate)
    loaded = [load.buffer for load in costs.loads[Place.PAIR]]
    moved = Counts()
    for buffer in scores.buffers:
        accesses = loaded.count(buffer.name) * pairs
        moved += Counts(
            accesses=accesses,
            wavefronts=accesses * warp_rows,
            delivered=accesses,
            l2_bytes=accesses * WARP * BUFFER_BYTES[buffer.dtype],
            global_waits=float(accesses > 0),
        )
    # The change ends in units of log2; what it and the predicate are asked for is kept within the arrays.
    changed = pairs if scores.change is not None else 0.0
    clamped = rows + columns if trees else 0.0
    masked = ALU_PER_MASKED * pairs if scores.predicate is not None else 0.0
    return moved + Counts(
        ffma=costs.total(Unit.FMA, rows, columns) + changed,
        alu=costs.total(Unit.ALU, rows, columns) + clamped + masked,
        exp=costs.total(Unit.SPECIAL, rows, columns),
    )


def mask_counts(
    problem: Problem, rows: float, columns: float, *, warp_rows: int, bc: int, tiles: float
) -> Counts:
    """Counts what one warp does to mask the scores of an average of its ``tiles`` tiles of ``bc`` keys, of
    which it computes ``warp_rows`` rows: those that a bound of its rows crosses."""
    scores = problem.scores
    if scores.predicate is not None or scores.is_plain:
        return Counts()
    ends = any(not each.flag or each.flag in scores.flags for each in scores.ends[1:])
    moving = bool(scores.begins) + ends
    crossed = min(1.0, moving * (warp_rows / bc + 1) / max(1.0, tiles))
    return Counts(alu=ALU_PER_MASKED * rows * columns) * crossed
