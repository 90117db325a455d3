"""Which float32 kernels on CUDA cores cannot run on a problem and a card, and which are never the best."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

from ...columns import least
from ...handover.reach import OWN_REACH, why_not_left_out
from ...handover.split_keys import no_need_to_split, splits_too_little
from ...limits import KIB, WARP, DeviceLimits
from ...problem import Problem
from ...scoring.values import first_rows_see_less, keys_in_reach
from ...shared_memory.tiles import (
    KEY_STEP,
    PADDED,
    ROW,
    SWIZZLED,
    TRANSPOSED,
    lane_corners,
    read_conflict,
    vector_group,
    wasted,
)
from ...variant import Verdict, rule
from .parameters import Parameters

#: Micro-tile entries per lane beyond which S and O cannot both stay in registers.
MAX_MICRO_TILE = 128


def _reads_are_conflict_free(name: str) -> Verdict:
    @rule("bank conflicts", after="p_layout", advisory=True)
    def verdict(self: RuledParameters, problem: Problem, limits: DeviceLimits) -> str | None:
        if name == "q" and self.q_in_registers:
            return None
        if (ways := self.read_conflict_of(name, problem)) > 1:
            return f"each read of {name.upper()} takes {ways:.0f} times its least wavefronts"
        return None

    return verdict


def _padding_or_swizzle_serves(name: str) -> Verdict:
    @rule("layout", after="p_layout", advisory=True)
    def verdict(self: RuledParameters, problem: Problem, limits: DeviceLimits) -> str | None:
        kind = getattr(self, f"{name}_layout")
        if kind in (PADDED, SWIZZLED) and not (name == "q" and self.q_in_registers):
            for simpler in (ROW, PADDED)[: 1 if kind == PADDED else 2]:
                other = self.changed(**{f"{name}_layout": simpler})
                if other.read_conflict_of(name, problem) == 1:
                    return f"{name}_layout={kind}, but {simpler} is free of conflicts too"
        return None

    return verdict


@dataclass(frozen=True)
class RuledParameters(Parameters):
    """Parameters with the rules of their family."""

    # -- limits: what cannot run -----------------------------------------------------------------------

    @rule("threads", after="threads_per_block")
    def _rows_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.br % self.warps:
            return f"br={self.br} rows do not split over {self.warps} warps"
        return None

    @rule("divisibility", after="lanes")
    def _rows_split_over_lanes(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.rows_per_warp % self.lane_rows:
            return f"{self.rows_per_warp} rows per warp do not split over {self.lane_rows} lanes"
        return None

    @rule("divisibility", after="bc")
    def _keys_split_over_lanes(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.bc % self.lanes:
            return f"bc={self.bc} keys do not split over {self.lanes} lanes"
        return None

    @rule("registers", after="bc")
    def _scores_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _overflow("S", self.tm, self.tn)

    @rule("divisibility", after="vec")
    def _vector_divides_head_dim(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for head_dim in (problem.head_dim, problem.head_dim_v):
            if head_dim % self.vec:
                return f"vec={self.vec} does not divide head dim {head_dim}"
        return None

    @rule("registers", after="q_in_registers")
    def _q_fits_in_registers(self, problem: Problem, limits: DeviceLimits) -> str | None:
        held = self.tm * problem.head_dim
        if self.q_in_registers and held > MAX_MICRO_TILE:
            return f"{self.tm} rows of Q take {held} registers per thread, {MAX_MICRO_TILE} at most"
        return None

    @rule("layout", after="q_layout")
    def _q_swizzles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unswizzlable("q", self.q_layout, problem.head_dim, self.vec)

    @rule("layout", after="k_layout")
    def _k_swizzles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unswizzlable("k", self.k_layout, problem.head_dim, self.vec)

    @rule("layout", after="v_layout")
    def _v_swizzles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unswizzlable("v", self.v_layout, self.padded_dim(problem.head_dim_v), self.vec)

    @rule("registers", after="v_layout")
    def _output_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _overflow("O", self.tm, self.td(problem.head_dim_v))

    @rule("layout", after="p_layout")
    def _p_swizzles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unswizzlable("p", self.p_layout, self.bc, KEY_STEP)

    @rule("divisibility", after="p_passes")
    def _passes_split_the_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tn % (self.p_passes * self.col_group) or self.bc % (self.p_passes * KEY_STEP):
            return f"{self.tn} keys per lane by {self.col_group} do not split over {self.p_passes} passes"
        return None

    @rule("shared memory", after="stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return limits.lacks_shared_memory(self.smem_bytes(problem, limits))

    @rule("registers", after="min_blocks")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed, allowed = self.registers(problem, limits), self._registers_allowed(self.min_blocks, limits)
        if needed > allowed:
            return (
                f"about {needed} per thread, {allowed} allowed with "
                f"{self.min_blocks} blocks of {self.threads_per_block} threads per SM"
            )
        return None

    @rule("occupancy", after="min_blocks")
    def _promised_blocks_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        smem = self.smem_bytes(problem, limits)
        room = limits.blocks_per_sm(self.threads_per_block, 0, smem)
        if self.min_blocks > room:
            return f"min_blocks={self.min_blocks}, but {smem} bytes of shared memory leave room for {room}"
        return None

    # -- advice: what runs, but never best ----------------------------------------------------------

    @rule("short sequence", after="lanes", advisory=True)
    def _rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("br", self.br, problem.seqlen_q)

    @rule("shares of keys", after="workspace_splits", advisory=True)
    def _blocks_fill_the_card(self, problem: Problem, limits: DeviceLimits) -> str | None:
        tiles, heads = -(-problem.seqlen_q // self.br) * problem.batch, problem.num_q_heads
        return no_need_to_split(self.workspace_splits, tiles, heads, problem, limits)

    @rule("shares of keys", after="bc", advisory=True)
    def _keys_suffice_for_all(self, problem: Problem, limits: DeviceLimits) -> str | None:
        keys = keys_in_reach(problem)
        if self.workspace_splits > 1 and keys < self.workspace_splits * self.bc:
            return f"bc={self.bc}: {keys} keys are no tile for each of {self.workspace_splits} shares"
        return splits_too_little(self.workspace_splits, self.bc, keys, problem)

    @rule("short sequence", after="bc", advisory=True)
    def _keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        longest = 8 * self.bc
        if self.bc % 16 and self.bc > 8 and problem.seqlen_k > longest:
            return f"bc={self.bc} fits odd lengths up to {longest}, this one is {problem.seqlen_k}"
        return wasted("bc", self.bc, problem.seqlen_k)

    @rule("micro-tile", after="bc", advisory=True)
    def _scores_feed_enough(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _starved("S", self.tm, self.tn, _wanted_intensity(problem, limits))

    @rule("vector width", after="vec", advisory=True)
    def _vector_is_widest(self, problem: Problem, limits: DeviceLimits) -> str | None:
        dims = sorted({problem.head_dim, problem.head_dim_v})
        widest = min(map(vector_group, dims))
        if self.vec < widest:
            return f"vec={self.vec}, but {widest} divides head dim {' and '.join(map(str, dims))} too"
        return None

    @rule("layout", after="q_layout", advisory=True)
    def _q_layout_is_best(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_in_registers and self.q_layout != TRANSPOSED:
            return f"q_layout={self.q_layout} of a Q that is held in registers"
        return _outdone("q", self.q_layout, self.tm)

    @rule("layout", after="v_layout", advisory=True)
    def _v_layout_is_best(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.v_layout in (PADDED, SWIZZLED):
            return f"v_layout={self.v_layout}: V is read along its rows, free of conflicts as it is"
        if self.v_layout == TRANSPOSED:
            by_rows = self.changed(v_layout=ROW).padded_dim(problem.head_dim_v)
            if by_rows == problem.head_dim_v:
                return f"v_layout=transposed: the lanes divide head dim {by_rows} without it"
        return None

    @rule("micro-tile", after="v_layout", advisory=True)
    def _output_feeds_enough(self, problem: Problem, limits: DeviceLimits) -> str | None:
        # Short head dims give a lane few columns.
        dv = problem.head_dim_v
        return _starved("O", self.tm, self.td(dv), min(_wanted_intensity(problem, limits), dv / 16))

    @rule("layout", after="p_layout", advisory=True)
    def _p_layout_is_best(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _outdone("p", self.p_layout, self.tm)

    # One rule for each operand: whether it conflicts is a matter of few parameters.
    _reads_of_k_are_free = _reads_are_conflict_free("k")
    _reads_of_p_are_free = _reads_are_conflict_free("p")
    _reads_of_q_are_free = _reads_are_conflict_free("q")
    _layout_of_k_serves = _padding_or_swizzle_serves("k")
    _layout_of_q_serves = _padding_or_swizzle_serves("q")
    _layout_of_p_serves = _padding_or_swizzle_serves("p")

    @rule("stages", after="stages", advisory=True)
    def _second_stage_is_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.stages == 2 and problem.seqlen_k <= self.bc:
            return f"{problem.seqlen_k} keys fill one tile of {self.bc}, a second stage would stay empty"
        return None

    @rule("shared memory", after="stages", advisory=True)
    def _second_pass_makes_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.p_passes == 1:
            return None
        whole = self.changed(p_passes=1).smem_bytes(problem, limits)
        halved = self.smem_bytes(problem, limits)
        room = [limits.blocks_per_sm(self.threads_per_block, 0, smem) for smem in (whole, halved)]
        if whole <= limits.smem_per_block and room[0] == room[1]:
            return f"p_passes=2 saves {whole - halved} bytes, but {room[1]} blocks fit either way"
        return None

    @rule("occupancy", after="min_blocks", advisory=True)
    def _blocks_hide_latency(self, problem: Problem, limits: DeviceLimits) -> str | None:
        room = limits.blocks_per_sm(self.threads_per_block, 0, self.smem_bytes(problem, limits))
        needed = self.registers(problem, limits)
        for blocks in sorted(self._choices("min_blocks"), reverse=True):
            fits = (blocks <= room) & (needed <= self._registers_allowed(blocks, limits))
            if (self.min_blocks < blocks) & fits:
                return f"min_blocks={self.min_blocks}, but {blocks} blocks fit"
        # Two warps per scheduler: one issues while the other waits. Small shared memories hold fewer.
        warps, wanted = self.min_blocks * self.warps, 8 if limits.smem_per_sm >= 128 * KIB else 4
        if warps < wanted:
            return f"{warps} warps per SM promised, {wanted} wanted to hide latencies"
        return None

    @rule("combination", after="far_keys")
    def _far_keys_have_no_weight(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.leaves_far_keys_out:
            return None
        reason = why_not_left_out(problem)
        if not reason and self.workspace_splits > 1:
            reason = OWN_REACH
        return f"far_keys={self.far_keys}: {reason}" if reason else None

    @rule("block order", after="block_order", advisory=True)
    def _blocks_differ(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.block_order == "heaviest_first" and not first_rows_see_less(problem):
            return "block_order=heaviest_first: without a causal mask all blocks are equally long"
        return None

    def _registers_allowed(self, blocks: int, limits: DeviceLimits) -> int:
        """Registers per thread when so many blocks are resident: warps live in one of four partitions, which
        own a quarter of the registers each."""
        warps_per_partition = -(-blocks * self.warps // 4)
        share = limits.registers_per_sm // 4 // (warps_per_partition * WARP) // 8 * 8
        return least(limits.max_registers_per_thread, share)

    def read_conflict_of(self, name: str, problem: Problem) -> float:
        """Returns the wavefronts of an operand's fragment read over the least possible."""
        tile = self.layout_of(name, problem)
        group = self.col_group if name == "k" else self.row_group
        keys, rows = lane_corners(index(self.lanes), index(group), index(group))
        width = KEY_STEP if name == "p" else self.vec
        at = keys if name == "k" else rows
        return read_conflict(tile.without_rows(), at, index(group if tile.transposed else width))


