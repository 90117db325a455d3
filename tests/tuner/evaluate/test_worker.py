"""The worker process: every way a kernel can end it becomes an outcome, and the next request is served."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.problem import Problem
from flashgen.tuner.errors import FlashgenError, LaunchError
from flashgen.tuner.evaluate.adversarial import BrokenPromise
from flashgen.tuner.evaluate.adversarial_inputs import adversarial_cases
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.outcome import Status
from flashgen.tuner.evaluate.worker import Worker
from flashgen.tuner.evaluate.worker_life import Died, TimedOut

from tests.support import ROOT
from tests.support.fakes import FakeDevice, Fault, fake_build
from tests.support.processes import gone

PROBLEM = Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=100, seqlen_k=100, head_dim=32)


@pytest.fixture(scope="module")
def worker():
    with Worker(FakeDevice(), deadline_s=20) as worker:
        yield worker


def pid_of(worker: Worker) -> int:
    assert worker.life.process is not None
    return worker.life.process.popen.pid


def test_right_kernel_is_measured(worker):
    outcome = worker.evaluate(fake_build(), PROBLEM, best_us=9.0)
    figures = outcome.measurement
    assert outcome.status is Status.OK and outcome.reason == "" and figures is not None
    assert figures.times_us == (10.0, 11.0, 12.0, 30.0) and figures.median_us == 11.5
    assert figures.spread == pytest.approx((16.5 - 10.75) / 11.5)
    assert figures.tflops == pytest.approx(PROBLEM.flops / 11.5e-6 / 1e12)
    assert (figures.registers, figures.smem_bytes, figures.occupancy) == (100, 4096, 0.5)
    assert 0 < figures.error < 2e-6 and not figures.predicted
    assert outcome.seconds["compile"] == 0.25 and {"validate", "measure"} <= set(outcome.seconds)
    assert outcome.variant == fake_build().kernel.variant


@pytest.mark.parametrize(
    "fields", [{"dtype": "f16"}, {"dtype": "bf16", "head_dim_v": 24}, {"precision": "tf32"}]
)
def test_kernels_of_other_classes_are_measured(worker, fields):
    problem = replace(PROBLEM, **fields)
    outcome = worker.evaluate(fake_build(problem=problem), problem)
    assert outcome.status is Status.OK and outcome.measurement is not None
    assert 1e-5 < outcome.measurement.error < problem.tolerance
    assert outcome.measurement.tflops == pytest.approx(problem.flops / 11.5e-6 / 1e12)
    wrong = worker.evaluate(fake_build(Fault.ZERO_MAXIMUM, problem), problem)
    assert wrong.status is Status.WRONG and "wrong" in wrong.reason


def test_slow_kernel_keeps_its_figures(worker):
    outcome = worker.evaluate(fake_build(Fault.SLOW), PROBLEM, best_us=10.0)
    assert outcome.status is Status.SLOW and "1001 us" in outcome.reason
    assert outcome.measurement is not None and outcome.measurement.median_us == 1001.0


def test_spilling_kernel_is_not_run(worker):
    build = fake_build(Fault.EXIT, spill_bytes=24)
    outcome = worker.evaluate(build, PROBLEM)
    assert outcome.status is Status.SPILLED and "24 bytes" in outcome.reason and "0 allowed" in outcome.reason
    assert worker.evaluate(fake_build(spill_bytes=24), PROBLEM, max_spill_bytes=32).status is Status.OK


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        (Fault.NO_MAXIMUM, Status.WRONG, "wrong result"),
        (Fault.STRAY_WRITE, Status.WRONG, "3 elements outside"),
        (Fault.ILLEGAL_ADDRESS, Status.LAUNCH_FAILED, "illegal memory access"),
        (Fault.REFUSED, Status.LAUNCH_FAILED, "too many resources"),
        (Fault.EXIT, Status.LAUNCH_FAILED, "exited with status 7 while it was to validate: terminate called"),
        (Fault.SEGFAULT, Status.LAUNCH_FAILED, "killed by SIGSEGV while it was to validate"),
    ],
)
def test_failure_is_an_outcome_and_the_next_build_is_served(worker, fault, status, reason):
    outcome = worker.evaluate(fake_build(fault), PROBLEM)
    assert outcome.status is status and reason in outcome.reason and outcome.measurement is None
    assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK


@pytest.mark.parametrize(("fault", "phase"), [(Fault.HANG, "validate"), (Fault.HANG_TIMING, "measure")])
def test_hang_is_killed_at_the_deadline(fault, phase):
    with Worker(FakeDevice(), deadline_s=1.0) as worker:
        assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK
        hung = pid_of(worker)
        started = time.monotonic()
        outcome = worker.evaluate(fake_build(fault), PROBLEM)
        assert time.monotonic() - started < 3
        assert outcome.status is Status.TIMED_OUT
        assert f"no answer within 1 s while it was to {phase}" in outcome.reason
        assert gone(hung)
        assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK


def test_process_is_kept_unless_its_context_is_lost(worker):
    worker.evaluate(fake_build(), PROBLEM)
    first = pid_of(worker)
    worker.evaluate(fake_build(Fault.REFUSED), PROBLEM)
    worker.evaluate(fake_build(Fault.NO_MAXIMUM), PROBLEM)
    worker.evaluate(fake_build(), PROBLEM)
    assert pid_of(worker) == first
    worker.evaluate(fake_build(Fault.ILLEGAL_ADDRESS), PROBLEM)
    assert gone(first)
    worker.evaluate(fake_build(), PROBLEM)
    assert pid_of(worker) != first


def test_death_between_requests_is_nobodys_fault(worker):
    worker.evaluate(fake_build(), PROBLEM)
    os.kill(pid_of(worker), signal.SIGKILL)
    assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK
    os.kill(pid_of(worker), signal.SIGKILL)
    time.sleep(0.2)
    assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK


def test_what_is_not_the_builds_fault_is_raised(worker):
    with pytest.raises(FlashgenError, match=r"300\.00 GiB"):
        worker.evaluate(fake_build(Fault.NO_MEMORY), PROBLEM)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        worker.evaluate(fake_build(Fault.BUG), PROBLEM)
    assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK


def test_device_that_cannot_be_opened_says_so():
    with Worker(FakeDevice(opens="no CUDA device was found")) as worker:
        worker.start()  # leaves it to the first request
        for _ in range(2):
            with pytest.raises(FlashgenError, match="no CUDA device was found"):
                worker.evaluate(fake_build(), PROBLEM)
    with Worker(FakeDevice(opens="bug")) as worker:
        worker.start()
        with pytest.raises(RuntimeError, match="could not start"):
            worker.evaluate(fake_build(), PROBLEM)


def test_a_device_opened_ahead_is_not_opened_again():
    with Worker(FakeDevice(), deadline_s=20) as worker:
        worker.start()
        opened = pid_of(worker)
        worker.start()
        assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK
        assert pid_of(worker) == opened


def test_death_while_the_device_opens_is_no_builds_fault():
    with Worker(FakeDevice(opens="abort")) as worker:
        with pytest.raises(
            FlashgenError, match=r"cannot be used.*SIGABRT while it was to open the device"
        ) as raised:
            worker.evaluate(fake_build(), PROBLEM)
        assert not isinstance(raised.value, Died)


def test_build_that_cannot_be_unpickled_is_no_builds_fault(worker):
    class Local(type(fake_build().kernel.variant)):
        """Known to this process alone."""

    Local.__module__, Local.__qualname__ = "__main__", "Local"
    main = sys.modules["__main__"]
    main.Local = Local  # type: ignore[attr-defined]
    try:
        build = fake_build()
        build = replace(build, kernel=replace(build.kernel, variant=Local(br=16, bc=16)))
        with pytest.raises(FlashgenError, match="Can't get attribute 'Local'") as raised:
            worker.evaluate(build, PROBLEM)
        assert not isinstance(raised.value, Died)
    finally:
        del main.Local  # type: ignore[attr-defined]
    assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK


def test_large_messages_pass_whole(worker):
    """Far beyond what a pipe buffers."""
    build = fake_build()
    build = replace(build, kernel=replace(build.kernel, source="// " + "x" * 2**24))
    assert len(worker.measure_interleaved([build] * 4, PROBLEM, rounds=1)) == 4


def test_full_validation_raises_what_is_wrong(worker):
    assert 0 < worker.validate_full(fake_build(), PROBLEM) < 2e-6
    with pytest.raises(WrongResult):
        worker.validate_full(fake_build(Fault.WRONG_KV_HEAD), PROBLEM)
    with pytest.raises(LaunchError):
        worker.validate_full(fake_build(Fault.ILLEGAL_ADDRESS), PROBLEM)
    with pytest.raises(Died, match="SIGSEGV"):
        worker.validate_full(fake_build(Fault.SEGFAULT), PROBLEM)


def test_interleaved_times_come_in_order(worker):
    fast, slow = worker.measure_interleaved([fake_build(), fake_build(Fault.SLOW)], PROBLEM, 7)
    assert fast.times_us == (10.0,) * 7 and slow.times_us == (1000.0,) * 7


def test_finals_give_one_outcome_each_in_order():
    faults = [Fault.NO_MAXIMUM, Fault.SEGFAULT, Fault.HANG_TIMING, Fault.SLOW, Fault.NONE]
    with Worker(FakeDevice(), deadline_s=0.5) as worker:
        outcomes = worker.finals([fake_build(f) for f in faults], PROBLEM, [1e-7] * 5, rounds=5)
    assert [o.status for o in outcomes] == [
        Status.WRONG,
        Status.LAUNCH_FAILED,
        Status.TIMED_OUT,
        Status.OK,
        Status.OK,
    ]
    best, slow = outcomes[4].measurement, outcomes[3].measurement
    assert best is not None and best.times_us == (10.0,) * 5 and best.error > 1e-7
    assert slow is not None and slow.median_us == 1000.0 and slow.error == 1e-7


def test_finals_are_timed_in_quiet_and_proved_beside_whatever_goes_on():
    told: list[str] = []

    @contextlib.contextmanager
    def quiet():
        told.append("quiet")
        yield
        told.append("over")

    with Worker(FakeDevice(), doing=told.append) as worker:
        worker.finals([fake_build(), fake_build(Fault.SLOW)], PROBLEM, [1e-7] * 2, quiet(), rounds=3)
    assert told[:4] == ["quiet", "timing 2 in turns", "over", "validating the fastest in full"]


def test_the_fastest_finalist_keeps_its_promise(worker):
    # Right wherever the suite looks, and wrong where an infinity is beside numbers.
    lossy = fake_build(Fault.ZERO_FOR_NAN)
    outcomes = worker.finals([lossy, fake_build(Fault.SLOW), lossy], PROBLEM, [1e-7] * 3, rounds=3)
    assert [o.status for o in outcomes] == [Status.WRONG, Status.OK, Status.WRONG]
    assert "wrong result on adversarial inputs" in outcomes[0].reason
    assert "promised are 2e-06 per head" in outcomes[0].reason


def test_a_promise_is_proved_and_what_breaks_it_raised(worker):
    assert worker.prove_promise(fake_build(), "few") == len(adversarial_cases("f32", "few"))
    with pytest.raises(BrokenPromise, match=r"adversarial inputs: q = 1e37, k = -1e37: "):
        worker.prove_promise(fake_build(Fault.ZERO_FOR_NAN), "few")
    names = ["v x 1e7", "an element of a key NaN"]
    found = worker.try_adversarial(fake_build(Fault.ZERO_FOR_NAN), names)
    assert [(f.case, f.kept) for f in found] == [(names[0], True), (names[1], False)]
    with pytest.raises(Died, match="SIGSEGV"):
        worker.prove_promise(fake_build(Fault.SEGFAULT), "few")


def test_inputs_are_fresh_for_every_request_and_repeat_for_the_same_run():
    with Worker(FakeDevice(), seed=3) as worker:
        errors = [worker.validate_full(fake_build(), PROBLEM) for _ in range(2)]
    with Worker(FakeDevice(), seed=3) as worker:
        again = [worker.validate_full(fake_build(), PROBLEM) for _ in range(2)]
    assert errors[0] != errors[1] and errors == again
    # What was tried of other problems before counts for nothing.
    with Worker(FakeDevice(), seed=3) as worker:
        worker.validate_full(fake_build(), replace(PROBLEM, batch=PROBLEM.batch + 1))
        assert worker.validate_full(fake_build(), PROBLEM) == errors[0]


def test_interrupt_is_the_parents_to_handle(worker):
    worker.evaluate(fake_build(), PROBLEM)
    pid = pid_of(worker)
    os.kill(pid, signal.SIGINT)
    assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK
    assert pid_of(worker) == pid and os.getsid(pid) != os.getsid(0)


def test_interrupted_request_leaves_no_stale_answer(worker, monkeypatch):
    worker.evaluate(fake_build(), PROBLEM)
    pipe = worker.life.process.pipe
    real = type(pipe).poll

    def interrupted(self, timeout=0.0):
        monkeypatch.setattr(type(pipe), "poll", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(pipe), "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.evaluate(fake_build(Fault.NO_MAXIMUM), PROBLEM)
    assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK


def test_worker_outlives_the_thread_that_started_it():
    worker = Worker(FakeDevice())
    thread = threading.Thread(target=worker.evaluate, args=(fake_build(), PROBLEM))
    thread.start()
    thread.join()
    pid = pid_of(worker)
    time.sleep(0.2)
    assert worker.evaluate(fake_build(), PROBLEM).status is Status.OK and pid_of(worker) == pid
    worker.close()
    assert gone(pid)


def test_closing_ends_the_process_and_its_pipes(worker):
    gc.collect()  # what earlier tests left open is not closed in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    each = Worker(FakeDevice())
    each.evaluate(fake_build(), PROBLEM)
    pid = pid_of(each)
    each.close()
    each.close()
    assert gone(pid) and len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.HANG])
def test_worker_ends_with_its_parent_even_when_killed(fault):
    script = f"""
        import time
        from tests.support.fakes import FakeDevice, Fault, fake_build
        from flashgen.tuner.evaluate.worker import Worker
        worker = Worker(FakeDevice())
        problem = fake_build().kernel.problem
        worker.evaluate(fake_build(), problem)
        print(worker.life.process.popen.pid, flush=True)
        worker.evaluate(fake_build(Fault({str(fault)!r})), problem)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    assert gone(pid)


def test_worker_prints_nothing_to_the_terminal(tmp_path, capfd):
    with Worker(FakeDevice()) as worker:
        worker.evaluate(fake_build(Fault.EXIT), PROBLEM)
    assert capfd.readouterr() == ("", "")


def test_worker_starts_from_a_script_on_standard_input():
    """No importable main module, as in `python - <<EOF` or a notebook."""
    code = (
        "from tests.support.fakes import FakeDevice, fake_build\n"
        "from flashgen.tuner.evaluate.worker import Worker\n"
        "build = fake_build()\n"
        "with Worker(FakeDevice()) as w: print(w.evaluate(build, build.kernel.problem).status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=code, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "ok", done.stderr


def test_errors_survive_the_pipe_by_type():
    from flashgen.tuner.evaluate.worker_process import _portable

    assert isinstance(_portable(TimedOut("late")), TimedOut)
    assert str(_portable(ValueError("odd"))) == "ValueError: odd"
