"""The coordinator killed by SIGKILL at random moments, again and again: nothing told is lost, nothing is
repeated, and the winner is the one of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from flashgen.tuner.evaluate.outcome import TunedKernel
from flashgen.tuner.shelf import library
from flashgen.tuner.store.studies import OUTCOME, open_storage
from optuna.study import get_all_study_names, load_study
from test_tune import PROBLEM

#: Kills per kind of storage. FLASHGEN_KILLS=500 looks longer.
KILLS = int(os.environ.get("FLASHGEN_KILLS", "50"))

#: Imports once, then forks a coordinator for every life: starting Python takes longer than most lives.
LIVES = """
import json, os, random, signal, sys, time, zlib
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_tune
from flashgen.gen.families import FAMILIES
from flashgen.tuner.tune import coordinator as tuning
from test_tune import PROBLEM, StandInDevice, StandInEvaluator

plain_cost = test_tune.cost

def cost(variant):  # no two alike, so that there is one winner
    return plain_cost(variant) + zlib.crc32(variant.name.encode()) / 2**32

test_tune.cost = cost
tuning.prior_of = lambda problem, limits: cost
out, kills, rng = Path({out!r}), {kills}, random.Random({seed})
told = os.open(out / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
options = tuning.TuneOptions(
    device=StandInDevice(),
    problem=PROBLEM,
    families=(FAMILIES["ladder"],),
    held={{"bc": 16, "br": 64, "hoisted": True}},
    minutes=5,
    storage=str(out / "trials.{suffix}"),
    out=out / "out",
    jobs=2,
)

def report(event):
    if isinstance(event, tuning.TrialDone):
        os.write(told, (json.dumps(event.outcome.variant.to_dict()) + chr(10)).encode())

def live():
    evaluator = StandInEvaluator()
    tuning.tune(options, report=report, make_evaluator=lambda device: evaluator)

killed = 0
while True:
    child = os.fork()
    if child == 0:
        try:
            live()
        except BaseException as error:
            print(f"{{type(error).__name__}}: {{error}}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if killed < kills:
        time.sleep(rng.uniform(0.0, {life_s}))
        os.kill(child, signal.SIGKILL)
        killed += 1
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        print(json.dumps({{"killed": killed, "status": os.waitstatus_to_exitcode(status)}}))
        if status or killed >= kills:
            sys.exit(os.waitstatus_to_exitcode(status))
"""


def live_and_die(out: Path, suffix: str, kills: int) -> list[dict]:
    """The variants that were told, in order, over so many killed lives and one that is let be."""
    script = LIVES.format(
        tests=str(Path(__file__).parent), out=str(out), suffix=suffix, kills=kills, seed=7, life_s=0.45
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "told").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> TunedKernel:
    """The winner of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert len(live_and_die(folder, "journal", 0)) > 50
    (entry,) = library.entries([folder / "out"])
    return entry.kernel


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
