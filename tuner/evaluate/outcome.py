"""What became of a variant: how it ended, why, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ...gen.problem import Problem
from ...gen.variant import Variant


class Status(StrEnum):
    """How one evaluation ended. Only ``OK`` and ``SLOW`` carry a measurement."""

    OK = "ok"
    ILLEGAL = "illegal"
    COMPILE_FAILED = "compile-failed"
    SPILLED = "spilled"
    LAUNCH_FAILED = "launch-failed"
    TIMED_OUT = "timed-out"
    WRONG = "wrong"
    SLOW = "slow"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One kernel's figures. Times in microseconds; ``predicted`` marks a cost model's figures."""

    times_us: tuple[float, ...]
    median_us: float
    spread: float
    """Interquartile range over the median."""
    tflops: float
    registers: int
    spill_bytes: int
    smem_bytes: int
    occupancy: float
    """Resident warps over the most the card allows, 0..1."""
    error: float
    """Largest per-head ‖o - ref‖ / ‖ref‖ against float64."""
    predicted: bool = False
    busy: str = ""
    """Why the times are doubtful (another process on the GPU, throttling); empty when they are not."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"times_us": list(self.times_us)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Measurement:
        return cls(**{**data, "times_us": tuple(data["times_us"])})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The record of one trial; ``reason`` is empty when the status is OK."""

    variant: Variant
    status: Status
    reason: str = ""
    measurement: Measurement | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: compile, validate, measure."""


@dataclass(frozen=True, kw_only=True)
class TunedKernel:
    """A winner and where it came from: all that out/<device>/<kernel>.json holds beside the source."""

    problem: Problem
    variant: Variant
    source: str
    measurement: Measurement
    device: str
    arch: int
    driver: str
    toolkit: str
    flashgen: str
    seed: int
    tuned_at: str
    """UTC, ISO 8601. Kept in the JSON alone: sources stay deterministic."""
