"""Where a run's wall time goes: the shares, and that cards come before everything else."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from flashgen.tuner.cards.device import Build
from flashgen.tuner.evaluate.outcome import Outcome
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.options import TuneOptions
from flashgen.tuner.tune.wall_time import WallTime
from flashgen.tuner.view.tuned import wall_time_words

from tests.support.stand_ins import StandInDevice, StandInEvaluator, StandInToolchain


def test_shares_add_up():
    spent = WallTime(
        seconds=50, cards=2, compilers=10, validating=20, timing=40, finals=10, waiting=15, compiling=400
    )
    shares = spent.shares()
    assert shares == pytest.approx(
        {
            "validate": 0.2,
            "time": 0.4,
            "finals": 0.1,
            "wait for compilers": 0.15,
            "idle": 0.15,
            "compile": 0.8,
        }
    )
    assert spent.busy == pytest.approx(0.7)
    assert wall_time_words(spent) == (
        "the cards busy 70 %: validating 20 %, timing 40 %, finalists 10 %; waiting for compilers 15 %, "
        "idle 15 %; compilers busy 80 %"
    )
    # Clocks that disagree by a little make no share above the whole.
    assert replace(spent, cards=1).shares()["idle"] == 0
    assert replace(spent, compiling=501).shares()["compile"] == 1


class Slow(StandInEvaluator):
    """Takes as long for a trial as it says it does."""

    def __init__(self, validate_s: float, measure_s: float) -> None:
        super().__init__()
        self.seconds = {"validate": validate_s, "measure": measure_s}
        self.pauses: list[float] = []
        self._ended: float | None = None

    def evaluate(self, build: Build, problem, *, best_us: float | None = None) -> Outcome:
        if self._ended is not None:
            self.pauses.append(time.monotonic() - self._ended)
        time.sleep(sum(self.seconds.values()))
        outcome = super().evaluate(build, problem, best_us=best_us)
        self._ended = time.monotonic()
        return replace(outcome, seconds={"compile": build.seconds, **self.seconds})


class SlowToolchain(StandInToolchain):
    def build(self, kernel) -> Build:
        time.sleep(0.2)
        return replace(super().build(kernel), seconds=0.2)


@pytest.fixture
def options(tune_options) -> TuneOptions:
    return replace(tune_options, held={"bc": 16, "br": 64}, trials=20, sampler=SamplerName.RANDOM)


def test_a_card_goes_on_while_the_search_thinks(options, monkeypatch):
    """An `ask` that takes as long as a trial costs the card nothing."""
    from flashgen.tuner.search.ask_tell import Search

    ask, asking = Search.ask, threading.Event()

    def slow_ask(self):
        if asking.is_set():
            time.sleep(0.08)
        return ask(self)

    monkeypatch.setattr(Search, "ask", slow_ask)
    evaluator = Slow(0.06, 0.06)
    evaluator.on_evaluate = asking.set
    result = tune(options, make_evaluator=lambda device: evaluator)
    assert evaluator.started == 1
    assert sorted(evaluator.pauses)[len(evaluator.pauses) // 2] < 0.04
    shares = result.wall_time.shares()
    assert shares["validate"] == pytest.approx(shares["time"]) and shares["time"] > 0.15
    assert result.to_dict()["wall_time"]["time"] == pytest.approx(shares["time"], abs=1e-3)


def test_a_card_that_waits_for_compilers_is_told_so(options):
    slow = replace(options, device=StandInDevice(chain=SlowToolchain()), trials=10)
    shares = tune(slow, make_evaluator=lambda device: Slow(0.0, 0.01)).wall_time.shares()
    assert shares["wait for compilers"] > 3 * shares["time"] > 0
    assert shares["compile"] > shares["wait for compilers"] / 2
