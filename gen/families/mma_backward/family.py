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

from ...layout import DENSE, PACKED
from ...limits import WARP, DeviceLimits
from ...operation import BACKWARD
from ...problem import Problem
from ...serves import Serves
from .parameters import COLUMN_STEP
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
        layouts=(DENSE, PACKED),
    )

    def blocks_of_queries(self, problem: Problem) -> tuple[int, int, int]:
        return self.row_warps * WARP, self.smem_bytes_of_rows(problem), self.rows

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        d, dv = self.columns(problem.head_dim), self.columns(problem.head_dim_v)
        own, own_v = self.own_columns(problem.head_dim), self.own_columns(problem.head_dim_v)
        groups = self.sum_groups(problem)
        return {
            **super().constants(problem, limits),
            "parts": False,
            "products": "families/mma_backward/products_16bit.cu.jinja",
            "multiplied": problem.dtype,
            "async_copy": limits.has_async_copy,
            "depth": 16 if limits.has_async_copy else 8,
            "columns": d,
            "columns_v": dv,
            "own_columns": own,
            "own_columns_v": own_v,
            # The last warp along columns has fewer than the others.
            "uneven": own * self.column_warps != d or own_v * self.column_warps != dv,
            "sum_groups": groups,
            "uneven_sums": d // COLUMN_STEP % groups[1] != 0,
            "tile": self.tile(problem.head_dim),
            "tile_v": self.tile(problem.head_dim_v),
            "weight_tile": self.weight_tile,
        }
