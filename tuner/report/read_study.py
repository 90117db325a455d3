"""A study read for a report: its finished trials with their outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna.storages import BaseStorage
from optuna.study import load_study
from optuna.trial import FrozenTrial, TrialState

from ...gen.families import family_named
from ...gen.variant import Variant
from ..evaluate.outcome import Outcome
from ..store.studies import OUTCOME, outcome_of


@dataclass(frozen=True)
class ReadStudy:
    """A study as it was read: its finished trials, and how many are under way or cannot be read."""

    name: str
    about: Mapping[str, Any]
    family: type[Variant]
    done: tuple[tuple[FrozenTrial, Outcome], ...]
    unreadable: int
    in_flight: int


def read_study(storage: BaseStorage, name: str) -> ReadStudy:
    study = load_study(study_name=name, storage=storage)
    about = study.user_attrs
    family = family_named(about["family"])
    done: list[tuple[FrozenTrial, Outcome]] = []
    unreadable = in_flight = 0
    for trial in study.get_trials(deepcopy=False):
        if trial.state is TrialState.RUNNING:
            in_flight += 1
        if OUTCOME not in trial.user_attrs or not trial.state.is_finished():
            continue
        outcome = outcome_of(trial, family)
        if outcome is None:
            unreadable += 1
        else:
            done.append((trial, outcome))
    return ReadStudy(name, about, family, tuple(done), unreadable, in_flight)
