"""What calls learn: explained choices, tuning as a call, and kernels shared in a file."""

from __future__ import annotations

import re
import zipfile
from dataclasses import replace

import flashgen
import numpy as np
import pytest
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.errors import FlashgenError, UsageError
from flashgen.tuner.front import candidates, tuning
from flashgen.tuner.front.asked import in_steps
from flashgen.tuner.front.card import sim_card
from flashgen.tuner.front.records import RECORDS
from flashgen.tuner.front.workshop import Workshop
from flashgen.tuner.shelf import library

from tests.support.emulated import needs_compiler
from tests.support.tuned_kernels import H100, H200
from tests.tuner.front.test_attention import CARD, arrays

BF16_D128 = {"dtype": "bf16", "head_dim": 128}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of one's own kernels, empty."""
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    RECORDS.forget()
    yield tmp_path / "home"
    monkeypatch.undo()
    RECORDS.forget()


def ranked(**asked):
    known = library.entries([library.shipped_folder()])
    return candidates.candidates(Problem(**{**BF16_D128, **asked}), preset("h200"), known)


def test_what_was_tuned_for_just_this_stands_first_and_nothing_untuned_is_looked_at():
    best = ranked()[0]
    assert best.exact and best.record is not None
    assert best.record.kernel.problem.name == "bf16_d128"
    assert abs(best.predicted_us / best.record.kernel.measurement.median_us - 1) < 1e-6


def test_of_what_was_tuned_for_others_the_fastest_by_prediction_on_this_shape_stands_first(monkeypatch):
    monkeypatch.setattr(candidates, "_untuned", lambda *of: [])
    found = ranked(batch=1, num_q_heads=32, num_kv_heads=8, seqlen_q=512, seqlen_k=8192)
    assert not any(each.exact for each in found)
    assert [each.predicted_us for each in found] == sorted(each.predicted_us for each in found)
    assert len({each.variant for each in found}) == len(found)


def test_gradients_of_the_same_bits_are_searched_for_among_kernels_that_make_them(tmp_path, monkeypatch):
    """However far they are behind those that add up in memory, which are all of the fastest here."""
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    shape = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 2, "seqlen_q": 2048, "seqlen_k": 2048}
    problem = Problem(dtype="f16", head_dim=128, backward=True, **shape)
    workshop = Workshop(sim_card("sim:a100"))
    found, again = (list(workshop.fitting(problem, repeating=True)) for _ in range(2))
    assert found and found == again and all(each.entry.deterministic for each in found)
    fastest = next(workshop.fitting(problem))
    assert fastest.candidate.predicted_us <= found[0].candidate.predicted_us
    assert not fastest.entry.deterministic


def test_gradients_of_the_same_bits_are_made_by_the_likes_of_tuned_kernels(monkeypatch):
    """Where these add up in order at the ends alone; not expected to be as fast."""
    monkeypatch.setattr(candidates, "_untuned", lambda *of: [])
    known, limits = library.entries([library.shipped_folder()]), preset("h200")
    unordered = [each for each in known if each.kernel.variant.to_dict().get("sums") == "ends_in_order"]
    assert len(unordered) >= 7
    for each in unordered:
        problem, tuned = each.kernel.problem, each.kernel
        assert not candidates.makes_same_bits(tuned.variant, problem, limits)
        found = candidates.candidates(problem, limits, known, repeating=True)
        assert found and all(candidates.makes_same_bits(one.variant, problem, limits) for one in found)
        like = next(one for one in found if one.variant == tuned.variant.with_same_bits(problem))
        assert like.record is None and not like.exact
        assert like.predicted_us > tuned.measurement.median_us


def test_numbers_of_no_weight_make_no_other_problem():
    known = library.entries([library.shipped_folder()])
    soft = next(each for each in known if each.kernel.problem.name.startswith("bf16_d256_softcap50"))
    problem = replace(soft.kernel.problem, scoring=in_steps(soft.kernel.problem.scoring))
    assert problem.scoring.softcap != 50
    assert candidates.candidates(problem, preset("h200"), known)[0].exact


def test_a_choice_is_explained_without_building(home, monkeypatch):
    monkeypatch.setattr(candidates, "_untuned", lambda *of: [])
    q = np.zeros((4, 16, 2000, 128), np.float16)
    told = flashgen.explain(q, q, q, device="sim:h200", causal=True)
    assert told.problem == Problem(dtype="f16", head_dim=128, causal=True, seqlen_q=2000, seqlen_k=2000)
    assert not told.built and told.predicted_us > told.at_best_us > 0
    text = str(told)
    assert "f16_d128_causal_n2000 on H200, emulated" in text and "built by its first call" in text
    assert "flashgen tune --dtype f16 --d 128 --causal" in text
    assert told.limiter in text and all(name in text for name, _ in told.others)


