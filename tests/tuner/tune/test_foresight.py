"""What a search will try first is foreseen as it then comes, and leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.limits import PRESETS
from flashgen.gen.render import render
from flashgen.tuner.errors import NotServed
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.store.studies import open_storage
from flashgen.tuner.tune import foresight
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.events import FinalsStarted
from flashgen.tuner.tune.foresight import Foresight, Question, Winning
from flashgen.tuner.tune.options import TuneOptions

from tests.support.stand_ins import PROBLEM, StandInDevice, StandInEvaluator, cost

NEXT = replace(PROBLEM, seqlen_q=256, seqlen_k=256)
SMALL = StandInDevice(limits=replace(PRESETS["h200"], smem_per_block=1024))
NOTHING_LEGAL = {
    "device": SMALL,
    "problem": replace(PROBLEM, head_dim=256, head_dim_v=0),
    "held": {"br": 128, "bc": 64, "hoisted": True},
}


@pytest.fixture
def options(tune_options) -> TuneOptions:
    return replace(tune_options, trials=6, held={"hoisted": True})


def run(options: TuneOptions, **others):
    """The run's result, and the variants that it tried in the order in which it asked for them."""
    result = tune(options, make_evaluator=lambda device: StandInEvaluator(), **others)
    storage = open_storage(options.storage)
    study = storage.get_study_id_from_name(result.studies[0])
    trials = storage.get_all_trials(study)
    return result, [options.families[0].with_values(trial.params) for trial in trials]


def foresee(options: TuneOptions, winning: Winning | None = None):
    return Foresight().answer(Question(options=options, toolkit="stand-in 1.0", winning=winning))


def tried_first(options: TuneOptions, winning: Winning | None = None):
    return [kernel.variant for kernel in foresee(options, winning).kernels]


def everything_in(folder: Path):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sampler", [SamplerName.GP, SamplerName.RANDOM, SamplerName.TPE])
def test_what_is_tried_first_is_foreseen_and_nothing_is_written(options, sampler):
    options = replace(options, sampler=sampler)
    run(options)
    following = replace(options, problem=NEXT)
    before = everything_in(options.out)
    foreseen = foresee(following)
    assert everything_in(options.out) == before
    _, tried = run(following)
    assert [kernel.variant for kernel in foreseen.kernels] == tried
    assert foreseen.kernels[0] == render(tried[0], NEXT, options.limits)
    (space,) = foreseen.spaces
    assert foreseen.problem == NEXT and space.catalogue.unseen.all()


def test_the_winner_of_what_is_under_way_counts_as_known(options, monkeypatch):
    # What is predicted to be fastest is not what wins.
    monkeypatch.setattr(
        "flashgen.tuner.tune.family_run.prior_of", lambda problem, limits: lambda v: 1000 - cost(v)
    )
    asked: list[tuple] = []

    def hear(event) -> None:
        if isinstance(event, FinalsStarted):
            winning = Winning(PROBLEM, event.finalists[0])
            asked.append((tried_first(following), tried_first(following, winning)))

    following = replace(options, problem=NEXT)
    winner, _ = run(options, report=hear)
    ((without, foreseen),) = asked
    _, tried = run(following)
    assert foreseen == tried and tried[0] == winner.kernel.variant
    assert without != tried


def test_of_a_study_that_was_begun_the_rest_and_of_one_that_is_complete_nothing(options):
    _, tried = run(replace(options, trials=4))
    rest = tried_first(options)
    _, all_tried = run(options)
    assert all_tried == [*tried, *rest] and len(rest) == 2
    assert tried_first(options) == []


def test_without_a_bound_on_trials_as_many_as_are_under_way_at_a_time(options):
    assert len(tried_first(replace(options, trials=None, minutes=1.0))) == 2 + 2 + 3 - 1


def test_what_was_predicted_is_not_predicted_again(options, monkeypatch):
    asked: list = []

    def prior_of(problem, limits):
        def predicted_us(variant) -> float:
            asked.append(variant)
            return 100.0 + len(variant.name)

        return predicted_us

    monkeypatch.setattr("flashgen.tuner.tune.family_run.prior_of", prior_of)
    ahead = Foresight()
    question = Question(options=options, toolkit="stand-in 1.0")
    first = ahead.answer(question)
    once = len(asked)
    assert once == len(set(asked)) == len(first.spaces[0].predicted) > 0
    assert ahead.answer(question) == first and len(asked) == once
    ahead.answer(replace(question, options=replace(options, problem=NEXT)))
    assert len(asked) > once


def test_where_nothing_is_legal_nothing_is_foreseen(options):
    with pytest.raises(NotServed):
        foresee(replace(options, **NOTHING_LEGAL))


def test_the_process_answers_until_the_parent_is_gone(options, monkeypatch):
    class Pipe:
        def __init__(self) -> None:
            self.questions = [
                Question(options=replace(options, **NOTHING_LEGAL), toolkit="stand-in 1.0"),
                Question(options=options, toolkit="stand-in 1.0"),
            ]
            self.answers: list = []

        def recv(self):
            if not self.questions:
                raise EOFError
            return self.questions.pop(0)

        def send(self, answer) -> None:
            self.answers.append(answer)

    class Exited(Exception):
        pass

    def leave(status: int):
        raise Exited

    run(replace(options, trials=1))
    monkeypatch.setattr(foresight.os, "nice", lambda by: 0)
    monkeypatch.setattr(foresight.os, "_exit", leave)
    pipe = Pipe()
    with pytest.raises(Exited):
        foresight.serve(pipe)  # pyright: ignore[reportArgumentType]
    nothing, something = pipe.answers
    assert nothing is None and something.problem == PROBLEM and something.kernels
