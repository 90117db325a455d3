"""Masks and changes of scores in float32 on CUDA cores: on emulated cards, beside float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import PLAIN, Scoring
from flashgen.gen.work import count_work
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimRunner
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.adversarial import adversarial_findings
from flashgen.tuner.evaluate.adversarial_inputs import case_named

from tests.support.covering import Setting, draw
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, check, inputs, needs_compiler
from tests.support.scored_attention import SCALE, assert_close, attend, built
from tests.support.scorings import SCORINGS, drawn_values

HEADS = {"num_q_heads": 4, "num_kv_heads": 2}
SMALL = Simt(br=32, bc=16, threads_per_block=64, min_blocks=1)
#: One of each way of bringing tiles in, with and without Q in registers and P in two parts.
VARIANTS = {
    "one stage": SMALL,
    "two stages": replace(SMALL, stages=2),
    "q in registers": replace(SMALL, q_in_registers=True, br=16, lanes=8),
    "two passes": replace(SMALL, bc=64, p_passes=2, block_order="heaviest_first"),
    "wide lanes": replace(SMALL, br=16, bc=48, lanes=16, stages=2, k_layout="padded"),
}
#: Of rows and keys: ragged; rows that see nothing under a causal mask; more keys; one row.
SHAPES = ((37, 53), (70, 45), (20, 100), (1, 40))
#: Cards with and without asynchronous copies, whose two stages differ.
CARDS = ("h200", "gtx-1080")


def problem_of(scoring: Scoring, *, causal: bool = False, **more) -> Problem:
    return Problem(scoring=scoring, causal=causal, **{"batch": 2, "head_dim": 24, **HEADS, **more})


def assert_right(found, expected: reference.Reference, tolerance: float = 4e-6) -> None:
    assert_close(found, expected, tolerance)


def cases():
    """Every scoring by every way, card and mask, so ordered that any even share has some of each."""
    every = [
        (name, way, card, causal)
        for name in SCORINGS
        for way in VARIANTS
        for card in CARDS
        for causal in (False, True)
        if causal or name != "prefix"
    ]
    random.Random(1).shuffle(every)
    return every


@needs_compiler
@pytest.mark.parametrize(("name", "way", "card", "causal"), sampled(cases(), 10, thorough=50))
def test_masks_and_changes_are_right(name, way, card, causal):
    problem = problem_of(SCORINGS[name], causal=causal)
    for rows, keys in SHAPES:
        values = drawn_values(problem, rows, keys)
        assert_right(*attend(built(VARIANTS[way], problem, card), rows, keys, values))


@needs_compiler
def test_what_is_lost_of_scaled_queries_is_promised():
    # A column of q is so small that some of it, times the scale, is flushed; and few keys are seen.
    problem = problem_of(Scoring(dilation=2), head_dim=64)
    case = case_named("a column of k x 1e37, of q / 1e37", "f32")
    variant = Simt(br=16, bc=16, threads_per_block=64, lanes=4, min_blocks=1)
    build = built(variant, problem)
    (found,) = adversarial_findings(SimRunner(PRESETS["h200"]), build, [case])
    assert found.kept and found.bound / 4 < found.error < found.bound, found.words()


@needs_compiler
@pytest.mark.parametrize("name", sampled(SCORINGS, 3))
def test_the_suite_holds(name):
    problem = problem_of(SCORINGS[name], causal=name == "prefix")
    assert check(Setting(SMALL, problem, PRESETS["h200"]), seed=3) < problem.tolerance


@needs_compiler
@pytest.mark.parametrize("name", sampled(SCORINGS, 1))
def test_nothing_is_read_that_is_not_there(name):
    problem = problem_of(SCORINGS[name], causal=name == "prefix")
    build = built(VARIANTS["two stages"], problem, sanitize=True)
    for rows, keys in ((37, 53), (3, 5)):
        values = drawn_values(problem, rows, keys)
        assert_right(*attend(build, rows, keys, values, sanitize=True))


# -- one thing each --------------------------------------------------------------------------------------


@needs_compiler
def test_numbers_and_arrays_change_without_a_build():
    build = built(SMALL, problem_of(Scoring(window=(127, 0), softcap=30.0)))
    for left, right, softcap in ((0, 0, 1.0), (-1, 5, 2.0), (31, -1, 50.0), (1000, 1000, 0.1)):
        values = {"window_left": left, "window_right": right, "softcap": softcap}
        assert_right(*attend(build, 37, 53, values))


@needs_compiler
def test_small_scores_and_large_ones_are_capped_alike():
    """Warps whose tiles have small ones alone, large ones in some, or nothing else."""
    q, k, v = inputs(problem_of(PLAIN), 70, 90, SCALE, batch=2, heads=4, kv_heads=2)
    q[:, :, 16:48] *= 0.05
    k[:, :, 30:60] *= 30
    assert_right(*attend(built(SMALL, problem_of(Scoring(softcap=2.5))), 70, 90, {"softcap": 2.5}, (q, k, v)))


@needs_compiler
def test_a_batch_may_have_no_keys_at_all():
    build = built(SMALL, problem_of(Scoring(lengths=True)))
    found, expected = attend(build, 37, 53, {"lengths": np.array([0, 53])})
    assert_right(found, expected)
    assert (found[0][0] == 0).all() and np.isneginf(found[1][0]).all()


@needs_compiler
@pytest.mark.parametrize("way", ["one stage", "two stages"])
def test_keys_past_the_length_may_be_no_numbers(way):
    problem = problem_of(Scoring(lengths=True))
    lengths = np.array([21, 40])
    case = inputs(problem, 37, 53, SCALE, batch=2, heads=4, kv_heads=2)
    for array in case[1:]:
        for b, length in enumerate(lengths):
            array[b, :, length:] = np.nan
    found, expected = attend(built(VARIANTS[way], problem), 37, 53, {"lengths": lengths}, case)
    assert_right(found, expected)


@needs_compiler
def test_rows_of_an_empty_document_see_nothing_but_the_sink():
    problem = problem_of(Scoring(documents=3, sinks=True))
    begins, ends = np.zeros((2, 60), int), np.full((2, 60), 45)
    ends[:, :9] = 0
    begins[:, 40:] = 30
    begins[1, 50:] = 45
    sinks = np.array([0.5, -np.inf, 3.0, -2.0])
    values = {"document_begin": begins, "document_end": ends, "sinks": sinks}
    found, expected = attend(built(SMALL, problem), 60, 45, values)
    assert_right(found, expected)
    assert (found[0][:, :, :9] == 0).all() and (found[0][1, :, 50:] == 0).all()
    np.testing.assert_allclose(found[1][:, 0, :9], 0.5, rtol=1e-6)
    assert np.isneginf(found[1][:, 1, :9]).all()


@needs_compiler
def test_a_prefix_is_seen_by_all_rows_and_the_rest_causally():
    build = built(SMALL, problem_of(Scoring(prefix=50), causal=True))
    for prefix in ([0, 53], [17, 40]):
        assert_right(*attend(build, 37, 53, {"prefix": np.array(prefix)}))


@needs_compiler
def test_an_additive_mask_of_minus_infinity_hides():
    problem = problem_of(Scoring(bias="f32"))
    bias = np.zeros((2, 4, 37, 53), np.float32)
    bias[:, :, np.arange(37)[:, None] < np.arange(53) - 16] = -np.inf
    bias[0, :, 5] = -np.inf
    bias[1, :, :, :20] = -np.inf
    found, expected = attend(built(SMALL, problem), 37, 53, {"bias": bias})
    assert_right(found, expected)
    assert (found[0][0, :, 5] == 0).all() and np.isneginf(found[1][0, :, 5]).all()


@needs_compiler
@pytest.mark.parametrize("card", sampled(CARDS, 1, thorough=2))
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys_beside_rows_whose_sums_are_parked(card, sinks):
    """Of walks longer than a run of tiles, which begin anywhere."""
    problem = problem_of(Scoring(bias="u8", sinks=sinks), batch=1, num_q_heads=1, num_kv_heads=1, head_dim=8)
    variant = Simt(br=32, bc=64, threads_per_block=32, min_blocks=1, stages=2)
    shown = np.ones((1, 1, 40, 2600), bool)
    shown[..., 5:9, :] = False
    shown[..., 17, :2300] = False
    shown[..., 18, 300:] = False
    values = {"bias": shown, "sinks": np.array([-np.inf])}
    assert_right(*attend(built(variant, problem, card), 40, 2600, values))


@needs_compiler
def test_a_long_window_parks_its_sums_too():
    problem = problem_of(Scoring(window=(2300, 0)), batch=1, num_q_heads=1, num_kv_heads=1, head_dim=8)
    variant = Simt(br=32, bc=64, threads_per_block=32, min_blocks=1, stages=2)
    assert_right(*attend(built(variant, problem), 70, 5001, {"window_left": 2300, "window_right": 0}))


@needs_compiler
def test_a_window_walks_its_own_tiles_alone():
    """Keys outside of what blocks see are not so much as read."""
    problem = problem_of(Scoring(window=(20, 0)))
    case = inputs(problem, 16, 400, SCALE, batch=2, heads=4, kv_heads=2)
    for array in case[1:]:
        array[:, :, : 400 - 16 - 20 - 16] = np.nan
    found, expected = attend(built(SMALL, problem), 16, 400, drawn_values(problem, 16, 400), case)
    assert_right(found, expected)


# -- texts, rules, costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORINGS)
def test_sources_read_well(name):
    for variant in (SMALL, VARIANTS["two stages"], VARIANTS["q in registers"]):
        kernel = render(variant, problem_of(SCORINGS[name], causal=True), PRESETS["h200"])
        source = kernel.source.replace(kernel.entry, "attention")
        assert_tidy(source, name, longest=160)
        assert "false ?" not in source


def test_what_is_not_asked_is_not_there():
    window = render(SMALL, problem_of(SCORINGS["window"]), PRESETS["h200"]).source
    assert "change_score" not in window and "sees(" not in window and "sinks" not in window
    capped = render(SMALL, problem_of(SCORINGS["soft cap"]), PRESETS["h200"]).source
    assert "tanhf(" in capped and "sees(" not in capped and "scale_log2" not in capped


def test_the_last_blocks_start_first_only_where_later_rows_see_more():
    heaviest = replace(SMALL, block_order="heaviest_first")
    limits = PRESETS["h200"]

    def told(scoring: Scoring, *, causal: bool) -> bool:
        return heaviest._blocks_differ(problem_of(scoring, causal=causal), limits) is not None

    assert not told(Scoring(softcap=30.0), causal=True)
    assert told(Scoring(softcap=30.0), causal=False)
    assert told(Scoring(window=(3, 0)), causal=True)
    assert not told(Scoring(window=(2047, 0)), causal=False)
    assert told(Scoring(chunk=64), causal=True)


def work(scoring: Scoring, **more):
    problem = Problem(seqlen_q=4096, seqlen_k=4096, head_dim=64, scoring=scoring, **more)
    return count_work(Simt(), problem, PRESETS["h200"])


def test_a_window_is_paid_for_by_its_width():
    whole, narrow = work(Scoring()), work(Scoring(window=(127, 0)))
    assert whole.mean_tiles == 64
    assert 3 <= narrow.mean_tiles <= 4
    assert work(Scoring(window=(1000, 0)), causal=True).mean_tiles < work(Scoring(), causal=True).mean_tiles
    assert work(Scoring(lengths=True)).mean_tiles < 64
    assert work(Scoring(documents=16)).mean_tiles < 32


def test_changes_and_predicates_are_paid_for_pair_by_pair():
    plain = work(Scoring()).per_warp_tile
    pairs = Simt().tm * Simt().tn
    capped = work(Scoring(softcap=30.0)).per_warp_tile
    assert capped.exp == plain.exp and capped.ffma - plain.ffma == 8 * pairs  # tangents of what is small
    biased = work(Scoring(bias="f16")).per_warp_tile
    assert biased.accesses - plain.accesses == pairs
    assert biased.l2_bytes == pairs * 32 * 2
    sloped = work(Scoring(alibi=True)).per_warp_tile
    assert sloped.accesses == plain.accesses  # slopes are the same for all of a head
    hidden = work(Scoring(bias="u8")).per_warp_tile
    assert hidden.alu - plain.alu >= 3 * pairs and hidden.l2_bytes == pairs * 32
    assert work(Scoring(sinks=True)).per_warp_tile == plain


# -- as cards' compilers have them -----------------------------------------------------------------------


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "card", sampled(["gtx-1080", "v100", "t4", "a100", "rtx-4090", "h200", "b200"], 1, thorough=2)
)
@pytest.mark.parametrize("name", sampled(["sums", "segments", "formulas", "hidden", "prefix", "always"], 2))
def test_scored_kernels_build(card, name, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    try:
        toolchain = cuda_toolchain(PRESETS[card].arch)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    problem = Problem(scoring=SCORINGS[name], causal=True)
    for variant in draw(Simt, problem, PRESETS[card], 1, random.Random(2)):
        assert 0 < toolchain.build(render(variant, problem, PRESETS[card])).registers <= 255
