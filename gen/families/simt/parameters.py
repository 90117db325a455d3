"""The parameters of a float32 kernel on CUDA cores, and the micro-tiles that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from ...handover.reach import FAR_KEYS, LEFT_OUT, WALKED
from ...limits import WARP, DeviceLimits
from ...problem import Problem
from ...shared_memory.tiles import (
    PADDED,
    ROW,
    SWIZZLED,
    TRANSPOSED,
    TileLayout,
    make_layout,
    make_p_layout,
    vector_group,
)
from ...variant import Variant, param

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Parameters(Variant):
    """A kernel's parameters, the micro-tiles that they imply and what of a card they need."""

    br: int = param(128, 16, 32, 48, 64, 80, 96, 112, 160, 192, 256, doc="query rows per block")
    workspace_splits: int = param(
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        doc="blocks that share the keys of a tile of rows by way of the workspace",
        implied=True,
    )
    far_keys: str = param(WALKED, LEFT_OUT, doc=FAR_KEYS, implied=True)
    threads_per_block: int = param(128, 32, 64, 96, 160, 192, 224, 256, doc="threads per block")
    lanes: int = param(8, 4, 16, doc="lanes of a warp side by side along keys and head dim")
    bc: int = param(64, 8, 16, 32, 40, 48, 56, 80, 96, 104, 128, doc="keys per tile")
    vec: int = param(4, 2, 1, doc="floats per global access and per shared access along the head dim")
    q_in_registers: bool = param(False, True, doc="keep Q in registers for the whole block")
    q_layout: str = param(TRANSPOSED, PADDED, ROW, SWIZZLED, doc="shared-memory layout of the Q tile")
    k_layout: str = param(TRANSPOSED, PADDED, ROW, SWIZZLED, doc="shared-memory layout of the K tile")
    v_layout: str = param(ROW, PADDED, SWIZZLED, TRANSPOSED, doc="shared-memory layout of the V tile")
    p_layout: str = param(TRANSPOSED, PADDED, ROW, SWIZZLED, doc="shared-memory layout of the P tile")
    p_passes: int = param(1, 2, doc="parts in which P passes through its slab, which shrinks as much")
    stages: int = param(1, 2, doc="K/V tiles in flight: shared-memory buffers, or registers before sm_80")
    min_blocks: int = param(2, 1, 3, 4, 6, 8, doc="blocks per SM the compiler must leave registers for")
    block_order: str = param(
        "by_head", "heaviest_first", doc="what neighbouring blocks share: a head, or a length"
    )
    unroll: int = param(4, 2, doc="unrolled steps of the two products")
    sweep: str = param("rows", "columns", doc="side of a micro-tile that the innermost loop runs along")

    # -- the micro-tile that the parameters imply --------------------------------------------------

    def threads(self) -> int:
        return self.threads_per_block

    def rows_per_block(self) -> int:
        return self.br

    def access_width(self, problem: Problem) -> int:
        return self.vec

    def key_shares(self) -> int:
        return self.workspace_splits

    def splits_by_workspace(self) -> int:
        return self.workspace_splits

    def wanted_blocks(self, limits: DeviceLimits) -> int:
        return limits.num_sms * self.min_blocks

    def partial_stride(self, problem: Problem) -> int:
        """Returns the floats between rows of a partial result: whole accesses of four."""
        return -(-problem.head_dim_v // 4) * 4

    def partial_floats(self, problem: Problem) -> int:
        """Returns the floats of a partial result: of each row outputs, their sum and the maximum."""
        return self.br * (self.partial_stride(problem) + 2)

    @property
    def warps(self) -> int:
        return self.threads_per_block // WARP

    @property
    def lane_rows(self) -> int:
        """Lanes of a warp along the rows."""
        return WARP // self.lanes

    @property
    def rows_per_warp(self) -> int:
        return self.br // self.warps

    @property
    def tm(self) -> int:
        """The query rows of a tile that each lane of a warp owns."""
        return self.rows_per_warp // self.lane_rows

    @property
    def tn(self) -> int:
        """The keys of a tile that each lane of a warp owns."""
        return self.bc // self.lanes

    @property
    def row_group(self) -> int:
        """Adjacent rows a lane owns, so that a transposed tile is read in vectors."""
        return vector_group(self.tm) if TRANSPOSED in (self.q_layout, self.p_layout) else 1

    @property
    def col_group(self) -> int:
        """Adjacent keys a lane owns."""
        return vector_group(self.tn) if self.k_layout == TRANSPOSED else 1

    def o_vec(self, head_dim_v: int) -> int:
        """Returns how many adjacent columns of O a lane owns: the widest that pads their head dim least."""
        if self.v_layout == TRANSPOSED:
            return 1
        widths = [w for w in (4, 2, 1) if w <= self.vec]
        return min(widths, key=lambda w: (self._o_columns(head_dim_v, w), -w))

    def _o_columns(self, head_dim_v: int, width: int) -> int:
        return -(-head_dim_v // (width * self.lanes)) * width * self.lanes

    def padded_dim(self, head_dim_v: int) -> int:
        """Returns how many columns of O a warp computes: the head dim of values in whole lane groups."""
        return self._o_columns(head_dim_v, self.o_vec(head_dim_v))

    def td(self, head_dim_v: int) -> int:
        """Returns how many columns of O a lane owns."""
        return self.padded_dim(head_dim_v) // self.lanes

    def layouts(self, problem: Problem) -> dict[str, TileLayout]:
        """Returns the layouts of the tiles in shared memory, by name; Q is absent when it lives in
        registers."""
        names = ("k", "v", "p") if self.q_in_registers else ("q", "k", "v", "p")
        return {name: self.layout_of(name, problem) for name in names}

    def layout_of(self, name: str, problem: Problem) -> TileLayout:
        """Returns the layout of one of them."""
        d = problem.head_dim
        if name == "q":
            return make_layout(self.q_layout, self.br, d, self.vec, self.row_group, written_once=True)
        if name == "k":
            return make_layout(self.k_layout, self.bc, d, self.vec, self.col_group)
        if name == "v":
            return make_layout(self.v_layout, self.bc, self.padded_dim(problem.head_dim_v), self.vec, 1)
        return make_p_layout(
            self.p_layout,
            self.rows_per_warp,
            self.bc // self.p_passes,
            self.lanes,
            self.row_group,
            self.col_group,
            roomy=self.p_passes == 1,
        )

    def copies_by_themselves(self, problem: Problem, limits: DeviceLimits) -> bool:
        """Tells whether tiles of K and V arrive while threads go on: before sm_80, and where keys become
        float32 on the way, they pass through registers."""
        return limits.has_async_copy and not problem.kv_dtype

    def smem_buffers(self, problem: Problem, limits: DeviceLimits) -> int:
        """Returns how many K/V tiles shared memory holds; where they pass through registers the second stage
        waits there."""
        return self.stages if self.copies_by_themselves(problem, limits) else 1

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        tiles = self.layouts(problem)
        q_floats = tiles["q"].floats if "q" in tiles else 0
        kv_floats = (tiles["k"].floats + tiles["v"].floats) * self.smem_buffers(problem, limits)
        statistics = -(-self.br // 4) * 4
        return FLOAT_BYTES * (q_floats + kv_floats + self.warps * tiles["p"].floats + statistics)

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        td = self.td(problem.head_dim_v)
        wide = max(self.tn, td)
        accumulators = self.tm * (self.tn + td + 2)
        # A row-major tile delivers whole vectors along the head dim, a transposed one a column at a time.
        columnwise = self.k_layout == TRANSPOSED and TRANSPOSED in (self.q_layout, self.p_layout)
        fragments = self.tm + wide if columnwise else (wide + 1) * self.vec
        resident_q = self.tm * problem.head_dim if self.q_in_registers else 0
        staged = 0
        if self.stages == 2 and not self.copies_by_themselves(problem, limits):
            widest = max(problem.head_dim, problem.head_dim_v)
            staged = -(-self.bc * widest // self.threads_per_block)
            staged = -(-staged // 4) if problem.kv_dtype else staged
        return accumulators + fragments + resident_q + staged + _scoring_registers(problem) + 40


def _scoring_registers(problem: Problem) -> int:
    """What masks and changes of scores hold beside the scores: the warp's bounds, the row and the key, and
    addresses of what they read."""
    scores = problem.scores
    if scores.is_plain:
        return 0
    return 4 + (8 if scores.predicate is not None or scores.change is not None else 0)
