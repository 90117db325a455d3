"""What is never the best of kernels of gradients in two launches: one keeps keys, the other query rows."""

from __future__ import annotations

from ..limits import DeviceLimits
from ..problem import Problem
from ..shared_memory.tiles import wasted
from ..variant import rule


class UsedTiles:
    """Rules of tiles that sequences are too short for, behind those of what cannot run: ``bc`` kept keys that
    ``br`` rows pass by, and ``rows`` kept ones that ``keys`` pass by."""

    bc: int
    br: int
    rows: int
    keys: int

    @rule("short sequence", after="bc", advisory=True)
    def _kept_keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("bc", self.bc, problem.seqlen_k)

    @rule("short sequence", after="br", advisory=True)
    def _passing_rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("br", self.br, problem.seqlen_q)

    @rule("short sequence", after="rows", advisory=True)
    def _kept_rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("rows", self.rows, problem.seqlen_q)

    @rule("short sequence", after="keys", advisory=True)
    def _passing_keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("keys", self.keys, problem.seqlen_k)
