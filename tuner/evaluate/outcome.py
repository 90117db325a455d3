"""What became of a variant: how it ended, why, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

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

    def __post_init__(self) -> None:
        """Raises ValueError for figures that nothing measured: times that are not positive and finite, or
        anything that is no number."""
        # At once where they are plain: a large study has millions of times.
        plain = set(map(type, self.times_us)) <= {float, int} and _all_within(self.times_us)
        for us in (self.median_us, *(() if plain else self.times_us)):
            if not _is_number(us) or not 0 < us < math.inf:
                raise ValueError(f"{us!r} us is not a time")
        for name in ("spread", "tflops", "registers", "spill_bytes", "smem_bytes", "occupancy", "error"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}, not a number from 0")

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"times_us": list(self.times_us)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Measurement:
        """Returns the figures that `to_dict` wrote. Raises TypeError or ValueError for anything else."""
        measurement = cls(**{**data, "times_us": tuple(data["times_us"])})
        if type(measurement.predicted) is not bool or not isinstance(measurement.busy, str):
            raise ValueError("predicted is no truth value, or busy no text")
        return measurement


def _all_within(times_us: Sequence[float]) -> bool:
    """Whether all times, which are numbers, are positive and finite."""
    # A sum is no number where one of them is none.
    return not times_us or (min(times_us) > 0 and max(times_us) < math.inf and sum(times_us) < math.inf)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


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
