"""Which kernels of latent attention cannot run on a problem and a card, and which are never the best."""

from __future__ import annotations

from dataclasses import dataclass

from ...handover.split_keys import no_need_to_split
from ...limits import DeviceLimits
from ...problem import Problem
from ...variant import FIRST_PARAMETER, rule
from ..shared_rules import why_not_both_ways, why_not_swizzled
from ..wgmma.shared_memory import CHUNK, SWIZZLED_ROWS, chunks
from .parameters import CONSUMERS, Parameters
from .shared_memory import bytes_of_storage, piece

#: Tiles of keys that a block should have, where there are more: its end costs as much as some tiles.
FEW_TILES = 4
#: Blocks per multiprocessor beyond which more of them only make shares smaller; one at a time has room.
ENOUGH_BLOCKS = 2


@dataclass(frozen=True)
class RuledParameters(Parameters):
    """Parameters with the rules of their family."""

    # -- limits: what cannot run -----------------------------------------------------------------------

    @rule("alignment", after=FIRST_PARAMETER)
    def _columns_suit_products(self, problem: Problem, limits: DeviceLimits) -> str | None:
        unit = CONSUMERS * CHUNK
        if problem.head_dim_v % unit:
            return f"{problem.head_dim_v} columns of values are not multiples of {unit}, {CHUNK} by consumer"
        if problem.head_dim % 8:
            return f"rows of {problem.head_dim} elements are not multiples of 16 bytes, as copies need"
        return None

    @rule("pages", after=FIRST_PARAMETER)
    def _pieces_of_pages_are_swizzled_alike(self, problem: Problem, limits: DeviceLimits) -> str | None:
        rows = piece(self, problem) if problem.page_size else 0
        return why_not_swizzled(problem, rows, f"give a multiple of {SWIZZLED_ROWS}")

    @rule("shared memory", after="boxes")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return limits.lacks_shared_memory(bytes_of_storage(self, problem))

    @rule("clusters", after="splits")
    def _clusters_form(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits > limits.max_cluster:
            return f"splits={self.splits}, {limits.sm} forms clusters of {limits.max_cluster} blocks at most"
        return None

    @rule("clusters", after="workspace_splits")
    def _blocks_share_keys_by_one_way(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return why_not_both_ways(self.splits, self.workspace_splits)

    # -- advice: what runs, but never best ----------------------------------------------------------

    @rule("splits", after="splits", advisory=True)
    def _splits_fill_the_card(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits == 1:
            return None
        rows = problem.seqlen_q * problem.group
        tiles = -(-rows // self.br) * problem.num_kv_heads * problem.batch
        fewer = max(each for each in self._choices("splits") if each < self.splits)
        if tiles * fewer >= limits.num_sms:
            return f"splits={self.splits}: {fewer} make {tiles * fewer} blocks, {limits.num_sms} run at once"
        of_keys = -(-problem.seqlen_k // self.bc)
        if of_keys < FEW_TILES * self.splits:
            return f"splits={self.splits}: {of_keys} tiles of keys, {FEW_TILES} are wanted for each block"
        return None

    @rule("shares of keys", after="workspace_splits", advisory=True)
    def _launches_more_are_worth_it(self, problem: Problem, limits: DeviceLimits) -> str | None:
        splits, of_keys = self.workspace_splits, -(-problem.seqlen_k // self.bc)
        if splits > 1 and of_keys < FEW_TILES * splits:
            wanted = f"{FEW_TILES} are wanted for each block"
            return f"workspace_splits={splits}: {of_keys} tiles of keys, {wanted}"
        tiles = -(-problem.seqlen_q * problem.group // self.br) * problem.batch
        heads = problem.num_kv_heads
        return no_need_to_split(splits, tiles, heads, problem, limits, enough_blocks=ENOUGH_BLOCKS)

    @rule("stages", after="boxes", advisory=True)
    def _boxes_are_there(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.boxes > chunks(problem.head_dim):
            return f"boxes={self.boxes}, but rows of keys are {chunks(problem.head_dim)} chunks"
        return None
