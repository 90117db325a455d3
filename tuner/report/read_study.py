"""A study read for a report: its finished trials with their outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import TrialState

from ...gen.families import family_named
from ...gen.variant import Variant
from ..store.ended_trials import EndedTrial, trial_records
from ..store.studies import OUTCOME, UNREADABLE


@dataclass(frozen=True)
class ReadStudy:
    """A study as it was read: its finished trials, and how many are under way or cannot be read."""

    name: str
    about: Mapping[str, Any]
    family: type[Variant]
    done: tuple[EndedTrial, ...]
    unreadable: int
    in_flight: int


def about_study(storage: BaseStorage, name: str) -> Mapping[str, Any]:
    """Returns what a study says of itself, without a trial of it."""
    return storage.get_study_user_attrs(storage.get_study_id_from_name(name))


def read_study(storage: BaseStorage, name: str, about: Mapping[str, Any]) -> ReadStudy:
    """Reads the trials of a study that says this of itself."""
    study_id = storage.get_study_id_from_name(name)
    family = family_named(about["family"])
    done: list[EndedTrial] = []
    unreadable = in_flight = 0
    for record in trial_records(storage, study_id):
        if record.state is TrialState.RUNNING:
            in_flight += 1
        if OUTCOME not in record.attributes or not record.state.is_finished():
            continue
        try:
            done.append(EndedTrial.of(record, family))
        except UNREADABLE:
            unreadable += 1
    return ReadStudy(name, about, family, tuple(done), unreadable, in_flight)
