"""What gradient kernels of Hopper cannot do, or have no use for, where float32 comes in parts of f16."""

from __future__ import annotations

from dataclasses import dataclass

from ...handover.split_tiles import TILE_ROWS
from ...limits import DeviceLimits
from ...problem import Problem
from ...variant import FIRST_PARAMETER, rule
from ..wgmma.parameters import is_split
from ..wgmma.shared_memory import CHUNK
from .parameters import ATOMICS, BULK, IN_SHARED, TOGETHER, WEIGHTS_FIRST, Parameters

#: Columns that the widths of warpgroups' products are multiples of.
WIDTH_STEP = 8


@dataclass(frozen=True)
class RulesOfParts(Parameters):
    """Parameters with the rules of numbers in two parts."""

    @rule("arithmetic", after=FIRST_PARAMETER)
    def _sequences_are_whole(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if is_split(problem) and problem.layout.is_packed:
            return "parts of float32 are of sequences of one length; family simt-backward takes packed ones"
        return None

    @rule("divisibility", after=FIRST_PARAMETER)
    def _columns_are_products(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for dim in (problem.head_dim, problem.head_dim_v):
            if is_split(problem) and dim % WIDTH_STEP:
                return (
                    f"products are {WIDTH_STEP} columns wide or multiples of it, not {dim}; family "
                    "mma-backward takes any"
                )
        return None

    @rule("combination", after="apart")
    def _parts_stay_with_their_warpgroup(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if is_split(problem) and self.apart:
            return "apart=true: weights of float32 are split where they are made, and go nowhere"
        return None

    @rule("combination", after="br")
    def _tiles_are_as_split(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if is_split(problem) and self.br != TILE_ROWS:
            return f"br={self.br}: float32 is split into tiles of {TILE_ROWS} rows"
        return None

    @rule("combination", after="schedule")
    def _nothing_is_ahead_of_parts(self, problem: Problem, limits: DeviceLimits) -> str | None:
        allowed = (TOGETHER,) if _is_wide(problem) else (TOGETHER, WEIGHTS_FIRST)
        if is_split(problem) and self.schedule not in allowed:
            return f"schedule={self.schedule}: beside parts of float32 no registers are left for it"
        return None

    @rule("combination", after="parts")
    def _wide_rows_are_weighed_in_turns(self, problem: Problem, limits: DeviceLimits) -> str | None:
        turns = 2 if _is_wide(problem) else 1
        if is_split(problem) and self.parts != turns:
            columns = max(problem.head_dim, problem.head_dim_v)
            return f"parts={self.parts}: beside sums of {columns} columns of float32, tiles come in {turns}"
        return None

    @rule("combination", after="kept")
    def _parts_stay_in_shared_memory(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if is_split(problem) and self.kept != IN_SHARED:
            return f"kept={self.kept}: beside parts of float32 no registers are left for it"
        return None

    @rule("combination", after="dq_path")
    def _parts_are_added_up(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if is_split(problem) and self.dq_path not in (BULK, ATOMICS):
            told = f"dq_path={self.dq_path}: float32 is added up in memory"
            return f"{told}; family mma-backward has a launch for the same bits every run"
        return None

    @rule("combination", after="ds_stages")
    def _parts_have_one_stage(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if is_split(problem) and self.ds_stages != 1:
            return f"ds_stages={self.ds_stages}: who agrees on a unit of float32 has done with the last tile"
        return None


def _is_wide(problem: Problem) -> bool:
    """Whether rows are of more than one chunk, each of which is summed for itself."""
    return max(problem.head_dim, problem.head_dim_v) > CHUNK
