"""What it costs to try nothing: the cost model's first choices, by times of an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.exchange import first_choices
from flashgen.tuner.exchange.first_choices import SEVERAL, Judged, judged, markdown, mean_regret, summaries
from flashgen.tuner.exchange.measured_tables import Measured, read, with_winner
from flashgen.tuner.shelf import library

from tests.support import DATA, ROOT
from tests.support.depth import sampled

#: Of each file and family the mean regret reached, rounded up, and the worst.
REACHED = {
    "measured_h200.json": {
        "latent": (1.024, 1.086),
        "mma": (1.011, 1.068),
        "mma-backward": (1.008, 1.113),
        "simt": (1.0, 1.0),
        "wgmma": (1.005, 1.086),
        "wgmma-backward": (1.011, 1.110),
        SEVERAL: (1.002, 1.006),
    },
    "h200_mma_times.json.gz": {"mma": (1.019, 1.111)},
    "h200_times.json.gz": {"simt": (1.025, 1.081)},
    "h200_wgmma_times.json.gz": {"wgmma": (1.034, 1.134)},
    "mma_bf16_d64.jsonl.xz": {"mma": (1.003, 1.003)},
    "simt_f32_d64.jsonl.xz": {"simt": (1.0, 1.0)},
    "measured_h200_later.json": {
        "latent": (1.012, 1.070),
        "mma": (1.016, 1.046),
        "mma-backward": (1.011, 1.045),
        "wgmma": (1.015, 1.090),
        "wgmma-backward": (1.031, 1.091),
        SEVERAL: (1.015, 1.046),
    },
    "measured_h200_serving.json": {
        "latent": (1.004, 1.046),
        "mma": (1.018, 1.080),
        "wgmma": (1.029, 1.091),
        "wgmma-backward": (1.016, 1.086),
        SEVERAL: (1.010, 1.058),
    },
}
#: What is promised of each family and operation, and of the choice among families, of more than one problem.
PROMISED_MEAN, PROMISED_WORST = 1.05, 1.15


@cache
def judgements(name: str) -> list[Judged]:
    return [each for measured in read(DATA / name) for each in judged(measured)]


@pytest.mark.parametrize(("name", "reached"), sampled(REACHED.items(), 2))
def test_first_choices_are_as_good_as_they_were(name, reached):
    found = judgements(name)
    assert {each.family for each in found} == reached.keys()
    for family, (mean, worst) in reached.items():
        group = [each for each in found if each.family == family]
        assert mean_regret(group) <= mean, family
        assert max(each.regret for each in group) <= worst, family


def all_judgements() -> list[Judged]:
    return [each for name in REACHED for each in judgements(name)]


@pytest.mark.thorough
def test_no_first_choice_is_far_behind_the_best():
    for each in summaries(all_judgements()):
        assert each.worst <= PROMISED_WORST, each
        assert each.problems == 1 or each.regret <= PROMISED_MEAN, each


@pytest.mark.thorough
def test_the_table_of_the_page_is_todays():
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert markdown(summaries(all_judgements())) in page, (
        "print it by python -m flashgen.tuner.exchange.first_choices of the tables in tests/data"
    )


def test_kernels_whose_text_has_changed_since_take_no_part(tmp_path):
    problem = Problem(dtype="bf16", head_dim=128, num_q_heads=8, num_kv_heads=2).to_dict()
    rows = [[10.0, 0, "wgmma", {}], [11.0, 0, "wgmma", {"bc": 96}], [9.0, 0, "wgmma", {"pack_heads": True}]]
    table: dict[str, object] = {"preset": "h200", "sets": [{"problem": problem, "rows": rows}]}
    path = tmp_path / "table.json"

    def times(*, superseded: bool) -> list[float]:
        path.write_text(json.dumps(table))
        return [us for each in read(path, superseded=superseded) for us in each.us.tolist()]

    assert times(superseded=False) == [10.0, 11.0, 9.0]
    table["superseded"] = [{"family": "wgmma", "values": {"pack_heads": True}, "since": "", "why": ""}]
    assert times(superseded=False) == [10.0, 11.0]
    assert times(superseded=True) == [10.0, 11.0, 9.0]
    table["superseded"] = [{"family": "mma", "values": {"pack_heads": True}, "since": "", "why": ""}]
    assert times(superseded=False) == [10.0, 11.0, 9.0]
    table["superseded"] = [{"family": "wgmma", "values": {"packed": True}}]
    with pytest.raises(FlashgenError, match="wgmma has no parameter packed"):
        times(superseded=False)


@pytest.mark.parametrize("superseded", [False, True])
def test_packed_heads_of_wgmma_were_timed_with_an_older_text(superseded):
    tables = [name for name in REACHED if name.startswith("measured")]
    timed = [v for name in tables for each in read(DATA / name, superseded=superseded) for v in each.variants]
    packed = [v for v in timed if isinstance(v, Wgmma) and v.pack_heads]
    assert bool(packed) == superseded and len(timed) - len(packed) > 1000


def test_winners_that_were_not_timed_stand_beside_those_that_were():
    winners = library.entries([ROOT / "out"])
    (tuned,) = (e.kernel for e in winners if e.kernel.problem.name == "bf16_d128")
    tables = [each for each in read(DATA / "measured_h200.json") if each.problem == tuned.problem]
    (added,) = (with_winner(each, winners) for each in tables)
    if tuned.variant in tables[0].variants:
        assert added == tables[0]
        added = with_winner(replace(tables[0], variants=tables[0].variants[1:], us=tables[0].us[1:]), winners)
    assert added.variants[-1] == tuned.variant and added.us[-1] == tuned.measurement.median_us
    assert with_winner(tables[0], []) is tables[0]


def test_regret_is_of_the_slowest_of_what_is_predicted_alike(monkeypatch):
    variants = tuple(Wgmma(bc=bc) for bc in (64, 80, 96, 128))
    predicted = dict(zip(variants, (5.0, 3.0, 3.0, 4.0), strict=True))
    monkeypatch.setattr(first_choices, "prior_of", lambda problem, limits: predicted.__getitem__)
    problem = Problem(dtype="bf16", head_dim=128, scoring=Scoring(softcap=30.0), causal=True)
    (found,) = judged(
        Measured(
            "", problem, read(DATA / "measured_h200.json")[0].limits, variants, np.array([1.0, 2.0, 3.0, 4.0])
        )
    )
    assert (found.regret, found.place, found.variants) == (3.0, 4, 4)
    assert found.operation == "scores causal"
    assert markdown(summaries([found, replace(found, regret=3.0)])).endswith(
        f"| `wgmma` | scores causal | 2 | 8 | {found.correlation:.2f} | 200.0% | 200.0% |"
    )


def test_what_is_no_table_is_refused(tmp_path):
    path = tmp_path / "table.json"
    for text in ("{", json.dumps({"preset": "h200"}), json.dumps({"preset": "toaster", "sets": []})):
        path.write_text(text)
        with pytest.raises(FlashgenError, match=r"table\.json is no table of measured times"):
            read(path)


def test_rows_that_nobody_can_choose_between_are_left_out(tmp_path):
    problem = Problem(dtype="bf16", head_dim=128).to_dict()
    rows = [[10.0, 0, "wgmma", {}], [11.0, 0, "wgmma", {"br": 256}]]  # too large for head dims of 128
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"preset": "h200", "sets": [{"problem": problem, "rows": rows}]}))
    assert read(path) == []
