"""What a `SimtBackward` kernel makes a card do, counted along its template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ...limits import WARP, DeviceLimits
from ...problem import Problem
from ...shared_memory.banks import wavefronts
from ...work import BlockWork, Counts, LaunchesWork, LaunchWork, count_work
from ..gradient_work import (
    bytes_of_keys,
    bytes_of_rows,
    heads_of,
    moved_by_keys,
    moved_by_rows,
    moved_by_statistics,
    scoring_counts,
    walk_of_keys,
    walk_of_rows,
)
from ..simt.work import ALU_PER_COPY, ALU_PER_STEP
from .family import SimtBackward
from .parameters import FLOAT_BYTES


@dataclass(frozen=True)
class _Tiling:
    """How the threads of a block share tiles: ``stay`` rows that it keeps, in groups of ``group``, and
    ``passing`` ones that come past; ``columns`` of the sums that they make, of those ``summed``."""

    variant: SimtBackward
    problem: Problem
    stay: int
    passing: int
    group: int
    summed: tuple[int, ...]

    @property
    def own(self) -> int:
        """Rows of a thread of those that stay."""
        return self.stay // self.variant.threads_high

    @property
    def other(self) -> int:
        """Rows of a thread of those that pass by."""
        return self.passing // self.variant.lanes

    @property
    def depth(self) -> int:
        """Columns of both products that make weights."""
        return self.problem.head_dim + self.problem.head_dim_v

    @property
    def per_warp_tile(self) -> Counts:
        """What one warp does for each tile that passes by."""
        vec, own, other = self.variant.vec, self.own, self.other
        scores, steps = own * other, self.depth / vec
        columns = sum(self.variant.padded(head_dim) // self.variant.lanes for head_dim in self.summed)
        stride = self.variant.stride(self.problem.head_dim)
        weights = self.stay + 4
        sums = self.passing * len(self.summed)
        reads_own = steps * own
        reads_other = steps * other
        reads_weights = sums * own / self.group
        reads_columns = self.passing * columns / vec
        puts = len(self.summed) * scores / self.group
        passes = (
            reads_own * _passes(self.variant.lanes, self.group * stride, 0, vec)
            + reads_other * _passes(self.variant.lanes, 0, stride, vec)
            + reads_weights * _passes(self.variant.lanes, self.group, 0, self.group)
            + reads_columns * _passes(self.variant.lanes, 0, vec, vec)
            + puts * _passes(self.variant.lanes, self.group, weights, self.group)
        )
        bodies = (steps + sums) / self.variant.unroll
        return Counts(
            ffma=scores * self.depth + self.passing * own * columns,
            scattered=scores * self.depth,
            # Masks are asked of every pair: two comparisons and a selection.
            alu=7 * scores + ALU_PER_STEP * bodies,
            exp=scores,
            accesses=reads_own + reads_other + reads_weights + reads_columns + puts,
            wavefronts=passes,
            delivered=(reads_own + reads_other + reads_columns) * vec + reads_weights * self.group,
            shared_waits=bodies + 2,
        ) + scoring_counts(self.problem, own, other, masked=0.0, warp_rows=WARP // self.variant.lanes)


@count_work.register
def simt_backward_work(variant: SimtBackward, problem: Problem, limits: DeviceLimits) -> LaunchesWork:
    """Returns the work of a kernel of this family on a problem and a card."""
    registers, threads = variant.registers(problem, limits), variant.threads()
    launches = (
        LaunchWork(_of_rows(variant, problem), threads, variant.storage_of_queries(problem), registers),
        LaunchWork(_of_keys(variant, problem), threads, variant.smem_bytes(problem, limits), registers),
    )
    return LaunchesWork(launches, others=1, moved_bytes=moved_by_statistics(problem))


def _of_keys(variant: SimtBackward, problem: Problem) -> BlockWork:
    """Blocks that keep keys, past which rows come: weights and gradients of scores each take turns in shared
    memory."""
    both = (problem.head_dim_v, problem.head_dim)
    tiling = _Tiling(variant, problem, variant.bc, variant.br, variant.key_group, both)
    block = BlockWork(
        once=_moved(variant, 2 * bytes_of_keys(problem, variant.bc)),
        per_tile=_copied(variant, bytes_of_rows(problem, variant.br), barriers=5),
        per_warp_tile=tiling.per_warp_tile,
        walks=walk_of_keys(problem, variant.bc, variant.br, variant.threads() // WARP),
        heads=heads_of(problem, problem.num_kv_heads),
        warps=variant.threads() // WARP,
        heads_share_keys=False,
        moved_bytes=moved_by_keys(problem),
        passing_bytes=problem.group * bytes_of_rows(problem, problem.seqlen_q),
    )
    return _with_code(block)


def _of_rows(variant: SimtBackward, problem: Problem) -> BlockWork:
    """Blocks that keep query rows, past which keys come."""
    tiling = _Tiling(variant, problem, variant.br, variant.bc, variant.row_group, (problem.head_dim,))
    kept = bytes_of_rows(problem, variant.br) + FLOAT_BYTES * variant.br * problem.head_dim
    block = BlockWork(
        once=_moved(variant, kept),
        per_tile=_copied(variant, bytes_of_keys(problem, variant.bc), barriers=3),
        per_warp_tile=tiling.per_warp_tile,
        walks=walk_of_rows(problem, variant.br, variant.bc, variant.threads() // WARP),
        heads=heads_of(problem, problem.num_q_heads),
        warps=variant.threads() // WARP,
        moved_bytes=moved_by_rows(problem),
        passing_bytes=bytes_of_keys(problem, problem.seqlen_k),
    )
    return _with_code(block)


def _with_code(block: BlockWork) -> BlockWork:
    """The same with how long its loop's code is: products stand there a few steps deep."""
    compute = block.per_warp_tile
    return replace(block, loop_instructions=compute.alu + compute.exp + compute.ffma / 8)


def _copied(variant: SimtBackward, tile_bytes: float, *, barriers: int) -> Counts:
    """A tile that passes by, from global to shared memory, which nothing is computed beside."""
    copies = tile_bytes / (variant.vec * FLOAT_BYTES * WARP)
    return Counts(
        alu=ALU_PER_COPY * copies,
        accesses=2 * copies,
        wavefronts=2 * tile_bytes / 128,
        l2_bytes=tile_bytes,
        barriers=barriers,
        global_waits=1,
    )


def _moved(variant: SimtBackward, num_bytes: float) -> Counts:
    """What a block keeps, read, and the gradients of it, written."""
    accesses = num_bytes / (variant.vec * FLOAT_BYTES * WARP)
    return Counts(
        alu=ALU_PER_COPY * accesses,
        accesses=accesses,
        wavefronts=2 * num_bytes / 128,
        l2_bytes=num_bytes,
        global_waits=2,
        barriers=1,
    )


@lru_cache(maxsize=65536)
def _passes(lanes: int, high: int, along: int, width: int) -> int:
    """Wavefronts of one warp's access of ``width`` floats, whose threads above each other are ``high`` floats
    apart and those side by side ``along``."""
    return wavefronts([lane // lanes * high + lane % lanes * along for lane in range(WARP)], width)
