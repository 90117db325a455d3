"""Which gradient kernels of Hopper cannot run on a problem and a card."""

from __future__ import annotations

from dataclasses import dataclass

from ...handover.reach import why_not_left_out
from ...limits import DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...variant import FIRST_PARAMETER, Verdict, rule
from ..gradients import slope_of_change
from ..wgmma.parameters import GROUP, GROUP_ROWS, is_split
from ..wgmma.registers import REGISTERS_BESIDE_SUMS
from ..wgmma.shared_memory import CHUNK, chunks
from .parameters import (
    AHEAD,
    AT_ONCE,
    ATOMICS,
    BEHIND,
    BULK,
    BY_HEAD,
    BY_SECTION,
    DOWN,
    FIXED,
    FREE,
    HELD,
    IN_SHARED,
    LAUNCH,
    MADE_FIRST,
    OF_ROWS,
    STEP,
    SUM_ROWS,
    TOGETHER,
    WEIGHTS_FIRST,
    WIDE,
)
from .registers import (
    consumer_registers,
    launch_registers,
    needed_registers,
    needed_registers_of_rows,
    producer_registers,
)
from .rules_of_parts import RulesOfParts
from .shared_memory import smem_bytes, smem_bytes_of_rows


def _is_of_a_launch(name: str) -> Verdict:
    """Returns the rule about a parameter of the launch that keeps query rows."""

    @rule("combination", after=name)
    def verdict(self: RuledParameters, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sums_queries and (value := getattr(self, name)) != self._choices(name)[0]:
            return f"dq_path={self.dq_path}: no launch keeps query rows, of which {name}={value} is"
        return None

    return verdict


@dataclass(frozen=True)
class RuledParameters(RulesOfParts):
    """Parameters with the rules of their family."""

    @rule("alignment", after=FIRST_PARAMETER)
    def _rows_suit_the_copy_engine(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for dim in (problem.head_dim, problem.head_dim_v):
            if dim * ITEM_BYTES[problem.dtype] % 16:
                return f"rows of {dim} elements are not multiples of 16 bytes, as the copy engine needs"
        return None

    @rule("registers", after="apart")
    def _warpgroups_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        threads = self.threads()
        if threads > GROUP * 4:
            return f"{threads} threads leave a consumer's {limits.registers_per_sm // threads}"
        return None

    @rule("registers", after="dq_path")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed, producer = needed_registers(self, problem), producer_registers(self, problem)
        return _lacks_registers(needed, self.threads(), limits, producer)

    @rule("registers", after="keys")
    def _registers_fit_rows(self, problem: Problem, limits: DeviceLimits) -> str | None:
        threads = GROUP * (1 + self.row_consumers)
        needed, producer = needed_registers_of_rows(self, problem), producer_registers(self, problem)
        return _lacks_registers(needed, threads, limits, producer)

    @rule("registers", after="keys")
    def _products_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        """One instruction's sums must fit what the launch gives: ptxas knows nothing of shares there."""
        columns = max(problem.head_dim, problem.head_dim_v, self.br, 0 if self.sums_queries else self.keys)
        if is_split(problem):
            columns = min(columns, CHUNK)  # at a time
        threads = max(self.threads(), GROUP * (1 + self.row_consumers))
        needed, given = columns // 2 + REGISTERS_BESIDE_SUMS, launch_registers(threads, limits)
        if needed > given:
            return (
                f"{needed} for one product of {columns} columns, a launch of {threads} threads gives {given}"
            )
        return None

    @rule("shared memory", after="ds_stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return limits.lacks_shared_memory(smem_bytes(self, problem))

    @rule("shared memory", after="v_stages")
    def _shared_memory_fits_rows(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return limits.lacks_shared_memory(smem_bytes_of_rows(self, problem))

    @rule("combination", after="schedule")
    def _weights_are_there_first(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.schedule in (MADE_FIRST, WEIGHTS_FIRST) and slope_of_change(problem.scores) is not None:
            return f"schedule={self.schedule}: a change of scores is differentiated where it is made"
        if self.apart and self.schedule not in (TOGETHER, AHEAD):
            return f"schedule={self.schedule}: apart, a warpgroup has nothing else to do with its weights"
        return None

    @rule("combination", after="dq_path")
    def _next_products_follow_sums(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.apart and self.schedule == AHEAD and self.sums_queries:
            return f"schedule={self.schedule}: apart, for dq_path={LAUNCH}, not dq_path={self.dq_path}"
        return None

    @rule("combination", after="parts")
    def _parts_are_weighed_ahead(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.parts == 1:
            return None
        if self.schedule != AHEAD and not is_split(problem):
            return f"parts={self.parts}: schedule={self.schedule} weighs a tile as a whole"
        if self.weighed_rows % STEP:
            return f"parts={self.parts}: {self.br} rows are no parts of whole steps of {STEP}"
        return None

    @rule("combination", after="dq_path")
    def _parts_have_sums_in_common(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.parts > 1 and not self.sums_queries:
            return f"parts={self.parts}: with dq_path={self.dq_path} br={self.weighed_rows} does the same"
        return None

    @rule("combination", after="kept")
    def _kept_operands_are_of_whole_consumers(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.apart and self.kept != IN_SHARED:
            return f"kept={self.kept}: apart, registers are for what is added up"
        return None

    @rule("combination", after="q_stages")
    def _next_queries_are_there(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.schedule == AHEAD and self.q_stages == 1:
            return f"schedule={self.schedule}: there is room for one tile of queries, not for the next"
        return None

    @rule("divisibility", after="dq_path")
    def _gradients_of_queries_are_shared(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.sums_queries or is_split(problem):
            return None
        if self.query_share(problem) == (0, 0):
            return (
                f"dq_path={self.dq_path}: {self.consumers} warpgroups cannot share {self.br} rows of "
                f"{problem.head_dim} columns in tiles of 64 by 64"
            )
        return None

    @rule("combination", after="dq_path")
    def _sums_across_are_added(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.sums_across:
            return None
        told = f"dq_path={self.dq_path}: {self.br} rows that pass by are no tiles of {GROUP_ROWS}, "
        if self.dq_path != BULK or is_split(problem):
            return told + f"of which only dq_path={BULK} makes gradients of 16 bits across"
        if self.apart or self.schedule != TOGETHER:
            return told + f"whose gradients are made across by schedule={TOGETHER}, not apart"
        return None

    @rule("combination", after="meeting")
    def _sums_across_are_awaited_at_once(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sums_across and self.meeting != AT_ONCE:
            return f"meeting={self.meeting}: with br={self.br} consumers await each other at once"
        return None

    @rule("combination", after="dq_path")
    def _clusters_serve(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.sums_in_cluster:
            return None
        if problem.layout.is_packed:
            return (
                f"dq_path={self.dq_path}: a cluster walks all keys of a head, packed sequences have tiles "
                "of their own"
            )
        if self.apart:
            return f"dq_path={self.dq_path}: apart, columns of sums are made by turns, which no block awaits"
        return None

    @rule("combination", after="cluster")
    def _blocks_of_clusters_share_sums_or_copies(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.cluster > limits.max_cluster:
            return f"clusters of {self.cluster} blocks, sm_{limits.arch} allows {limits.max_cluster}"
        if self.shares_copies:
            return self._why_not_copied_to_all(problem)
        if not self.sums_in_cluster:
            return None
        if self.cluster == 1:
            return f"dq_path={self.dq_path}: of one block there is no cluster"
        if not self.sums_of_block(problem):
            return (
                f"cluster={self.cluster}: blocks cannot share {self.br // SUM_ROWS} times {SUM_ROWS} rows of "
                f"{problem.head_dim} columns"
            )
        return None

    @rule("combination", after="heads")
    def _turns_are_of_clusters(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sums_in_cluster:
            return None
        if self.sum_stages != 2:
            return f"sum_stages={self.sum_stages}: with dq_path={self.dq_path} blocks send each other nothing"
        if self.heads != 1:
            return f"heads={self.heads}: with dq_path={self.dq_path} a block takes a tile of keys"
        return None

    @rule("combination", after="order")
    def _clusters_start_by_head(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sums_in_cluster and self.order != BY_HEAD:
            return f"order={self.order}: a cluster takes all tiles of a head"
        return None

    @rule("combination", after="ds_stages")
    def _gradients_of_scores_are_kept(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.sums_queries and self.ds_stages != 2:
            return f"ds_stages={self.ds_stages}: with dq_path={self.dq_path} they stay in registers"
        return None

    @rule("combination", after="meeting")
    def _consumers_have_other_products(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.meeting == AT_ONCE:
            return None
        told = f"meeting={self.meeting}: "
        if is_split(problem):
            return told + "consumers of float32 in parts add for their own keys, and await nobody"
        if self.dq_path not in (BULK, ATOMICS):
            return told + f"with dq_path={self.dq_path} consumers await each other at once, or never"
        if self.apart:
            return told + "apart, warpgroups await each other's weights as well"
        if self.consumers == 1:
            return told + "a lone consumer awaits nobody"
        if self.ds_stages == 1:
            return told + "ds_stages=1 leaves a tile no room beside those that are awaited"
        if self.schedule == AHEAD and self.parts == 1:
            return told + f"schedule={self.schedule} with a tile as a whole has no part to begin"
        return None

    @rule("combination", after="ranges")
    def _masks_are_told_by_keys_that_stay(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.ranges == OF_ROWS:
            return None
        told = f"ranges={self.ranges}: "
        if is_split(problem) or self.apart:
            return (
                told + "where tiles come in parts or weights go to others, rows tell the keys that they see"
            )
        if self.dq_path not in (BULK, ATOMICS):
            return told + f"with dq_path={self.dq_path} no block has the same keys for all its rows"
        return None

    @rule("combination", after="min_blocks")
    def _blocks_share_an_sm(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.min_blocks == 1:
            return None
        told = f"min_blocks={self.min_blocks}: "
        if is_split(problem) or self.dq_path not in (BULK, ATOMICS):
            return told + "for blocks of 16-bit keys that add queries' gradients up in memory"
        smem = smem_bytes(self, problem)
        given = launch_registers(self.threads() * self.min_blocks, limits)
        if (room := limits.blocks_per_sm(self.threads(), given, smem)) < self.min_blocks:
            return told + f"{smem} bytes of shared memory leave room for {room}"
        if columns := self._columns_beyond(problem, given):
            return told + f"one product of {columns} columns takes more than the {given} of a launch"
        allowed = consumer_registers(
            self.threads(), limits, producer_registers(self, problem), self.min_blocks
        )
        if (needed := needed_registers(self, problem)) > allowed:
            return told + f"about {needed} per thread of a consumer, which has {allowed} at most"
        return None

    @rule("combination", after="turns")
    def _blocks_stay_for_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.persistent:
            return None
        told = f"turns={self.turns}: "
        if problem.layout.is_packed:
            return told + "tiles of packed sequences are a plan's, by block"
        if self.apart and not self.sums_queries:
            return self._why_warpgroups_apart_do_not_stay(problem)
        if is_split(problem) or self.apart or self.dq_path not in (BULK, ATOMICS):
            return told + "for whole consumers of 16-bit keys that add queries' gradients up in memory"
        return None

    @rule("combination", after="sums")
    def _sums_are_handed_on(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.hands_on_sums:
            return None
        told = f"sums={self.sums}: "
        if self.sums_across:
            return told + f"br={self.br} makes sums across, and the last of a tile writes gradients by rows"
        if self.dq_path != BULK or self.turns != FREE:
            # Only turns that are taken in their order never wait for one that nobody has begun.
            return told + f"for dq_path={BULK} and turns={FREE}, where blocks take keys in their order"
        _, columns = self.query_share(problem)
        beyond = problem.head_dim % columns if columns else 0
        if beyond and (columns != CHUNK or beyond < CHUNK // 2):
            # Gradients of a share, of two bytes, take the place of what there is of its sums, of four.
            return told + f"{problem.head_dim} columns are no whole shares of {columns}, nor half one more"
        if columns == CHUNK and problem.head_dim % STEP:
            # What a warp has of 16 rows is to begin where swizzles of 1024 bytes do.
            return told + f"{problem.head_dim} columns of 16 rows are no whole swizzles, of {STEP} columns"
        return None

    # Blocks that stay, and those that hand sums on, need more than earlier rules know of; so do those whose
    # consumers meet late.
    @rule("registers", after="sums")
    def _registers_fit_those_that_stay(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return self._registers_fit(problem, limits) if self.persistent else None

    @rule("shared memory", after="sums")
    def _shared_memory_fits_those_that_stay(self, problem: Problem, limits: DeviceLimits) -> str | None:
        stays = self.persistent or self.meeting != AT_ONCE
        return self._shared_memory_fits(problem, limits) if stays else None

    @rule("combination", after="sums")
    def _blocks_that_stay_share_an_sm(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return self._blocks_share_an_sm(problem, limits) if self.persistent else None

    @rule("combination", after="walk")
    def _walks_against_keys_hand_on(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.walk != DOWN and not self.hands_on_sums:
            return f"walk={self.walk}: for sums that are handed on, against the order of keys"
        return None

    @rule("combination", after="far_keys")
    def _far_keys_have_no_weight(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.leaves_far_keys_out:
            return None
        reason = why_not_left_out(problem)
        if not reason and self.dq_path not in (BULK, ATOMICS):
            reason = f"with dq_path={self.dq_path} rows, or clusters, take what they see"
        return f"far_keys={self.far_keys}: {reason}" if reason else None

    @rule("combination", after="last_turn")
    def _last_turns_are_of_free_blocks(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.shares_last_turn() or self.turns == FREE:
            return None
        told = f"last_turn={self.last_turn}: turns={self.turns} "
        if self.persistent:
            return told + f"has blocks wait for others that may not have begun; turns={FREE} does not"
        return told + f"has no last one of fewer blocks; turns={FREE} has"

    @rule("combination", after="second")
    def _blocks_of_keys_have_others_beside_them(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.second == BEHIND:
            return None
        told = f"second={self.second}: "
        if self.sums_queries:
            return told + f"with dq_path={self.dq_path} no launch keeps query rows; dq_path={LAUNCH} has one"
        if problem.layout.is_packed:
            return told + f"blocks of packed sequences wait for a plan, as second={BEHIND} has them do"
        return None

    @rule("combination", after="sections")
    def _sections_are_wide_where_blocks_follow(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.sections == HELD:
            return None
        told = f"sections={self.sections}: "
        if self.order != BY_SECTION:
            return told + f"order={self.order} has no sections; order={BY_SECTION} has some"
        if self.sections == WIDE and not self.hands_on_sums:
            return told + f"where sums={self.sums} blocks of a head are anywhere along its rows"
        return None

    @rule("combination", after="finisher")
    def _sums_end_somewhere(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.finishes_behind and not self.hands_on_sums:
            return f"finisher={self.finisher}: with sums={self.sums} a launch makes gradients of all sums"
        return None

    @rule("combination", after="writer")
    def _consumers_have_room_to_write_from(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.writes_by_consumers:
            return None
        told = f"writer={self.writer}: "
        if not self.hands_on_sums:
            return told + f"with sums={self.sums} consumers have gradients of keys written anyway"
        if self.schedule != AHEAD or self.ds_stages == 1:
            return told + f"for schedule={AHEAD} and ds_stages=2, whose next gradients of scores come late"
        columns = CHUNK * (chunks(problem.head_dim) + chunks(problem.head_dim_v))
        if columns > self.br:
            return told + f"{self.br} rows of gradients of scores have no room for {columns} columns"
        return None

    def _why_warpgroups_apart_do_not_stay(self, problem: Problem) -> str | None:
        """Why blocks cannot stay whose gradients of keys and values leave by way of a turn's last rows."""
        told = f"turns={self.turns}: apart, with dq_path={self.dq_path}, "
        if self.schedule != AHEAD or self.turns != FREE:
            return told + f"blocks stay with schedule={AHEAD} and turns={FREE}"
        if self.br % GROUP_ROWS:
            return told + f"gradients of {GROUP_ROWS} keys leave by way of as many rows, not br={self.br}"
        if not self.sends_keys(problem):
            return told + f"for {problem.head_dim} columns of values as of keys, not {problem.head_dim_v}"
        return None

    def _why_not_copied_to_all(self, problem: Problem) -> str | None:
        """Why the blocks of a cluster cannot get the same rows by one copy."""
        told = f"cluster={self.cluster}: rows are copied to all its blocks "
        if not self.sums_queries:
            return told + f"where these make all gradients, as dq_path={BULK} has it"
        if is_split(problem):
            return told + f"as they lie in arrays, not in parts of {problem.dtype}"
        if problem.layout.is_packed:
            return told + "by tiles of one length, not of packed sequences"
        if self.apart:
            return told + "where each warpgroup needs both queries and gradients of outputs, not apart"
        return None

    @rule("combination", after="sums")
    def _clusters_take_fixed_turns(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.shares_copies and self.turns != FIXED:
            told = f"cluster={self.cluster}: with turns={self.turns} its blocks may take keys that lie apart"
            return f"{told}; turns={FIXED} has them take neighbouring ones"
        return None

    def _columns_beyond(self, problem: Problem, given: int) -> int:
        """Returns the columns of a product whose sums so many registers do not hold; 0 where they hold
        all."""
        columns = max(problem.head_dim, problem.head_dim_v, self.br)
        return columns if columns // 2 + REGISTERS_BESIDE_SUMS > given else 0

    # One rule for each parameter of that launch: what it leaves out is not combined with the others' values.
    _rows_are_of_a_launch = _is_of_a_launch("rows")
    _keys_are_of_a_launch = _is_of_a_launch("keys")
    _k_stages_are_of_a_launch = _is_of_a_launch("k_stages")
    _v_stages_are_of_a_launch = _is_of_a_launch("v_stages")


def _lacks_registers(needed: int, threads: int, limits: DeviceLimits, producer: int) -> str | None:
    """Why a consumer's thread spills, beside a producer whose threads keep so many."""
    allowed = consumer_registers(threads, limits, producer) or launch_registers(threads, limits)
    if needed > allowed:
        return f"about {needed} per thread of a consumer, of {threads} threads each has {allowed} at most"
    return None
