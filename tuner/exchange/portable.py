"""A study's trials apart from its storage: taken out for export, and put back by an import.

What is put back is data that was checked: variants of a family's own choices, legal on their card, and
figures. Kernels are rendered anew from them whenever one is needed.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study, get_all_study_names
from optuna.trial import TrialState, create_trial

from ...gen.limits import DeviceLimits
from ...gen.variant import Variant
from ..cards.slug import same_card
from ..errors import FlashgenError
from ..evaluate.outcome import Outcome, Status
from ..request import Shapes
from ..store.about import About
from ..store.ended_trials import ended_trials, last_ended
from ..store.places import require_existing, without_password
from ..store.studies import (
    OUTCOME,
    UNREADABLE,
    distributions,
    open_storage,
    open_study,
    outcome_to_dict,
    plain_figures,
    storage_errors,
)

#: What a trial's ``origin`` says when an import put it there.
IMPORTED = "imported"


@dataclass(frozen=True)
class Ended:
    """An outcome and when it was."""

    outcome: Outcome
    at: datetime.datetime


@dataclass(frozen=True)
class Trials:
    """A study's finished trials, oldest first."""

    about: About
    ended: tuple[Ended, ...]


@dataclass(frozen=True)
class Imported:
    """What an import did: trials added, and those whose variant the study had tried itself."""

    study: str
    storage: str
    added: int
    known: int


def take(where: str, wanted: Callable[[About], bool], name: str | None = None) -> tuple[Trials, list[str]]:
    """Returns the trials of the study ``name``, or of the last used of the ``wanted``, and the names of the
    others.

    Raises:
        FlashgenError: there is no such storage or study, or it has no finished trial.
    """
    require_existing(where)
    storage = open_storage(where)
    with storage_errors(where):
        names = get_all_study_names(storage)
        if name is not None and name not in names:
            raise FlashgenError(f"{without_password(where)} has no study {name!r}; it has {_listed(names)}")
        # The last used first, so that no more than one of many large studies is read.
        fitting = sorted(_used(storage, wanted, name), reverse=True)
        for _, each in fitting:
            trials = _trials(storage, each)
            if trials is not None and trials.ended:
                others = [other for _, other in fitting if other != each]
                return trials, sorted(others, key=names.index)
    which = f"study {name!r}" if name is not None else "no study that was asked for"
    raise FlashgenError(
        f"{which} in {without_password(where)} has a finished trial of this version's families; it has "
        f"{_listed(names)}"
    )


def _used(
    storage: BaseStorage, wanted: Callable[[About], bool], name: str | None
) -> Iterator[tuple[datetime.datetime, str]]:
    """The studies that are meant and have a finished trial, each with when the last one ended."""
    for study in storage.get_all_studies():
        try:
            about = About.of_study(study.study_name, study.user_attrs)
        except (KeyError, TypeError, ValueError):
            continue
        if study.study_name == name if name is not None else wanted(about):
            at = last_ended(storage, study._study_id)
            if at is not None:
                yield at, study.study_name


def fits(
    shapes: Shapes, limits: DeviceLimits | None, family: type[Variant] | None
) -> Callable[[About], bool]:
    """Returns a test of which studies the options mean: what is given of a problem must agree."""

    def wanted(about: About) -> bool:
        if limits is not None and not same_card(about.slug, limits.slug):
            return False
        if family is not None and about.family is not family:
            return False
        return shapes.fits(about.problem)

    return wanted


def put(where: str, trials: Trials) -> Imported:
    """Adds the trials to the study they belong to. Raises FlashgenError as a storage does."""
    about = trials.about
    storage = open_storage(where)
    with storage_errors(where):
        new = about.study not in get_all_study_names(storage)
    study = open_study(storage, where, about.study, about.attributes() if new else {})
    known = added = 0
    with storage_errors(where):
        have = {trial.outcome.variant for trial in ended_trials(storage, study._study_id, about.family)}
        for each in trials.ended:
            if each.outcome.variant in have:
                known += 1
                continue
            have.add(each.outcome.variant)
            _add(study, about.family, each)
            added += 1
    return Imported(about.study, without_password(where), added, known)


def _trials(storage: BaseStorage, name: str) -> Trials | None:
    """None for a study of a family or of parameters that this version does not know."""
    study_id = storage.get_study_id_from_name(name)
    try:
        about = About.of_study(name, storage.get_study_user_attrs(study_id))
        ended = [
            Ended(trial.outcome, (trial.at or datetime.datetime.now()).astimezone(datetime.UTC))
            for trial in ended_trials(storage, study_id, about.family)
        ]
    except UNREADABLE:
        return None
    return Trials(about, tuple(ended))


def _add(study: Study, family: type[Variant], ended: Ended) -> None:
    outcome = ended.outcome
    measured = outcome.measurement
    fine = measured is not None and outcome.status in (Status.OK, Status.SLOW)
    trial = create_trial(
        state=TrialState.COMPLETE if fine else TrialState.PRUNED,
        value=measured.median_us if measured is not None and fine else None,
        params=dict(outcome.variant.to_dict()),
        distributions=dict[str, optuna.distributions.BaseDistribution](distributions(family)),
        user_attrs={"origin": IMPORTED, **plain_figures(outcome), OUTCOME: outcome_to_dict(outcome)},
    )
    # Studies keep local time without saying so.
    trial.datetime_start = trial.datetime_complete = ended.at.astimezone().replace(tzinfo=None)
    study.add_trial(trial)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"
