"""Why a kernel is as fast as it is: how much of its time each resource is occupied, and what bounds its
occupancy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from .cost_model import predict
from .prediction import Prediction

PLENTY = 1 << 30


@dataclass(frozen=True)
class Part:
    """A resource: how long it alone would take, by the cost model's count; ``share`` is of the kernel's time,
    ``typical_us`` what the median trial of the family needs of it."""

    name: str
    us: float
    share: float
    typical_us: float | None


@dataclass(frozen=True)
class Residency:
    """Blocks that fit an SM, and how many would if one resource alone counted."""

    blocks: int
    by_resource: dict[str, int]

    @property
    def bound_by(self) -> tuple[str, ...]:
        least = min(self.by_resource.values())
        return tuple(name for name, blocks in self.by_resource.items() if blocks == least)


@dataclass(frozen=True)
class Bounds:
    """What limits a kernel; ``parts`` has the largest first."""

    parts: tuple[Part, ...]
    predicted_us: float
    waves: float
    residency: Residency
    dram_gbps: float
    """GB/s through device memory, counting only the bytes that cannot be saved: each tensor once."""
    dram_share: float

    @property
    def limiter(self) -> Part:
        return self.parts[0]


def predicted(variant: Variant, problem: Problem, limits: DeviceLimits) -> Prediction | None:
    """Returns the cost model's prediction of a variant; None for one that it calls impossible."""
    try:
        return predict(variant, problem, limits)
    except ValueError:
        return None


def bounds_of(
    variant: Variant,
    us: float,
    registers: int,
    others: Sequence[Prediction],
    problem: Problem,
    limits: DeviceLimits,
) -> Bounds | None:
    """Returns what limits a kernel that was timed at ``us`` microseconds and takes so many registers per
    thread; None for one that the cost model calls impossible.

    ``others`` are predictions of its family's trials, its own among them.
    """
    prediction = predicted(variant, problem, limits)
    if prediction is None:
        return None
    parts = [
        Part(
            name,
            part_us,
            part_us / us,
            median(other.parts_us.get(name, 0.0) for other in others) if others else None,
        )
        for name, part_us in prediction.parts_us.items()
        if part_us > 0
    ]
    parts.sort(key=lambda part: -part.us)
    gbps = problem.min_bytes / us / 1e3
    return Bounds(
        parts=tuple(parts),
        predicted_us=prediction.median_us,
        waves=prediction.waves,
        residency=residency(variant, registers, problem, limits),
        dram_gbps=gbps,
        dram_share=gbps / limits.dram_gbps,
    )


def residency(variant: Variant, registers: int, problem: Problem, limits: DeviceLimits) -> Residency:
    """Returns how many blocks of a kernel an SM holds, compiled to so many registers per thread."""
    threads, smem = variant.threads(), variant.smem_bytes(problem, limits)
    roomy = replace(
        limits,
        max_threads_per_sm=PLENTY,
        max_blocks_per_sm=PLENTY,
        registers_per_sm=PLENTY,
        smem_per_sm=PLENTY,
    )
    alone = {
        "registers": replace(roomy, registers_per_sm=limits.registers_per_sm),
        "shared memory": replace(roomy, smem_per_sm=limits.smem_per_sm),
        "threads": replace(roomy, max_threads_per_sm=limits.max_threads_per_sm),
        "block slots": replace(roomy, max_blocks_per_sm=limits.max_blocks_per_sm),
    }
    return Residency(
        limits.blocks_per_sm(threads, registers, smem),
        {name: card.blocks_per_sm(threads, registers, smem) for name, card in alone.items()},
    )
