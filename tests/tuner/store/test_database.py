"""Studies in a database: read without Optuna's mapper, they are what Optuna itself reads, to the last
attribute."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterator

import optuna
import pytest
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.search.ask_tell import Search
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.store import database
from flashgen.tuner.store.database import Database
from flashgen.tuner.store.ended_trials import ended_trials, last_ended, trial_records
from flashgen.tuner.store.liveness import OWNER, Pulse
from flashgen.tuner.store.studies import OUTCOME, open_storage, open_study, outcomes
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import RDBStorage, get_storage
from optuna.study import load_study
from optuna.trial import FrozenTrial, TrialState

from tests.support.depth import sampled
from tests.support.large_studies import about_of, believable, fill
from tests.support.postgres import postgres_server
from tests.support.stand_ins import LADDER

PROBLEM = Problem(head_dim=64)
#: Leaves few of the family's variants.
HELD = {"bc": 16, "br": 64, "hoisted": True, "vec": 4, "coalesced": True}


@pytest.fixture(params=sampled(["sqlite", "postgresql"], 1))
def where(request, tmp_path) -> Iterator[str]:
    if request.param == "postgresql":
        with postgres_server() as url:
            yield url
    else:
        yield str(tmp_path / "trials.sqlite3")


@contextlib.contextmanager
def opened(where: str) -> Iterator[Database]:
    storage = open_storage(where)
    assert isinstance(storage, Database)
    yield storage
    storage.engine.dispose()


def fill_with_everything(storage: Database) -> int:
    """Trials of every state, with and without parameters, values, attributes and steps, in two studies."""
    study = optuna.create_study(storage=storage, study_name="varied", directions=["minimize", "maximize"])
    other = optuna.create_study(storage=storage, study_name="other")
    for number in range(7):
        other.add_trial(optuna.create_trial(value=math.inf if number % 2 else -math.inf))
        trial = study.ask()
        if number > 0:
            trial.suggest_categorical("z", [True, "two", 3])
            trial.suggest_int("a", 1, 9)
            trial.suggest_float("m", 1e-3, 1.0, log=True)
        if number > 1:
            trial.set_user_attr("outcome", {"times": [1.5, None], "deep": {"a": [{}]}})
            trial.set_user_attr("text", "{not JSON's")
            trial.set_user_attr("nothing", None)
            trial.set_user_attr("long", "é" * 300)
            storage.set_trial_system_attr(trial._trial_id, "constraints:x", [0.5])
        if number in (2, 3):
            for step, value in enumerate((1.0, math.nan, math.inf, -math.inf)):
                storage.set_trial_intermediate_value(trial._trial_id, step, value)
        if number in (1, 3):
            study.tell(trial, [math.inf, -2.5])
        elif number == 4:
            study.tell(trial, state=TrialState.PRUNED)
        elif number == 5:
            study.tell(trial, state=TrialState.FAIL)
    study.enqueue_trial({"z": "two"})
    return study._study_id


def facts(trial: FrozenTrial) -> tuple:
    """All that a trial is, comparable: no NaN equals another, and what has no order has none."""
    told = {key: value for key, value in vars(trial).items() if key != "intermediate_values"}
    return told, {step: repr(value) for step, value in trial.intermediate_values.items()}


def same(ours: list[FrozenTrial], theirs: list[FrozenTrial]) -> bool:
    """Whether two lists of trials are the same, parameters in the same order too."""
    assert [list(trial.params) for trial in ours] == [list(trial.params) for trial in theirs]
    return [facts(trial) for trial in ours] == [facts(trial) for trial in theirs]


@pytest.mark.parametrize("most_named", [500, 1])
def test_trials_are_those_that_optuna_reads(where, monkeypatch, most_named):
    monkeypatch.setattr(database, "MOST_NAMED", most_named)
    with opened(where) as storage:
        study_id = fill_with_everything(storage)
        for states in (None, (TrialState.RUNNING,), (TrialState.COMPLETE, TrialState.PRUNED)):
            theirs = RDBStorage._get_trials(storage, study_id, states, set(), -1)
            assert theirs and same(storage.get_all_trials(study_id, states=states), theirs)
            assert storage.get_n_trials(study_id, states) == len(theirs)
        assert storage.get_n_trials(study_id, TrialState.WAITING) == 1
        every = [trial._trial_id for trial in RDBStorage._get_trials(storage, study_id, None, set(), -1)]
        for included, beyond in ((set(every[:2]), every[4]), (set(), every[-2]), (set(every), every[-1])):
            ours = storage._get_trials(study_id, None, included, beyond)
            assert same(ours, RDBStorage._get_trials(storage, study_id, None, included, beyond))
        assert storage._get_trials(study_id, None, set(), every[-1]) == []
        with pytest.raises(KeyError):
            storage.get_all_trials(study_id + 7)
        with pytest.raises(KeyError):
            storage.get_n_trials(study_id + 7)


def test_a_study_that_is_read_again_and_again_sees_every_change(where):
    with opened(where) as storage, opened(where) as elsewhere:
        study = optuna.create_study(storage=storage, study_name="one")
        space = {
            "x": FloatDistribution(0, 1),
            "n": IntDistribution(1, 5),
            "c": CategoricalDistribution(["a"]),
        }
        mine = load_study(study_name="one", storage=elsewhere)
        assert mine.get_trials(deepcopy=False) == []
        first, second = study.ask(space), study.ask(space)
        assert [t.state for t in mine.get_trials(deepcopy=False)] == [TrialState.RUNNING] * 2
        second.set_user_attr("late", 1)
        study.tell(second, 2.0)
        first.set_user_attr("later", "x")
        first_read, second_read = mine.get_trials(deepcopy=False)
        assert (first_read.user_attrs, second_read.user_attrs) == ({"later": "x"}, {"late": 1})
        study.tell(first, 1.0)
        assert [t.value for t in mine.get_trials(deepcopy=False)] == [1.0, 2.0]
        assert same(mine.get_trials(), get_storage(where_url(where)).get_all_trials(study._study_id))


def where_url(where: str) -> str:
    return where.replace("postgresql://", "postgresql+psycopg://") if "://" in where else f"sqlite:///{where}"


@pytest.mark.parametrize("journal", [False, True])
def test_records_are_of_all_trials_and_ended_ones_of_those_with_an_outcome(where, tmp_path, journal):
    where = str(tmp_path / "trials.journal") if journal else where
    catalogue = build_catalogue(LADDER, PROBLEM, PRESETS["h200"])
    about = about_of(catalogue)
    fill(where, about, believable(catalogue, 40))
    storage = open_storage(where)
    study = open_study(storage, where, about.study, {})
    study.ask()
    records = list(trial_records(storage, study._study_id))
    trials = study.get_trials()
    assert [(r.number, r.state, r.completed) for r in records] == [
        (t.number, t.state, t.datetime_complete) for t in trials
    ]
    assert all(set(r.attributes) <= {OUTCOME, "origin"} for r in records)
    ended = ended_trials(storage, study._study_id, LADDER)
    assert [(e.number, e.outcome) for e in ended] == [(t.number, o) for t, o in outcomes(study, LADDER)]
    assert [e.origin for e in ended] == [t.user_attrs["origin"] for t in trials[:40]]
    assert last_ended(storage, study._study_id) == max(t.datetime_complete for t in trials[:40])
    assert isinstance(last_ended(storage, study._study_id), datetime.datetime)
    empty = open_study(storage, where, "empty", {})
    assert list(trial_records(storage, empty._study_id)) == []
    assert last_ended(storage, empty._study_id) is None


@pytest.mark.parametrize("journal", [False, True])
def test_large_studies_are_written_as_a_search_writes_them(where, tmp_path, journal):
    where = str(tmp_path / "trials.journal") if journal else where
    catalogue = build_catalogue(LADDER, PROBLEM, PRESETS["h200"], HELD)
    about = about_of(catalogue)
    ran = list(believable(catalogue, len(catalogue), seed=3))
    assert {each.state for each in ran} == {TrialState.COMPLETE, TrialState.PRUNED}
    # In two goes, as if two runs had written them.
    fill(where, about, ran[:7])
    fill(where, about, ran[7:])
    storage = open_storage(where)
    study = open_study(storage, where, "searched", about.attributes())
    search = Search(catalogue, study, sampler=SamplerName.RANDOM, pulse=Pulse())
    outcome_of = {each.outcome.variant: each.outcome for each in ran}
    while (proposal := search.ask()) is not None:
        search.tell(proposal, outcome_of[proposal.variant])
    written, searched = (load_study(study_name=name, storage=storage) for name in (about.study, "searched"))
    assert (written.user_attrs, written.metric_names) == (searched.user_attrs, searched.metric_names)
    trials = written.get_trials()
    assert [trial.number for trial in trials] == list(range(len(ran)))
    assert trials[0].datetime_start == ran[0].began.astimezone().replace(tzinfo=None)
    assert trials[0].datetime_complete == ran[0].ended.astimezone().replace(tzinfo=None)
    by_parameters = {tuple(trial.params.items()): trial for trial in searched.get_trials()}
    assert len(by_parameters) == len(trials)
    for trial in trials:
        other = by_parameters[tuple(trial.params.items())]
        for each in (trial, other):
            # Who ran it, and why.
            assert isinstance(each.user_attrs.pop(OWNER), str) and each.user_attrs.pop("origin")
        for name in ("state", "distributions", "user_attrs", "system_attrs", "values", "intermediate_values"):
            assert getattr(trial, name) == getattr(other, name), name
