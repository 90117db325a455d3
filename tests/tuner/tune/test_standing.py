"""A finished study run again: the finals' winner stands as long as nothing was tried since."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.shelf import library
from flashgen.tuner.store.studies import open_storage
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.events import FinalsStarted, Notice
from flashgen.tuner.tune.options import TuneOptions
from flashgen.tuner.tune.standing import FINALS

from tests.support.stand_ins import StandInDevice, StandInEvaluator

STANDS = "nothing was tried since the finals, so their winner stands"


@pytest.fixture
def options(tune_options) -> TuneOptions:
    return replace(tune_options, trials=12, sampler=SamplerName.RANDOM)


def run(options: TuneOptions, evaluator: StandInEvaluator, **others):
    events = []
    result = tune(options, make_evaluator=lambda device: evaluator, report=events.append, **others)
    return result, events


def test_nothing_is_timed_anew_and_the_files_are_written_again(options):
    first, _ = run(options, StandInEvaluator())
    first.paths.cu.unlink()
    first.paths.json.unlink()
    again = StandInEvaluator()
    result, events = run(options, again)
    assert (again.evaluated, again.finalists, result.trials_run, result.finalists) == ([], [], 0, ())
    assert [e.text for e in events if isinstance(e, Notice)] == [STANDS]
    assert not any(isinstance(e, FinalsStarted) for e in events)
    # As it was timed then, not as its trial was.
    assert replace(result.kernel, source="") == replace(first.kernel, source="")
    (found,) = library.entries([options.out])
    assert found.kernel.tuned_at == first.kernel.tuned_at and first.paths.cu.exists()
    assert found.kernel.measurement == first.kernel.measurement


@pytest.mark.parametrize("change", ["more trials", "another driver", "parameters held"])
def test_finals_are_held_anew_where_something_may_have_changed(options, change):
    run(options, StandInEvaluator())
    again = StandInEvaluator()
    if change == "more trials":
        options = replace(options, trials=13)
    elif change == "another driver":
        options = replace(options, device=StandInDevice(driver="590"))
    else:
        options = replace(options, held={"hoisted": True}, trials=1)
    _, events = run(options, again)
    assert again.finalists and any(isinstance(e, FinalsStarted) for e in events)
    third = StandInEvaluator()
    result, _ = run(options, third)
    assert (third.finalists, result.trials_run) == ([], 0)


def test_a_run_that_was_stopped_before_its_finals_leaves_them_to_the_next(options):
    stop = threading.Event()
    evaluator = StandInEvaluator()
    evaluator.on_evaluate = lambda: stop.set() if len(evaluator.evaluated) > 8 else None
    result, _ = run(options, evaluator, stop=stop)
    assert result.interrupted and not evaluator.finalists
    again = StandInEvaluator()
    run(replace(options, trials=sum(result.counts.values())), again)
    assert again.evaluated == [] and again.finalists


def test_a_record_that_cannot_be_read_does_not_stand(options):
    result, _ = run(options, StandInEvaluator())
    storage = open_storage(options.storage)
    study_id = storage.get_study_id_from_name(result.studies[0])
    assert FINALS in storage.get_study_user_attrs(study_id)
    storage.set_study_user_attr(study_id, "tuned", {"variant": 5})
    again = StandInEvaluator()
    run(options, again)
    assert again.finalists
