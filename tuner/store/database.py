"""Optuna's storage in a database, which reads a study of many thousand trials within seconds.

Optuna makes an object of its mapper of every parameter and every attribute of every trial: of 20,000 trials
half a million, a kilobyte or two each. Here rows are read as they are, and what trials have in common is kept
once; the trials that come out are the same.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, Executable, func, or_, select

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

#: Rows that a database sends at once.
ROWS_AT_ONCE = 5000
#: Trials that a query names at most, since databases bound how many values one may have; of more, all from
#: the first of them on are read.
MOST_NAMED = 500
#: Values of attributes that are as short as this are parsed once: states, origins, owners, small numbers.
SHORT, MOST_SHORT = 64, 10_000
#: What reading something that Optuna never wrote raises, and how much of it is told.
UNREADABLE = (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
MAX_WHY = 200


@contextlib.contextmanager
def strange_contents() -> Iterator[None]:
    """Turns what reading something that Optuna never wrote raises into an error of the storage. A study that
    is not there is told of so too."""
    try:
        yield
    except UNREADABLE as error:
        why = f"{type(error).__name__}: {error}"[:MAX_WHY]
        raise StorageInternalError(
            f"something in it cannot be read, as if another program wrote to it ({why})"
        ) from None


@dataclass(frozen=True)
class TrialRecord:
    """A trial as far as it was asked for: its number, its state, when it was complete in local time without
    saying so, and some of its user attributes."""

    number: int
    state: TrialState
    completed: datetime.datetime | None
    attributes: dict[str, Any]


class Database(RDBStorage):
    """Optuna's storage in a database, made fast where a study has many trials or cards wait for new ones."""

    @strange_contents()
    def get_all_studies(self) -> list[FrozenStudy]:
        return super().get_all_studies()

    @strange_contents()
    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return super().get_study_user_attrs(study_id)

    @strange_contents()
    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return super().get_study_system_attrs(study_id)

    @strange_contents()
    def get_trial(self, trial_id: int) -> FrozenTrial:
        return super().get_trial(trial_id)

    def _set_trial_param_without_commit(
        self,
        session: Any,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
        previous_distribution: BaseDistribution | None = None,
    ) -> None:
        """Writes a trial's parameters together, and does not look for what each was like in earlier trials: a
        family's are always the same. New trials take half as long."""
        known = previous_distribution or distribution
        with session.no_autoflush:
            super()._set_trial_param_without_commit(
                session, trial_id, param_name, param_value_internal, distribution, known
            )

    def get_n_trials(self, study_id: int, state: tuple[TrialState, ...] | TrialState | None = None) -> int:
        """Counts a study's trials, of some states alone where they are given; Optuna reads them to do so."""
        from optuna.storages._rdb.models import StudyModel, TrialModel

        states = (state,) if isinstance(state, TrialState) else state
        with self._session() as session:
            StudyModel.find_or_raise_by_id(study_id, session)
            counted = select(func.count(TrialModel.trial_id)).where(TrialModel.study_id == study_id)
            if states is not None:
                counted = counted.where(TrialModel.state.in_(states))
            return session.execute(counted).scalar_one()

    def records(self, study_id: int, names: Collection[str]) -> Iterator[TrialRecord]:
        """Yields all trials of a study, each with the named ones of its user attributes, in the order in
        which they were made. None of them is held here."""
        from optuna.storages._rdb.models import TrialModel, TrialUserAttributeModel

        trial, attribute = TrialModel.__table__.c, TrialUserAttributeModel.__table__.c
        theirs = (attribute.trial_id == trial.trial_id) & attribute.key.in_(names)
        query = (
            select(
                trial.trial_id,
                trial.number,
                trial.state,
                trial.datetime_complete,
                attribute.key,
                attribute.value_json,
            )
            .outerjoin_from(TrialModel.__table__, TrialUserAttributeModel.__table__, theirs)
            .where(trial.study_id == study_id)
            .order_by(trial.trial_id)
        )
        # Its own connection: whoever goes through the trials may ask the storage for more meanwhile.
        with self.engine.connect() as connection:
            rows = _streamed(connection, query)
            for (_, number, state, completed), of_one in groupby(rows, itemgetter(slice(4))):
                with strange_contents():
                    attributes = {name: json.loads(text) for *_, name, text in of_one if name is not None}
                yield TrialRecord(number, state, _local(completed), attributes)

    def last_completed(
        self, study_id: int, states: Collection[TrialState], name: str
    ) -> datetime.datetime | None:
        """Returns when the last of a study's trials was complete that are in one of those states and have a
        user attribute of that name; None where there is none."""
        from optuna.storages._rdb.models import TrialModel, TrialUserAttributeModel

        trial, attribute = TrialModel.__table__.c, TrialUserAttributeModel.__table__.c
        query = (
            select(func.max(trial.datetime_complete))
            .join_from(TrialModel.__table__, TrialUserAttributeModel.__table__)
            .where(trial.study_id == study_id, trial.state.in_(states), attribute.key == name)
        )
        with self.engine.connect() as connection:
            return _local(connection.execute(query).scalar_one())

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        """Returns a study's trials of those states, in the order in which they were made: those whose key is
        greater than one, and of the others those that are included."""
        from optuna.storages._rdb.models import StudyModel

        with self._session() as session:
            StudyModel.find_or_raise_by_id(study_id, session)
            included = {key for key in included_trial_ids if key <= trial_id_greater_than}
            with strange_contents():
                return _Reading(session, study_id, states, included, trial_id_greater_than).trials()

    def _session(self) -> Any:
        """A session as Optuna opens them, which turns a database's errors into Optuna's."""
        from optuna.storages._rdb.storage import _create_scoped_session

        return _create_scoped_session(self.scoped_session)


