"""Which Hopper kernels cannot run on a problem and a card."""

from __future__ import annotations

from dataclasses import dataclass

from ...handover.reach import OWN_REACH, why_not_left_out
from ...layout import DENSE
from ...limits import DeviceLimits
from ...problem import EIGHT, ITEM_BYTES, Problem
from ...scored_tiles.arrays import tile_arrays
from ...variant import rule
from ..shared_rules import why_not_both_ways, why_not_swizzled
from .caps import WITHIN_EXPONENTS, why_no_such_tangent
from .parameters import FREE, HEADS, ROWS, TILES, Parameters, is_split
from .registers import (
    REGISTERS_BESIDE_SUMS,
    consumer_registers,
    launch_registers,
    needed_registers,
    producer_registers,
)
from .shared_memory import (
    ALIGNMENT,
    SWIZZLED_ROWS,
    bytes_of_storage,
    bytes_of_tiles,
    partial_bytes,
    pieces,
    staged_chunk,
)

#: Keys that one product of weights of eight bits takes: 32 bytes.
EIGHT_BITS_DEPTH = 32


@dataclass(frozen=True)
class RuledParameters(Parameters):
    """Parameters with the rules of their family."""

    def _sharing(self) -> str:
        """By which parameter blocks share keys, as reasons name it."""
        return f"splits={self.splits}" if self.splits > 1 else f"workspace_splits={self.workspace_splits}"

    @rule("alignment", after="br")
    def _rows_suit_the_copy_engine(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for dim in (problem.head_dim, problem.head_dim_v):
            if dim * ITEM_BYTES[problem.dtype] % 16:
                return f"rows of {dim} elements are not multiples of 16 bytes, as the copy engine needs"
        if problem.head_dim_v % 8:
            return f"{problem.head_dim_v} columns of values are not a multiple of 8, as products need"
        return None

    @rule("pages", after="br")
    def _pages_are_swizzled_alike(self, problem: Problem, limits: DeviceLimits) -> str | None:
        others = "families mma and simt take pages of any size"
        return why_not_swizzled(problem, problem.page_size, others)

    @rule("combination", after="cluster")
    def _eight_bits_are_plain(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.has_scales and self.p_in_shared:
            return f"p_in_shared=True: not made for {problem.dtype}, whose Q and weights differ in size"
        if problem.has_scales and self.cluster > 1:
            return f"cluster={self.cluster}: each block turns values of {problem.dtype} into f16 for itself"
        return None

    @rule("combination", after="weights")
    def _weights_of_eight_bits_are_asked_for(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.has_small_weights():
            return None
        if not problem.has_scales:
            return f"weights={self.weights}: not made for {problem.dtype}"
        if problem.precision != EIGHT:
            return (
                f"weights={self.weights}: four bits of a weight are less than precision "
                f"{problem.precision} promises, precision {EIGHT} takes them"
            )
        if self.bc % EIGHT_BITS_DEPTH:
            return f"bc={self.bc}: products of weights={self.weights} take {EIGHT_BITS_DEPTH} keys at a time"
        if problem.scores.ends_of_batches():
            return (
                f"weights={self.weights}: values behind the end of a batch's keys are cleared by rows of keys"
            )
        return None

    @rule("combination", after="values")
    def _what_is_turned_in_front(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.turns_values_in_front:
            return None
        if not problem.has_scales:
            return f"values={self.values}: products read those of {problem.dtype} as they are"
        return self._why_not_whole(problem, f"values={self.values}")

    def _why_not_whole(self, problem: Problem, what: str) -> str | None:
        """Why launches in front cannot leave tiles for all blocks."""
        if problem.layout is not DENSE or problem.append is not None:
            return f"{what}: made for queries and keys that lie there whole, with one length each"
        return None

    @rule("combination", after="far_keys")
    def _far_keys_have_no_weight(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.leaves_far_keys_out:
            return None
        reason = why_not_left_out(problem)
        if not reason and self.splits_in_front:
            reason = f"not made for split={self.split}"
        return f"far_keys={self.far_keys}: {reason}" if reason else None

    @rule("combination", after="cluster")
    def _rows_have_a_reach_of_their_own(self, problem: Problem, limits: DeviceLimits) -> str | None:
        shares_keys = self.key_shares() > 1 or self.shares_last_turn()
        if self.leaves_far_keys_out and (self.pack_heads or self.cluster > 1 or shares_keys):
            return f"far_keys={self.far_keys}: {OWN_REACH}"
        return None

    @rule("combination", after="powers")
    def _powers_are_straight(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.sums_by_products:
            return None
        what = f"powers={self.powers}"
        if not self.has_small_weights():
            return f"{what}: weights={self.weights} have more bits than straight lines are right to"
        if not self.turns_values_in_front:
            return f"{what}: the ones that sum weights stand beside values that come values=in_front"
        return None

    @rule("combination", after="tangent")
    def _straight_powers_are_of_scores(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sums_by_products and (self.poly_exp or self.tangent in WITHIN_EXPONENTS):
            what = f"poly_exp={self.poly_exp}" if self.poly_exp else f"tangent={self.tangent}"
            return f"{what}: powers={self.powers} have no exponentials"
        return None

    @rule("combination", after="q_in_registers")
    def _scores_are_pairs(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.pairs_scores:
            return None
        what = f"score_type={self.score_type}"
        if not self.sums_by_products:
            return f"{what}: powers={self.powers} take scores of more bits"
        if not problem.scores.is_plain:
            return f"{what}: not made for scores that are changed, or hidden by more than a causal mask"
        if self.q_in_registers:
            return f"{what}: Q is brought into range in shared memory"
        return None

    @rule("combination", after="rescale")
    def _pairs_have_maxima_that_lag(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.pairs_scores and self.rescale != "lazy":
            return f"rescale={self.rescale}: maxima of score_type={self.score_type} are looked for by bounds"
        return None

    @rule("combination", after="promotion")
    def _sums_are_kept(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.keeps_sums():
            return None
        if not self.has_small_weights():
            return f"promotion={self.promotion}: sums of weights={self.weights} lose nothing"
        if not self.persistent:
            return f"promotion={self.promotion}: room for sums is that of blocks that stay"
        return None

    @rule("combination", after="cluster")
    def _pieces_are_shared(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.copiers == 1:
            return None
        what = f"copiers={self.copiers}"
        if not problem.layout.is_paged:
            return f"{what}: one thread copies whole tiles"
        if is_split(problem) or problem.has_scales:
            return f"{what}: the producer's other warps have tiles of {problem.dtype} to turn"
        if self.bias_stages:
            return f"{what}: with bias_stages={self.bias_stages} another warp copies arrays"
        of_tile = pieces(self, problem)
        if of_tile % self.copiers:
            return f"{what}: {of_tile} pieces of a tile are not as many for each"
        return None

    @rule("combination", after="bias_stages")
    def _arrays_are_there(self, problem: Problem, limits: DeviceLimits) -> str | None:
        reason = self.bias_stages and why_not_staged(problem)
        if not reason and self.bias_stages and self.pack_heads:
            reason = "rows of packed heads lie apart"
        return f"bias_stages={self.bias_stages}: {reason}" if reason else None

    @rule("combination", after="cluster")
    def _heads_share_biases(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.bias_heads == 1:
            return None
        what = f"bias_heads={self.bias_heads}"
        if not self.bias_stages:
            return f"{what}: not made for bias_stages={self.bias_stages}, by which each warp copies its own"
        if self.cluster > 1 or self.key_shares() > 1:
            return f"{what}: blocks form clusters, or share keys, by one way"
        if problem.scores.vary_by_head:
            return f"{what}: each head may walk other keys"
        if self.section > 1:
            return f"{what}: not made for section={self.section}"
        widths = [staged_chunk(self, each.item_bytes) for each in self.met_arrays(problem)]
        share = self.br // self.bias_heads * min(widths)
        if share % ALIGNMENT:
            return f"{what}: shares of {share} bytes are swizzled unlike in multiples of {ALIGNMENT}"
        return None

    @rule("combination", after="seen_bits")
    def _bits_are_of_lists(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.seen_bits:
            return None
        if not problem.scores.needs_lists:
            return "seen_bits=True: no mask is asked pair by pair"
        if is_split(problem) or problem.layout.is_packed:
            what = problem.dtype if is_split(problem) else "packed sequences"
            return f"seen_bits=True: not made for {what}"
        if self.bias_stages and not self.met_arrays(problem):
            return f"bias_stages={self.bias_stages}: with seen_bits=True no array is read for a mask"
        return None

    @rule("combination", after="split")
    def _what_is_split_in_front(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.splits_in_front:
            return None
        if not is_split(problem):
            return f"split={self.split}: {problem.dtype} is not split"
        return self._why_not_whole(problem, f"split={self.split}")

    @rule("combination", after="summed_columns")
    def _columns_are_summed_apart(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.summed_columns:
            return None
        if not self.splits_in_front:
            return f"summed_columns={self.summed_columns}: not made for split={self.split}"
        if self.summed_columns >= problem.head_dim_v:
            return f"summed_columns={self.summed_columns}: {problem.head_dim_v} columns of values are no more"
        return None

    @rule("combination", after="split_by")
    def _what_is_split(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.split_by != ROWS and not is_split(problem):
            return f"split_by={self.split_by}: {problem.dtype} is not split"
        if self.split_by != ROWS and self.splits_in_front:
            return f"split_by={self.split_by}: no block splits anything (split={self.split})"
        stages = min(self.k_stages, self.v_stages)
        if self.split_by == TILES and stages == 1:
            return f"split_by=tiles: with {stages} stage of K or V no other tile is there to split"
        return None

    @rule("combination", after="tangent")
    def _tangents_are_taken(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if reason := why_no_such_tangent(problem, self.tangent):
            return f"tangent={self.tangent}: {reason}"
        if self.tangent in WITHIN_EXPONENTS and self.rescale != "lazy":
            return f"tangent={self.tangent}: not made for rescale={self.rescale}"
        return None

    @rule("combination", after="tail")
    def _parts_are_plain(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not is_split(problem):
            return None
        for name in ("o_apart", "p_in_shared", "q_in_registers", "poly_exp", "tail"):
            if value := getattr(self, name):
                return f"{name}={value}: not made for {problem.dtype} in parts"
        if self.cluster > 1 and self.splits_in_front:
            return f"cluster={self.cluster}: each block copies tiles in parts for itself"
        if self.cluster > 1:
            return f"cluster={self.cluster}: each block splits {problem.dtype} for itself"
        return None

    @rule("combination", after="cluster")
    def _clusters_are_of_several(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.cluster_over == HEADS and self.cluster == 1:
            return "cluster_over=heads: a cluster of one block shares keys with no other"
        return None

    @rule("combination", after="cluster")
    def _clusters_walk_one_list(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads_per_cluster() > 1 and problem.scores.vary_by_head:
            return f"cluster={self.cluster}: heads that walk the same keys, of which each sees others"
        return None

    @rule("combination", after="cluster")
    def _shares_are_swizzled_alike(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.bc % (SWIZZLED_ROWS * self.cluster):
            whole = f"whole groups of {SWIZZLED_ROWS}, in which rows are swizzled"
            return f"cluster={self.cluster}: bc={self.bc} keys are not as many shares of {whole}"
        return None

    @rule("combination", after="cluster")
    def _sections_are_of_clusters(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.section > 1 and self.section <= self.heads_per_cluster():
            return f"section={self.section}: a cluster takes {self.cluster} heads, which is section=1 too"
        return None

    @rule("combination", after="cluster")
    def _clusters_are_of_one_length(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.cluster > 1 and problem.layout.is_packed:
            return f"cluster={self.cluster}: plans of packed sequences list blocks one by one"
        return None

    @rule("combination", after="section")
    def _plans_have_an_order(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.section > 1 and problem.layout.is_packed:
            return f"section={self.section}: heads of packed sequences come by those that share keys, or all"
        return None

    @rule("combination", after="pack_heads")
    def _heads_are_packed_of_16_bits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        reason = why_not_packed(problem)
        return f"pack_heads=True: {reason}" if self.pack_heads and reason else None

    @rule("combination", after="workspace_splits")
    def _keys_are_split_of_16_bits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.key_shares() > 1 and ITEM_BYTES[problem.dtype] != 2:
            return f"{self._sharing()}: not made for {problem.dtype}"
        return None

    @rule("clusters", after="splits")
    def _clusters_form(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits > limits.max_cluster:
            return f"splits={self.splits}: {limits.sm} forms clusters of {limits.max_cluster} blocks at most"
        return None

    @rule("clusters", after="workspace_splits")
    def _blocks_share_keys_by_one_way(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return why_not_both_ways(self.splits, self.workspace_splits)

    @rule("combination", after="persistent")
    def _blocks_that_share_keys_end(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits > 1 and self.persistent:
            return f"splits={self.splits}: what blocks make together takes the place of the next tiles"
        if self.workspace_splits > 1 and self.persistent:
            return f"{self._sharing()}: each block leaves one result, where its number says"
        return None

    @rule("combination", after="last_turn")
    def _last_turns_are_shared_evenly(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.shares_last_turn():
            return None
        if not self.persistent:
            return "last_turn=shared: blocks of one tile have no turns"
        if not problem.scores.only_flags_limit_rows or problem.layout != DENSE:
            return "last_turn=shared: made for arrays of one length, with no mask but a causal one"
        if ITEM_BYTES[problem.dtype] != 2:
            return f"last_turn=shared: not made for {problem.dtype}"
        if self.key_shares() > 1:
            return f"last_turn=shared: blocks share the keys of all tiles already ({self._sharing()})"
        return None

    @rule("combination", after="cluster")
    def _clusters_have_whole_turns(self, problem: Problem, limits: DeviceLimits) -> str | None:
        together = self.cluster * self.bias_heads
        if self.shares_last_turn() and together > 1:
            return f"cluster={together}: last_turn=shared is for blocks that take tiles alone"
        return None

    @rule("combination", after="o_apart")
    def _packed_queries_have_one_place(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.pack_heads and self.q_stages > 1:
            return f"q_stages={self.q_stages}: rows of packed heads are brought by those who need them"
        if self.pack_heads and self.o_apart:
            return "o_apart=True: rows of packed heads are brought by those who need them"
        return None

    @rule("combination", after="cluster")
    def _clusters_share_keys_or_split_them(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.cluster > 1 and self.splits > 1:
            return (
                f"cluster={self.cluster}: the blocks of a cluster split keys already (splits={self.splits})"
            )
        if self.cluster > 1 and self.workspace_splits > 1:
            return f"cluster={self.cluster}: blocks have keys of their own each ({self._sharing()})"
        if self.heads_per_cluster() > 1 and self.pack_heads:
            return f"cluster={self.cluster}: heads that share keys are packed already"
        return None

    @rule("shared memory", after="v_stages")
    def _partial_results_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits == 1:
            return None
        needed, room = partial_bytes(self, problem), bytes_of_tiles(self, problem)
        if needed > room:
            return (
                f"splits={self.splits}: a partial result of {needed} bytes takes the place of tiles of {room}"
            )
        return None

    @rule("shared memory", after="v_stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return limits.lacks_shared_memory(bytes_of_storage(self, problem))

    @rule("combination", after="order_of_groups")
    def _groups_take_turns(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.consumers == 1 and self.order_of_groups != FREE:
            return f"order_of_groups={self.order_of_groups}: br={self.br} is one warpgroup's alone"
        return None

    @rule("combination", after="section")
    def _blocks_that_stay_have_an_order(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.persistent and self.section != 1:
            return f"section={self.section}: blocks that stay take a head's tiles in pairs of one length"
        return None

    @rule("combination", after="q_stages")
    def _queries_follow_each_other(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_stages > 1 and not self.persistent:
            return f"q_stages={self.q_stages}: a block that does not stay has no next tile"
        return None

    @rule("combination", after="o_apart")
    def _next_queries_come_beside_outputs(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.o_apart and not self.persistent:
            return "o_apart=True: a block that does not stay has no next tile to make room for"
        return None

    @rule("registers", after="min_blocks")
    def _products_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        """One instruction's sums must fit what the launch gives: ptxas knows nothing of shares there."""
        sums, columns = max((self.score_registers(), self.bc), (problem.head_dim_v // 2, problem.head_dim_v))
        needed, given = sums + REGISTERS_BESIDE_SUMS, launch_registers(self, limits)
        if needed > given:
            return (
                f"{needed} for one product of {columns} columns, a launch of "
                f"{self.min_blocks} blocks of {self.threads()} threads per SM gives {given}"
            )
        return None

    @rule("registers", after="min_blocks")
    def _copying_gives_some_up(self, problem: Problem, limits: DeviceLimits) -> str | None:
        given, kept = launch_registers(self, limits), producer_registers(self, problem, limits)
        if kept > given:
            return (
                f"the warpgroup that copies keeps {kept}, a launch of {self.min_blocks} blocks of "
                f"{self.threads()} threads per SM gives {given}"
            )
        return None

    @rule("registers", after="min_blocks")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed, allowed = needed_registers(self, problem), consumer_registers(self, problem, limits)
        if needed > allowed:
            return (
                f"about {needed} per computing thread, {allowed} allowed with "
                f"{self.min_blocks} blocks of {self.threads()} threads per SM"
            )
        return None

    @rule("occupancy", after="min_blocks")
    def _promised_blocks_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        smem = bytes_of_storage(self, problem)
        room = limits.blocks_per_sm(self.threads(), 0, smem)
        if self.min_blocks > room:
            return f"min_blocks={self.min_blocks}, but {smem} bytes of shared memory leave room for {room}"
        return None

    @rule("clusters", after="cluster")
    def _blocks_have_neighbours(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tiles_per_cluster() > 1 and self.query_rows(problem) <= self.br:
            return (
                f"cluster={self.cluster}: {self.query_rows(problem)} query rows are one tile of {self.br}, a "
                f"cluster takes {self.cluster} of one head"
            )
        return None

    @rule("combination", after="tail")
    def _tails_are_plain(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tail >= self.bc:
            return f"tail={self.tail}: no narrower than tiles of {self.bc}"
        if self.tail and (self.p_in_shared or problem.has_scales):
            what = "weights that pass by shared memory" if self.p_in_shared else problem.dtype
            return f"tail={self.tail}: not made for {what}"
        if self.tail and self.bias_stages:
            return f"tail={self.tail}: not made for bias_stages={self.bias_stages}, which all warps give up"
        if self.tail and problem.scores.needs_lists:
            return f"tail={self.tail}: not made for lists of tiles, which may end before the last"
        return None


def why_not_packed(problem: Problem) -> str | None:
    """Says why no tile's rows may be those of several heads; None where they may."""
    if ITEM_BYTES[problem.dtype] != 2:
        return f"not made for {problem.dtype}"
    if problem.scores.needs_lists:
        return "not made for lists of tiles of keys"
    if arrays := tile_arrays(problem.scores):
        return (
            f"rows of {' and '.join(each.name for each in arrays)} come to shared memory by those of a head"
        )
    return None


def why_not_staged(problem: Problem) -> str | None:
    """Says why the copy engine brings no arrays that scores meet; None where it does."""
    arrays = tile_arrays(problem.scores)
    if not arrays:
        return "no bias or mask is read at each pair's own row and key"
    if ITEM_BYTES[problem.dtype] != 2:
        return f"of {problem.dtype}, the producer's warps have more to do than to copy"
    if problem.layout is not DENSE:
        return "sequences have lengths of their own, by which no map of an array ends"
    return next((f"{each.name} is read in several ways" for each in arrays if not each.is_alone), None)
