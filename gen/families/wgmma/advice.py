"""Which Hopper kernels run on a problem and a card, but are never the best there."""

from __future__ import annotations

from dataclasses import dataclass

from ...handover.split_keys import no_need_to_split, splits_too_little
from ...limits import DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...scoring.values import first_rows_see_less, keys_in_reach
from ...shared_memory.tiles import wasted
from ...variant import rule
from ...work import heads_alike
from ..scoring_work import asks_special_functions
from ..shared_rules import why_not_pack_heads
from .caps import cap_in_exponents
from .parameters import CUBIC, GROUP_ROWS, HEADS, MIXED, is_split
from .registers import consumer_registers, needed_registers
from .rules import RuledParameters, why_not_packed
from .shared_memory import bytes_of_storage, tiles_ahead

#: Keys per tile that are few for a long sequence, and tiles of keys that make copies of Q negligible, and
#: shares of them worth what it takes to put results together.
SMALL_TILE, MANY_TILES = 64, 32
#: A cluster loses too much where a block waits for more than this share of its neighbour's time.
WAITING_SHARE = 1 / 8
#: Query rows from which those of one head fill tiles, whatever their size.
MANY_ROWS = 512
#: Blocks per SM, of those that share keys, beyond which more of them only make shares smaller.
ENOUGH_WAVES = 4
#: Of whole waves of blocks, the share that leaves nothing for shares of keys to fill where rows are many.
FILLED = 0.9


