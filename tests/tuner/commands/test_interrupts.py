"""Ctrl-C before a run goes on: exit code 130 and one plain line, whenever it comes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flashgen.tuner import interrupts
from flashgen.tuner.commands import kernels

from tests.support.depth import sampled

SEED = 11
PROGRAM = "from flashgen.tuner.start import main; main()"


def interrupted_after(seconds: float, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that gets Ctrl-C so long after Python itself has started."""
    # Python's own start is not ours to guard: the clock runs from our first statement.
    program = f"import sys; sys.argv[0] = 'flashgen'; print('up', flush=True); {PROGRAM}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


@pytest.mark.parametrize("number", sampled(range(20), 3))
def test_an_interrupt_in_the_first_second_is_one_line(tmp_path, number):
    seconds = random.Random(SEED + number).uniform(0.02, 1.0)
    # A suite: one problem may be told in less than a second.
    done = interrupted_after(seconds, tmp_path, "space", "--device", "h200", "--suite", "llm")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, (seconds, done.stderr)
    assert (done.returncode, done.stderr) == (interrupts.EXIT_CODE, "interrupted\n"), seconds


def test_an_interrupt_under_way_is_told_in_json_too(flashgen, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashgen.tuner.cards.names.cards", interrupted)
    result = flashgen("devices", "--json", code=130)
    assert json.loads(result.stdout) == {"error": "interrupted", "exit_code": 130}
    assert result.stderr == "interrupted\n"
    assert kernels


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both", "stdin"])
def test_streams_that_the_caller_closed_are_no_files_of_ours(tmp_path, closed):
    """The next file that is opened would be taken for stdout, and printed into."""
    redirection = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-", "stdin": "<&-"}[closed]
    command = f"{sys.executable} -c '{PROGRAM}' devices --json {redirection}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    if closed in ("stdout", "both"):
        assert done.returncode == 1 and (closed == "both" or "Bad file descriptor" in done.stderr)
    else:
        assert done.returncode == 0 and json.loads(done.stdout)
