"""Gradients in float32 on CUDA cores, by two launches that add nothing up in memory.

One keeps a tile of ``bc`` keys and values in shared memory and lets the query rows that see some of them pass
by in tiles of ``br``: what it adds up in registers are the gradients of both. The other keeps ``br`` query
rows and lets keys pass by, for the gradients of the queries. Scores and weights are so computed twice, seven
products instead of five; in return every sum has one order, the same bits come out every run, and no card
needs atomic additions.

Before both, a launch leaves of each row what they share: Δ = Σ dout · o, less the gradient of the log-sum-exp
where there is one, for the gradient of a score is its weight times what the weight's own gradient is above Δ
(Dao 2023, "FlashAttention-2", section 3.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...layout import DENSE, PACKED
from ...limits import DeviceLimits
from ...operation import BACKWARD
from ...problem import Problem
from ...serves import Serves
from .rules import RuledParameters


@dataclass(frozen=True)
class SimtBackward(RuledParameters):
    """Gradients of attention in float32 by multiply-adds."""

    family: ClassVar[str] = "simt-backward"
    template: ClassVar[str] = "families/simt_backward/main.cu.jinja"
    serves: ClassVar[Serves] = Serves(
        precisions={"f32": ("auto", "ieee")},
        float32="computes by IEEE multiply-adds",
        operations=(BACKWARD,),
        layouts=(DENSE, PACKED),
    )

    def blocks_of_queries(self, problem: Problem) -> tuple[int, int, int]:
        return self.threads(), self.storage_of_queries(problem), self.br

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        return {
            **super().constants(problem, limits),
            "padded": self.padded(problem.head_dim),
            "padded_v": self.padded(problem.head_dim_v),
            "row_group": self.row_group,
            "key_group": self.key_group,
        }
