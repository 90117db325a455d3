"""Trials that have ended, as far as they are told of afterwards: when, how, and what proposed them.

Reports, exports and lists need nothing else, and a database sends it in one go. A search reads whole trials.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import TrialState

from ...gen.variant import Variant
from ..evaluate.outcome import Outcome
from .database import UNREADABLE, Database, TrialRecord
from .studies import OUTCOME, log_unread, outcome_from_dict

#: The attribute of a trial that says what proposed it.
ORIGIN = "origin"
#: States of trials that came to their end.
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class EndedTrial:
    """A trial that came to its end: its number in the study, when it ended in local time without saying so,
    what proposed it, and what became of its variant."""

    number: int
    at: datetime.datetime | None
    origin: str
    outcome: Outcome

    @classmethod
    def of(cls, record: TrialRecord, family: type[Variant]) -> EndedTrial:
        """Returns what a record with an outcome tells. Raises one of `UNREADABLE` for values that
        this version does not know."""
        attributes = record.attributes
        outcome = outcome_from_dict(family, attributes[OUTCOME])
        return cls(record.number, record.completed, str(attributes.get(ORIGIN, "")), outcome)


def trial_records(storage: BaseStorage, study_id: int, more: tuple[str, ...] = ()) -> Iterator[TrialRecord]:
    """Yields all trials of a study, in any state, the oldest first, with their outcome and origin and what
    ``more`` is named of their attributes alone."""
    names = (OUTCOME, ORIGIN, *more)
    if isinstance(storage, Database):
        yield from storage.records(study_id, names)
        return
    for trial in storage.get_all_trials(study_id, deepcopy=False):
        known: dict[str, Any] = {name: trial.user_attrs[name] for name in names if name in trial.user_attrs}
        yield TrialRecord(trial.number, trial.state, trial.datetime_complete, known)


def ended_trials(storage: BaseStorage, study_id: int, family: type[Variant]) -> list[EndedTrial]:
    """Returns every trial of a study that came to its end, the oldest first. Those that cannot be read are
    passed over, and counted in the log."""
    found: list[EndedTrial] = []
    unread: list[int] = []
    for record in trial_records(storage, study_id):
        if record.state in ENDED and OUTCOME in record.attributes:
            try:
                found.append(EndedTrial.of(record, family))
            except UNREADABLE:
                unread.append(record.number)
    log_unread(storage.get_study_name_from_id(study_id), len(found), unread)
    return found


def last_ended(storage: BaseStorage, study_id: int) -> datetime.datetime | None:
    """Returns when the last trial of a study came to its end with an outcome, in local time without saying
    so; None where none did."""
    if isinstance(storage, Database):
        return storage.last_completed(study_id, ENDED, OUTCOME)
    times = (
        trial.datetime_complete
        for trial in storage.get_all_trials(study_id, deepcopy=False, states=ENDED)
        if OUTCOME in trial.user_attrs
    )
    return max((at for at in times if at is not None), default=None)