@dataclass(frozen=True)
class AdvisedParameters(RuledParameters):
    """Parameters with the rules of their family, and with its advice."""

    def _row_tiles(self, problem: Problem) -> int:
        """Of the rows of a head, or of all heads that are packed."""
        return -(-self.query_rows(problem) // self.br)

    def _blocks_alone(self, problem: Problem) -> int:
        """Blocks if none shares another's keys."""
        return problem.batch * self.heads_apart(problem) * self._row_tiles(problem)

    def _fills_the_card_alone(self, problem: Problem, limits: DeviceLimits) -> bool:
        """Whether rows are many and their tiles whole waves of blocks, or nearly so."""
        alone = self._blocks_alone(problem)
        waves = -(-alone // limits.num_sms)
        return self._row_tiles(problem) > 1 and alone >= FILLED * waves * limits.num_sms

    @rule("packing", after="pack_heads", advisory=True)
    def _packing_fills_tiles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.pack_heads:
            return why_not_pack_heads(problem, MANY_ROWS)
        few = problem.seqlen_q < GROUP_ROWS
        if problem.group > 1 and few and not why_not_packed(problem):
            return f"pack_heads=False: {problem.seqlen_q} query rows leave tiles of {GROUP_ROWS} to be filled"
        return None

    @rule("shares of keys", after="splits", advisory=True)
    def _multiprocessors_idle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits == 1:
            return None
        alone, enough = self._blocks_alone(problem), ENOUGH_WAVES * limits.num_sms
        if self._fills_the_card_alone(problem, limits):
            return f"splits={self.splits}: {alone} blocks fill {limits.num_sms} multiprocessors without"
        if alone * self.splits > enough:
            return f"splits={self.splits}: makes {self.splits * alone} blocks of {alone}, {enough} are enough"
        return None

    @rule("shares of keys", after="workspace_splits", advisory=True)
    def _launches_more_are_worth_it(self, problem: Problem, limits: DeviceLimits) -> str | None:
        splits, tiles = self.workspace_splits, self._row_tiles(problem) * problem.batch
        # Of packed sequences the longest may keep a few multiprocessors busy at the end.
        if splits > 1 and not problem.layout.is_packed and self._fills_the_card_alone(problem, limits):
            alone = self._blocks_alone(problem)
            return f"workspace_splits={splits}: {alone} blocks fill {limits.num_sms} multiprocessors without"
        return no_need_to_split(
            splits, tiles, self.heads_apart(problem), problem, limits, enough_blocks=ENOUGH_WAVES
        )

    @rule("shares of keys", after="bc", advisory=True)
    def _keys_suffice_for_all(self, problem: Problem, limits: DeviceLimits) -> str | None:
        keys, shares = self.keys_walked(problem), self.key_shares()
        if shares > 1 and keys < shares * self.bc:
            return f"bc={self.bc}: {keys} keys are no tile for each of {shares} shares"
        return splits_too_little(self.workspace_splits, self.bc, keys, problem)

    @rule("shares of keys", after="min_blocks", advisory=True)
    def _last_turns_leave_blocks_idle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.shares_last_turn():
            return None
        if self.pack_heads:
            return "last_turn=shared: rows of packed heads have taken a fifth longer so"
        items, blocks = self.items(problem), limits.blocks_at_once(self.min_blocks, 1)
        left = items % blocks
        if self._blocks_alone(problem) < blocks or not 0 < left < FILLED * blocks:
            what = "tiles" if self.tiles_of_item(problem) == 1 else "pairs of tiles"
            return f"last_turn=shared: {items} {what} leave {left} of {blocks} blocks a last one"
        keys = self.keys_walked(problem)
        if keys < MANY_TILES * self.bc:
            return f"last_turn=shared: {keys} keys are too few for what it takes to put results together"
        return None

    @rule("short sequence", after="br", advisory=True)
    def _rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        # No tile has fewer rows than a warpgroup.
        return wasted("br", self.br, self.query_rows(problem)) if self.br > GROUP_ROWS else None

    @rule("short sequence", after="bc", advisory=True)
    def _keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        # Of float32, tiles in parts are as large as those of twice the keys.
        keys = self.keys_walked(problem)
        shortest, least = keys // 8, SMALL_TILE // (2 if is_split(problem) else 1)
        if self.bc < min(least, shortest):
            return f"bc={self.bc} is for short sequences, not for {keys} keys"
        return wasted("bc", self.bc, keys)

    @rule("Q stages", after="q_stages", advisory=True)
    def _next_queries_are_worth_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        tiles = self.key_tiles(problem)
        if self.q_stages > 1 and tiles > MANY_TILES:
            return f"q_stages={self.q_stages}: Q comes once for {tiles} tiles of keys"
        return None

    @rule("Q stages", after="o_apart", advisory=True)
    def _room_of_outputs_is_needed(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.o_apart and self.q_stages > 1:
            return f"o_apart=True: with q_stages={self.q_stages} the next Q comes early already"
        return None

    @rule("stages", after="v_stages", advisory=True)
    def _stages_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        tiles, stages = self.key_tiles(problem), f"k_stages={self.k_stages} v_stages={self.v_stages}"
        if self.k_stages > max(1, tiles):
            return f"{stages}, but {self.keys_walked(problem)} keys are {tiles} tiles of {self.bc}"
        as_many = bytes_of_storage(self.changed(v_stages=self.k_stages), problem)
        if self.v_stages > self.k_stages or (
            self.v_stages < self.k_stages and as_many <= limits.smem_per_block
        ):
            return f"{stages}: V keeps its room as long as K, and {as_many} bytes for as many of both fit"
        if self.k_stages == 1 and tiles > 1:
            return f"{stages}: the next of {tiles} tiles could not arrive beside this one's products"
        return None

    @rule("rescaling", after="rescale", advisory=True)
    def _maximum_settles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        keys = self.keys_walked(problem)
        if self.rescale == "always" and keys > 4 * self.bc:
            return f"rescale=always: maxima seldom grow after {self.bc} of {keys} keys"
        return None

    @rule("exponentials", after="poly_exp", advisory=True)
    def _exponentials_are_many(self, problem: Problem, limits: DeviceLimits) -> str | None:
        long = problem.head_dim + problem.head_dim_v > 2 * 96 and not asks_special_functions(problem)
        if self.poly_exp and long:
            return f"poly_exp={self.poly_exp}: with head dims of {problem.head_dim} the products take longer"
        return None

    @rule("tile order", after="section", advisory=True)
    def _sections_fill_l2(self, problem: Problem, limits: DeviceLimits) -> str | None:
        """The more heads together the better lengths even out, as long as L2 holds their K and V."""
        if self.section == 1:
            return None
        if not first_rows_see_less(problem):
            why = "under this mask" if problem.causal else "without a causal mask"
            return f"section={self.section}: {why} all tiles take as long"
        heads = heads_alike(problem)
        together = self.section or heads
        if together > heads:
            return f"section={self.section}, but there are {heads} heads"
        needed = _kv_bytes(problem, together)
        if needed > limits.l2_bytes:
            return f"section={self.section}: {needed} bytes of K and V, L2 holds {limits.l2_bytes}"
        more = self.section and 2 * self.section in self._choices("section")
        if more and _kv_bytes(problem, min(2 * together, heads)) <= limits.l2_bytes:
            return f"section={self.section}: L2 holds K and V of more heads"
        return None

    @rule("weights", after="min_blocks", advisory=True)
    def _weights_need_other_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.p_in_shared:
            return None
        needed = needed_registers(self.changed(p_in_shared=False), problem)
        allowed = consumer_registers(self, problem, limits)
        if needed <= allowed:
            return f"p_in_shared=True: registers hold the weights as well, about {needed} of {allowed}"
        return None

    @rule("tiles ahead", after="min_blocks", advisory=True)
    def _arrays_come_ahead(self, problem: Problem, limits: DeviceLimits) -> str | None:
        arrays = () if self.bias_stages else self.met_arrays(problem)
        if not arrays or tiles_ahead(self, problem, limits):
            return None
        names = " and ".join(each.name for each in arrays)
        needed = bytes_of_storage(self, problem, 1)
        return f"{needed} bytes with a tile of {names} ahead, {limits.sm} allows {limits.smem_per_block}"

    @rule("tangents", after="tangent", advisory=True)
    def _tangents_are_within_exponents(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tangent == MIXED and cap_in_exponents(problem, CUBIC) is not None:
            return "tangent=mixed: within exponents they take fewer instructions of either kind"
        return None

    @rule("clusters", after="cluster_over", advisory=True)
    def _heads_share_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.cluster_over == HEADS and problem.group == 1:
            return f"cluster_over=heads: {problem.num_q_heads} query heads have as many of keys"
        return None

    @rule("clusters", after="cluster", advisory=True)
    def _heads_fill_clusters(self, problem: Problem, limits: DeviceLimits) -> str | None:
        missing = -problem.group % self.heads_per_cluster()
        if missing > WAITING_SHARE * problem.group:
            return (
                f"cluster={self.cluster}: {problem.group} query heads share keys, {missing} of "
                f"{problem.group + missing} blocks have none"
            )
        return None

    @rule("clusters", after="cluster", advisory=True)
    def _neighbours_have_as_much_to_do(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tiles_per_cluster() == 1:
            return None
        if self.tiles_per_cluster() > 2:
            return f"cluster={self.cluster}: 2 neighbouring tiles gain 2 % at most, more wait for each other"
        tiles = -(-self.query_rows(problem) // self.br)
        missing = -tiles % self.cluster
        if missing > WAITING_SHARE * tiles:
            rows = f"{self.query_rows(problem)} query rows are {tiles} tiles of {self.br}"
            return f"cluster={self.cluster}: {rows}, beside the last a block has none"
        # The neighbour with later rows sees so many more keys, or others.
        seen = problem.seqlen_k - problem.seqlen_q // 2 if problem.scores.is_plain else keys_in_reach(problem)
        if not problem.scores.all_rows_alike and self.br / 2 > WAITING_SHARE * seen:
            return f"cluster={self.cluster}: neighbours see {self.br} keys apart, rows {seen} on average"
        return None

    @rule("short sequence", after="tail", advisory=True)
    def _tails_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tail and problem.layout.is_packed:
            return f"tail={self.tail}: packed sequences end anywhere in their last of {self.bc} keys"
        left, tiles = problem.seqlen_k % self.bc, self.key_tiles(problem)
        if self.tail and not 0 < left <= self.tail:
            return f"tail={self.tail}: the last of {tiles} tiles has {left or self.bc} keys"
        alike = problem.scores.all_rows_alike
        if self.tail and (tiles > MANY_TILES or not alike):
            few = f"it is one of {tiles}" if alike else "the last rows alone see it"
            return f"tail={self.tail}: a narrow tile saves little where {few}"
        return None


def _kv_bytes(problem: Problem, heads: int) -> int:
    """The bytes of K and V that so many query heads read."""
    row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES[problem.dtype]
    return -(-heads // problem.group) * problem.seqlen_k * row_bytes
