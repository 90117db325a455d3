"""Gradients by mma.sync from registers: neither weights nor their gradients pass through shared memory.

A warp that keeps keys computes scores the other way round, a row for each of its keys; what the tensor
cores leave in registers is then, as weights and as gradients of scores, the left operand of the products
that make the gradients of values and of keys (Dao 2023, "FlashAttention-2", has them in shared memory; the
exchange of both sides is that of FlashAttention-3's backward pass). Query rows pass by in tiles that are
copied ahead.

Gradients of queries are sums over keys, which many blocks keep. Instead of adding them up in memory,
another launch keeps query rows and lets keys pass by: two products more of seven, for which no accumulator
in memory is read, written or cleared, nothing is atomic, and the same bits come out every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...formula.derivative import derivative
from ...launch import QUERIES_ROLE, Launch
from ...limits import WARP, DeviceLimits
from ...operation import BACKWARD
from ...problem import Problem
from ...scores import SCORE
from ...serves import Serves
from ...statistics import STATISTICS_ROWS, STATISTICS_THREADS, statistics_launch, statistics_regions
from ...workspace import Workspace
from .rules import RuledParameters


@dataclass(frozen=True)
class MmaBackward(RuledParameters):
    """Gradients of attention by tensor cores fed by warps."""

    family: ClassVar[str] = "mma-backward"
    template: ClassVar[str] = "families/mma_backward/main.cu.jinja"
    serves: ClassVar[Serves] = Serves(
        precisions={"f16": ("auto",), "bf16": ("auto",)},
        float32="multiplies 16 bits alone",
        operations=(BACKWARD,),
    )

    def launch(self, problem: Problem, limits: DeviceLimits) -> Launch:
        return Launch(self.threads(), self.smem_bytes(problem, limits), self.bc, of_keys=True)

    def launches(self, problem: Problem, limits: DeviceLimits) -> tuple[Launch, ...]:
        smem_bytes = self.smem_bytes_of_rows(problem)
        queries = Launch(self.row_warps * WARP, smem_bytes, self.rows, role=QUERIES_ROLE)
        return (statistics_launch(), queries, self.launch(problem, limits))

    def workspace(self, problem: Problem, limits: DeviceLimits) -> Workspace:
        return Workspace(statistics_regions())

    def tile_lists(self, problem: Problem, limits: DeviceLimits) -> None:
        """Returns none: predicates are asked pair by pair."""

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        scores = problem.scores
        return {
            "columns": self.columns(problem.head_dim),
            "columns_v": self.columns(problem.head_dim_v),
            "tile": self.tile(problem.head_dim),
            "tile_v": self.tile(problem.head_dim_v),
            "statistics_rows": STATISTICS_ROWS,
            "statistics_threads": STATISTICS_THREADS,
            "slope": derivative(scores.change, SCORE.name) if scores.change is not None else None,
        }
