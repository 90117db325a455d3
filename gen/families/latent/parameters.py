"""The parameters of a kernel of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...problem import ITEM_BYTES, Problem
from ...variant import Variant, param
from ..wgmma.parameters import GROUP, GROUP_ROWS, SHARES

#: Warpgroups that compute, beside the one that copies.
CONSUMERS = 2

#: Columns of outputs that threads put together at once, two of every eight each, and the most parts that a
#: block does so in: more leave a thread too few registers.
COLUMNS_TOGETHER, MOST_PARTS = 32, 2


@dataclass(frozen=True)
class Parameters(Variant):
    """The parameters of a kernel, and what all kernels have alike: a product's rows, and as many keys as
    there is room for twice beside Q."""

    br: ClassVar[int] = GROUP_ROWS
    bc: ClassVar[int] = 64
    rescale: ClassVar[str] = "lazy"
    poly_exp: ClassVar[int] = 0
    pack_heads: ClassVar[bool] = True

    splits: int = param(1, 2, 3, 4, 6, 8, 12, 16, doc="blocks of a cluster that share a tile's keys")
    workspace_splits: int = param(
        1, *SHARES, doc="blocks of no cluster that do so by way of the workspace", implied=True
    )
    boxes: int = param(1, 3, 9, doc="chunks of 64 columns of keys that are waited for at once")

    l2_ahead: int = param(
        0, 1, 2, doc="tiles of keys that come to L2 before there is room for them", implied=True
    )

    def threads(self) -> int:
        return GROUP * (1 + CONSUMERS)

    def rows_per_block(self) -> int:
        return self.br

    def packs_heads(self) -> bool:
        return True

    def blocks_per_tile(self) -> int:
        return self.splits

    def key_shares(self) -> int:
        return self.splits * self.workspace_splits

    def splits_by_workspace(self) -> int:
        return self.workspace_splits

    def partial_floats(self, problem: Problem) -> int:
        """Returns the floats of a partial result: of each row outputs, both consumers' sums, the maximum."""
        return self.br * (problem.head_dim_v + CONSUMERS + 1)

    def access_width(self, problem: Problem) -> int:
        """Returns as many elements as strides are multiples of, for the copy engine: 16 bytes."""
        return 16 // ITEM_BYTES[problem.dtype]
