"""The parameters of a gradient kernel on tensor cores that is fed by warps, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...variant import param
from ..gradients import GradientVariant
from ..mma.layouts import CHUNK_BYTES, PADDED, SWIZZLED, TILE_ROWS, Tile, tile_of, whole

#: Columns that gradients and products along the head dim are made of: an operand's, or two tiles'.
COLUMN_STEP = 16


@dataclass(frozen=True)
class Parameters(GradientVariant):
    """A kernel's parameters, what they imply and what of a card they need."""

    bc: int = param(64, 32, 128, 256, 16, doc="keys that a block keeps, whose gradients it makes")
    br: int = param(64, 16, 32, 128, doc="query rows that pass by them")
    key_warps: int = param(4, 1, 2, 8, doc="warps of such a block, which share its keys")
    rows: int = param(64, 32, 128, 256, 16, doc="query rows that a block of the other launch keeps")
    keys: int = param(64, 16, 32, 128, doc="keys that pass by them")
    row_warps: int = param(4, 1, 2, 8, doc="warps of such a block, which share its rows")
    layout: str = param(PADDED, SWIZZLED, doc="how rows in shared memory avoid bank conflicts")
    stages: int = param(2, 1, doc="tiles that pass by in shared memory")
    min_blocks: int = param(1, 2, 3, 4, doc="blocks per SM the compiler must leave registers for")

    def threads(self) -> int:
        return self.key_warps * WARP

    def rows_per_block(self) -> int:
        return self.bc

    def access_width(self, problem: Problem) -> int:
        """Returns the widest access, up to 16 bytes, that divides the rows of all tensors."""
        dims = problem.head_dim | problem.head_dim_v
        return min(CHUNK_BYTES // ITEM_BYTES[problem.dtype], dims & -dims)

    @property
    def key_tiles(self) -> int:
        """Tiles of 16 keys that a warp keeps."""
        return self.bc // (self.key_warps * TILE_ROWS)

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 query rows that a warp keeps in the other launch."""
        return self.rows // (self.row_warps * TILE_ROWS)

    def columns(self, head_dim: int) -> int:
        """Returns the columns of a tile with so many, filled up to whole steps of products."""
        return whole(head_dim, COLUMN_STEP)

    def tile(self, head_dim: int) -> Tile:
        """Returns how rows with so many columns lie in shared memory."""
        return tile_of(self.layout, self.columns(head_dim), CHUNK_BYTES // 2)

    def storage(self, stay: int, passing: int, problem: Problem) -> int:
        """Returns the bytes of shared memory of a block that keeps so many rows of two arrays, and lets so
        many of two others pass by, without what is known of the query rows."""
        strides = self.tile(problem.head_dim).stride + self.tile(problem.head_dim_v).stride
        return 2 * strides * (stay + self.stages * passing)

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        return self.storage(self.bc, self.br, problem) + 8 * self.stages * self.br

    def smem_bytes_of_rows(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a block that keeps query rows."""
        return self.storage(self.rows, self.keys, problem) + 8 * self.rows

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        d, dv = self.columns(problem.head_dim), self.columns(problem.head_dim_v)
        of_keys = self.key_tiles * (d + dv + 2 * self.br) // 2
        of_rows = self.row_tiles * (d + 2 * self.keys) // 2
        return max(of_keys, of_rows) + 64
