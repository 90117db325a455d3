"""What a finished tuning run found and what it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..evaluate.outcome import Outcome, TunedKernel
from ..shelf import library, records
from ..store.studies import outcome_to_dict
from .wall_time import WallTime


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """A finished run. ``counts`` are of all trials of the studies, by status; ``reasons`` of the failures.

    ``kept_faster`` is the library's kernel, where what was found with parameters held or families left out
    is slower. ``trials_elsewhere`` were made by other coordinators that shared the studies meanwhile.
    ``doubtful`` counts trials whose times something spoke against, though they were repeated, by what it was.
    """

    kernel: TunedKernel
    slug: str
    paths: library.Paths
    kept_faster: Path | None
    counts: Mapping[str, int]
    reasons: Mapping[str, int]
    finalists: tuple[Outcome, ...]
    trials_run: int
    trials_earlier: int
    interrupted: bool
    seconds: float
    wall_time: WallTime
    storage: str
    studies: tuple[str, ...]
    trials_elsewhere: int = 0
    doubtful: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as `flashgen tune --json` tells it."""
        return {
            **records.to_record(self.kernel),
            "files": None if self.kept_faster else {k: str(v) for k, v in vars(self.paths).items()},
            "kept_faster": str(self.kept_faster) if self.kept_faster else None,
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            "doubtful": dict(self.doubtful),
            "finalists": [outcome_to_dict(o) for o in self.finalists],
            "trials_run": self.trials_run,
            "trials_earlier": self.trials_earlier,
            "trials_elsewhere": self.trials_elsewhere,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
            "wall_time": self.wall_time.to_dict(),
            "storage": self.storage,
            "studies": list(self.studies),
        }
