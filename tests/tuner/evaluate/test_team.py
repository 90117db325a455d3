"""Several cards under one coordinator: shared work, one compile pool, kinds apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.limits import PRESETS
from flashgen.tuner.cards import cuda, names
from flashgen.tuner.cards.cuda import CudaDevice
from flashgen.tuner.cards.names import resolve_all
from flashgen.tuner.errors import FlashgenError, UsageError
from flashgen.tuner.evaluate.outcome import Outcome
from flashgen.tuner.evaluate.team import Team
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.options import TuneOptions

from tests.support.stand_ins import PROBLEM, StandInDevice, StandInEvaluator, cost

needs_compiler = pytest.mark.skipif(
    not any(Path(folder, "g++").exists() for folder in os.get_exec_path()), reason="needs g++"
)


def card(ordinal: int, name: str = "h200") -> CudaDevice:
    return CudaDevice(ordinal, PRESETS[name], "580", f"0000:{ordinal:02x}:00.0", 2**37)


@pytest.fixture
def machine(monkeypatch) -> list[CudaDevice]:
    """Two cards of one kind around one of another."""
    cards = [card(0), card(1, "a100"), card(2)]
    monkeypatch.setattr(names, "count_devices", lambda: len(cards))
    monkeypatch.setattr(names, "find_device", lambda ordinal: cards[ordinal])
    return cards


def test_cards_of_one_kind_are_together(machine):
    one, another, same = machine
    assert resolve_all("all") == [(one, same), (another,)]
    assert resolve_all("0,2") == [(one, same)] and resolve_all("cuda:2, 1") == [(same,), (another,)]
    emulated = resolve_all("sim:gtx-1080,sim:gtx-1080,sim:h200")
    assert [[d.spec for d in kind] for kind in emulated] == [["sim:gtx-1080"] * 2, ["sim:h200"]]
    # A prediction for a card is no measurement of it.
    assert len(resolve_all("0,sim:h200")) == 2


def test_wrong_lists_are_told(machine, monkeypatch):
    with pytest.raises(UsageError, match=r"device 0 is named twice in '0,1,0'"):
        resolve_all("0,1,0")
    with pytest.raises(UsageError, match="unknown device ''"):
        resolve_all("0,")
    monkeypatch.setattr(names, "count_devices", lambda: 0)

    def none(ordinal: int) -> CudaDevice:
        raise FlashgenError(cuda.NO_GPU.format(why=""))

    monkeypatch.setattr(names, "find_device", none)
    with pytest.raises(FlashgenError, match="no CUDA device was found"):
        resolve_all("all")


class Slow(StandInEvaluator):
    """Takes a while, as a card does, and counts those that work at once."""

    working = most = 0
    lock = threading.Lock()

    def evaluate(self, build, problem, *, best_us=None) -> Outcome:
        with Slow.lock:
            Slow.working += 1
            Slow.most = max(Slow.most, Slow.working)
        time.sleep(0.1)
        try:
            return super().evaluate(build, problem, best_us=best_us)
        finally:
            with Slow.lock:
                Slow.working -= 1


@pytest.fixture
def options(tune_options) -> TuneOptions:
    Slow.working = Slow.most = 0
    others = (StandInDevice(spec="1"), StandInDevice(spec="2"))
    return replace(tune_options, more_devices=others, trials=24)


def run(options: TuneOptions, kind: type[StandInEvaluator] = Slow, **others):
    made: dict[str, StandInEvaluator] = {}

    def make(device):
        made[device.spec] = kind()
        return made[device.spec]

    return tune(options, make_evaluator=make, **others), made


def test_cards_share_the_work(options):
    result, made = run(options)
    assert list(made) == ["0", "1", "2"] and Slow.most == 3
    tried = [variant for each in made.values() for variant in each.evaluated]
    assert len(tried) == len(set(tried)) == result.trials_run == 24
    assert all(len(each.evaluated) >= 4 and each.closed for each in made.values())
    assert cost(result.kernel.variant) == min(map(cost, tried))
    # Finalists are timed against each other on one card.
    assert made["0"].finalists and not made["1"].finalists and not made["2"].finalists
    # One card goes on where three left off.
    again, _ = run(replace(options, more_devices=(), trials=26))
    assert (again.trials_earlier, again.trials_run) == (24, 2)


class Failing(Slow):
    def evaluate(self, build, problem, *, best_us=None) -> Outcome:
        if len(self.evaluated) == 2:
            raise FlashgenError("the card fell off the bus")
        return super().evaluate(build, problem, best_us=best_us)


def test_a_card_that_fails_ends_the_run_and_loses_nothing(options):
    with pytest.raises(FlashgenError, match="fell off the bus"):
        run(options, Failing)
    result, _ = run(options)
    assert result.trials_earlier >= 2 and result.trials_earlier + result.trials_run == 24


def test_stopping_keeps_what_every_card_was_at(options):
    stop = threading.Event()

    class Stopping(Slow):
        def evaluate(self, build, problem, *, best_us=None) -> Outcome:
            if len(self.evaluated) == 2:
                stop.set()
            return super().evaluate(build, problem, best_us=best_us)

    result, made = run(options, Stopping, stop=stop)
    assert result.interrupted
    assert result.trials_run == sum(len(each.evaluated) for each in made.values())
    assert result.trials_run + run(options)[0].trials_run == 24


def test_ending_a_team_ends_what_is_under_way():
    class Endless(StandInEvaluator):
        def __init__(self) -> None:
            super().__init__()
            self.ended = threading.Event()

        def evaluate(self, build, problem, *, best_us=None) -> Outcome:
            self.ended.wait(30)
            raise FlashgenError("killed")

        def kill(self) -> None:
            self.ended.set()

    evaluators = [Endless(), Endless()]
    started = time.monotonic()
    with Team(evaluators) as team:
        futures = [team.submit(None, PROBLEM, None) for _ in range(3)]  # type: ignore[arg-type]
    assert time.monotonic() - started < 10 and all(future.done() for future in futures)
    assert all(each.closed for each in evaluators)


@pytest.mark.thorough
@needs_compiler
def test_emulated_cards_of_two_kinds_from_the_command_line(tmp_path):
    program = "from flashgen.tuner.cli import main; main()"
    what = ["--device", "sim:gtx-1080,sim:gtx-1080,sim:rtx-3090", "--d", "32", "--trials", "3", "--json"]
    held = [f"--set={s}" for s in ("br=64", "bc=32", "hoisted=true", "transposed=true", "vec=4")]
    done = subprocess.run(
        [sys.executable, "-c", program, "tune", *what, "--family=ladder", *held],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["device"], second["device"]) == ("GTX 1080", "RTX 3090")
    assert first["studies"] != second["studies"]
    assert first["trials_run"] == second["trials_run"] == 3
    assert "GTX 1080: 2 workers (sim:gtx-1080, sim:gtx-1080)" in done.stderr
