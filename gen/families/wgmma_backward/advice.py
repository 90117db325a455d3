"""Which gradient kernels of Hopper run, but are never the best."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...limits import DeviceLimits
from ...problem import Problem
from ...variant import rule
from .parameters import AHEAD, BY_HEAD, DOWN, EVEN, HANDED_ON, HEAVIEST_FIRST, HELD, NARROW, OF_ROWS, UP, WIDE
from .rules import RuledParameters
from .slices import slices_of_left, tiles_left

#: So few blocks of a head at once hardly wait for each other.
FEW_OF_HEAD = 8
#: A head's rows that pass by in a turn, in the mean, for each column: where fewer do, a warp of the producer
#: has not done with gradients of those that end when the next turn's do. On an H200 it has by 64, not by 32.
ROWS_TO_FINISH = 48
#: Columns beyond which another warpgroup's products of a tile take as long as its weights, and tiles that
#: pass by from which on it pays that those of the first come one after the other: on an H200, of 160 to 256
#: columns and 8 to 128 tiles.
COLUMNS_TO_WEIGH_BESIDE, TILES_TO_WEIGH_BESIDE = 192, 16
#: The least part of the time of blocks that keep rows in which multiprocessors stand idle, for others to
#: begin beside them.
LEAST_IDLE = 0.01


@dataclass(frozen=True)
class AdvisedParameters(RuledParameters):
    """Parameters with the rules of their family, and with its advice."""

    @rule("combination", after="turns", advisory=True)
    def _products_are_long_enough_to_weigh_beside(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.apart or self.schedule != AHEAD or self.persistent:
            return None
        told = f"schedule={self.schedule}: apart, "
        columns, tiles = max(problem.head_dim, problem.head_dim_v), -(-problem.seqlen_q // self.br)
        if columns <= COLUMNS_TO_WEIGH_BESIDE:
            return told + f"products of {columns} columns are over before weights are made beside them"
        if tiles < TILES_TO_WEIGH_BESIDE:
            return told + f"of {tiles} tiles of rows the first one's products are too large a part"
        return None

    @rule("combination", after="order", advisory=True)
    def _some_tiles_are_heaviest(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.order == HEAVIEST_FIRST and _all_rows_see_all_keys(problem):
            return f"order={self.order}: without a mask all tiles weigh the same"
        return None

    @rule("combination", after="ranges", advisory=True)
    def _a_mask_is_told(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.ranges != OF_ROWS and _all_rows_see_all_keys(problem):
            return f"ranges={self.ranges}: without a mask all rows see all keys"
        return None

    @rule("combination", after="last_turn", advisory=True)
    def _last_turns_leave_blocks_idle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.shares_last_turn():
            return None
        told = f"last_turn={self.last_turn}: "
        if not _all_rows_see_all_keys(problem):
            return told + "where tiles differ in length, those of the last turn are the shortest"
        blocks = limits.blocks_at_once(self.min_blocks, 1)
        left = tiles_left(self, problem, blocks)
        if slices_of_left(self, problem, left, blocks) == 1:
            return told + f"{blocks} blocks have done no sooner with slices of the {left} tiles that are left"
        return None

    @rule("combination", after="second", advisory=True)
    def _blocks_of_keys_begin_where_others_leave_some_idle(
        self, problem: Problem, limits: DeviceLimits
    ) -> str | None:
        if self.sums_queries or problem.layout.is_packed:
            return None  # Then there is one way alone.
        # Each has a multiprocessor's registers.
        slots = limits.blocks_at_once(1, 1)
        blocks = problem.batch * problem.num_q_heads * -(-problem.seqlen_q // self.rows)
        turns = -(-blocks // slots)
        # Under a mask the last ones end at any time.
        idle = turns - blocks / slots if _all_rows_see_all_keys(problem) else 0.5
        if self.begins_beside == (idle >= LEAST_IDLE * turns):
            return None
        return (
            f"second={self.second}: {blocks} blocks that keep rows leave {slots} multiprocessors idle "
            f"for {idle / turns:.1%} of their time"
        )

    @rule("combination", after="sections", advisory=True)
    def _sections_are_narrow(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sections != WIDE:
            return None
        heads = self._heads_that_l2_holds(problem, limits)
        blocks = limits.blocks_at_once(1, 1)
        if heads * FEW_OF_HEAD > blocks:
            return f"sections={self.sections}: {blocks} blocks are of {heads} heads as it is"
        return None

    @rule("combination", after="sections", advisory=True)
    def _sections_differ(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sections != EVEN:
            return None
        told = f"sections={self.sections}: "
        if problem.layout.is_packed:
            return told + "those of packed sequences are of one sequence's heads, which are few"
        heads, all_heads = self._heads_that_l2_holds(problem, limits), problem.batch * problem.num_kv_heads
        if 0 < heads < all_heads and all_heads % heads:
            return None
        return told + f"{all_heads} heads are whole sections of {min(max(heads, 1), all_heads)} as it is"

    @rule("combination", after="sections", advisory=True)
    def _sections_hold_tiles_of_one_weight(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sections != NARROW or _all_rows_see_all_keys(problem):
            return None
        return f"sections={self.sections}: under masks heavy tiles of more heads come first"

    @rule("combination", after="finisher", advisory=True)
    def _a_warp_finishes_in_time(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.finishes_behind:
            return None
        told = f"finisher={self.finisher}: "
        if not problem.causal or not problem.scores.is_plain or self.walk != DOWN:
            return told + f"rows end with each tile of keys under a causal mask alone, where walk={DOWN}"
        rows = problem.seqlen_q // 2
        if rows < ROWS_TO_FINISH * problem.head_dim:
            return told + (
                f"a warp makes gradients of {problem.head_dim} columns in the time of "
                f"{ROWS_TO_FINISH * problem.head_dim} rows, of which {rows} pass by"
            )
        return None

    def _heads_that_l2_holds(self, problem: Problem, limits: DeviceLimits) -> int:
        """Returns for how many heads of keys L2 has room, at a section's share of it."""
        # Of a head: queries, gradients of outputs, and sums of queries' gradients in float32.
        passing = problem.group * problem.seqlen_q * (6 * problem.head_dim + 2 * problem.head_dim_v)
        return replace(self, sections=HELD).section_bytes(limits) // max(passing, 1)

    @rule("combination", after="walk", advisory=True)
    def _walks_begin_where_masks_do(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sums == HANDED_ON and problem.causal and self.walk == DOWN:
            return f"walk={self.walk}: under a causal mask all blocks of a head begin with its last rows"
        if self.walk == UP and not problem.causal:
            return f"walk={self.walk}: without a causal mask all blocks of a head begin with the same rows"
        return None

    @rule("combination", after="walk", advisory=True, waived_by="order")
    def _neighbours_in_turn_start_apart(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.order != BY_HEAD or not self.starts_together(problem):
            return None
        return f"sums={self.sums}: order={self.order} starts blocks together that wait for each other"


def _all_rows_see_all_keys(problem: Problem) -> bool:
    """Whether nothing limits what rows see."""
    return problem.scores.is_plain and not problem.causal
