"""The latent family: attention on Hopper whose values are the first columns of the keys, as in decoding with
latent (MLA) caches.

A block takes 64 of the rows of all query heads that share a head of keys, Q staying in shared memory. Each
tile of keys comes there once, in chunks of 64 columns, and serves both products: by columns for scores, by
rows for outputs. Outputs of 64 rows are too many for one warpgroup's registers, so that each of two has half
of the columns. Weights both need: the consumers take tiles in turns, pass their weights to the other one by
shared memory, and so one's softmax runs beside the other's products. Maxima go to and fro with the weights;
outputs follow them where they grew.

There is room for two tiles alone. What hides how long memory takes is that parts of a tile are given up one
by one: columns that are no values behind the tile's scores, each half of values behind the products of its
consumer; and that scores begin with the first chunk that arrives. As memory gives first what is asked for
first, a block asks for its second tile once Q is there.

Keys are split over the blocks of a cluster where rows are few, or over as many of none as fill the card,
which meet in memory; outputs come together in an order that is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...launch import Launch, TensorMap
from ...layout import DENSE, PAGED
from ...limits import DeviceLimits
from ...operation import LATENT
from ...problem import Problem
from ...serves import Serves
from ..arithmetic import LAG
from ..wgmma.parameters import GROUP
from ..wgmma.registers import COPYING_REGISTERS, MAX_CONSUMER_REGISTERS
from .parameters import COLUMNS_TOGETHER, CONSUMERS, MOST_PARTS
from .rules import RuledParameters
from .shared_memory import bytes_of_storage, piece, rest_chunks


@dataclass(frozen=True)
class Latent(RuledParameters):
    """Latent attention by wgmma and TMA."""

    family: ClassVar[str] = "latent"
    template: ClassVar[str] = "families/latent/main.cu.jinja"
    arch_suffix: ClassVar[str] = "a"
    serves: ClassVar[Serves] = Serves(
        precisions={"f16": ("auto",), "bf16": ("auto",)},
        float32="multiplies 16 bits alone",
        operations=(LATENT,),
        archs=(90,),
        units="warpgroups multiply",
        layouts=(DENSE, PAGED),
        plain_scores=True,
    )

    def knows_page_size(self, problem: Problem) -> bool:
        return problem.layout.is_paged  # boxes have a size

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        return bytes_of_storage(self, problem)

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        """Returns what a launch gives each thread before the warpgroups share them out."""
        return limits.registers_per_sm // self.threads() // 8 * 8

    def launch(self, problem: Problem, limits: DeviceLimits) -> Launch:
        return Launch(
            self.threads(),
            self.smem_bytes(problem, limits),
            self.br,
            tensor_maps=(TensorMap("k", piece(self, problem)),),
            pack_heads=True,
            splits=self.splits,
            workspace_splits=self.workspace_splits,
        )

    def combine_threads(self, problem: Problem, main: Launch) -> int:
        """Returns the threads of consumers, for each of which one puts the same columns together, times the
        parts that a block does its columns in."""
        groups = problem.head_dim_v // CONSUMERS // COLUMNS_TOGETHER
        parts = max(1, min(MOST_PARTS, groups // self.workspace_splits))
        return GROUP * CONSUMERS * parts

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        return {
            # For what is shared with family wgmma.
            "visibility": "families/wgmma/visibility.cu.jinja",
            "change": None,
            "cap": None,
            "lag": LAG,
            "shares_keys": self.key_shares() > 1,
            "writes_rows": self.workspace_splits == 1,
            "partial_floats": self.partial_floats(problem),
            "half": problem.head_dim_v // 2,
            "rest_chunks": rest_chunks(problem),
            "piece": piece(self, problem),
            "by_pieces": piece(self, problem) < self.bc,  # each copied by another lane
            "producer_registers": COPYING_REGISTERS,
            "consumer_registers": MAX_CONSUMER_REGISTERS,
        }
