"""Injected faults: each becomes a recorded outcome or one clear message, and the run goes on or resumes."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.build.compile import run_compiler
from flashgen.tuner.cards.device import Build
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.outcome import Status
from flashgen.tuner.evaluate.worker import Worker
from flashgen.tuner.store import studies as study_module
from flashgen.tuner.store.studies import open_storage, open_study, outcomes
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.options import TuneOptions

from tests.support import ROOT
from tests.support.depth import sampled
from tests.support.fakes import FakeDevice, Fault, fake_build
from tests.support.stand_ins import StandInDevice, StandInEvaluator

LADDER = FAMILIES["ladder"]
CARD = preset("gtx-1080")
FAKED = fake_build().kernel.problem
SMALL = Problem(batch=1, num_q_heads=1, num_kv_heads=1, seqlen_q=64, seqlen_k=64, head_dim=32)
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

# -- kernels, on the emulated card ------------------------------------------------------------------------

#: One kernel for all: what it does wrong is in a file, so that it is compiled once.
INJECTED = """
extern "C" int open(const char*, int, ...);
extern "C" long read(int, void*, unsigned long);
extern "C" int close(int);
struct alignas(16) Wide { float x, y, z, w; };
template <class Arguments>
void do_wrong(const Arguments& args) {
  char fault = '0';
  const int file = open("%s", 0);
  (void)!read(file, &fault, 1);
  close(file);
  float* end = args.o + args.o_stride_batch * (args.batch - 1) + args.o_stride_head * (args.num_q_heads - 1) +
               args.o_stride_row * (args.seqlen_q - 1) + %d;
  if (fault == 'a') *(volatile float*)8 = 1.0f;
  if (fault == 'm') {
    // As the vector instructions of a compiler that trusts the type.
    asm volatile("movaps (%%%%rax), %%%%xmm0" : : "a"((char*)args.o + 4) : "xmm0");
  }
  if (fault == 'l') while (true) asm volatile("");
  if (fault == 't') __builtin_trap();
  if (fault == 'p') for (int i = 0; i < 100; ++i) end[i] = 7.0f;
  if (fault == 'w') for (int i = 0; i < 1 << 22; ++i) end[i] = 7.0f;
}
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> tuple[Build, Path]:
    """A kernel of the ladder that first does what a file says, and the file."""
    fault = tmp_path_factory.mktemp("fault") / "fault"
    fault.write_text("0")
    kernel = render(LADDER(br=64, bc=16), SMALL, CARD)
    head, marker, tail = kernel.source.partition('extern "C" __global__')
    first_statement = tail.index("{\n", tail.index(kernel.symbol)) + 2
    body = f"{tail[:first_statement]}  if (threadIdx.x == 0 && blockIdx.x == 0) do_wrong(args);\n"
    source = head + INJECTED % (fault, SMALL.head_dim) + marker + body + tail[first_statement:]
    return SimDevice("gtx-1080", CARD).toolchain().build(replace(kernel, source=source)), fault


@pytest.fixture(scope="module")
def emulated() -> Iterator[Worker]:
    with Worker(SimDevice("gtx-1080", CARD)) as worker:
        yield worker


@needs_compiler
@pytest.mark.parametrize(
    ("fault", "statuses", "words"),
    [
        ("a", [Status.LAUNCH_FAILED], "SIGSEGV"),
        pytest.param(
            "m",
            [Status.LAUNCH_FAILED],
            "SIGSEGV",
            marks=pytest.mark.skipif(os.uname().machine != "x86_64", reason="by an instruction of x86"),
        ),
        ("t", [Status.LAUNCH_FAILED], "SIGILL|SIGTRAP"),
        ("p", [Status.WRONG], "overwrote 400 bytes past o"),
        # Far past it, where the process's own data may be.
        ("w", [Status.WRONG, Status.LAUNCH_FAILED], "overwrote|SIG"),
    ],
    ids=["illegal address", "misaligned", "trap", "past the output", "far past the output"],
)
def test_a_faulty_kernel_is_an_outcome(emulated, faulty, fault, statuses, words):
    build, file = faulty
    file.write_text(fault)
    outcome = emulated.evaluate(build, SMALL)
    assert outcome.status in statuses, outcome.reason
    assert any(word in outcome.reason for word in words.split("|")) and outcome.measurement is None
    # Whatever it has done to its process, the next build is not blamed for it.
    assert emulated.life.process is None
    file.write_text("0")
    assert emulated.evaluate(build, SMALL).status is Status.OK


