"""The times of the ladder's steps on the report's cases, and what each step brought."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...gen.families.ladder.family import STEPS
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..evaluate.measure import tflops
from ..evaluate.outcome import Measurement, Status
from ..suites import SUITES

#: The report's cases, by its numbers.
CASES: dict[str, Problem] = SUITES["report"].problems

#: The contenders beside the steps: what the steps' own arithmetic reaches, what the card does by whichever
#: family, and PyTorch.
SIMT, FASTEST, FUSED, UNFUSED = "simt", "fastest", "fused", "unfused"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender on one case. ``median_us`` is None where it did not run, and ``reason`` says why."""

    case: str
    name: str
    """The name of the contender: a step, or ``simt``, ``fastest``, ``fused``, ``unfused``."""
    title: str
    status: Status
    reason: str = ""
    tuned: bool | None = None
    """Whether a search found the kernel; None of the steps and of PyTorch."""
    variant: Variant | None = None
    median_us: float | None = None
    measurement: Measurement | None = None
    """What was measured of a kernel of flashgen's own, at the length ``scaled_from`` where that is set, else
    at the case's."""
    scaled_from: int | None = None
    """The length that was timed instead of the case's; the time is scaled by the square."""

    @property
    def is_step(self) -> bool:
        return self.name in STEPS

    @property
    def label(self) -> str:
        """What the contender is called in tables: the fastest by its family."""
        return self.variant.family if self.name == FASTEST and self.variant is not None else self.name

    @property
    def tflops(self) -> float | None:
        return None if self.median_us is None else tflops(CASES[self.case], self.median_us)


@dataclass(frozen=True, kw_only=True)
class LadderResult:
    """All rows, by case and in the order of the steps."""

    device: str
    driver: str
    toolkit: str
    predicted: bool
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def cases(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.case for row in self.rows))

    def rows_of(self, case: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.case == case)

    def speedups(self, row: Row) -> tuple[float | None, float | None]:
        """Returns how many times faster a row is than the first step that was timed on its case and, for a
        step, than the one timed before it; None where that is not known."""
        timed = [r for r in self.rows_of(row.case) if r.is_step and r.median_us is not None]
        if row.median_us is None or not timed:
            return None, None
        over_first = timed[0].median_us / row.median_us  # type: ignore[operator]
        place = next((i for i, r in enumerate(timed) if r.name == row.name), 0)
        over_previous = timed[place - 1].median_us / row.median_us if place else None  # type: ignore[operator]
        return over_first, over_previous

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values; times are in milliseconds."""
        return {
            "device": self.device,
            "driver": self.driver,
            "toolkit": self.toolkit,
            "predicted": self.predicted,
            "interrupted": self.interrupted,
            "notes": list(self.notes),
            "cases": {
                case: {
                    "problem": CASES[case].to_dict(),
                    "rows": [self._row_dict(row) for row in self.rows_of(case)],
                }
                for case in self.cases
            },
        }

    def _row_dict(self, row: Row) -> dict[str, Any]:
        over_first, over_previous = self.speedups(row)
        return {
            "name": row.name,
            "title": row.title,
            "status": row.status,
            "family": None if row.variant is None else row.variant.family,
            "tuned": row.tuned,
            "reason": row.reason,
            "ms": None if row.median_us is None else row.median_us / 1000,
            "tflops": row.tflops,
            "speedup_over_first": over_first,
            "speedup_over_previous": over_previous,
            "scaled_from_seqlen": row.scaled_from,
            "variant": None if row.variant is None else row.variant.to_dict(),
            "measurement": None if row.measurement is None else row.measurement.to_dict(),
        }
