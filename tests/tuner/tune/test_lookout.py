"""While one problem is tuned the next one's first kernels are built, if that is foreseen in time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

import pytest
from flashgen.gen.kernel import Kernel
from flashgen.tuner.evaluate.outcome import Outcome, Status
from flashgen.tuner.tune import lookout
from flashgen.tuner.tune.events import FinalsStarted, Notice
from flashgen.tuner.tune.lookout import Lookout
from flashgen.tuner.tune.options import TuneOptions

from tests.support.answering import AnswersInPlace
from tests.support.stand_ins import LADDER, PROBLEM

FIRST, SECOND, THIRD = (replace(PROBLEM, seqlen_q=n, seqlen_k=n) for n in (128, 256, 512))


@dataclass
class Wishes:
    """Notes what is wanted of a pool."""

    kernels: list[list[Kernel]] = field(default_factory=list)

    def want(self, kernels) -> None:
        self.kernels.append(list(kernels))


class Slow(AnswersInPlace):
    """Answers once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()

    def receive(self, timeout_s):
        answer = super().receive(timeout_s)
        self.let.wait(10)
        return answer


@pytest.fixture
def wishes() -> Wishes:
    return Wishes()


@pytest.fixture
def options(tune_options) -> TuneOptions:
    (tune_options.out).mkdir()
    return replace(tune_options, trials=3, held={"hoisted": True})


def looking(wishes: Wishes, process, stop: threading.Event | None = None) -> Lookout:
    return Lookout(wishes, "stand-in 1.0", stop or threading.Event(), lambda: process)  # pyright: ignore


def of(options: TuneOptions, problem) -> TuneOptions:
    return replace(options, problem=problem)


def test_each_problem_is_foreseen_while_the_one_before_has_its_turn(options, wishes):
    process = AnswersInPlace()
    with looking(wishes, process) as ahead:
        assert ahead.turn(of(options, FIRST), of(options, SECOND)) == ()
        (space,) = ahead.turn(of(options, SECOND), of(options, THIRD))
        assert space.catalogue.problem == SECOND and space.catalogue.family is LADDER
        (space,) = ahead.turn(of(options, THIRD), None)
        assert space.catalogue.problem == THIRD and space.predicted
    assert [[k.problem for k in kernels] for kernels in wishes.kernels] == [[SECOND] * 3, [THIRD] * 3]
    assert [question.options.problem for question in process.questions] == [SECOND, THIRD] and process.closed


def test_the_last_problem_needs_no_process(options, wishes):
    def start():
        raise AssertionError("there is nothing to foresee")

    with Lookout(wishes, "stand-in 1.0", threading.Event(), start) as ahead:  # pyright: ignore
        assert ahead.turn(of(options, FIRST), None) == ()
        ahead.heard_by(lambda event: None)(FinalsStarted((Outcome(variant=LADDER(), status=Status.OK),)))
    assert not wishes.kernels


def test_once_finals_tell_who_is_likely_to_win_it_looks_again(options, wishes):
    heard: list = []
    process = AnswersInPlace()
    fastest = Outcome(variant=LADDER(), status=Status.OK)
    with looking(wishes, process) as ahead:
        ahead.turn(of(options, FIRST), of(options, SECOND))
        report = ahead.heard_by(heard.append)
        events = [Notice("anything"), FinalsStarted((fastest, Outcome(variant=LADDER(), status=Status.OK)))]
        for event in events:
            report(event)
        deadline = time.monotonic() + 10
        while not process.questions or process.questions[-1].winning is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert heard == events
    winning = process.questions[-1].winning
    assert winning is not None and (winning.problem, winning.outcome) == (FIRST, fastest)


def test_what_is_foreseen_too_late_is_not_awaited_for_ever(options, wishes, monkeypatch):
    monkeypatch.setattr(lookout, "PATIENCE_S", 0.2)
    process = Slow()
    with looking(wishes, process) as ahead:
        ahead.turn(of(options, FIRST), of(options, SECOND))
        began = time.monotonic()
        assert ahead.turn(of(options, SECOND), of(options, THIRD)) == ()
        assert 0.15 < time.monotonic() - began < 5
        process.let.set()
        monkeypatch.setattr(lookout, "PATIENCE_S", 20.0)
        assert len(ahead.turn(of(options, THIRD), None)) == 1
    # What was meant for a problem whose turn had come is wanted no more.
    assert [kernels[0].problem for kernels in wishes.kernels] == [THIRD]


def test_a_run_that_is_stopped_awaits_nothing(options, wishes, monkeypatch):
    monkeypatch.setattr(lookout, "PATIENCE_S", 60.0)
    stop, process = threading.Event(), Slow()
    with looking(wishes, process, stop) as ahead:
        ahead.turn(of(options, FIRST), of(options, SECOND))
        threading.Timer(0.2, stop.set).start()
        began = time.monotonic()
        assert ahead.turn(of(options, SECOND), None) == ()
        assert time.monotonic() - began < 5
        process.let.set()


def test_without_its_process_every_turn_goes_as_before(options, wishes, monkeypatch):
    monkeypatch.setattr(lookout, "PATIENCE_S", 60.0)
    process = AnswersInPlace()
    process.kill()
    with looking(wishes, process) as ahead:
        for now, following in ((FIRST, SECOND), (SECOND, THIRD), (THIRD, FIRST)):
            assert ahead.turn(of(options, now), of(options, following)) == ()
    assert not wishes.kernels