@needs_compiler
def test_a_kernel_without_end_is_an_outcome(faulty):
    build, file = faulty
    file.write_text("l")
    with Worker(SimDevice("gtx-1080", CARD), deadline_s=2.0) as worker:
        outcome = worker.evaluate(build, SMALL)
        assert outcome.status is Status.TIMED_OUT and "validate" in outcome.reason
        worker.deadline_s = 60.0
        file.write_text("0")
        assert worker.evaluate(build, SMALL).status is Status.OK


# -- the worker ------------------------------------------------------------------------------------------


def kill_after(worker: Worker, seconds: float, signum: int, times: int = 1) -> threading.Thread:
    """Kills the worker's process from outside, so long after each start."""

    def kill() -> None:
        killed = set()
        while len(killed) < times:
            process = worker.life.process
            if process is not None and process.popen.pid not in killed and process.phase == "validate":
                time.sleep(seconds)
                killed.add(process.popen.pid)
                process.popen.send_signal(signum)
            time.sleep(0.01)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("signum", sampled([signal.SIGKILL, signal.SIGTERM], 1))
def test_a_worker_killed_from_outside_is_replaced(signum):
    """Short of memory, the system kills whom it likes: the build is tried again before it is blamed."""
    with Worker(FakeDevice()) as worker:
        thread = kill_after(worker, 0.1, signum)
        assert worker.evaluate(fake_build(Fault.DAWDLE), FAKED).status is Status.OK
        thread.join(5)


def test_a_build_whose_worker_is_always_killed_is_blamed():
    with Worker(FakeDevice()) as worker:
        thread = kill_after(worker, 0.05, signal.SIGKILL, times=2)
        outcome = worker.evaluate(fake_build(Fault.HANG), FAKED)
        thread.join(5)
        assert outcome.status is Status.LAUNCH_FAILED and "SIGKILL" in outcome.reason
        assert worker.evaluate(fake_build(), FAKED).status is Status.OK


def test_a_worker_can_be_killed_from_another_thread():
    worker = Worker(FakeDevice())
    failures: list[BaseException] = []

    def evaluate() -> None:
        try:
            worker.evaluate(fake_build(Fault.HANG), FAKED)
        except FlashgenError as error:
            failures.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    while worker.life.process is None or worker.life.process.phase != "validate":
        time.sleep(0.02)
    worker.kill()
    thread.join(10)
    assert [str(f) for f in failures] == ["the run was ended"]
    worker.close()
    assert worker.evaluate(fake_build(), FAKED).status is Status.OK
    worker.close()


@pytest.fixture
def options(tmp_path, tune_options) -> TuneOptions:
    return replace(tune_options, held={"br": 64}, trials=10, storage=str(tmp_path / "trials.sqlite3"))


def run(options: TuneOptions, on_evaluate=lambda count: None):
    evaluator = StandInEvaluator()
    evaluator.on_evaluate = lambda: on_evaluate(len(evaluator.evaluated))
    return tune(options, make_evaluator=lambda device: evaluator)


# -- the compiler ----------------------------------------------------------------------------------------

#: What compilers do, by their call.
COMPILERS = (
    "kill -SEGV $$",
    "echo 'kernel.cu:1: error: made to fail'; exit 1",
    "sleep 1000 & sleep 1000",
    "exit 0",
)


@dataclass(frozen=True)
class FaultyToolchain:
    """Runs a real process for each build; the first few go wrong."""

    folder: Path
    calls: Iterator[int] = field(default_factory=itertools.count, compare=False)
    version: str = "faulty 1.0"

    def build(self, kernel: Kernel) -> Build:
        call = next(self.calls)
        artifact = self.folder / f"{call}.so"
        script = COMPILERS[call] if call < len(COMPILERS) else f"echo > {artifact}"
        run_compiler(["/bin/sh", "-c", script], self.folder, makes=artifact, timeout_s=1.0)
        return Build(kernel, artifact, registers=40, spill_bytes=0, seconds=0.001)


