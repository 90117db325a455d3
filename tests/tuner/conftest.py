"""What tests of several rooms of the tuner share."""

from __future__ import annotations

import pytest
from flashgen.tuner.shelf import library
from flashgen.tuner.tune.options import TuneOptions

from tests.support.command_line import command_runner
from tests.support.stand_ins import LADDER, PROBLEM, StandInDevice, cost


@pytest.fixture
def flashgen(tmp_path, monkeypatch):
    """Runs a command in an empty folder without shipped kernels; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(library, "shipped_folder", lambda: tmp_path / "shipped")
    return command_runner()


@pytest.fixture
def tune_options(tmp_path, monkeypatch) -> TuneOptions:
    """A run with a stand-in for the card, whose prior knows the made-up times."""
    monkeypatch.setattr("flashgen.tuner.tune.family_run.prior_of", lambda problem, limits: cost)
    return TuneOptions(
        device=StandInDevice(),
        problem=PROBLEM,
        families=(LADDER,),
        storage=str(tmp_path / "out" / "trials.journal"),
        out=tmp_path / "out",
        jobs=2,
    )
