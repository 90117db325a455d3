"""The coordinator killed at random moments, again and again: nothing told is lost, nothing is repeated, no
process and no file is left, and the winner is the one of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flashgen.tuner.build.cache import cached
from flashgen.tuner.evaluate.outcome import TunedKernel
from flashgen.tuner.files import SCRATCH_PREFIX, write_text
from flashgen.tuner.shelf import library
from flashgen.tuner.store.studies import OUTCOME, open_storage
from optuna.study import get_all_study_names, load_study

from tests.support import ROOT
from tests.support.depth import sampled
from tests.support.lives import GONE_S, MARK, SIGNALS, processes_marked, trials_of
from tests.support.stand_ins import PROBLEM

#: Kills in all, and where their moments come from. FLASHGEN_KILLS=500 looks longer.
KILLS, SEED = int(os.environ.get("FLASHGEN_KILLS", "60")), int(os.environ.get("FLASHGEN_SEED", "7"))


def live_and_die(out: Path, suffix: str, kills: int) -> list[dict]:
    """The variants that were told, in order, over so many killed lives and one that is let be."""
    command = [sys.executable, "-m", "tests.support.lives", str(out), suffix, str(kills), str(SEED)]
    print(f"FLASHGEN_SEED={SEED}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "told").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> TunedKernel:
    """The winner of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert len(live_and_die(folder, "journal", 0)) > 50
    (entry,) = library.entries([folder / "out"])
    return entry.kernel


def test_a_few_kills_lose_nothing_and_leave_nothing(tmp_path):
    """As after each life `tests.support.lives` makes sure."""
    assert live_and_die(tmp_path, "journal", 3)


@pytest.mark.thorough
@pytest.mark.parametrize(("suffix", "kills"), [("sqlite3", KILLS - KILLS // 3), ("journal", KILLS // 3)])
def test_nothing_told_is_lost_or_repeated(tmp_path, undisturbed, suffix, kills):
    told = [json.dumps(variant, sort_keys=True) for variant in live_and_die(tmp_path, suffix, kills)]
    assert len(set(told)) == len(told)

    storage = open_storage(str(tmp_path / f"trials.{suffix}"))
    (name,) = get_all_study_names(storage)
    trials = load_study(study_name=name, storage=storage).trials
    # One that was killed before it said whose it is holds no variant; it is given up when it has aged.
    assert {t.state.name for t in trials if t.user_attrs} <= {"COMPLETE", "FAIL"}
    complete = [t.user_attrs[OUTCOME]["variant"] for t in trials if t.state.name == "COMPLETE"]
    kept = [json.dumps(variant, sort_keys=True) for variant in complete]
    assert len(set(kept)) == len(kept)
    # The last of a life may have been kept while the kill forestalled its telling.
    assert set(told) <= set(kept) and len(kept) - len(told) <= kills

    (winner,) = library.entries([tmp_path / "out"])
    assert winner.kernel.variant == undisturbed.variant
    assert winner.kernel.measurement == undisturbed.measurement
    compile(library.Paths.of(tmp_path / "out", winner.slug, PROBLEM.name).py.read_text(), "winner", "exec")


# -- the program itself, with its compilers and its worker --------------------------------------------------

#: A run that goes on for as long as it is let, many compilers at once.
TUNE = [
    "tune",
    "--device",
    "sim:gtx-1080",
    "--d",
    "32",
    "--family",
    "ladder",
    "--minutes",
    "5",
    "--jobs",
    "2",
]
#: How many of the kills are of the real program, and how long a run is let be.
REAL_KILLS, LONGEST_RUN_S = 10, 7.0


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("number", sampled(range(REAL_KILLS), 1))
def test_a_real_run_killed_at_any_moment_leaves_nothing_and_loses_nothing(tmp_path, monkeypatch, number):
    rng = random.Random(SEED + number)
    suffix, signum = rng.choice(["sqlite3", "journal"]), rng.choice(SIGNALS)
    seconds = rng.uniform(0.3, LONGEST_RUN_S)
    print(
        f"FLASHGEN_SEED={SEED}, run {number}: {suffix}, {signal.Signals(signum).name} after {seconds:.2f} s"
    )
    where = tmp_path / f"trials.{suffix}"
    token = f"real-{os.getpid()}-{number}"
    process = subprocess.Popen(
        [sys.executable, "-c", "from flashgen.tuner.start import main; main()", *TUNE, "--storage", where],
        cwd=tmp_path,
        env={**os.environ, MARK: token, "FLASHGEN_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    time.sleep(seconds)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=120)
    # Python's own start, before our first statement, knows one answer to Ctrl-C.
    assert "Traceback" not in said or "flashgen" not in said, said
    assert process.returncode in ({-signum} if signum == signal.SIGKILL else {0, 1, 130, -signum}), said
    deadline = time.monotonic() + GONE_S
    while left := processes_marked(token):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    told = max(map(int, re.findall(r"^trial (\d+)", said, re.MULTILINE)), default=0)
    if where.exists():
        storage = open_storage(str(where))
        kept = [trial for name in get_all_study_names(storage) for trial in trials_of(storage, name)]
        assert len(kept) >= told
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".holder", ".lock"))]
    # Whoever writes next to what was half written removes it.
    for folder in {
        path.parent for path in tmp_path.rglob(f"{SCRATCH_PREFIX}*") if path.parent.name != "cache"
    }:
        write_text(folder / "next", "")
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(exist_ok=True)
    cached(["next"], ".next", lambda path: {"bytes": path.write_bytes(b"x")})
    assert not list(tmp_path.rglob(f"{SCRATCH_PREFIX}*"))
