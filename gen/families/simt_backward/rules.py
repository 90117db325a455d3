"""Which gradient kernels on CUDA cores cannot run on a problem and a card, and which are never the best."""

from __future__ import annotations

from dataclasses import dataclass

from ...limits import WARP, DeviceLimits
from ...problem import Problem
from ...shared_memory.tiles import wasted
from ...variant import rule
from .parameters import Parameters

#: Scores, or elements of a gradient, beyond which a thread cannot hold its own in registers.
MAX_MICRO_TILE = 128


@dataclass(frozen=True)
class RuledParameters(Parameters):
    """Parameters with the rules of their family."""

    @rule("divisibility", after="lanes")
    def _threads_split_the_tiles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for name, rows in (("br", self.br), ("bc", self.bc)):
            for threads in (self.threads_high, self.lanes):
                if rows % threads:
                    return f"{name}={rows} does not split over {threads} threads"
        return None

    @rule("divisibility", after="vec")
    def _vector_divides_head_dims(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for head_dim in (problem.head_dim, problem.head_dim_v):
            if head_dim % self.vec:
                return f"vec={self.vec} does not divide head dim {head_dim}"
        return None

    @rule("shared memory", after="vec")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = max(self.smem_bytes(problem, limits), self.storage_of_queries(problem))
        return limits.lacks_shared_memory(needed)

    @rule("registers", after="vec")
    def _gradients_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        both = self.padded(problem.head_dim) + self.padded(problem.head_dim_v)
        held = self.bc // self.threads_high * both // self.lanes
        if held > MAX_MICRO_TILE:
            return f"gradients of k and v take {held} registers per thread, {MAX_MICRO_TILE} at most"
        return None

    @rule("registers", after="min_blocks")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = self.registers(problem, limits)
        share = limits.registers_per_sm // (self.min_blocks * self.threads_per_block) // 8 * 8
        allowed = min(limits.max_registers_per_thread, share)
        if needed > allowed:
            return f"about {needed} per thread, {allowed} allowed with {self.min_blocks} blocks per SM"
        return None

    @rule("occupancy", after="min_blocks")
    def _promised_blocks_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        smem = max(self.smem_bytes(problem, limits), self.storage_of_queries(problem))
        room = limits.blocks_per_sm(self.threads_per_block, 0, smem)
        if self.min_blocks > room:
            return f"min_blocks={self.min_blocks}, but {smem} bytes of shared memory leave room for {room}"
        return None

    @rule("short sequence", after="br", advisory=True)
    def _rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("br", self.br, problem.seqlen_q)

    @rule("short sequence", after="bc", advisory=True)
    def _keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("bc", self.bc, problem.seqlen_k)

    @rule("micro-tile", after="lanes", advisory=True)
    def _threads_have_work(self, problem: Problem, limits: DeviceLimits) -> str | None:
        scores = self.br * self.bc // self.threads_per_block
        least = 4 if max(problem.head_dim, problem.head_dim_v) > 128 else 8
        if scores < least and self.threads_per_block > WARP:
            return f"{scores} scores per thread, {least} wanted to feed on what is read"
        return None