def test_compilers_that_crash_fail_hang_or_lie_cost_a_variant_each(options, tmp_path):
    device = StandInDevice(chain=FaultyToolchain(tmp_path))
    result = run(replace(options, device=device))
    told = " / ".join(result.reasons)
    for words in ("SIGSEGV", "made to fail", "sh did not finish within 1 s", "wrote no .so file"):
        assert words in told
    assert result.counts == {"compile-failed": 4, "ok": 6}


# -- the storage -----------------------------------------------------------------------------------------


def test_a_locked_database_is_waited_for_and_then_told(options, monkeypatch):
    monkeypatch.setattr(study_module, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr("optuna.storages._rdb.storage.random.random", lambda: 0.05)
    with contextlib.closing(
        sqlite3.connect(options.storage, isolation_level=None, check_same_thread=False)
    ) as other:

        def lock(count: int) -> None:
            if count == 3:
                while other.execute("SELECT count(*) FROM trials WHERE state = 'COMPLETE'").fetchone() < (2,):
                    time.sleep(0.01)
                other.execute("BEGIN IMMEDIATE")

        with pytest.raises(FlashgenError, match=r"kept in .*: database is locked; .*it resumes"):
            run(options, lock)
        other.execute("ROLLBACK")
    result = run(options)
    # The two that had been told when the database was locked.
    assert result.trials_earlier >= 2 and result.trials_earlier + result.trials_run == 10


def test_a_database_half_made_is_completed(options):
    """As a run killed between a table and its index leaves it: two studies of one name would get in."""
    where = options.storage
    open_storage(where)
    with contextlib.closing(sqlite3.connect(where)) as database:
        database.execute("DROP INDEX ix_studies_study_name")
        open_storage(where)
        database.execute("INSERT INTO studies (study_name) VALUES ('once')")
        with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
            database.execute("INSERT INTO studies (study_name) VALUES ('once')")


@pytest.mark.parametrize("suffix", ["sqlite3", "journal"])
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_database_that_vanishes_is_told(options, suffix, replaced):
    path = Path(options.storage).with_suffix(f".{suffix}")
    options = replace(options, storage=str(path))
    kept = path.with_suffix(".kept")

    def take_away(count: int) -> None:
        if count == 3:
            path.rename(kept)
            if replaced:
                path.write_bytes(b"")

    with pytest.raises(FlashgenError, match=r"replaced|removed|No such file") as told:
        run(options, take_away)
    assert str(path) in str(told.value)
    if suffix == "journal":  # SQLite still holds what it once opened, in this process
        kept.replace(path)
        result = run(options)
        assert result.trials_earlier + result.trials_run == 10


def test_a_journal_whose_last_line_is_cut_is_mended(options):
    options = replace(options, storage=str(Path(options.storage).with_suffix(".journal")))
    run(replace(options, trials=5))
    path = Path(options.storage)
    path.write_bytes(path.read_bytes() + b'{"op_code":4,"worker_')
    result = run(options)
    assert (result.trials_earlier, result.trials_run) == (5, 5)
    assert run(options).trials_earlier == 10


@pytest.mark.parametrize(("suffix", "limit"), sampled([("sqlite3", 1_500_000), ("journal", 40_000)], 1))
def test_a_disk_that_takes_no_more_is_told_and_the_run_resumes(tmp_path, options, suffix, limit):
    """For real, by the system's limit on a file's size: what was told before is whole."""
    where = str(tmp_path / f"trials.{suffix}")
    command = [sys.executable, "-m", "tests.support.full_disk", str(limit), str(tmp_path), where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "told: the trials cannot be kept in" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "--storage" in done.stderr
    result = run(replace(options, storage=where, trials=12))
    assert result.trials_earlier + result.trials_run >= 12 and result.trials_earlier > 0
    study = open_study(open_storage(where), where, result.studies[0], {})
    variants = [outcome.variant for _, outcome in outcomes(study, LADDER)]
    assert len(set(variants)) == len(variants)
