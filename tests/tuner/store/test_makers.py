"""Trials are found again: by what made them, under whatever name, also those that version 0.1.0 wrote.

``data/version_0_1_0.journal`` was written by version 0.1.0 on an emulated H200: three trials each of ladder
and mma. The compiler it names is replaced here by this machine's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from flashgen.gen import identity as identity_module
from flashgen.gen.families import FAMILIES
from flashgen.gen.identity import IDENTITIES_OF_0_1_0, identities
from flashgen.gen.problem import Problem
from flashgen.tuner.cards.names import resolve
from flashgen.tuner.cli import app
from flashgen.tuner.store.makers import ITS_COST_MODEL, Makers, name_of_study, study_name
from flashgen.tuner.store.studies import OUTCOME, open_storage, open_study
from flashgen.tuner.tune import family_run
from optuna.study import get_all_study_names, load_study
from typer.testing import CliRunner

from tests.support import DATA
from tests.support.caches import without_kernels

JOURNAL = DATA / "version_0_1_0.journal"
ITS_TOOLKIT = "g++ (Debian 12.2.0-14+deb12u1) 12.2.0, emulating H200"
PROBLEM = Problem(batch=1, num_q_heads=1, num_kv_heads=1, seqlen_q=64, seqlen_k=64, head_dim=16)
SIZES = ("--batch", "1", "--heads", "1", "--seqlen", "64", "--d", "16")
LADDER = FAMILIES["ladder"]


@pytest.fixture
def journal(tmp_path) -> Path:
    """What version 0.1.0 left on a machine like this one."""
    path = tmp_path / "trials.journal"
    here = resolve("sim:h200").toolchain().version
    path.write_text(JOURNAL.read_text().replace(json.dumps(ITS_TOOLKIT), json.dumps(here)))
    return path


def run(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def trials(journal: Path) -> dict[str, int]:
    """By study, its finished trials."""
    storage = open_storage(str(journal))
    names = get_all_study_names(storage)
    return {
        name: sum(OUTCOME in t.user_attrs for t in load_study(study_name=name, storage=storage).trials)
        for name in names
    }


@pytest.mark.thorough
@pytest.mark.parametrize("model", [ITS_COST_MODEL, ITS_COST_MODEL + 1])
def test_a_study_of_version_0_1_0_is_resumed(model, journal, tmp_path, monkeypatch):
    """As long as the cost model is that version's: of an emulated card, its times are predictions."""
    monkeypatch.setenv("FLASHGEN_CACHE", str(without_kernels(tmp_path / "cache")))
    monkeypatch.setattr(family_run, "COST_MODEL", model)
    before = trials(journal)
    assert len(before) == 2 and set(before.values()) == {3}
    where = ("--storage", journal, "--out", tmp_path / "out")
    told = run("tune", "--device", "sim:h200", "--family", "ladder", *SIZES, "--trials", "5", *where)
    after = trials(journal)
    if model != ITS_COST_MODEL:
        (ladder,) = after.keys() - before.keys()
        assert after == {**before, ladder: 5}, "what another model predicted is left alone"
    else:
        assert after.keys() == before.keys(), "the trials went to a new study"
        (ladder,) = [name for name in after if "/ladder/" in name]
        assert after[ladder] == 5, told
    about = load_study(study_name=ladder, storage=open_storage(str(journal))).user_attrs
    assert about["identity"] == identities("ladder")[0] and about["cost_model"] == model


def test_what_version_0_1_0_found_is_reported_and_emitted(journal, tmp_path):
    out = ("--storage", journal, "--out", tmp_path / "out")
    target = tmp_path / "page.html"
    assert "mma" in run("list", *out, "--device", "sim:h200", "--dtype", "f16", "--d", "16", "--json")
    assert (
        "f32_d16_b1_h1_n64" in run("report", target, *out, "--dtype", "f32", "--d", "16")
        and target.stat().st_size > 10_000
    )
    assert "predicted" in run("emit", tmp_path / "best.cu", *out, "--device", "sim:h200", *SIZES)
    assert "attention_f32_d16" in (tmp_path / "best.cu").read_text()
    assert "f16_d16" in run("report", target, *out, "--dtype", "f16", "--d", "16")


