"""Gradients by mma.sync, of f16, bf16 and float32.

A warp that keeps keys computes scores the other way round, a row for each of its keys; what the tensor
cores leave in registers is then, as weights and as gradients of scores, the left operand of the products
that make the gradients of values and of keys (Dao 2023, "FlashAttention-2", has them in shared memory; the
exchange of both sides is that of FlashAttention-3's backward pass). Query rows pass by in tiles that are
copied ahead. Rows of many columns have gradients too wide for one warp: then several have the same keys,
each makes the weights of some of the rows that pass by and the gradients in some of the columns, and
weights do pass through shared memory.

Gradients of queries are sums over keys, which many blocks keep. By default they are not added up in memory:
another launch keeps query rows and lets keys pass by, two products more of seven, for which no accumulator
in memory is read, written or cleared, nothing is atomic, and the same bits come out every run. Or else
blocks of keys add them up in the workspace, in whatever order, and a launch behind them writes what they are.

float32 is multiplied as sums of two f16 numbers, three products of four. Launches in front leave each row
of the four arrays in parts, in a unit of its own, a power of two; so tiles are copied as those of 16 bits
are, and nothing is split twice. Weights are split where they are made, times the units of the rows that
they will be multiplied by, with a unit for each row of a tile, and what a tile adds to a gradient is summed
apart: so accumulators, which cut off what they cannot hold, never grow large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...handover.split_rows import SPLIT_ROWS, SPLIT_THREADS, UNIT_WORDS, split_launches, split_regions
from ...handover.workspace import Workspace
from ...launch import Launch
from ...layout import DENSE, PACKED
from ...limits import DeviceLimits
from ...operation import BACKWARD
from ...problem import Problem
from ...serves import Serves
from ..arithmetic import LEAST_EXPONENT, TOP_EXPONENT
from ..used_tiles import UsedTiles
from .parameters import ATOMICS, COLUMN_STEP
from .rules import RuledParameters

#: The template of what is multiplied.
PRODUCTS = {
    "16-bit": "families/mma_backward/products_16bit.cu.jinja",
    "parts": "families/mma_backward/products_parts.cu.jinja",
}


@dataclass(frozen=True)
class MmaBackward(UsedTiles, RuledParameters):
    """Gradients of attention by tensor cores fed by warps."""

    family: ClassVar[str] = "mma-backward"
    template: ClassVar[str] = "families/mma_backward/main.cu.jinja"
    serves: ClassVar[Serves] = Serves(
        precisions={"f32": ("auto", "3xf16"), "f16": ("auto",), "bf16": ("auto",)},
        float32="multiplies float32 as f16",
        operations=(BACKWARD,),
        layouts=(DENSE, PACKED),
    )

    def blocks_of_queries(self, problem: Problem) -> tuple[int, int, int]:
        return self.threads_of_rows, self.smem_bytes_of_rows(problem), self.rows

    def launches(self, problem: Problem, limits: DeviceLimits) -> tuple[Launch, ...]:
        statistics, *others = super().launches(problem, limits)
        return (statistics, *(split_launches() if self.parts(problem) > 1 else ()), *others)

    def workspace_of(self, problem: Problem, main: Launch) -> Workspace:
        workspace = super().workspace_of(problem, main)
        if self.parts(problem) == 1:
            return workspace
        split = split_regions(self.columns(problem.head_dim), self.columns(problem.head_dim_v))
        return Workspace((*workspace.regions, *split))

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        d, dv = self.columns(problem.head_dim), self.columns(problem.head_dim_v)
        own, own_v = self.own_columns(problem.head_dim), self.own_columns(problem.head_dim_v)
        own_of_rows = self.own_columns_of_rows(problem.head_dim)
        groups = self.sum_groups(problem)
        return {
            **super().constants(problem, limits),
            "parts": self.parts(problem) > 1,
            "products": PRODUCTS["parts" if self.parts(problem) > 1 else "16-bit"],
            "multiplied": "bf16" if problem.dtype == "bf16" else "f16",
            "unit_words": UNIT_WORDS,
            "split_rows": SPLIT_ROWS,
            "split_threads": SPLIT_THREADS,
            "top_exponent": TOP_EXPONENT,
            "least_exponent": LEAST_EXPONENT,
            "async_copy": limits.has_async_copy,
            "depth": 16 if limits.has_async_copy else 8,
            "columns": d,
            "columns_v": dv,
            "own_columns": own,
            "own_columns_v": own_v,
            "own_columns_of_rows": own_of_rows,
            # The last warp along columns has fewer than the others.
            "uneven": own * self.column_warps != d
            or own_v * self.column_warps != dv
            or own_of_rows * self.gradient_warps != d,
            "sum_groups": groups,
            "uneven_sums": d // COLUMN_STEP % groups[1] != 0,
            "tile": self.tile(problem.head_dim, problem),
            "tile_v": self.tile(problem.head_dim_v, problem),
            "weight_tile": self.weight_tile(problem),
            # With parts those that rows want are apart.
            "gradients_shared": self.column_warps > 1
            or (self.dq_path == ATOMICS and self.parts(problem) == 1),
        }
