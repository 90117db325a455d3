"""The parameters of a gradient kernel on tensor cores that is fed by warps, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...variant import param
from ..gradients import VECTOR_SUMS, GradientVariant
from ..mma.layouts import CHUNK_BYTES, PADDED, SWIZZLED, TILE_ROWS, Tile, tile_of, whole

#: Where the gradients of queries are made: by a launch that keeps these, the same bits every run, or by the
#: blocks that keep keys, which add them up in memory.
LAUNCH, ATOMICS = "launch", "atomics"
#: Columns that gradients and products along the head dim are made of: an operand's, or two tiles'.
COLUMN_STEP = 16
#: Registers beside sums and scores with fewer than which kernels spilled more than some dozen bytes: of
#: 16-bit numbers, and of those in parts.
OTHER_REGISTERS, OTHER_REGISTERS_OF_PARTS = 60, 104


@dataclass(frozen=True)
class Parameters(GradientVariant):
    """A kernel's parameters, what they imply and what of a card they need."""

    bc: int = param(64, 32, 128, 256, 16, doc="keys that a block keeps, whose gradients it makes")
    br: int = param(64, 16, 32, 128, doc="query rows that pass by them")
    key_warps: int = param(4, 1, 2, 8, doc="warps of such a block, which share its keys")
    column_warps: int = param(
        1, 2, 4, doc="warps with the same keys, which take columns of their gradients each"
    )
    dq_path: str = param(
        LAUNCH,
        ATOMICS,
        doc="who makes queries' gradients: a launch of its own, or blocks of keys by atomic sums",
    )
    rows: int = param(64, 32, 128, 256, 16, doc="query rows that a block of the other launch keeps")
    keys: int = param(64, 16, 32, 128, doc="keys that pass by them")
    row_warps: int = param(4, 1, 2, 8, doc="warps of such a block, which share its rows")
    gradient_warps: int = param(
        1,
        2,
        doc="warps with the same rows, which take columns of their gradients each, and make weights anew",
        implied=True,
    )
    layout: str = param(PADDED, SWIZZLED, doc="how rows in shared memory avoid bank conflicts")
    stages: int = param(2, 1, doc="tiles that pass by in shared memory")
    min_blocks: int = param(1, 2, 3, 4, doc="blocks per SM the compiler must leave registers for")

    def threads(self) -> int:
        return self.key_warps * self.column_warps * WARP

    def rows_per_block(self) -> int:
        return self.bc

    def oldest_arch(self, problem: Problem, arch: int) -> int:
        """Returns 90 where four sums are added to memory at once, 80 where products are sixteen deep."""
        if self.dq_path == ATOMICS and arch >= VECTOR_SUMS:
            return VECTOR_SUMS
        return 80 if arch >= 80 else 75

    def float32_products(self, problem: Problem) -> str:
        return "3xf16" if problem.dtype == "f32" else ""

    def parts(self, problem: Problem) -> int:
        """Returns how many 16-bit numbers make an element."""
        return 2 if problem.dtype == "f32" else 1

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

    def summed_columns(self, problem: Problem) -> int:
        return self.columns(problem.head_dim) if self.dq_path == ATOMICS else 0

    @property
    def threads_of_rows(self) -> int:
        """Threads of a block that keeps query rows."""
        return self.row_warps * self.gradient_warps * WARP

    def own_columns(self, head_dim: int) -> int:
        """Returns the columns of a gradient of keys or values that a warp makes at most."""
        return whole(-(-self.columns(head_dim) // self.column_warps), COLUMN_STEP)

    def own_columns_of_rows(self, head_dim: int) -> int:
        """Returns the columns of a gradient of queries that a warp makes at most in the other launch."""
        return whole(-(-self.columns(head_dim) // self.gradient_warps), COLUMN_STEP)

    def sum_groups(self, problem: Problem) -> tuple[int, int]:
        """Returns into how many shares the rows and the columns of what blocks of keys make of queries'
        gradients are split, one for each warp: none has more than it must, of these those with the fewest
        fragments."""
        warps, steps = self.key_warps * self.column_warps, self.columns(problem.head_dim) // COLUMN_STEP
        row_tiles = self.br // TILE_ROWS

        def cost(groups: tuple[int, int]) -> tuple[int, int]:
            rows, columns = row_tiles // groups[0], -(-steps // groups[1])
            return rows * columns, rows + columns

        ways = [(n, warps // n) for n in range(1, warps + 1) if warps % n == 0 and row_tiles % n == 0]
        return min(ways, key=cost)

    @property
    def weights_kept(self) -> int:
        """The tiles in shared memory of weights and gradients of scores, but for those in units of rows."""
        return 2 if self.column_warps > 1 else int(self.dq_path == ATOMICS)

    def weight_tile(self, problem: Problem) -> Tile:
        """Returns how weights lie in shared memory: keys are rows, and what passes by are columns."""
        return tile_of(self.layout, self.parts(problem) * self.br, CHUNK_BYTES // 2)

    def weight_bytes(self, problem: Problem) -> int:
        """Returns the bytes of shared memory that weights and gradients of scores pass through: of parts, in
        which keys and rows have other units, each for itself."""
        shared, summed = self.column_warps > 1, self.dq_path == ATOMICS
        tile = 2 * self.bc * self.weight_tile(problem).stride
        if self.parts(problem) == 1:
            return tile * self.weights_kept
        of_keys = 2 * (tile + 4 * self.column_warps * self.bc) if shared else 0
        return of_keys + (tile + 4 * self.key_warps * self.br if summed else 0)

    def columns(self, head_dim: int) -> int:
        """Returns the columns of a tile with so many, filled up to whole steps of products."""
        return whole(head_dim, COLUMN_STEP)

    def tile(self, head_dim: int, problem: Problem) -> Tile:
        """Returns how rows with so many columns lie in shared memory: of parts, the big ones first."""
        return tile_of(self.layout, self.parts(problem) * self.columns(head_dim), CHUNK_BYTES // 2)

    def numbers_of_rows(self, problem: Problem) -> int:
        """Returns how many numbers are known of a query row: with parts also two units."""
        return 4 if problem.dtype == "f32" else 2

    def storage(self, stay: int, passing: int, problem: Problem) -> int:
        """Returns the bytes of shared memory of a block that keeps so many rows of two arrays, and lets so
        many of two others pass by, without what is known of the query rows."""
        strides = sum(self.tile(dim, problem).stride for dim in (problem.head_dim, problem.head_dim_v))
        return 2 * strides * (stay + self.stages * passing)

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        tiles = self.storage(self.bc, self.br, problem) + self.weight_bytes(problem)
        return tiles + 4 * self.numbers_of_rows(problem) * self.stages * self.br

    def smem_bytes_of_rows(self, problem: Problem) -> int:
        """Returns the bytes of shared memory of a block that keeps query rows; 0 without such blocks."""
        if self.dq_path == ATOMICS:
            return 0
        numbers = self.numbers_of_rows(problem)
        of_keys = 4 * (numbers - 2) * self.stages * self.keys
        return self.storage(self.rows, self.keys, problem) + 4 * numbers * self.rows + of_keys

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        d, dv = self.own_columns(problem.head_dim), self.own_columns(problem.head_dim_v)
        kept, at_once = self.key_tiles * (d + dv) // 2, self.key_tiles * self.br // self.column_warps
        # Weights as left operands, of which parts are all held at a time that one warp has made.
        operands = self.key_tiles * self.br // (2 * self.column_warps) if self.parts(problem) > 1 else 0
        if self.dq_path == LAUNCH:
            return kept + at_once + operands + self._other_registers(problem)
        groups = self.sum_groups(problem)
        steps = -(-self.columns(problem.head_dim) // COLUMN_STEP // groups[1])
        sums = self.parts(problem) * self.br // TILE_ROWS // groups[0] * steps * 8
        return kept + max(at_once + operands, sums) + self._other_registers(problem)

    def registers_of_rows(self, problem: Problem) -> int:
        """Returns the estimated registers per thread of a block that keeps query rows; 0 without such."""
        if self.dq_path == ATOMICS:
            return 0
        operands = self.row_tiles * self.keys // 2 if self.parts(problem) > 1 else 0
        kept = self.row_tiles * self.own_columns_of_rows(problem.head_dim) // 2
        return kept + self.row_tiles * self.keys + operands + self._other_registers(problem)

    def _other_registers(self, problem: Problem) -> int:
        return OTHER_REGISTERS_OF_PARTS if self.parts(problem) > 1 else OTHER_REGISTERS
