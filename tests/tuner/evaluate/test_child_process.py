"""Processes of our own: what goes over their pipe, how their end is told, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from flashgen.tuner.evaluate.child_process import ChildProcess, Ended

from tests.support.processes import gone


def doubling(pipe: Connection) -> None:
    while True:
        pipe.send(2 * pipe.recv())


def printing(pipe: Connection) -> None:
    print("one")
    print("two", file=sys.stderr)
    sys.exit(pipe.recv())


def with_a_child(pipe: Connection) -> None:
    pipe.send(subprocess.Popen(["sleep", "600"], pass_fds=(pipe.fileno(),)).pid)
    pipe.recv()


def test_objects_go_both_ways_until_it_is_closed():
    with ChildProcess(doubling) as child:
        for value in (21, "ab", (1, 2)):
            child.send(value)
            assert child.receive(30) == 2 * value
        with pytest.raises(TimeoutError):
            child.receive(0.01)
    assert gone(child.popen.pid)
    child.close()


@pytest.mark.parametrize(
    ("status", "ending", "reason"), [(0, "exited with status 0", "two"), (3, "exited with status 3", "two")]
)
def test_its_end_is_told_with_what_it_printed(status, ending, reason):
    with ChildProcess(printing) as child:
        child.send(status)
        with pytest.raises(Ended):
            child.receive(30)
        assert (child.exit_status(), child.ending(), child.reason()) == (status, ending, reason)
        assert child.last_words() == "one\ntwo"
        with pytest.raises(Ended):
            child.send(0)


def test_a_signal_says_more_than_what_was_printed():
    with ChildProcess(doubling) as child:
        child.send(1)
        child.receive(30)
        os.kill(child.popen.pid, signal.SIGABRT)
        with pytest.raises(Ended):
            child.receive(30)
        assert child.ending() == "was killed by SIGABRT" and child.reason() == "killed by SIGABRT"


def test_it_is_killed_with_all_it_started():
    with ChildProcess(with_a_child) as child:
        its_child = child.receive(30)
        child.kill()
        with pytest.raises(Ended):
            child.receive(30)
    assert gone(its_child)


def test_a_child_of_its_own_that_holds_the_pipe_does_not_hide_its_end():
    with ChildProcess(with_a_child) as child:
        its_child = child.receive(30)
        child.send(None)
        try:
            with pytest.raises(Ended):
                child.receive(30)
        finally:
            os.kill(its_child, signal.SIGKILL)


def test_what_cannot_be_started_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        ChildProcess(doubling)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
