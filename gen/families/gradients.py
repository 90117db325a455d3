"""What families of gradients have in common: three launches, and what the first leaves the others of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..formula.derivative import derivative
from ..launch import QUERIES_ROLE, Launch
from ..limits import DeviceLimits
from ..problem import Problem
from ..scores import SCORE
from ..statistics import STATISTICS_ROWS, STATISTICS_THREADS, statistics_launch, statistics_regions
from ..variant import Variant
from ..workspace import Workspace


@dataclass(frozen=True)
class GradientVariant(Variant):
    """The base of variants whose main launch keeps keys, and another one query rows.

    What `rows_per_block`, `threads` and `smem_bytes` say is of blocks that keep keys.
    """

    def blocks_of_queries(self, problem: Problem) -> tuple[int, int, int]:
        """Returns the threads, the bytes of shared memory and the query rows of a block that keeps these."""
        raise NotImplementedError

    def launch(self, problem: Problem, limits: DeviceLimits) -> Launch:
        """Returns the launch that makes the gradients of keys and values."""
        smem_bytes = self.smem_bytes(problem, limits)
        return Launch(self.threads(), smem_bytes, self.rows_per_block(), of_keys=True)

    def launches(self, problem: Problem, limits: DeviceLimits) -> tuple[Launch, ...]:
        """Returns those of the rows' statistics, of the queries' gradients, and `launch`."""
        queries = Launch(*self.blocks_of_queries(problem), role=QUERIES_ROLE)
        return (statistics_launch(), queries, self.launch(problem, limits))

    def workspace(self, problem: Problem, limits: DeviceLimits) -> Workspace:
        """Returns what the first launch leaves the others."""
        return Workspace(statistics_regions())

    def tile_lists(self, problem: Problem, limits: DeviceLimits) -> None:
        """Returns none: predicates are asked pair by pair."""

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        """Returns what all templates of gradients need."""
        change = problem.scores.change
        return {
            "statistics_rows": STATISTICS_ROWS,
            "statistics_threads": STATISTICS_THREADS,
            "slope": derivative(change, SCORE.name) if change is not None else None,
        }
