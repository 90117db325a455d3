"""A run never stands still without saying why: on a terminal and in a log."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from flashgen.gen.problem import Problem
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.commands.terminal import waiting
from flashgen.tuner.evaluate.worker import Worker
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.events import Doing, Event, InFlight, Notice, SpaceReady, TrialDone
from flashgen.tuner.view import progress
from flashgen.tuner.view.progress import RunView
from rich.console import Console

from tests.support.fakes import FakeDevice, fake_build
from tests.support.stand_ins import StandInEvaluator

SPACE = SpaceReady("simt", 10, 20, {}, 0, 24, False, 0.1)


def console(*, terminal: bool) -> tuple[Console, Callable[[], str]]:
    file = io.StringIO()
    return Console(file=file, width=80, force_terminal=terminal, color_system=None), file.getvalue


def wait_until(text: str, told: Callable[[], str]) -> None:
    deadline = time.monotonic() + 10
    while text not in told():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


def test_a_terminal_shows_what_is_waited_for_at_any_moment():
    where, told = console(terminal=True)
    with RunView(where) as view:
        view(Doing("simt: enumerating the legal variants"))
        wait_until("0:00:00 simt: enumerating the legal variants", told)
        view(SPACE)
        wait_until("choosing the first variants", told)
        view(InFlight(2, 1))
        wait_until("1 on the card, 2 compiling", told)
        view(Doing("validating in full, 1 of 6: case 3"))
        wait_until("validating in full, 1 of 6: case 3", told)
        view(Doing("validating in full, 1 of 6: case 4, of inputs with names longer than the line is"))
        wait_until("case 4", told)
        assert all(len(line) <= 80 for line in told().replace("\r", "\n").splitlines() if "\x1b" not in line)


def test_a_log_says_what_takes_long(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    where, told = console(terminal=False)
    with RunView(where) as view:
        view(Doing("simt: enumerating the legal variants"))
        wait_until("still at it: simt: enumerating the legal variants\n", told)
        view(SPACE)
        view(InFlight(0, 1))
        wait_until("still at it: 1 on the card\n", told)
    ended = told()
    time.sleep(0.3)
    assert told() == ended


def test_each_part_of_a_run_says_what_it_does(tune_options):
    events: list[Event] = []
    options = replace(tune_options, trials=4)
    tune(options, report=events.append, make_evaluator=lambda device: StandInEvaluator())
    said = [event.text for event in events if isinstance(event, Doing)]
    for words in ("earlier runs", "enumerating", "tried before", "ranking", "building the", "writing"):
        assert any(words in text for text in said), words
    first = events[0]
    assert isinstance(first, Doing)
    # Before the first trial ends it is known what it waits for.
    kinds = [type(event) for event in events if not isinstance(event, Notice)]
    assert InFlight in kinds[: kinds.index(TrialDone)]


def test_a_full_validation_tells_its_cases():
    said: list[str] = []
    problem = Problem(head_dim=32, batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=64, seqlen_k=64)
    builds: list[Build] = [fake_build(problem=problem)]
    with Worker(FakeDevice(), doing=said.append) as worker:
        worker.evaluate(builds[0], problem)
        assert not said, "trials are many and short"
        worker.finals(builds, problem, [1e-7])
    assert said[:2] == ["timing 1 in turns", "validating the fastest in full"]
    assert any(text.startswith("validating the fastest in full: case 2, normal inputs") for text in said)


@pytest.mark.parametrize("terminal", [True, False])
def test_commands_say_what_they_wait_for_and_leave_nothing(terminal):
    where, told = console(terminal=terminal)
    with waiting(where, "reading the kernels") as doing:
        if terminal:
            wait_until("reading the kernels", told)
        doing("choosing [one]")
        if terminal:
            wait_until("choosing [one]", told)
    assert terminal or told() == ""
