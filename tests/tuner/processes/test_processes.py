"""Programs are run to their end, their deadline or ours, whichever comes first: nothing of them is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
from flashgen.tuner.processes import Programs, TookTooLong, is_gone, process_name, run_program

from tests.support import ROOT
from tests.support.processes import gone


def sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def test_what_a_program_prints_and_how_it_ends():
    done = run_program(sh("cat; echo told >&2; exit 3"), timeout_s=10, given=b"given ")
    assert (done.status, done.output) == (3, "given told\n")
    assert done.ending() == "exited with status 3"
    done = run_program(sh("printf '\\377'; kill -SEGV $$"), timeout_s=10)
    assert done.output == "\ufffd" and done.ending() == "was killed by SIGSEGV"
    with pytest.raises(FileNotFoundError):
        run_program(["/nonexistent"], timeout_s=10)


def test_a_deadline_ends_a_program_with_all_it_started(tmp_path):
    pids = tmp_path / "pids"
    script = (
        f"sleep 600 & echo $! >> {pids}; (trap '' TERM HUP INT; sleep 600) & echo $! >> {pids}; sleep 600"
    )
    began = time.monotonic()
    with pytest.raises(TookTooLong):
        run_program(sh(script), timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_what_a_program_leaves_running_ends_with_it(tmp_path):
    pid = tmp_path / "pid"
    run_program(sh(f"sleep 600 >/dev/null 2>&1 & echo $! > {pid}"), timeout_s=10)
    assert gone(int(pid.read_text()))


class Runs(threading.Thread):
    """A program run in a thread of its own, as one of ``programs``."""

    def __init__(self, programs: Programs, script: str, timeout_s: float = 60) -> None:
        super().__init__()
        self.programs, self.script, self.timeout_s = programs, script, timeout_s
        self.done: list[int] = []
        self.start()

    def run(self):
        with self.programs.own():
            self.done.append(run_program(sh(self.script), timeout_s=self.timeout_s).status)


def test_programs_can_be_stopped_from_another_thread():
    programs, others = Programs(), Programs()
    stopped, spared = Runs(programs, "sleep 600"), Runs(others, "sleep 1")
    time.sleep(0.3)
    programs.stop()
    stopped.join(10)
    spared.join(10)
    assert (stopped.done, spared.done) == ([-signal.SIGKILL], [0])


def test_programs_stand_still_and_go_on(tmp_path):
    ticks = tmp_path / "ticks"
    ticking = f"for i in $(seq 20); do echo >> {ticks}; sleep 0.05; done"
    programs = Programs()
    # What it stands still for is no time that it took: it has 2 seconds, and takes one.
    under_way = Runs(programs, ticking, timeout_s=2)
    while not ticks.exists():
        time.sleep(0.01)
    with programs.still():
        waiting = Runs(programs, f"echo >> {tmp_path / 'later'}")
        time.sleep(0.2)
        before = ticks.read_text()
        time.sleep(2.0)
        assert ticks.read_text() == before and not (tmp_path / "later").exists()
    under_way.join(10)
    waiting.join(10)
    assert (under_way.done, waiting.done) == ([0], [0]) and len(ticks.read_text()) == 20


def test_what_stands_still_can_be_stopped():
    programs = Programs()
    stopped = Runs(programs, "sleep 600")
    time.sleep(0.3)
    with programs.still():
        programs.stop()
        stopped.join(10)
    assert stopped.done == [-signal.SIGKILL]


def test_programs_that_stand_still_die_with_who_runs_them(tmp_path):
    pid = tmp_path / "pid"
    program = f"""
import threading, time
from flashgen.tuner.processes import Programs, run_program
programs = Programs()
def run():
    with programs.own():
        run_program(["/bin/sh", "-c", "echo $$ > {pid}; sleep 600"], timeout_s=99)
threading.Thread(target=run, daemon=True).start()
time.sleep(0.5)
with programs.still():
    print("still", flush=True)
    time.sleep(99)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"still\n"
    parent.kill()
    parent.communicate()
    assert gone(int(pid.read_text()))


def test_programs_die_with_who_runs_them_even_by_sigkill(tmp_path):
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! >> {pids}; echo $$ >> {pids}; sleep 600"
    program = f"from flashgen.tuner.processes import run_program; run_program({sh(script)!r}, timeout_s=99)"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_which_processes_are_gone():
    assert not is_gone(process_name()) and not is_gone("") and not is_gone("elsewhere/1/1/1")
    host, pid, started, namespace = process_name().split("/")
    assert is_gone(f"{host}/{pid}/{int(started) - 1}/{namespace}")
    # A number as large as that is no process's, and one that only Unicode takes for a number is none.
    assert is_gone(f"{host}/{10**30}/{started}/{namespace}") and not is_gone(f"{host}/²/1/{namespace}")
