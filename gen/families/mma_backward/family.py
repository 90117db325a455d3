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

from ...limits import WARP, DeviceLimits
from ...operation import BACKWARD
from ...problem import Problem
from ...serves import Serves
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

    def blocks_of_queries(self, problem: Problem) -> tuple[int, int, int]:
        return self.row_warps * WARP, self.smem_bytes_of_rows(problem), self.rows

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        return {
            **super().constants(problem, limits),
            "columns": self.columns(problem.head_dim),
            "columns_v": self.columns(problem.head_dim_v),
            "tile": self.tile(problem.head_dim),
            "tile_v": self.tile(problem.head_dim_v),
        }
