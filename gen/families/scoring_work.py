"""What masks and changes of scores make a warp do beside its products, counted from their expressions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..expression import Expression
from ..formula.cost import Place, costs_of
from ..limits import WARP
from ..problem import Problem
from ..scored_tiles.arrays import TileArray
from ..scored_tiles.change import changed_tile, reads_at
from ..scored_tiles.sliding import SlidingArray
from ..scoring.asked import BUFFER_BYTES
from ..scoring.scores import KEY, QUERY
from ..tree.functions import Unit
from ..work import Counts

#: What an access to global memory brings at once.
LINE_BYTES = 128
#: What a lane copies by one access.
COPIED_BYTES = 16
#: Lanes that share a row of the tensor cores' products.
LANES_OF_ROW = 4
#: A score is masked by two comparisons and a selection.
ALU_PER_MASKED = 3.0
#: Of keys at every so many: per score, which is selected, bits of two neighbours becoming predicates at once;
#: and per row and 32 keys, whose bits are found.
STEP_SLOTS, STEP_WORD_SLOTS = 1.75, 4.0


def pair_counts(
    problem: Problem,
    rows: float,
    columns: float,
    *,
    warp_rows: int,
    partial: float = 1.0,
    approximate: bool = False,
    change: Sequence[Expression] | None = None,
    predicate: Sequence[Expression] | None = None,
) -> Counts:
    """Counts what one warp does to change the scores of a tile and to ask the predicate of each, where a lane
    has ``rows`` by ``columns`` of them.

    What depends on the row or the key alone is computed once for each of the lane's. A warp's access to a
    buffer touches ``warp_rows`` rows of it. ``partial`` is the share of tiles in which the predicate is
    asked. ``approximate``: functions are those of 16-bit types. ``change`` is what the kernel computes in the
    change's place, if these are other expressions, which leave the units of log2 to the exponentials;
    ``predicate`` what it computes in the predicate's, likewise.
    """
    scores, pairs = problem.scores, rows * columns
    counts = Counts()
    if scores.change is not None:
        trees = change or (scores.change,)
        changed = _tree_counts(problem, trees, rows, columns, warp_rows, approximate=approximate)
        counts += changed + Counts(ffma=0.0 if change else pairs)  # which ends in units of log2
    if scores.predicate is not None:
        trees = predicate or (scores.predicate,)
        asked = _tree_counts(problem, trees, rows, columns, warp_rows, approximate=approximate)
        counts += (asked + Counts(alu=ALU_PER_MASKED * pairs)) * partial
    return counts


def period_counts(rows: float, columns: float) -> Counts:
    """Counts what one warp does to hide what is between keys at every so many, where a lane has ``rows`` by
    ``columns`` scores of a tile, two of every eight keys."""
    words = rows * max(1.0, columns * LANES_OF_ROW / WARP)
    return Counts(alu=STEP_SLOTS * rows * columns + STEP_WORD_SLOTS * words)


def array_counts(array: TileArray, pairs: float, *, copies_itself: bool = True) -> Counts:
    """Counts what one warp does to read a tile of an array in shared memory where a lane has so many
    ``pairs``: two neighbours at a time, which leave 16 bits by an instruction each; and to copy it there
    before, unless it comes by itself."""
    bytes_of_lane = pairs * array.item_bytes
    copies = bytes_of_lane / COPIED_BYTES if copies_itself else 0.0
    reads = pairs / (4 if array.item_bytes == 2 else 2)
    return Counts(
        alu=pairs if array.item_bytes < 4 else 0.0,
        accesses=copies + reads,
        wavefronts=(bytes_of_lane + max(bytes_of_lane, 2 * pairs)) / 4,  # copied, and read
        l2_bytes=WARP * bytes_of_lane,
    )


def sliding_counts(array: SlidingArray, rows: int, columns: int) -> Counts:
    """Counts what one warp does to read an array that slides past a tile, where a lane has ``rows`` eight
    apart and ``columns`` as tensor cores leave them, two of every eight: each element that a lane's scores
    meet is read once, and lanes' elements lie side by side."""
    places = {
        8 * row * array.per_row + (column // 2 * 8 + column % 2) * array.per_key
        for row in range(rows)
        for column in range(columns)
    }
    # Elements among which the lanes of an access, eight rows by four pairs of columns, read theirs.
    together = 7 * abs(array.per_row) + 6 * abs(array.per_key) + 1
    item_bytes = BUFFER_BYTES[array.buffer.dtype]
    accesses = float(len(places))
    return Counts(
        alu=accesses if item_bytes == 2 else 0.0,
        accesses=accesses,
        wavefronts=accesses * -(-together * item_bytes // LINE_BYTES),
        delivered=accesses,
        l2_bytes=float((max(places) - min(places) + together) * item_bytes),
        global_waits=1.0,
    )


def _tree_counts(
    problem: Problem,
    trees: Sequence[Expression],
    rows: float,
    columns: float,
    warp_rows: int,
    *,
    approximate: bool,
) -> Counts:
    """The instructions and loads of expressions for all pairs of a lane: rows and keys where arrays are read
    are kept within these."""
    costs = costs_of(*trees, approximate=approximate)
    loaded = [load.buffer for load in costs.loads[Place.PAIR]]
    clamped = rows * reads_at(QUERY, *trees) + columns * reads_at(KEY, *trees)
    counts = Counts(
        ffma=costs.total(Unit.FMA, rows, columns),
        alu=costs.total(Unit.ALU, rows, columns) + clamped,
        exp=costs.total(Unit.SPECIAL, rows, columns),
    )
    for buffer in problem.scores.buffers:
        accesses = loaded.count(buffer.name) * rows * columns
        counts += Counts(
            accesses=accesses,
            wavefronts=accesses * warp_rows,
            delivered=accesses,
            l2_bytes=accesses * WARP * BUFFER_BYTES[buffer.dtype],
            global_waits=float(accesses > 0),
        )
    return counts


@lru_cache(maxsize=256)
def asks_special_functions(problem: Problem) -> bool:
    """Tells whether tensor cores' threads change each score by some function of the unit that exponentials
    wait for."""
    change = changed_tile(problem)
    if change is None:
        return False
    costs = costs_of(*change.in_names_of_pairs, approximate=problem.dtype != "f32")
    return costs.units[Place.PAIR].get(Unit.SPECIAL, 0.0) > 0


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
