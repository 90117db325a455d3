"""Which kernels of this family cannot run on a problem and a card, and which run but are never the best."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from ...columns import least
from ...handover.reach import OWN_REACH, why_not_left_out
from ...handover.split_keys import no_need_to_split, splits_too_little
from ...limits import MEMORY_LATENCY_NS, PORTABLE_CLUSTER, WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...scoring.values import first_rows_see_less
from ...shared_memory.tiles import wasted
from ...variant import rule
from ..scoring_work import asks_special_functions
from ..shared_rules import why_not_both_ways, why_not_pack_heads
from .decoding import FEW_ROWS, decodes
from .layouts import (
    CHUNK_BYTES,
    PADDED,
    SWIZZLED,
    TILE_COLUMNS,
    TILE_ROWS,
    WIDE_HEAD_DIM,
    unswizzled_head_dim,
    whole,
)
from .parameters import AT_ONCE, EIGHT_BITS, F16, TF32, WIDENS_FROM, Parameters

#: Warps per SM below which the tensor cores wait: two for each scheduler.
MIN_WARPS = 8
#: Blocks per SM, of those that share keys, beyond which more of them only make shares smaller.
ENOUGH_BLOCKS = 8
#: Keys per tile of a decoding block up to which its one warp per ring holds the scores.
DECODING_KEYS = 64


@dataclass(frozen=True)
class RuledParameters(Parameters):
    """Parameters with the rules of their family."""

    # -- limits: what cannot run -----------------------------------------------------------------------

    @rule("arithmetic", after="parts")
    def _parts_are_asked_for(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.dtype != "f32":
            return f"parts={self.parts}: {problem.dtype} is multiplied whole" if self.parts != TF32 else None
        asked = {"3xtf32": TF32, "tf32": TF32, "3xf16": F16}.get(problem.precision, self.parts)
        if self.parts != asked:
            return f"parts={self.parts}: precision {problem.precision} is asked for"
        return None

    @rule("arithmetic", after="parts")
    def _tensor_cores_serve(self, problem: Problem, limits: DeviceLimits) -> str | None:
        number = self.parts if problem.dtype == "f32" else problem.dtype
        needed = {F16: 75, EIGHT_BITS: WIDENS_FROM}.get(number, 80)
        if limits.arch < needed:
            return f"tensor cores multiply {number} from sm_{needed} on, this is {limits.sm}"
        return None

    @rule("arithmetic", after="parts")
    def _parts_fill_chunks(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for dim in (problem.head_dim, problem.head_dim_v):
            if self.parts == F16 and dim % TILE_COLUMNS:
                return f"parts=f16: tiles are split by {TILE_COLUMNS} columns, no divisor of head dim {dim}"
        return None

    @rule("alignment", after="parts")
    def _rows_of_eight_bits_are_aligned(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for dim in (problem.head_dim, problem.head_dim_v):
            if self.arithmetic(problem) == EIGHT_BITS and dim % TILE_COLUMNS:
                return f"rows of {dim} elements are not multiples of {TILE_COLUMNS} bytes"
        return None

    @rule("divisibility", after="rows_per_warp")
    def _rows_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.br % self.rows_per_warp:
            return f"br={self.br} rows do not split into warps of {self.rows_per_warp}"
        return None

    @rule("divisibility", after="key_warps")
    def _warps_share_rows(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.key_warps > 1 and self.br != self.rows_per_warp:
            more = f"br={self.br} rows are more than the {self.rows_per_warp} of a warp"
            return f"key_warps={self.key_warps}: {more}"
        return None

    @rule("clusters", after="splits")
    def _clusters_form(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits > limits.max_cluster:
            return f"splits={self.splits}: {limits.sm} forms clusters of {limits.max_cluster} blocks at most"
        return None

    @rule("clusters", after="workspace_splits")
    def _blocks_share_keys_by_one_way(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return why_not_both_ways(self.splits, self.workspace_splits)

    @rule("combination", after="merge")
    def _results_meet_at_once(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.merge != AT_ONCE:
            return None
        if self.splits == 1 and (self.workspace_splits == 1 or self.key_warps == 1):
            return f"merge={AT_ONCE}: results of a single block's warps are written as they meet"
        if self.workspace_splits > 1 and problem.layout.is_packed:
            return f"merge={AT_ONCE}: a plan has some blocks write their rows, from registers"
        return None

    @rule("layout", after="layout")
    def _rows_swizzle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.layout == SWIZZLED and (dim := unswizzled_head_dim(problem)):
            return f"layout=swizzled: a row of {dim} elements is not made of four 16-byte chunks each"
        return None

    @rule("copies", after="stages")
    def _stages_need_async_copy(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.stages > 1 and not limits.has_async_copy:
            return f"stages={self.stages}: {limits.sm} has no asynchronous copies to fill them"
        return None

    @rule("shared memory", after="stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return limits.lacks_shared_memory(self.smem_bytes(problem, limits))

    @rule("copies", after="evict_first")
    def _copies_are_hinted(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.evict_first:
            return None
        if not limits.has_async_copy:
            return f"evict_first=True: {limits.sm} has no asynchronous copies to hint"
        access_bytes = self.key_access_bytes(problem)
        if access_bytes < CHUNK_BYTES:
            return f"evict_first=True: copies of {access_bytes} bytes take no hint, those of {CHUNK_BYTES} do"
        return None

    @rule("combination", after="poly_exp")
    def _options_of_half_precision(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.dtype == "f32" and self.poly_exp:
            return f"poly_exp={self.poly_exp} is good to 1e-4, which float32 is not content with"
        return None

    @rule("combination", after="q_in_registers")
    def _queries_take_the_order_of_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.kv_dtype and not self.q_in_registers:
            return f"q_in_registers=False: beside keys of {problem.kv_dtype} Q has their order, in registers"
        return None

    @rule("combination", after="q_whole")
    def _queries_have_parts(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_whole and (self.q_in_registers or self.arithmetic(problem) != "3xtf32"):
            where = "in registers" if self.q_in_registers else f"of class {self.arithmetic(problem)}"
            return f"q_whole=True: Q {where} is never kept in two parts"
        return None

    @rule("combination", after="heads")
    def _heads_follow_each_other(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and (self.stages == 1 or self.q_in_registers):
            return f"heads={self.heads}: the next head arrives in a second stage, and its Q in shared memory"
        return None

    @rule("combination", after="heads")
    def _heads_are_packed_or_in_turn(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and self.pack_heads:
            return f"heads={self.heads}: a block with heads side by side takes none in turn"
        if self.heads > 1 and self.key_shares() > 1:
            shared = f"key_warps={self.key_warps} splits={self.splits}"
            shared += f" workspace_splits={self.workspace_splits}" if self.workspace_splits > 1 else ""
            return f"heads={self.heads}: keys that others have too ({shared}) are those of one head"
        return None

    @rule("combination", after="heads")
    def _heads_are_of_one_sequence(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and problem.layout.is_packed:
            return f"heads={self.heads}: packed sequences have no tiles in common to take in turn"
        if self.heads > 1 and problem.layout.is_paged:
            return f"heads={self.heads}: sequences in pages have tiles of keys of their own"
        return None

    @rule("combination", after="heads")
    def _heads_see_the_same_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and problem.scores.vary_by_batch:
            return f"heads={self.heads}: heads in turn walk the same keys, which differ from batch to batch"
        lists = self.tile_lists(problem, limits) if self.heads > 1 else None
        if lists is not None and (lists.by_batch or lists.by_head):
            return f"heads={self.heads}: heads in turn walk the same tiles of keys, each of these sees others"
        return None

    @rule("combination", after="far_keys")
    def _far_keys_have_no_weight(self, problem: Problem, limits: DeviceLimits) -> str | None:
        reason = why_not_left_out(problem) if self.leaves_far_keys_out else None
        return f"far_keys={self.far_keys}: {reason}" if reason else None

    @rule("combination", after="heads")
    def _rows_have_a_reach_of_their_own(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.leaves_far_keys_out and (self.pack_heads or self.heads > 1 or self.key_shares() > 1):
            return f"far_keys={self.far_keys}: {OWN_REACH}"
        return None

    @rule("combination", after="block_order")
    def _heads_are_neighbours(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and self.block_order != "by_head":
            return f"heads={self.heads} of a block are neighbours: block_order={self.block_order} is moot"
        return None

    @rule("registers", after="min_blocks")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed, allowed = self.registers(problem, limits), self._registers_allowed(limits, self.min_blocks)
        if needed > allowed:
            return (
                f"about {needed} per thread, {allowed} allowed with "
                f"{self.min_blocks} blocks of {self.threads()} threads per SM"
            )
        return None

    @rule("occupancy", after="min_blocks")
    def _promised_blocks_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        smem = self.smem_bytes(problem, limits)
        room = limits.blocks_per_sm(self.threads(), 0, smem)
        if self.min_blocks > room:
            return f"min_blocks={self.min_blocks}, but {smem} bytes of shared memory leave room for {room}"
        return None

    # -- advice: what runs, but never best ----------------------------------------------------------

    @rule("parts", after="parts", advisory=True)
    def _parts_are_fast(self, problem: Problem, limits: DeviceLimits) -> str | None:
        in_chunks = problem.head_dim % TILE_COLUMNS == problem.head_dim_v % TILE_COLUMNS == 0
        if self.arithmetic(problem) == "3xtf32" and problem.precision == "auto" and in_chunks:
            return "parts=tf32: tensor cores multiply f16 twice as fast, and all warps share tiles in parts"
        return None

    @rule("packing", after="pack_heads", advisory=True)
    def _heads_share_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        together = problem.seqlen_q * problem.group
        if self.pack_heads:
            return why_not_pack_heads(problem, FEW_ROWS)
        if problem.group > 1 and together <= FEW_ROWS:
            return f"pack_heads=False: {problem.group} heads of {problem.seqlen_q} query rows fit one tile"
        return None

    @rule("shares of keys", after="key_warps", advisory=True)
    def _warps_wait_for_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.key_warps > 1 and not decodes(problem):
            rows = problem.seqlen_q * problem.group
            there_are = f"{rows} query rows for {self.keys_walked(problem)} keys"
            return f"key_warps={self.key_warps}: {there_are} suffice for all warps"
        return None

    # The next three are from times of 480 variants on an H200: eight problems of one query row, bf16.

    @rule("decoding", after="splits", advisory=True)
    def _clusters_leave_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        half = self._blocks(problem) // 2
        if self._is_timed_decoding(problem) and self.splits == 16 and half >= 3 * limits.num_sms // 8:
            return (
                f"splits=16: never within 4 % of the best where 8 make {half} blocks on {limits.num_sms} SMs"
            )
        return None

    @rule("decoding", after="bc", advisory=True)
    def _tiles_are_small(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self._is_timed_decoding(problem) and self.bc > DECODING_KEYS:
            return (
                f"bc={self.bc}: most of more than {DECODING_KEYS} keys spill, others were 3 % slower at least"
            )
        return None

    @rule("decoding", after="layout", advisory=True)
    def _copies_swizzle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self._is_timed_decoding(problem) and self.layout == PADDED and not unswizzled_head_dim(problem):
            return "layout=padded: 4 to 16 % slower at best, 7 % where nothing else differs"
        return None

    @rule("shares of keys", after="splits", advisory=True)
    def _multiprocessors_idle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits == 1:
            return None
        alone = self._blocks(problem) // (self.splits * self.workspace_splits)
        enough = limits.num_sms * (ENOUGH_BLOCKS if decodes(problem) else 1)
        if alone >= limits.num_sms and not decodes(problem):
            return f"splits={self.splits}: {alone} blocks occupy {limits.num_sms} multiprocessors without"
        if self.splits * alone > enough:
            return f"splits={self.splits}: makes {self.splits * alone} blocks of {alone}, {enough} are enough"
        return None

    @rule("shares of keys", after="workspace_splits", advisory=True)
    def _blocks_fill_the_card(self, problem: Problem, limits: DeviceLimits) -> str | None:
        splits = self.workspace_splits
        if 1 < splits <= min(limits.max_cluster, PORTABLE_CLUSTER) and not problem.layout.is_packed:
            return f"workspace_splits={splits}: as many blocks of a cluster meet without a launch more"
        heads = problem.num_kv_heads if self.pack_heads else problem.num_q_heads
        alone = self._blocks(problem) // (self.splits * splits)
        return no_need_to_split(splits, alone // heads, heads, problem, limits)

    @rule("shares of keys", after="bc", advisory=True)
    def _plans_split_as_is_needed(self, problem: Problem, limits: DeviceLimits) -> str | None:
        keys_of_share = self.key_warps * self.bc
        return splits_too_little(self.workspace_splits, keys_of_share, self.keys_walked(problem), problem)

    @rule("shares of keys", after="bc", advisory=True)
    def _keys_suffice_for_all(self, problem: Problem, limits: DeviceLimits) -> str | None:
        shares = self.key_shares()
        keys = self.keys_walked(problem)
        if shares > 1 and keys < shares * self.bc:
            return f"bc={self.bc}: {keys} keys are no tile for each of {shares} shares"
        return None

    @rule("short sequence", after="br", advisory=True)
    def _rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("br", self.br, self.query_rows(problem))

    @rule("short sequence", after="bc", advisory=True)
    def _keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        longest, keys = 8 * self.bc, self.keys_walked(problem)
        if self.bc % 16 and keys > longest:
            return f"bc={self.bc} fits odd lengths up to {longest}, this one is {keys}"
        return wasted("bc", self.bc, keys)

    @rule("Q in parts", after="q_whole", advisory=True)
    def _queries_take_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_whole and problem.head_dim <= WIDE_HEAD_DIM:
            return f"q_whole=True: at a head dim of {problem.head_dim} there is room for Q in two parts"
        return None

    @rule("last step", after="d_steps", advisory=True)
    def _last_step_differs(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.d_steps == "whole" and self.widens(problem):
            return f"d_steps=whole: all steps are, beside keys of {problem.key_dtype}"
        if self.d_steps == "whole" and (problem.dtype == "f32" or whole(problem.head_dim, 8) % 16 == 0):
            return f"d_steps=whole: a head dim of {problem.head_dim} ends with a whole step"
        return None

    @rule("stages", after="stages", advisory=True)
    def _stages_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        keys = self.keys_walked(problem)
        tiles = -(-keys // self.bc)
        if self.stages > max(2, tiles):
            return f"stages={self.stages}, but {keys} keys are {tiles} tiles of {self.bc}"
        if self.stages == 1 and decodes(problem) and limits.has_async_copy:
            return "stages=1: nothing is under way from device memory while a tile is computed"
        return None

    @rule("copies", after="evict_first", advisory=True)
    def _keys_are_read_once(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.evict_first:
            return None
        if not decodes(problem):
            return f"evict_first=True: {problem.seqlen_q} query rows take longer than their keys to be read"
        tiles = -(-self.query_rows(problem) // self.br) * (1 if self.pack_heads else problem.group)
        if tiles > 1:
            return f"evict_first=True: {tiles} tiles of query rows read the same keys, all but one from L2"
        return None

    @rule("rescaling", after="rescale", advisory=True)
    def _maximum_settles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        keys = self.keys_walked(problem)
        if self.rescale == "always" and keys > 4 * self.bc:
            return f"rescale=always: maxima seldom grow after {self.bc} of {keys} keys"
        return None

    @rule("exponentials", after="poly_exp", advisory=True)
    def _exponentials_are_many(self, problem: Problem, limits: DeviceLimits) -> str | None:
        long = problem.head_dim + problem.head_dim_v > 128 and not asks_special_functions(problem)
        if self.poly_exp and long:
            return f"poly_exp={self.poly_exp}: with head dims of {problem.head_dim} the products take longer"
        if self.poly_exp and decodes(problem):
            return f"poly_exp={self.poly_exp}: {problem.seqlen_q} query rows wait for memory alone"
        return None

    @rule("short sequence", after="heads", advisory=True)
    def _heads_are_short(self, problem: Problem, limits: DeviceLimits) -> str | None:
        keys = self.keys_walked(problem)
        if self.heads > 1 and keys > 1024:
            return f"heads={self.heads}: {keys} keys hide the next head's first copies by themselves"
        return None

    @rule("occupancy", after="min_blocks", advisory=True)
    def _blocks_hide_latency(self, problem: Problem, limits: DeviceLimits) -> str | None:
        room = limits.blocks_per_sm(self.threads(), 0, self.smem_bytes(problem, limits))
        needed = self.registers(problem, limits)
        for blocks in sorted(self._choices("min_blocks"), reverse=True):
            fits = (blocks <= room) & (needed <= self._registers_allowed(limits, blocks))
            if (self.min_blocks < blocks) & fits:
                return f"min_blocks={self.min_blocks}, but {blocks} blocks fit"
        if decodes(problem):
            return self._too_little_under_way(problem, limits)
        warps = self.min_blocks * self.warps
        if warps < MIN_WARPS:
            return f"{warps} warps per SM promised, {MIN_WARPS} wanted: two for each scheduler take turns"
        return None

    @rule("block order", after="block_order", advisory=True)
    def _blocks_differ(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.block_order == "heaviest_first" and not first_rows_see_less(problem):
            return "block_order=heaviest_first: without a causal mask all blocks are equally long"
        return None

    def _is_timed_decoding(self, problem: Problem) -> bool:
        """Whether it is of the kind that was timed: one tile of 16 rows, of 16-bit numbers, many keys."""
        return self.br == TILE_ROWS and problem.dtype != "f32" and decodes(problem)

    def _too_little_under_way(self, problem: Problem, limits: DeviceLimits) -> str | None:
        row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES[problem.key_dtype]
        walked = self.keys_walked(problem)
        all_bytes = problem.batch * problem.num_kv_heads * walked * row_bytes
        wanted = min(limits.dram_gbps * MEMORY_LATENCY_NS, all_bytes) // limits.num_sms
        blocks = self._blocks(problem)
        keys = least(self.tiles_ahead * self.bc, walked / (self.splits * self.workspace_splits))
        under_way = floor(least(self.min_blocks, blocks / limits.num_sms) * keys * row_bytes)
        if under_way < wanted:
            return f"{under_way} bytes per SM under way, {wanted} wanted for the bandwidth of device memory"
        return None

    def _blocks(self, problem: Problem) -> int:
        """Returns the blocks of a launch."""
        heads = problem.num_kv_heads if self.pack_heads else problem.num_q_heads
        splits = self.splits * self.workspace_splits
        return problem.batch * heads * -(-self.query_rows(problem) // self.br) * splits

    def _registers_allowed(self, limits: DeviceLimits, blocks: int) -> int:
        """Registers per thread with so many blocks resident: a warp lives in one of four partitions."""
        warps_per_partition = -(-blocks * self.warps // 4)
        share = limits.registers_per_sm // 4 // (warps_per_partition * WARP) // 8 * 8
        return least(limits.max_registers_per_thread, share)
