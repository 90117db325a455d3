"""The fp32 family on CUDA cores: register micro-tiles fed from shared memory.

A block covers ``br`` query rows and walks the keys in tiles of ``bc``. Each warp owns whole rows, so softmax
needs only shuffles. A warp's 32 lanes stand ``lanes`` wide along keys (then along head dim) and 32 / lanes
tall along rows; a lane holds a micro-tile of S and one of O in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...layout import DENSE, PACKED, PACKED_PAGED, PAGED
from ...limits import DeviceLimits
from ...operation import FORWARD, LATENT
from ...problem import Problem
from ...scored_tiles.change import scaled_change
from ...serves import IEEE_FLOAT32, Serves
from ...shared_memory.tiles import (
    KEY_STEP,
    plan_copy,
    vector_group,
)
from .rules import RuledParameters


@dataclass(frozen=True)
class Simt(RuledParameters):
    """Attention in float32 by multiply-adds."""

    family: ClassVar[str] = "simt"
    template: ClassVar[str] = "families/simt/main.cu.jinja"
    serves: ClassVar[Serves] = replace(
        IEEE_FLOAT32,
        operations=(FORWARD, LATENT),
        layouts=(DENSE, PACKED, PAGED, PACKED_PAGED),
        key_dtypes={"f32": ("e4m3",)},
    )

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        d, dv = problem.head_dim, problem.head_dim_v
        columns = {"q": d, "k": d, "v": dv}
        tiles = self.layouts(problem)
        return {
            "d": d,
            "dv": dv,
            "columns": {name: "kD" if width == d else "kDv" for name, width in columns.items()},
            "td": self.td(dv),
            "o_vec": self.o_vec(dv),
            "padded_dim": self.padded_dim(dv),
            "row_group": self.row_group,
            "col_group": self.col_group,
            "lane_bits": [bit for bit in (1, 2, 4, 16) if bit < self.lanes or bit == self.lanes == 16],
            "warps": self.warps,
            "tiles": tiles,
            "copies": {
                name: plan_copy(
                    tiles[name], self.br if name == "q" else self.bc, width, self.vec, self.threads_per_block
                )
                for name, width in columns.items()
                if name in tiles
            },
            "buffers": self.smem_buffers(problem, limits),
            "async_copy": self.copies_by_themselves(problem, limits),
            "register_stage": self.stages == 2 and not self.copies_by_themselves(problem, limits),
            "key_vec": "kVec",
            "partial_stride": self.partial_stride(problem),
            "partial_floats": self.partial_floats(problem),
            "partial_width": min(self.vec, vector_group(dv)),
            "key_step": KEY_STEP,
            # Q has the scale.
            "change": scaled_change(problem.scores.change) if problem.scores.change else None,
        }
