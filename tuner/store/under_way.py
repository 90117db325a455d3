"""The studies of a storage as they stand: how far, how fast the best is, what failed, and who is at work."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass

from optuna.storages import BaseStorage
from optuna.study import get_all_study_names
from optuna.trial import TrialState

from ..evaluate.outcome import Status
from .ended_trials import ENDED, trial_records
from .liveness import OWNER, is_dead
from .studies import OUTCOME


@dataclass(frozen=True)
class StudyUnderWay:
    """A study at one moment."""

    study: str
    ended: int
    """Trials that came to their end."""
    failed: dict[str, int]
    """How many of those by how they failed; slow ones and those that went well are not among them."""
    workers: int
    """Runs that have trials in flight, and are not known to be gone."""
    in_flight: int
    best_us: float | None
    best_trial: int | None
    last_at: datetime.datetime | None
    """When the last trial came to its end, in local time without saying so."""


#: What a trial may end with that is no failure.
_NO_FAILURE = frozenset({Status.OK, Status.SLOW})


def studies_under_way(storage: BaseStorage) -> list[StudyUnderWay]:
    """Returns the studies of a storage, those in which somebody is at work first, then by their last
    trial."""
    found = [_study(storage, name) for name in get_all_study_names(storage)]
    never = datetime.datetime.min
    return sorted(found, key=lambda each: (each.workers > 0, each.last_at or never), reverse=True)


def _study(storage: BaseStorage, name: str) -> StudyUnderWay:
    study_id = storage.get_study_id_from_name(name)
    owners: list[str] = []
    ended: list[datetime.datetime | None] = []
    failed: Counter[str] = Counter()
    times: list[tuple[float, int]] = []
    for record in trial_records(storage, study_id, more=(OWNER,)):
        if record.state is TrialState.RUNNING:
            owners.append(str(record.attributes.get(OWNER, "")))
        # Read as it stands: trials of another version's variants have ended and have times, too.
        elif record.state in ENDED and isinstance(outcome := record.attributes.get(OUTCOME), dict):
            ended.append(record.completed)
            status, measured = str(outcome.get("status")), outcome.get("measurement")
            if status not in _NO_FAILURE:
                failed[status] += 1
            elif status == Status.OK and isinstance(measured, dict) and "median_us" in measured:
                times.append((float(measured["median_us"]), record.number))
    living = [owner for owner in owners if owner and not is_dead(owner)]
    best_us, best_trial = min(times, default=(None, None))
    return StudyUnderWay(
        study=name,
        ended=len(ended),
        failed=dict(failed.most_common()),
        workers=len(set(living)),
        in_flight=len(living),
        best_us=best_us,
        best_trial=best_trial,
        last_at=max((at for at in ended if at is not None), default=None),
    )