def test_measured_trials_of_version_0_1_0_are_found():
    storage = optuna.storages.InMemoryStorage()
    about = {"flashgen": "0.1.0", "family": "ladder", "toolkit": "nvcc 13.0.88", "predicted": False}
    old = study_name("nvidia_h200", PROBLEM, LADDER, "89abcdef")
    study = open_study(storage, "memory", old, about)
    makers = Makers.of(LADDER, "nvcc 13.0.88", None)
    assert name_of_study(storage, "nvidia_h200", PROBLEM, LADDER, makers) == old
    # Once it says what made it, that counts.
    study.set_user_attr("identity", "of other kernels")
    assert name_of_study(storage, "nvidia_h200", PROBLEM, LADDER, makers).endswith(f"/{makers.mark}")


ABOUT = {"flashgen": "0.1.0", "family": "ladder", "toolkit": "nvcc 13.0.88", "predicted": False}


@pytest.mark.parametrize(
    ("changed", "made"),
    [
        ({}, True),
        ({"flashgen": "0.2.0"}, False),
        ({"family": "mma"}, False),
        ({"toolkit": "nvcc 13.1.1"}, False),
        ({"predicted": True}, False),
        ({"identity": "0123456789abcdef", "cost_model": None}, False),
    ],
)
def test_trials_are_of_the_same_makers(changed, made):
    makers = Makers.of(LADDER, "nvcc 13.0.88", None)
    assert makers.made({**ABOUT, **changed}) is made
    assert makers.made({**ABOUT, **makers.attributes(), "flashgen": "0.9.0"})


def test_predictions_are_of_one_cost_model():
    makers = Makers.of(LADDER, "nvcc 13.0.88", 1)
    assert makers.made({**ABOUT, "predicted": True}) and not makers.made(ABOUT)
    assert not replace(makers, cost_model=2).made({**ABOUT, "predicted": True})
    assert len({makers.mark, replace(makers, cost_model=2).mark, replace(makers, cost_model=None).mark}) == 3


def test_trials_of_earlier_kernels_of_the_same_machine_code_are_found(monkeypatch):
    storage = optuna.storages.InMemoryStorage()
    today = Makers.of(LADDER, "nvcc 13.0.88", None)
    earlier = replace(today, identities=("0123456789abcdef",))
    for mark, makers in (("1", earlier), ("2", replace(earlier, toolkit="nvcc 12"))):
        open_study(
            storage,
            "memory",
            study_name("h", PROBLEM, LADDER, mark),
            {"family": "ladder", **makers.attributes()},
        )
    assert name_of_study(storage, "h", PROBLEM, LADDER, today).endswith(f"/{today.mark}")
    monkeypatch.setattr(identity_module, "SAME_MACHINE_CODE", {"ladder": ("0123456789abcdef",)})
    renamed = Makers.of(LADDER, "nvcc 13.0.88", None)
    assert renamed.mark == today.mark
    assert name_of_study(storage, "h", PROBLEM, LADDER, renamed).endswith("/1")
    # Of several the fullest; what bears the mark itself comes first.
    about = {"family": "ladder", **earlier.attributes()}
    full = open_study(storage, "memory", study_name("h", PROBLEM, LADDER, "0"), about)
    full.ask()
    assert name_of_study(storage, "h", PROBLEM, LADDER, renamed).endswith("/0")
    own = study_name("h", PROBLEM, LADDER, today.mark)
    open_study(storage, "memory", own, {"family": "ladder", **today.attributes()})
    assert name_of_study(storage, "h", PROBLEM, LADDER, renamed) == own


def test_the_ladder_of_version_0_1_0_is_todays():
    """Its machine code did not change since, that of the other families did."""
    for family in FAMILIES:
        assert (IDENTITIES_OF_0_1_0.get(family) in identities(family)) == (family == "ladder")