def test_on_another_card_of_the_architecture_what_was_tuned_for_just_this_serves(home, monkeypatch):
    monkeypatch.setattr(candidates, "_untuned", lambda *of: [])
    shape = {"batch": 32, "seqlen_q": 512, "seqlen_k": 512, "causal": True}
    known = library.entries([library.shipped_folder()])
    problem = Problem(**BF16_D128, **shape)
    best = candidates.candidates(problem, preset("h100"), known)[0]
    assert best.elsewhere and not best.exact
    assert best.record is not None and best.record.kernel.problem == problem
    monkeypatch.setattr(RECORDS, "_found", tuple(known))
    workshop = Workshop(sim_card("sim:h100"))
    for _ in range(2):  # as it is ranked, and as it is remembered
        found = next(workshop.fitting(problem))
        assert (found.candidate.variant, found.candidate.elsewhere) == (best.variant, True)
        # No figure of an H200 goes by the name of an H100.
        assert not found.entry.measurement and found.entry.device["name"] == "H100 SXM5"
        workshop = Workshop(sim_card("sim:h100"))


def test_what_was_shipped_for_the_card_serves_before_what_was_for_another(monkeypatch):
    monkeypatch.setattr(candidates, "_untuned", lambda *of: [])
    known = library.entries([library.shipped_folder()])
    there, here = ({each.kernel.problem for each in known if each.slug == card.slug} for card in (H100, H200))
    both = there & here
    assert len(both) >= 7
    for problem in both:
        assert candidates.candidates(problem, preset("h200"), known)[0].exact, problem.name


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (4096, "tuned for just this on NVIDIA H200; nothing known is predicted to be clearly faster here"),
        (3000, r"tuned as \w+ on NVIDIA H200, predicted to be the fastest of all known on this shape"),
    ],
)
def test_who_is_told_why_hears_of_the_card(home, monkeypatch, rows, words):
    monkeypatch.setattr(candidates, "_untuned", lambda *of: [])
    q = np.zeros((4, 8, rows, 40), np.float16)
    told = flashgen.explain(q, q, q, device="sim:h100")
    assert re.fullmatch(words, told.why), told.why
    assert told.tuned_on == "NVIDIA H200" and not told.exact and told.measured_us is None
    assert "not tuned for just their call" in told.tuning_may_bring


@needs_compiler
@pytest.mark.thorough
def test_a_call_tunes_and_the_next_takes_what_was_found(home):
    q, k, v = arrays(d=16, rows=64, keys=64)
    asked = {"heads": 4, "kv_heads": 2, "batch": 1, "seqlen": 64, "d": 16}
    best = flashgen.tune(**asked, device=CARD, trials=2)
    assert best.paths.json.is_relative_to(home)
    told = flashgen.explain(q, k, v, device=CARD)
    assert told.exact and told.kernel == best.kernel.variant.name
    assert flashgen.pack(home / "winners.zip") == 1
    best.paths.json.unlink()
    RECORDS.forget()
    assert not flashgen.explain(q, k, v, device=CARD).exact
    assert flashgen.load(home / "winners.zip") == 1
    assert flashgen.explain(q, k, v, device=CARD).exact
    RECORDS._given.clear()


@needs_compiler
@pytest.mark.thorough
def test_autotune_tunes_the_costliest_of_what_was_called(home, monkeypatch):
    asked = []
    monkeypatch.setattr(tuning, "tune_problem", lambda problem, *told, **more: asked.append((problem, *told)))
    small, large = arrays(d=16, rows=8, keys=9), arrays(d=16, rows=64, keys=200)
    with flashgen.autotune(minutes=2) as notes:
        flashgen.attention(*small, device=CARD)
        for _ in range(3):
            flashgen.attention(*large, device=CARD)
    assert [(each.calls, each.problem.seqlen_k) for each in notes.all()] == [(3, 200), (1, 9)]
    assert [problem.seqlen_k for problem, *_ in asked] == [200, 9]
    assert asked[0][1] == CARD and asked[0][3] > asked[1][3]
    assert "3 x f32_d16" in str(notes)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"dtype": "f8"}, "dtype 'f8' is not served"),
        ({"d": 300}, "head_dim is 300; it must lie in 1..256"),
        ({"windows": 3}, "windows= is no argument of tune"),
        ({"device": "sim:b7"}, "unknown preset 'b7'"),
    ],
)
def test_problems_that_are_none_are_not_tuned(told, text):
    with pytest.raises(UsageError, match=text):
        flashgen.tune(**{"device": CARD, **told})


def test_files_that_hold_no_kernels_are_refused(tmp_path, home):
    with pytest.raises(FlashgenError, match="nothing was tuned in"):
        flashgen.pack(tmp_path / "none.zip", places=[tmp_path])
    with pytest.raises(FlashgenError, match="cannot be read"):
        flashgen.load(tmp_path / "none.zip")
    (tmp_path / "text.zip").write_text("not a zip")
    with pytest.raises(FlashgenError, match="is no file of tuned kernels"):
        flashgen.load(tmp_path / "text.zip")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as packed:
        packed.writestr("sim_h200/a.json", "{}")
    with pytest.raises(FlashgenError, match="is no file of tuned kernels"):
        flashgen.load(tmp_path / "empty.zip")
