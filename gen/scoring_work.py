"""What masks and changes of scores make a warp do beside its products, counted from their expressions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .expression import Apply, Expression, Load, distinct
from .functions import FUNCTIONS, Kind, Unit
from .limits import WARP
from .problem import Problem
from .scores import KEY, QUERY, SCORE
from .work import Counts

#: A score is masked by two comparisons and a selection.
ALU_PER_MASKED = 3.0
#: Bytes of an element of a buffer, by its type.
BUFFER_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i16": 2, "i32": 4, "i64": 8, "u8": 1}


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
    units: defaultdict[Unit, float] = defaultdict(float)
    loads: defaultdict[str, float] = defaultdict(float)
    trees = [each for each in (scores.change, scores.predicate) if each is not None]
    for node in distinct(*trees):
        times = _times(node, rows, columns)
        if isinstance(node, Load):
            loads[node.buffer] += times if times == pairs else 0
        elif isinstance(node, Apply):
            for unit, number in _costs(node, approximate=approximate):
                units[unit] += number * times
    moved = Counts()
    for buffer in scores.buffers:
        accesses = loads[buffer.name]
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
        ffma=units[Unit.FMA] + changed,
        alu=units[Unit.ALU] + clamped + masked,
        exp=units[Unit.SPECIAL],
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


def _times(node: Expression, rows: float, columns: float) -> float:
    """How often a lane computes it for a tile; 0 where that is the same for all tiles."""
    names = node.names()
    if SCORE.name in names or {QUERY.name, KEY.name} <= names:
        return rows * columns
    return rows if QUERY.name in names else columns if KEY.name in names else 0.0


def _costs(node: Apply, *, approximate: bool) -> Iterator[tuple[Unit, int]]:
    row = FUNCTIONS[node.function]
    costs = row.costs
    if row.float_costs is not None and node.operands[-1].kind is Kind.FLOAT:
        costs = row.float_costs
    if row.fast_costs is not None and approximate:
        costs = row.fast_costs
    yield from costs.items()
