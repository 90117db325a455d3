"""The parameters of a gradient kernel on CUDA cores, and the micro-tiles that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from ...limits import DeviceLimits
from ...problem import Problem
from ...shared_memory.tiles import vector_group
from ...variant import param
from ..gradients import GradientVariant

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Parameters(GradientVariant):
    """A kernel's parameters, what they imply and what of a card they need."""

    br: int = param(64, 8, 16, 32, 96, 128, doc="query rows per tile")
    bc: int = param(64, 8, 16, 32, 96, 128, doc="keys per tile")
    threads_per_block: int = param(256, 64, 128, doc="threads per block")
    lanes: int = param(16, 8, doc="threads side by side along what passes by, then along the head dim")
    vec: int = param(4, 2, 1, doc="floats per access along the head dim")
    unroll: int = param(2, 1, 4, doc="unrolled steps of the products")
    min_blocks: int = param(1, 2, 3, 4, doc="blocks per SM the compiler must leave registers for")

    def threads(self) -> int:
        return self.threads_per_block

    def rows_per_block(self) -> int:
        return self.bc

    def access_width(self, problem: Problem) -> int:
        return self.vec

    @property
    def threads_high(self) -> int:
        """Threads above each other, along what a block keeps."""
        return self.threads_per_block // self.lanes

    @property
    def row_group(self) -> int:
        """Adjacent query rows of a thread where the block keeps rows."""
        return vector_group(self.br // self.threads_high)

    @property
    def key_group(self) -> int:
        """Adjacent keys of a thread where the block keeps keys."""
        return vector_group(self.bc // self.threads_high)

    def padded(self, head_dim: int) -> int:
        """Returns the columns of a gradient that a block computes: whole vectors of all threads of a row."""
        width = self.vec * self.lanes
        return -(-head_dim // width) * width

    def stride(self, head_dim: int) -> int:
        """Returns the floats from one row of a tile to the next: a vector more than it has columns, so that
        neighbouring rows begin in other banks."""
        return self.padded(head_dim) + self.vec

    def _tile_floats(self, rows: int, problem: Problem) -> int:
        return rows * (self.stride(problem.head_dim) + self.stride(problem.head_dim_v))

    def _both_tiles(self, problem: Problem) -> int:
        statistics = 2 * self.br
        return self._tile_floats(self.br, problem) + self._tile_floats(self.bc, problem) + statistics

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        return FLOAT_BYTES * (self._both_tiles(problem) + self.br * (self.bc + 4))

    def storage_of_queries(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a block that makes gradients of queries."""
        return FLOAT_BYTES * (self._both_tiles(problem) + self.bc * (self.br + 4))

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        both = self.padded(problem.head_dim) + self.padded(problem.head_dim_v)
        scores = 2 * self.br * self.bc // self.threads_per_block
        of_keys = self.bc // self.threads_high * both // self.lanes
        of_rows = self.br // self.threads_high * self.padded(problem.head_dim) // self.lanes
        fragments = 4 * (self.br + self.bc) // self.lanes
        return max(of_keys, of_rows) + scores + fragments + 40
