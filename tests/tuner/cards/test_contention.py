"""A card that is busy, hot or another tuner's: noticed by a fake NVML, named, repeated or waited for."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from flashgen.tuner.cards import nvml
from flashgen.tuner.cards.device import Timing
from flashgen.tuner.cards.lock import FOLDER, CardLock, GaveUp
from flashgen.tuner.cards.nvml import CardMonitor
from flashgen.tuner.evaluate import worker_process
from flashgen.tuner.evaluate.outcome import Status
from flashgen.tuner.evaluate.worker import Worker
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.events import Notice
from flashgen.tuner.tune.options import TuneOptions
from flashgen.tuner.view.progress import RunView
from flashgen.tuner.view.tuned import show_result
from rich.console import Console

from tests.support import ROOT
from tests.support.fakes import FakeDevice, Fault, fake_build
from tests.support.stand_ins import StandInEvaluator

FAKED = fake_build().kernel.problem


class FakeNvml:
    """The library's bindings on one card."""

    NVMLError = pynvml.NVMLError

    def __init__(self) -> None:
        self.mask = 0
        self.celsius, self.clock_mhz, self.max_clock_mhz = 45, 1980, 1980
        self.milliwatts, self.limit_milliwatts = 300_000, 700_000
        self.held_down_ns = {1: 5_000_000, 3: 0}
        self.computing: list[int] = [os.getpid()]
        self.drawing: list[int] = []
        self.percent: dict[int, int] = {}
        self.asked_since: list[int] = []

    def __getattr__(self, question: str) -> Any:
        assert hasattr(pynvml, question), "the bindings have no such function"
        return lambda *arguments: self._refuse(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> int:
        return 0xCA7D if bus_id == "0000:3B:00.0" else self._refuse(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert handle == 0xCA7D
        return self.celsius if sensor == 0 else self._refuse()

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return self.clock_mhz if clock == 1 else self._refuse()

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return self.max_clock_mhz if clock == 1 else self._refuse()

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self.milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return self.limit_milliwatts

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.mask

    def nvmlDeviceGetViolationStatus(self, handle: int, policy: int) -> Any:
        return SimpleNamespace(violationTime=self.held_down_ns[policy])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.computing]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.drawing]

    def nvmlDeviceGetProcessUtilization(self, handle: int, since_us: int) -> list[Any]:
        self.asked_since.append(since_us)
        if not self.percent:
            self._refuse(pynvml.NVML_ERROR_NOT_FOUND)  # no samples
        return [SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in self.percent.items()]

    @staticmethod
    def _refuse(error: int = pynvml.NVML_ERROR_INVALID_ARGUMENT) -> Any:
        raise pynvml.NVMLError(error)