def _overflow(name: str, rows: int, columns: int) -> str | None:
    """Why a micro-tile cannot stay in registers."""
    held = rows * columns
    if held > MAX_MICRO_TILE:
        return f"{rows}x{columns} of {name} per thread take {held} registers, {MAX_MICRO_TILE} at most"
    return None


def _starved(name: str, rows: int, columns: int, least: float) -> str | None:
    """Why a micro-tile starves the FFMA pipe: a step reads rows + columns floats for rows · columns FFMAs."""
    fed = rows * columns / (rows + columns)
    if fed < least:
        return f"a {rows}x{columns} tile of {name} feeds {fed:.2f} FFMAs per shared float, {least:.2f} wanted"
    return None


def _wanted_intensity(problem: Problem, limits: DeviceLimits) -> float:
    """FFMAs per shared float worth asking for: two, but long rows leave a small memory with small tiles."""
    return min(2.0, limits.smem_per_block / (512 * max(problem.head_dim, problem.head_dim_v)))


def _unswizzlable(name: str, kind: str, columns: int, width: int) -> str | None:
    chunks = columns // width
    if kind == SWIZZLED and chunks % 2:
        return f"{name}_layout=swizzled: the {chunks} chunks of a row have no power of two to XOR"
    return None


def _outdone(name: str, kind: str, tm: int) -> str | None:
    """Why another layout of Q or P is at least as good: whole vectors of rows need few fragment registers."""
    if kind != TRANSPOSED and tm % 4 == 0:
        return f"{name}_layout={kind}, but {tm} rows per lane are whole vectors of a transposed tile"
    return None
