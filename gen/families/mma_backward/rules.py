"""Which gradient kernels on tensor cores cannot run on a problem and a card, and which are never the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...limits import DeviceLimits
from ...problem import Problem
from ...variant import FIRST_PARAMETER, rule
from ..mma.layouts import PADDED, TILE_ROWS
from .parameters import COLUMN_STEP, LAUNCH, Parameters


@dataclass(frozen=True)
class RuledParameters(Parameters):
    """Parameters with the rules of their family."""

    @rule("arithmetic", after=FIRST_PARAMETER)
    def _tensor_cores_are_there(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed, number = (80, "bf16") if problem.dtype == "bf16" else (75, "f16")
        if limits.arch < needed:
            return f"tensor cores multiply {number} from sm_{needed} on, this is {limits.sm}"
        return None

    @rule("divisibility", after="key_warps")
    def _keys_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unsplit("bc", self.bc, self.key_warps)

    @rule("divisibility", after="column_warps")
    def _scores_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.column_warps > 1:
            return _unsplit("br", self.br, self.column_warps)
        return None

    @rule("divisibility", after="column_warps")
    def _columns_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        least = min(self.columns(problem.head_dim), self.columns(problem.head_dim_v))
        if (self.column_warps - 1) * self.own_columns(least) >= least:
            return (
                f"column_warps={self.column_warps}: {least} columns, in steps of {COLUMN_STEP}, are too few"
            )
        return None

    @rule("divisibility", after="gradient_warps")
    def _columns_of_rows_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        columns = self.columns(problem.head_dim)
        if (self.gradient_warps - 1) * self.own_columns_of_rows(columns) >= columns:
            return (
                f"gradient_warps={self.gradient_warps}: {columns} columns, in steps of {COLUMN_STEP}, "
                "are too few"
            )
        return None

    @rule("combination", after="row_warps")
    def _kept_rows_are_of_a_launch(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return self._of_no_launch({"rows": self.rows, "keys": self.keys, "row_warps": self.row_warps})

    @rule("combination", after="gradient_warps")
    def _shared_rows_are_of_a_launch(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return self._of_no_launch({"gradient_warps": self.gradient_warps})

    def _of_no_launch(self, asked: Mapping[str, int]) -> str | None:
        """Why values of the launch that keeps query rows, but the defaults, mean nothing without one."""
        if self.dq_path == LAUNCH:
            return None
        for parameter in self.parameters():
            if asked.get(parameter.name, parameter.default) != parameter.default:
                told = f"{parameter.name}={asked[parameter.name]}"
                return f"dq_path={self.dq_path}: no launch keeps query rows, of which {told} is"
        return None

    @rule("combination", after="dq_path")
    def _sequences_keep_rows(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.layout.is_packed and self.dq_path != LAUNCH:
            return f"dq_path={self.dq_path}: sums of packed sequences are not laid out; take {LAUNCH}"
        return None

    @rule("arithmetic", after=FIRST_PARAMETER)
    def _sequences_are_whole(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.layout.is_packed and self.parts(problem) > 1:
            return "parts of float32 are of sequences of one length; family simt-backward takes packed ones"
        return None

    @rule("divisibility", after="row_warps")
    def _rows_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unsplit("rows", self.rows, self.row_warps)

    @rule("registers", after="dq_path")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _lacks_registers(self.registers(problem, limits), self.threads(), limits)

    @rule("registers", after="gradient_warps")
    def _registers_fit_rows(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _lacks_registers(self.registers_of_rows(problem), self.threads_of_rows, limits)

    @rule("weights made anew", after="gradient_warps", advisory=True)
    def _one_warp_would_not_do(self, problem: Problem, limits: DeviceLimits) -> str | None:
        # Two products more of each tile pay only where no warp holds the gradients by itself.
        alone = self.changed(gradient_warps=1)
        if alone == self or _lacks_registers(alone.registers_of_rows(problem), alone.threads_of_rows, limits):
            return None
        return f"gradient_warps={self.gradient_warps}, but one warp holds the gradients of its rows"

    @rule("layout", after="layout")
    def _rows_swizzle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for head_dim in (problem.head_dim, problem.head_dim_v):
            if self.layout != PADDED and self.tile(head_dim, problem).period < 2:
                return f"layout=swizzled: rows of {head_dim} columns have no power of two to XOR"
        return None

    @rule("shared memory", after="stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = max(self.smem_bytes(problem, limits), self.smem_bytes_of_rows(problem))
        return limits.lacks_shared_memory(needed)

    @rule("occupancy", after="min_blocks")
    def _promised_blocks_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        blocks = [(self.threads(), self.registers(problem, limits), self.smem_bytes(problem, limits))]
        if self.dq_path == LAUNCH:
            of_rows = self.registers_of_rows(problem), self.smem_bytes_of_rows(problem)
            blocks.append((self.threads_of_rows, *of_rows))
        for threads, needed, smem in blocks:
            room = limits.blocks_per_sm(threads, needed, smem)
            if self.min_blocks > max(1, room):
                told = f"{threads} threads of {needed} registers and {smem} bytes"
                return f"min_blocks={self.min_blocks}, but {told} leave room for {room}"
        return None


def _lacks_registers(needed: int, threads: int, limits: DeviceLimits) -> str | None:
    """Why a block of so many threads cannot have so many registers each."""
    allowed = min(limits.max_registers_per_thread, limits.registers_per_sm // threads // 8 * 8)
    if needed > allowed:
        return f"about {needed} per thread, {threads} threads allow {allowed}"
    return None


def _unsplit(name: str, rows: int, warps: int) -> str | None:
    """Why warps cannot share rows in tiles of 16."""
    if rows % (warps * TILE_ROWS):
        return f"{name}={rows} does not split into tiles of {TILE_ROWS} for {warps} warps"
    return None
