"""Studies as they stand: what `flashgen watch` shows."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace

import optuna
import pytest
from flashgen.tuner.store.liveness import OWNER
from flashgen.tuner.store.studies import OUTCOME, open_storage
from flashgen.tuner.store.under_way import StudyUnderWay, studies_under_way
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.view.under_way import under_way_table
from rich.console import Console

from tests.support.stand_ins import StandInDevice, StandInEvaluator, StandInToolchain


@pytest.fixture(params=["trials.journal", "trials.sqlite3"])
def where(request, tmp_path) -> str:
    return str(tmp_path / request.param)


def add(storage, name: str, status: str, median_us: float | None = None) -> None:
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    trial = study.ask()
    measured = None if median_us is None else {"median_us": median_us}
    trial.set_user_attr(OUTCOME, {"status": status, "measurement": measured})
    study.tell(trial, median_us if median_us is not None else 1.0)


def test_trials_are_counted_by_what_became_of_them(where):
    storage = open_storage(where)
    for status, median_us in (("ok", 20.0), ("ok", 12.5), ("slow", 99.0), ("wrong", None), ("spilled", None)):
        add(storage, "card/f32/one", status, median_us)
    add(storage, "card/f32/one", "wrong")
    (study,) = studies_under_way(open_storage(where))
    assert (study.ended, study.best_us, study.best_trial) == (6, 12.5, 1)
    assert study.failed == {"wrong": 2, "spilled": 1} and (study.workers, study.in_flight) == (0, 0)
    assert study.last_at is not None


def test_those_at_work_come_first(where):
    storage = open_storage(where)
    add(storage, "card/f32/idle", "ok", 1.0)
    add(storage, "card/f32/busy", "ok", 2.0)
    busy = optuna.load_study(storage=storage, study_name="card/f32/busy")
    for owner in ("host-a/1/1/x/0", "host-a/1/1/x/0", "host-b/1/1/x/0", ""):
        busy.ask().set_user_attr(OWNER, owner)
    add(storage, "card/f32/later", "ok", 3.0)
    found = studies_under_way(open_storage(where))
    assert [each.study for each in found] == ["card/f32/busy", "card/f32/later", "card/f32/idle"]
    assert (found[0].workers, found[0].in_flight, found[0].ended) == (2, 3, 1)


def test_a_run_is_seen(tune_options, flashgen):
    device = StandInDevice(chain=StandInToolchain(refuses=(16,)))
    tune(replace(tune_options, trials=12, device=device), make_evaluator=lambda device: StandInEvaluator())
    data = json.loads(flashgen("watch", "--json", "--storage", tune_options.storage).stdout)
    assert data[0]["ended"] >= 12 and data[0]["best_us"] > 100 and data[0]["workers"] == 0
    assert datetime.datetime.fromisoformat(data[0]["last_at"])
    text = flashgen("watch", "--storage", tune_options.storage).stdout
    assert "studies in" in text and "h200" in text and "compile-failed" in text


def test_a_storage_that_is_not_there_is_not_made(flashgen, tmp_path):
    told = flashgen("watch", "--storage", "none.sqlite3", code=1).stderr
    assert "none.sqlite3 does not exist" in told and not (tmp_path / "none.sqlite3").exists()


def test_the_table_fits():
    now = datetime.datetime(2026, 1, 2, 12, 0)
    study = StudyUnderWay(
        study="nvidia_h200/bf16_d128_window4095x0_softcap50_causal_b2_h32_kv8_n8192/wgmma/0123456789abcdef",
        ended=1234,
        failed={"compile-failed": 12, "spilled": 7, "wrong": 1},
        workers=2,
        in_flight=9,
        best_us=1389.5,
        best_trial=1007,
        last_at=now - datetime.timedelta(minutes=5),
    )
    console = Console(width=80, record=True)
    console.print(under_way_table("out/tuning.sqlite3", [study], now))
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text
    assert "1.389 ms" in text or "1.390 ms" in text
    assert "2 (9)" in text and "5 min" in text and "0123456789abcdef" not in text
