"""The teaching family: how a first fused fp32 kernel becomes a fast one, a change at a time.

Every thread owns one query row. K and V tiles, read from shared memory, reach all threads of a warp as
broadcasts, so that each 16-byte read feeds four FFMAs: a quarter of a modern card's peak at best, which the
``simt`` family's micro-tiles lift. The nine steps are cumulative and carry the section numbers of the
optimisation report for the GTX 1080 that they follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...limits import KIB, DeviceLimits
from ...problem import Problem
from ...serves import IEEE_FLOAT32, Serves
from ...variant import Variant, param, rule

FLOAT_BYTES = 4
#: Shared memory the steps' tiles are chosen for: what one block of a GTX 1080 may have.
STEP_SMEM_BYTES = 48 * KIB
MAX_REGISTERS = 255
#: Registers beside a thread's Q row and weights: addresses, bounds, the fragments in flight.
OTHER_REGISTERS = 44


@dataclass(frozen=True)
class Ladder(Variant):
    """fp32 attention with one query row per thread."""

    family: ClassVar[str] = "ladder"
    template: ClassVar[str] = "families/ladder/main.cu.jinja"
    serves: ClassVar[Serves] = replace(IEEE_FLOAT32, plain_scores=True, values_as_wide_as_keys=True)

    br: int = param(128, 32, 64, 256, doc="query rows per tile, and threads per block")
    bc: int = param(32, 4, 8, 16, 64, doc="keys per tile")
    split_queries: bool = param(True, False, doc="a block per query tile, not one walking a head's tiles")
    vec: int = param(4, 2, 1, doc="floats per access along the head dim")
    hoisted: bool = param(True, False, doc="Q load, exponentials and division outside the loops")
    coalesced: bool = param(True, False, doc="neighbouring threads load neighbouring elements")
    stats_in_registers: bool = param(True, False, doc="running maximum and sum in registers")
    transposed: bool = param(True, False, doc="Q and S column by column in shared memory")
    q_in_registers: bool = param(True, False, doc="Q and the weights of a tile in registers")

    def threads(self) -> int:
        return self.br

    def rows_per_block(self) -> int | None:
        return self.br if self.split_queries else None

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        return FLOAT_BYTES * self._smem_floats(problem.head_dim)

    def _smem_floats(self, head_dim: int) -> int:
        q = 0 if self.q_in_registers else self.br * head_dim
        stats = 0 if self.stats_in_registers else 2 * self.br
        return q + self.bc * head_dim + self.br * self.bc + stats

    def access_width(self, problem: Problem) -> int:
        return self.vec

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        return self._registers(problem.head_dim)

    def _registers(self, head_dim: int) -> int:
        # A tile's weights are in flight at once even where they come from shared memory.
        return (head_dim if self.q_in_registers else 0) + self.bc + 4 * self.vec + OTHER_REGISTERS

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        chunks = self.bc * problem.head_dim // self.vec
        return {
            "d": problem.head_dim,
            "step": step_of(self, problem.head_dim),
            "steps": STEPS,
            "even_kv_copy": chunks % self.br == 0,
            "line_bytes": 32 * FLOAT_BYTES * self.vec,
        }

    # -- rules ---------------------------------------------------------------------------------------

    @rule("divisibility", after="vec")
    def _vector_divides_head_dim(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.head_dim % self.vec:
            return f"vec={self.vec} does not divide head dim {problem.head_dim}"
        return None

    @rule("combination", after="q_in_registers")
    def _q_stays_in_registers(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_in_registers and not self.hoisted:
            return "q_in_registers=true needs hoisted=true: a Q loaded for every tile does not stay there"
        return None

    @rule("shared memory", after="q_in_registers")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return limits.lacks_shared_memory(self.smem_bytes(problem, limits))

    @rule("registers", after="q_in_registers")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = self.registers(problem, limits)
        share = limits.registers_per_sm // self.br // 8 * 8
        allowed = min(limits.max_registers_per_thread, share)
        if needed > allowed:
            return f"about {needed} per thread, {allowed} allowed with blocks of {self.br} threads"
        return None


@dataclass(frozen=True)
class Step:
    """One rung: what changes and why it helps, and the switches it turns."""

    name: str
    title: str
    switches: dict[str, bool]


#: The nine steps in order, by the report's section.
STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        Step("4.2.2", "fused tiles in shared memory, one block per head", {}),
        Step("4.2.3", "a taller query tile, for less K and V traffic", {}),
        Step("4.2.4", "query tiles split over blocks", {"split_queries": True}),
        Step("4.2.5", "vector accesses", {}),
        Step("4.2.6", "Q load, exponentials and division out of the loops", {"hoisted": True}),
        Step("4.2.7", "coalesced loads of Q, K and V", {"coalesced": True}),
        Step("4.2.8", "running maximum and sum in registers", {"stats_in_registers": True}),
        Step("4.2.9", "Q and S transposed against bank conflicts", {"transposed": True}),
        Step("4.2.10", "Q in registers, the key tile doubled", {"q_in_registers": True}),
    )
}


def steps(head_dim: int) -> dict[str, Ladder]:
    """Returns the variants of the nine steps by name, with tiles that fit 48 KiB of shared memory.

    At head dims 32 and 64 they are the report's: 32x32, then 128x32 and 128x16, at last 128x64 and 128x32.
    A head dim whose row does not fit in registers has no legal 4.2.10; `Ladder.check` says so.
    """
    variants: dict[str, Ladder] = {}
    settings: dict[str, Any] = dict.fromkeys(
        ("split_queries", "hoisted", "coalesced", "stats_in_registers", "transposed", "q_in_registers"), False
    )
    settings |= {"vec": 1}
    for name, step in STEPS.items():
        settings |= step.switches
        if name == "4.2.2":
            settings |= _tile(head_dim, tallest=32)
        elif name == "4.2.3":
            settings |= _tile(head_dim, tallest=128)
        elif name == "4.2.5":
            settings |= {"vec": min(4, head_dim & -head_dim)}
        elif name == "4.2.10":
            settings |= {"bc": _doubled(Ladder(**settings), head_dim)}
        variants[name] = Ladder(**settings)
    return variants


def step_of(variant: Ladder, head_dim: int) -> Step | None:
    """Returns the step that ``variant`` is at that head dim; of steps that coincide there, the first."""
    return next((STEPS[name] for name, each in steps(head_dim).items() if each == variant), None)


def _tile(head_dim: int, tallest: int) -> dict[str, int]:
    """The tallest tile with room for 16 keys (failing that 8, then 4), then the longest up to 32 keys."""
    shapes = sorted(_shapes(tallest), key=lambda s: (min(s[1], 16), s[0], s[1]), reverse=True)
    for br, bc in shapes:
        # Sized with everything in shared memory, so that one tile serves all steps up to 4.2.9.
        first = Ladder(br=br, bc=bc, hoisted=False, stats_in_registers=False, q_in_registers=False)
        if FLOAT_BYTES * first._smem_floats(head_dim) <= STEP_SMEM_BYTES:
            return {"br": br, "bc": bc}
    raise AssertionError(f"no tile for head dim {head_dim}")


def _shapes(tallest: int) -> Iterator[tuple[int, int]]:
    for br in (32, 64, 128):
        for bc in (4, 8, 16, 32):
            if br <= tallest:
                yield br, bc


def _doubled(variant: Ladder, head_dim: int) -> int:
    """Twice the key tile where shared memory and registers allow."""
    doubled = variant.changed(bc=2 * variant.bc)
    in_smem = FLOAT_BYTES * doubled._smem_floats(head_dim) <= STEP_SMEM_BYTES
    in_registers = doubled._registers(head_dim) <= MAX_REGISTERS
    return doubled.bc if in_smem and in_registers else variant.bc