@pytest.fixture
def card(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(nvml, "_library", lambda: fake)
    return fake


def disturbance(card: FakeNvml, meanwhile=lambda: None) -> str:
    interval = CardMonitor("0000:3B:00.0").begin()
    meanwhile()
    return interval.disturbance()


def test_a_quiet_card_is_not_doubted(card):
    card.percent = {os.getpid(): 100}
    before_us = time.time_ns() // 1000
    assert disturbance(card) == ""
    assert before_us <= card.asked_since[0] <= time.time_ns() // 1000


@pytest.mark.parametrize("mask", [0x01, 0x02, 0x04, 0x10])
def test_what_is_no_fault_is_passed_over(card, mask):
    """Idle, clocks that the user set, the power cap under which heavy kernels always run, sync boost."""
    card.mask = mask
    assert disturbance(card) == ""


def test_a_hot_card_is_told_with_its_numbers(card):
    card.mask, card.celsius, card.clock_mhz = 0x20 | 0x40, 91, 1200
    card.milliwatts = 650_000
    assert disturbance(card) == "clocks held down: too hot (91 C, 1200 of 1980 MHz, 650 of 700 W)"


def test_what_was_over_before_the_end_is_told_too(card):
    def heat() -> None:
        card.held_down_ns[1] += 20_000_000

    assert disturbance(card, heat).startswith("clocks held down: too hot (45 C")
    assert disturbance(card) == ""


def test_another_process_is_told(card):
    card.computing += [77, 78]
    card.drawing = [79]
    card.percent = {os.getpid(): 50, 77: 40, 78: 3, 79: 9, 80: 90}
    told = disturbance(card)
    assert told == "process 77 keeps 40% of the SMs busy; process 79 keeps 9% of the SMs busy"


def test_in_a_container_two_busy_processes_are_one_too_many(card):
    card.computing = [1077, 1078]
    card.percent = {1077: 60}
    assert disturbance(card) == ""
    card.percent = {1077: 60, 1078: 30}
    assert disturbance(card).startswith("2 processes keep 60% and 30% of the SMs busy")


def test_a_library_that_knows_less_says_less(card, monkeypatch):
    for name in list(vars(FakeNvml)):
        if name.startswith("nvmlDeviceGet") and "Handle" not in name and "Throttle" not in name:
            monkeypatch.delattr(FakeNvml, name)
    card.mask = 0x80
    assert disturbance(card) == "clocks held down: power brake"
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert disturbance(card) == "" and str(CardMonitor("x").condition()) == ""


@pytest.mark.skipif(nvml._library() is not None, reason="there is a driver")
def test_without_a_driver_there_are_no_answers():
    assert nvml.driver_version() == "" and CardMonitor("0000:3B:00.0").begin().disturbance() == ""


# -- repeated, told and kept ------------------------------------------------------------------------------


def test_disturbed_times_are_repeated_and_else_flagged(monkeypatch):
    monkeypatch.setattr(worker_process, "REPEAT_AFTER_S", (0.0, 0.0))
    for disturbed, expected, calls in ((0, "", 1), (1, "", 2), (2, "", 3), (9, "hot", 3)):
        made: list[Timing] = []

        def measure(made=made, disturbed=disturbed) -> list[Timing]:
            made.append(Timing((1.0,), busy="hot" if len(made) < disturbed else ""))
            return [Timing((1.0,)), made[-1]]

        assert worker_process._undisturbed(measure)[1].busy == expected
        assert len(made) == calls


@pytest.fixture
def options(tune_options) -> TuneOptions:
    return replace(tune_options, trials=8)


class BusyEvaluator(StandInEvaluator):
    """Every other time is disturbed."""

    def evaluate(self, build, problem, *, best_us=None):
        outcome = super().evaluate(build, problem, best_us=best_us)
        busy = f"process {len(self.evaluated)} keeps 40% of the SMs busy" if len(self.evaluated) % 2 else ""
        return replace(outcome, measurement=replace(outcome.measurement, busy=busy))


def test_doubtful_times_are_named_in_the_output(options):
    console = Console(record=True, width=160, file=io.StringIO())
    with RunView(console) as view:
        result = tune(options, report=view, make_evaluator=lambda device: BusyEvaluator())
    show_result(console, result)
    told = console.export_text()
    assert told.count("times are doubtful, though repeated: process") == 1
    assert "times of 4 trials: process 1 to 7 keeps 40% of the SMs busy" in told
    assert result.to_dict()["doubtful"] == {"process 1 to 7 keeps 40% of the SMs busy": 4}


# -- the lock ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path / FOLDER


def test_two_tuners_take_turns(folder):
    order: list[str] = []
    inside = threading.Semaphore(1)

    def tuner(name: str) -> None:
        lock = CardLock("0000:3B:00.0")
        for _ in range(10):
            with lock.held():
                assert inside.acquire(blocking=False)
                order.append(name)
                time.sleep(0.01)
                inside.release()
        lock.close()

    threads = [threading.Thread(target=tuner, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(order) == ["a"] * 10 + ["b"] * 10
    # Neither keeps the other waiting for long while both want the card.
    longest = max(len(run) for name in "ab" for run in "".join(order).split(name))
    assert longest <= 9 and "ab" in "".join(order) and "ba" in "".join(order)


def test_cards_do_not_wait_for_each_other(folder):
    with CardLock("0000:3B:00.0").held(), CardLock("0000:5E:00.0").held():
        names = sorted(path.name for path in folder.iterdir())
    assert names == [f"0000_{bus}_00_0.{kind}" for bus in ("3b", "5e") for kind in ("card", "next")]
    assert all(path.stat().st_mode & 0o777 == 0o666 for path in folder.iterdir())


def test_who_holds_the_card_is_told_and_the_wait_can_end(folder, monkeypatch):
    monkeypatch.setattr("flashgen.tuner.cards.lock.TELL_SECONDS", 0.1)
    told: list[str] = []
    with CardLock("x").held():
        lock = CardLock("x")
        with pytest.raises(GaveUp), lock.held(tell=told.append, over=lambda: bool(told)):
            pass
        assert told == [f"process {os.getpid()}"]
    with lock.held(tell=told.append):
        pass
    assert len(told) == 1


def test_a_worker_waits_for_its_card(folder, monkeypatch):
    monkeypatch.setattr("flashgen.tuner.cards.lock.TELL_SECONDS", 0.1)
    notices: list[str] = []
    # The wait is longer than the deadline, which is for the kernel alone.
    with Worker(FakeDevice(lock_key="x"), deadline_s=5.0, notify=notices.append) as worker:
        assert worker.evaluate(fake_build(), FAKED).status is Status.OK
        holder = CardLock("x")
        worker.deadline_s = 1.0
        with holder.held():
            release = threading.Event()
            outcomes: list[Any] = []
            thread = threading.Thread(target=lambda: outcomes.append(worker.evaluate(fake_build(), FAKED)))
            thread.start()
            release.wait(1.3)
            assert thread.is_alive()
        thread.join(20)
    assert outcomes[0].status is Status.OK
    assert notices == [f"device fake is in use by process {os.getpid()} of flashgen; taking turns with it"]


def test_a_killed_tuner_keeps_the_card_until_its_kernel_is_off_it(folder):
    script = f"""
        from tests.support.fakes import FakeDevice, Fault, fake_build
        from flashgen.tuner.evaluate.worker import Worker
        worker = Worker(FakeDevice(lock_key="x"))
        worker.evaluate(fake_build(), fake_build().kernel.problem)
        print("ready", flush=True)
        worker.evaluate(fake_build(Fault({str(Fault.HANG)!r})), fake_build().kernel.problem)
    """
    tuner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder.parent)},
    )
    assert tuner.stdout is not None and tuner.stdout.readline() == b"ready\n"
    time.sleep(0.3)
    tuner.kill()
    tuner.wait()
    killed = time.monotonic()
    with CardLock("x").held():
        waited = time.monotonic() - killed
    assert 0.3 < waited < 10.0


def test_notices_are_events(options):
    events: list[Any] = []
    tune(options, report=events.append, make_evaluator=lambda device: BusyEvaluator())
    assert [type(e) for e in events].count(Notice) == 1