def _streamed(connection: Connection, query: Executable) -> Iterator[Any]:
    """A query's rows, of which no more than `ROWS_AT_ONCE` are here at a time."""
    result = connection.execute(query, execution_options={"yield_per": ROWS_AT_ONCE})
    for rows in result.partitions():
        yield from rows


def _local(stored: datetime.datetime | None) -> datetime.datetime | None:
    """A time of a trial as Optuna gives it, in local time; from its fifth version on it keeps UTC."""
    from optuna.storages._rdb.models import TrialModel

    if stored is None or not hasattr(TrialModel, "_datetime_complete_utc"):
        return stored
    return stored.replace(tzinfo=datetime.UTC).astimezone().replace(tzinfo=None)


class _Reading:
    """One reading of a study's trials: a query for each of Optuna's tables, all with the same condition."""

    def __init__(
        self,
        session: Session,
        study_id: int,
        states: Container[TrialState] | None,
        included: set[int],
        greater_than: int,
    ) -> None:
        from optuna.storages._rdb import models

        self._models = models
        self._session = session
        self._included, self._greater_than = included, greater_than
        trial = models.TrialModel
        self._wanted = [trial.study_id == study_id]
        if states is not None:
            assert isinstance(states, Iterable)
            self._wanted.append(trial.state.in_(states))
        if included and len(included) <= MOST_NAMED:
            self._wanted.append(or_(trial.trial_id > greater_than, trial.trial_id.in_(included)))
        elif included:
            self._wanted.append(trial.trial_id >= min(included))
        elif greater_than > -1:
            self._wanted.append(trial.trial_id > greater_than)

    def trials(self) -> list[FrozenTrial]:
        """Reads the trials themselves first: one that has ended then has all that belongs to it."""
        trial, models = self._models.TrialModel, self._models
        table = trial.__table__.c
        query = (
            select(table.trial_id, table.number, table.state, table.datetime_start, table.datetime_complete)
            .where(*self._wanted)
            .order_by(table.trial_id)
        )
        read = [
            (key, number, state, _local(started), _local(completed))
            for key, number, state, started, completed in self._stream(query)
            if key > self._greater_than or key in self._included
        ]
        if not read:
            return []
        parameters, values, steps = self._parameters(), self._values(), self._intermediate_values()
        user, system = (
            self._attributes(model)
            for model in (models.TrialUserAttributeModel, models.TrialSystemAttributeModel)
        )
        found = []
        for key, number, state, started, completed in read:
            params, distributions = parameters.pop(key, ({}, {}))
            found.append(
                FrozenTrial(
                    number=number,
                    state=state,
                    value=None,
                    values=values.get(key),
                    datetime_start=started,
                    datetime_complete=completed,
                    params=params,
                    # Those of a trial under way are its own.
                    distributions=distributions if state.is_finished() else dict(distributions),
                    user_attrs=user.pop(key, {}),
                    system_attrs=system.pop(key, {}),
                    intermediate_values=steps.get(key, {}),
                    trial_id=key,
                )
            )
        return found

    def _rows(self, model: Any, *columns: str, by: str | None = None) -> Iterator[Any]:
        """The rows of one table that belong to the trials, the trial's key first; trial by trial in the order
        of ``by`` where it is given."""
        trial, table = self._models.TrialModel, model.__table__.c
        query = select(table.trial_id, *(table[name] for name in columns))
        query = query.join(trial, trial.trial_id == table.trial_id).where(*self._wanted)
        if by is not None:
            query = query.order_by(table.trial_id, table[by])
        return self._stream(query)

    def _stream(self, query: Executable) -> Iterator[Any]:
        """A query's rows as they come. A session's own way looks at each for objects of the mapper."""
        return _streamed(self._session.connection(), query)

    def _parameters(self) -> dict[int, tuple[dict[str, Any], dict[str, BaseDistribution]]]:
        """Every trial's parameters and their distributions: those of one text are one object, and trials that
        have the same share a dictionary of them."""
        model = self._models.TrialParamModel
        rows = self._rows(model, "param_name", "param_value", "distribution_json", by="param_id")
        known: dict[tuple[str, str], tuple[str, BaseDistribution]] = {}
        shared: dict[tuple[int, ...], dict[str, BaseDistribution]] = {}
        found = {}
        for key, theirs in groupby(rows, itemgetter(0)):
            params: dict[str, Any] = {}
            pairs = []
            for _, name, value, text in theirs:
                pair = known.get((name, text))
                if pair is None:
                    pair = known[name, text] = (name, json_to_distribution(text))
                params[pair[0]] = pair[1].to_external_repr(value)
                pairs.append(pair)
            same = tuple(map(id, pairs))
            if same not in shared:
                shared[same] = dict(pairs)
            found[key] = (params, shared[same])
        return found

    def _attributes(self, model: Any) -> dict[int, dict[str, Any]]:
        """Every trial's attributes; a short text that many have is parsed once."""
        names: dict[str, str] = {}
        parsed: dict[str, Any] = {}
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        for key, name, text in self._rows(model, "key", "value_json"):
            if len(text) <= SHORT and text[0] not in "[{":
                value = parsed.get(text)
                if value is None:
                    value = json.loads(text)
                    if len(parsed) < MOST_SHORT:
                        parsed[text] = value
            else:
                value = json.loads(text)
            found[key][names.setdefault(name, name)] = value
        return found

    def _values(self) -> dict[int, list[float]]:
        model = self._models.TrialValueModel
        found: dict[int, dict[int, float]] = defaultdict(dict)
        for key, objective, value, kind in self._rows(model, "objective", "value", "value_type"):
            found[key][objective] = model.stored_repr_to_value(value, kind)
        return {key: [values[i] for i in range(len(values))] for key, values in found.items()}

    def _intermediate_values(self) -> dict[int, dict[int, float]]:
        model = self._models.TrialIntermediateValueModel
        found: dict[int, dict[int, float]] = defaultdict(dict)
        for key, step, value, kind in self._rows(
            model, "step", "intermediate_value", "intermediate_value_type"
        ):
            found[key][step] = model.stored_repr_to_intermediate_value(value, kind)
        return found
