"""What families of gradients have in common: three launches, and what the first leaves the others of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..expression import Constant, Expression
from ..formula.derivative import derivative
from ..handover.plan import Plan
from ..handover.query_sums import TILE_ROWS, postprocess_launch, query_sums_region
from ..handover.statistics import (
    STATISTICS_THREADS,
    RowSums,
    statistics_launch,
    statistics_regions,
    sums_by_lanes,
)
from ..handover.workspace import Workspace
from ..launch import QUERIES_ROLE, Launch
from ..limits import DeviceLimits
from ..problem import Problem
from ..scored_tiles.sliding import sliding_past_tiles
from ..scoring.buffer_gradients import (
    PAIR_COLUMNS,
    PAIR_KEYS,
    PAIR_ROWS,
    PAIR_THREADS,
    SINK_THREADS,
    buffer_gradients,
)
from ..scoring.first_rows import first_rows_behind
from ..scoring.scores import SCORE, Scores
from ..variant import Variant

_ONE = Constant(1.0)
#: The first architecture that adds four numbers to neighbouring ones in memory by one instruction.
VECTOR_SUMS = 90


def slope_of_change(scores: Scores) -> Expression | None:
    """Returns how fast changed scores grow with scores; None where as fast as these, as what is added to them
    does not matter to that."""
    slope = _ONE if scores.change is None else derivative(scores.change, SCORE.name)
    return None if slope == _ONE else slope


@dataclass(frozen=True)
class GradientVariant(Variant):
    """The base of variants whose main launch keeps keys, and another one query rows, unless the first adds up
    the gradients of these in memory.

    What `rows_per_block`, `threads` and `smem_bytes` say is of blocks that keep keys.
    """

    def blocks_of_queries(self, problem: Problem) -> tuple[int, int, int]:
        """Returns the threads, the bytes of shared memory and the query rows of a block that keeps these."""
        raise NotImplementedError

    def summed_columns(self, problem: Problem) -> int:
        """Returns the columns of the queries' gradients that blocks of keys add up in the workspace; 0 where
        a launch of its own makes them."""
        return 0

    @property
    def reads_sums(self) -> bool:
        """Whether these begin at nothing, and a launch of their own reads them from there; else blocks of
        keys write gradients themselves, and leave sums there where they come to a row more than once."""
        return True

    @property
    def statistics_tile(self) -> int:
        """The multiple of a head's rows for which there is room for what is known of them: where whole tiles
        of it are copied at once."""
        return 1

    def row_sums(self, problem: Problem) -> RowSums:
        """Returns how outputs times their gradients are summed, row by row."""
        return sums_by_lanes(problem.head_dim_v, self.access_width(problem))

    @property
    def counts_turns(self) -> bool:
        """Whether blocks of keys count in the workspace what they have taken, from nothing on."""
        return False

    @property
    def hands_on_sums(self) -> bool:
        """Whether blocks of keys hand on what they add up, in an order of keys: for each tile of rows the
        workspace tells how far that is."""
        return False

    @property
    def adds_in_between(self) -> bool:
        """Whether that order is one of the first keys and the last, between which blocks add as they come."""
        return False

    @property
    def unordered(self) -> bool:
        return self.adds_in_between

    @property
    def sums_across(self) -> bool:
        """Whether what they add up lies in memory as tensor cores leave it where they make queries' gradients
        the other way round, a row for each column of these."""
        return False

    @property
    def sums_by_tiles(self) -> bool:
        """Whether it goes by whole tiles of the rows that pass by, as statistics do."""
        return False

    def launch(self, problem: Problem, limits: DeviceLimits) -> Launch:
        """Returns the launch that makes the gradients of keys and values."""
        smem_bytes = self.smem_bytes(problem, limits)
        packed = problem.layout.is_packed
        return Launch(self.threads(), smem_bytes, self.rows_per_block(), of_keys=True, packed=packed)

    def launches(self, problem: Problem, limits: DeviceLimits) -> tuple[Launch, ...]:
        """Returns those of a plan where sequences are packed, of the rows' statistics and of the queries'
        gradients, and `launch`, which stands before what it adds up for; and those of the gradients of what
        scores read."""
        main, plan = self.launch(problem, limits), self.plan(problem, limits)
        before = () if plan is None else (plan.launch,)
        before += self.launches_in_front(problem)
        rows = self.row_sums(problem).rows
        statistics = statistics_launch(packed=problem.layout.is_packed, rows=rows)
        of_buffers = (each.launch for each in buffer_gradients(problem.scores))
        if self.summed_columns(problem):
            behind = (self._postprocess(problem),) if self.reads_sums else ()
            return (*before, statistics, main, *behind, *of_buffers)
        return (*before, statistics, self._queries(problem), main, *of_buffers)

    def _queries(self, problem: Problem) -> Launch:
        packed = problem.layout.is_packed
        return Launch(*self.blocks_of_queries(problem), role=QUERIES_ROLE, packed=packed)

    def _postprocess(self, problem: Problem) -> Launch:
        return postprocess_launch(self._packed_tile(problem))

    def _packed_tile(self, problem: Problem) -> int:
        """The rows that packed sequences are filled up to multiples of in the workspace; 0 of dense ones."""
        return self.statistics_tile if problem.layout.is_packed else 0

    def plan(self, problem: Problem, limits: DeviceLimits) -> Plan | None:
        """Returns the plan of both, or of keys alone; None where a block's number says what it takes."""
        if not problem.layout.is_packed:
            return None
        queries = () if self.summed_columns(problem) else (self._queries(problem),)
        return Plan.of_launches((*queries, self.launch(problem, limits)))

    def workspace_of(self, problem: Problem, main: Launch) -> Workspace:
        """Returns what launches leave those behind them."""
        columns, packed = self.summed_columns(problem), problem.layout.is_packed
        tile = self.statistics_tile if packed or self.sums_by_tiles else TILE_ROWS
        sums = (query_sums_region(columns, tile, packed=packed),) if columns else ()
        regions = statistics_regions(self.statistics_tile, packed=packed)
        return Workspace((*regions, *sums))

    def tile_lists(self, problem: Problem, limits: DeviceLimits) -> None:
        """Returns none: predicates are asked pair by pair."""

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        """Returns what all templates of gradients need."""
        postprocess = self._postprocess(problem)
        sliding = sliding_past_tiles(problem.scores)
        return {
            "statistics_tile": self.statistics_tile,
            "counts_turns": self.counts_turns,
            "row_sums": self.row_sums(problem),
            "statistics_threads": STATISTICS_THREADS,
            "summed_columns": self.summed_columns(problem),
            "reads_sums": self.reads_sums,
            "hands_on_sums": self.hands_on_sums,
            "adds_in_between": self.adds_in_between,
            "sums_across": self.sums_across,
            "sums_by_tiles": self.sums_by_tiles,
            "postprocess_rows": postprocess.rows_per_block,
            "postprocess_threads": postprocess.threads,
            # Floats that a lane adds to memory at once.
            "summed_together": 4 if limits.arch >= VECTOR_SUMS else 1,
            "buffer_gradients": buffer_gradients(problem.scores),
            "pairs": {"threads": PAIR_THREADS, "rows": PAIR_ROWS, "keys": PAIR_KEYS, "columns": PAIR_COLUMNS},
            "sink_threads": SINK_THREADS,
            "first_rows": {each: first_rows_behind(problem.scores, each) for each in ("begins", "ends")},
            "slope": slope_of_change(problem.scores),
            "sliding": sliding,
            # What accessors of these are called where a change of scores is told whether they are within.
            "checked": {f"{each.load.buffer}_at": f"{each.load.buffer}_at<is_within>" for each in sliding},
        }
