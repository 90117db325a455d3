"""The winner of the last finals, where it stands: nothing was tried since, so that nothing is to be decided.

The study that holds a winner says which trials its finals covered: how many there were of each study that
competed, under which held parameters and which driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optuna.study import Study
from optuna.trial import TrialState

from ..evaluate.outcome import Outcome, Status
from ..shelf import records
from ..shelf.winners import TUNED
from .family_run import FamilyRun
from .options import TuneOptions

#: Attribute of a study that holds a winner: what the finals covered that it won.
FINALS = "finals"


@dataclass(frozen=True)
class Standing:
    """A winner as it was timed in finals, and when: UTC, ISO 8601."""

    outcome: Outcome
    tuned_at: str


def standing_winner(runs: Sequence[FamilyRun], options: TuneOptions) -> Standing | None:
    """Returns the winner of finals that covered just the trials there are; None where there were none."""
    covered = _covered(runs, options)
    for run in runs:
        about = run.search.study.user_attrs
        if about.get(FINALS) != covered:
            continue
        try:
            kernel = records.from_record(about[TUNED], "")
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        outcome = Outcome(variant=kernel.variant, status=Status.OK, measurement=kernel.measurement)
        return Standing(outcome, kernel.tuned_at)
    return None


def note_finals(runs: Sequence[FamilyRun], options: TuneOptions, study: Study) -> None:
    """Writes down what the finals covered with the winner, which that study holds."""
    study.set_user_attr(FINALS, _covered(runs, options))


def _covered(runs: Sequence[FamilyRun], options: TuneOptions) -> dict[str, Any]:
    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    counts = {
        run.search.study.study_name: len(run.search.study.get_trials(deepcopy=False, states=ended))
        for run in runs
    }
    return {"trials": counts, "held": dict(options.held), "driver": options.device.driver}
