"""Kernels tuned on one machine, packed for calls on others."""

from __future__ import annotations

import json
import shutil
import zipfile

import flashgen as package
import pytest
from flashgen.tuner.front.records import RECORDS

from tests.support import ROOT


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    yield
    RECORDS._given.clear()
    RECORDS.forget()


def test_what_was_tuned_is_packed_and_loaded(flashgen, tmp_path):
    folder = tmp_path / "out" / "nvidia_h200"
    folder.mkdir(parents=True)
    for suffix in ("json", "cu"):
        shutil.copy(ROOT / "out" / "nvidia_h200" / f"bf16_d128.{suffix}", folder)
    assert "wrote winners.zip: 1 kernel" in flashgen("pack", "winners.zip").stdout
    told = json.loads(flashgen("pack", "winners.zip", "--json").stdout)
    assert told == {"target": "winners.zip", "kernels": 1}
    assert zipfile.ZipFile("winners.zip").namelist() == ["nvidia_h200/bf16_d128.json"]
    assert package.load("winners.zip") == 1
    assert (RECORDS.all()[0].slug, RECORDS.all()[0].kernel.problem.name) == ("nvidia_h200", "bf16_d128")


def test_nothing_to_pack_says_where_it_looked(flashgen, tmp_path):
    assert f"nothing was tuned in {tmp_path / 'home'}" in flashgen("pack", "winners.zip", code=1).stderr
