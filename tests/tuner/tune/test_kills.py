"""The coordinator killed at random moments, again and again: nothing told is lost, nothing is repeated, no
process and no file is left, and the winner is the one of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flashgen.tuner.evaluate.outcome import TunedKernel
from flashgen.tuner.shelf import library
from flashgen.tuner.store.studies import OUTCOME, open_storage
from optuna.study import get_all_study_names, load_study

from tests.support import ROOT
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
