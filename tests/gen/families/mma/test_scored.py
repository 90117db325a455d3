"""Masks and changes of scores in tensor-core kernels: on emulated cards, beside float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.mma.decoding import decodes
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.limits import PRESETS, preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import PLAIN, Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.gen.work import BlockWork, count_work
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimRunner
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.adversarial import adversarial_findings
from flashgen.tuner.evaluate.adversarial_inputs import case_named

from tests.support import array_layouts
from tests.support.covering import Setting, draw, held_by
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, check, inputs, needs_compiler
from tests.support.scored_attention import (
    SCALE,
    assert_close,
    attend,
    attended_by_steps,
    built,
    cases_by_steps,
    hiding_biases,
    is_legal,
)
from tests.support.scorings import OF_STEPS, SCORINGS, drawn_values

HEADS = {"num_q_heads": 4, "num_kv_heads": 2}
#: How numbers are multiplied, and the largest error.
NUMBERS = {
    "f16": (Problem(dtype="f16"), 2e-3),
    "bf16": (Problem(dtype="bf16"), 2e-2),
    "3xf16": (Problem(precision="3xf16"), 1e-5),
    "3xtf32": (Problem(precision="3xtf32"), 1e-5),
    "tf32": (Problem(precision="tf32"), 4e-3),
}
MAIN = Mma(br=32, bc=16, rows_per_warp=16, q_in_registers=False)
#: One of each walk over keys, and of each way of bringing tiles in and of keeping Q.
WALKS = {
    "main": MAIN,
    "wide": replace(MAIN, rows_per_warp=32, bc=32, q_in_registers=True, stages=3, layout="swizzled"),
    "one stage": replace(MAIN, stages=1, rescale="always"),
    "in turn": replace(MAIN, heads=4),
    "packed": replace(MAIN, pack_heads=True, br=48),
    "key warps": replace(MAIN, br=16, key_warps=4, pack_heads=True),
    "splits": replace(MAIN, br=16, splits=2, stages=1),
    "shared": replace(MAIN, rows_per_warp=32, splits=4, key_warps=2, q_in_registers=True),
}
#: Of rows and keys: ragged; rows that see nothing under a causal mask; more keys; one row.
SHAPES = ((37, 53), (70, 45), (20, 100), (1, 40))
H200 = PRESETS["h200"]


def problem_of(scoring: Scoring, numbers: str = "bf16", *, causal: bool = False, **more: Any) -> Problem:
    sizes = {"batch": 2, "head_dim": 32, "seqlen_q": 64, "seqlen_k": 64, **HEADS, **more}
    return replace(NUMBERS[numbers][0], scoring=scoring, causal=causal, **sizes)


def variant_of(walk: str, numbers: str = "bf16") -> Mma:
    return replace(WALKS[walk], parts="f16" if numbers == "3xf16" else "tf32")


def assert_right(found, expected: reference.Reference, numbers: str = "bf16") -> None:
    assert_close(found, expected, NUMBERS[numbers][1])


def cases():
    """Every scoring by every walk and number, so ordered that any even share has some of each."""
    every = [
        (name, walk, numbers, causal)
        for name in SCORINGS
        for walk in WALKS
        for numbers in NUMBERS
        for causal in (False, True)
        if causal or name != "prefix"
        if is_legal(variant_of(walk, numbers), problem_of(SCORINGS[name], numbers, causal=causal))
    ]
    random.Random(1).shuffle(every)
    return every


@needs_compiler
@pytest.mark.parametrize(("name", "walk", "numbers", "causal"), sampled(cases(), 9, thorough=45))
def test_masks_and_changes_are_right(name, walk, numbers, causal):
    problem = problem_of(SCORINGS[name], numbers, causal=causal)
    for rows, keys in SHAPES:
        values = drawn_values(problem, rows, keys)
        assert_right(*attend(built(variant_of(walk, numbers), problem), rows, keys, values), numbers)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "walk", "causal"), sampled(cases_by_steps(WALKS, problem_of), 3, thorough=20)
)
def test_keys_at_every_so_many_are_seen(name, walk, causal):
    problem = problem_of(OF_STEPS[name], causal=causal)
    for found, expected in attended_by_steps(built(WALKS[walk], problem)):
        assert_right(found, expected)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "walk", "numbers", "layout"),
    sampled(
        [
            (name, walk, numbers, layout)
            for i, name in enumerate(array_layouts.SCORINGS)
            for j, walk in enumerate(WALKS)
            for k, numbers in enumerate(NUMBERS)
            for n, layout in enumerate(array_layouts.LAYOUTS)
            if (i + j + k + n) % 4 == 0
            and is_legal(variant_of(walk, numbers), problem_of(array_layouts.SCORINGS[name], numbers))
        ],
        2,
        thorough=20,
    ),
)
def test_arrays_of_pairs_may_lie_anyhow(name, walk, numbers, layout):
    problem = problem_of(array_layouts.SCORINGS[name], numbers)
    build = built(variant_of(walk, numbers), problem)
    for rows, keys in SHAPES:
        values = array_layouts.values_laid(problem, rows, keys, layout)
        # Some outputs are beyond 3, which f16 rounds by 2^-10 alone.
        assert_close(*attend(build, rows, keys, values), 1.5 * NUMBERS[numbers][1])


@needs_compiler
@pytest.mark.parametrize("walk", sampled(WALKS, 1))
def test_keys_hidden_by_a_large_number_leave_nothing(walk):
    problem = problem_of(Scoring(bias="f32"), "f16", batch=1)
    rows, keys = 20, 150
    for bias in hiding_biases(problem.num_q_heads, rows, keys):
        found, expected = attend(built(variant_of(walk, "f16"), problem), rows, keys, {"bias": bias})
        assert_right(found, expected, "f16")


@needs_compiler
@pytest.mark.parametrize(("name", "walk", "numbers", "causal"), sampled(cases()[:120], 1, thorough=20))
def test_the_suite_holds(name, walk, numbers, causal):
    problem = problem_of(SCORINGS[name], numbers, causal=causal)
    setting = Setting(variant_of(walk, numbers), problem, H200)
    assert check(setting, seed=3) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("name", "walk"), sampled([(n, w) for n in SCORINGS for w in ("main", "shared")], 0, thorough=12)
)
def test_nothing_is_read_that_is_not_there(name, walk):
    problem = problem_of(SCORINGS[name], causal=name == "prefix")
    build = built(variant_of(walk), problem, sanitize=True)
    for rows, keys in ((37, 53), (3, 5)):
        assert_right(*attend(build, rows, keys, drawn_values(problem, rows, keys), sanitize=True))


@needs_compiler
@pytest.mark.parametrize("numbers", sampled(["bf16", "3xf16"], 1))
@pytest.mark.parametrize("walk", sampled(["main", "packed", "splits"], 1))
@pytest.mark.parametrize("name", sampled(SCORINGS, 1, thorough=4))
def test_rows_computed_again_obey_it_all(name, walk, numbers):
    problem = problem_of(SCORINGS[name], numbers, causal=name == "prefix")
    build = built(variant_of(walk, numbers), problem, distrusting=True)
    for rows, keys in SHAPES:
        assert_right(*attend(build, rows, keys, drawn_values(problem, rows, keys)), numbers)


# -- one thing each --------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("numbers", sampled(["bf16", "3xf16", "3xtf32"], 1))
@pytest.mark.parametrize("walk", sampled(["main", "packed", "splits"], 1))
def test_small_scores_and_large_ones_are_capped_alike(walk, numbers):
    """Warps whose tiles have small ones alone, large ones in some, or nothing else."""
    problem = problem_of(Scoring(softcap=2.5), numbers)
    q, k, v = inputs(problem, 70, 90, SCALE, batch=2, heads=4, kv_heads=2)
    q[:, :, 16:48] = (q[:, :, 16:48].astype(np.float32) * 0.05).astype(q.dtype)
    k[:, :, 30:60] = (k[:, :, 30:60].astype(np.float32) * 30).astype(k.dtype)
    build = built(variant_of(walk, numbers), problem)
    assert_right(*attend(build, 70, 90, {"softcap": 2.5}, (q, k, v)), numbers)


@needs_compiler
@pytest.mark.parametrize("numbers", sampled(["bf16", "3xf16", "3xtf32"], 1))
def test_scores_beyond_float32_are_computed_again(numbers):
    """Some rows of a tile, under a window, a bias and sinks."""
    problem = problem_of(Scoring(window=(20, 0), bias="f32", sinks=True), numbers)
    q, k, v = inputs(problem, 37, 53, SCALE, batch=2, heads=4, kv_heads=2)
    q[:, :, ::5] = (q[:, :, ::5].astype(np.float32) * 1e6).astype(q.dtype)
    build = built(variant_of("main", numbers), problem)
    found, expected = attend(build, 37, 53, drawn_values(problem, 37, 53), (q, k, v))
    assert np.abs(found[0].astype(np.float64) - expected.o).max() <= NUMBERS[numbers][1]
    assert np.allclose(found[1], expected.lse, rtol=1e-6, atol=NUMBERS[numbers][1])


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["main", "one stage", "packed", "shared"], 1))
def test_what_no_row_sees_may_be_no_number(walk):
    """Behind each batch's length, and before a window, from the tile before on."""
    problem = problem_of(Scoring(lengths=True, window=(15, 0)))
    case, lengths = inputs(problem, 20, 200, SCALE, batch=2, heads=4, kv_heads=2), np.array([190, 200])
    for array in case[1:]:
        array[0, :, 190:] = np.nan
        array[:, :, : 200 - 20 - 15 - 32] = np.nan
    values = {"lengths": lengths, "window_left": 15, "window_right": 0}
    assert_right(*attend(built(variant_of(walk), problem), 20, 200, values, case))


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["key warps", "shared"], 1))
def test_decoding_with_a_window_walks_the_window(walk):
    problem = problem_of(Scoring(window=(100, 0), sinks=True))
    case = inputs(problem, 1, 900, SCALE, batch=2, heads=4, kv_heads=2)
    for array in case[1:]:
        array[:, :, : 900 - 101 - 32] = np.nan
    values = {**drawn_values(problem, 1, 900), "window_left": 100, "window_right": 0}
    assert_right(*attend(built(variant_of(walk), problem), 1, 900, values, case))


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["main", "packed", "splits"], 1))
def test_rows_that_see_nothing_have_the_sink_alone(walk):
    problem = problem_of(Scoring(documents=3, sinks=True))
    begins, ends = np.zeros((2, 60), int), np.full((2, 60), 45)
    ends[:, :9] = 0
    begins[:, 40:] = 30
    begins[1, 50:] = 45
    sinks = np.array([0.5, -np.inf, 3.0, -2.0])
    values = {"document_begin": begins, "document_end": ends, "sinks": sinks}
    found, expected = attend(built(variant_of(walk), problem), 60, 45, values)
    assert_right(found, expected)
    np.testing.assert_allclose(found[1][:, 0, :9], 0.5, rtol=1e-6)
    assert np.isneginf(found[1][:, 1, :9]).all()


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["main", "wide", "shared"], 1))
def test_an_additive_mask_of_minus_infinity_hides(walk):
    problem = problem_of(Scoring(bias="f32"))
    bias = np.zeros((2, 4, 37, 53), np.float32)
    bias[:, :, np.arange(37)[:, None] < np.arange(53) - 16] = -np.inf
    bias[0, :, 5] = -np.inf
    bias[1, :, :, :20] = -np.inf
    found, expected = attend(built(variant_of(walk), problem), 37, 53, {"bias": bias})
    assert_right(found, expected)
    assert (found[0][0, :, 5] == 0).all() and np.isneginf(found[1][0, :, 5]).all()


@needs_compiler
@pytest.mark.parametrize("numbers", sampled(["bf16", "3xf16"], 1))
def test_a_negative_scale_and_none_are_changed_scores_too(numbers):
    problem = problem_of(Scoring(softcap=2.0, alibi=True), numbers)
    build, values = built(variant_of("main", numbers), problem), drawn_values(problem, 37, 53)
    case = inputs(problem, 37, 53, SCALE, batch=2, heads=4, kv_heads=2)
    for scale in (-0.3, 0.0):
        found = SimRunner(H200).attend(build, *case, scale=scale, want_lse=True, values=values)
        right = reference.attention(*case, scale=scale, scores=problem.scores, values=values)
        assert_right(found, right, numbers)


# -- texts, rules, costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORINGS)
def test_sources_read_well(name):
    for walk in WALKS:
        problem = problem_of(SCORINGS[name], causal=True)
        if is_legal(variant_of(walk), problem):
            kernel = render(variant_of(walk), problem, H200)
            assert_tidy(kernel.source.replace(kernel.entry, "attention"), f"{name}, {walk}", longest=175)


def test_what_is_not_asked_is_not_there():
    window = render(MAIN, problem_of(SCORINGS["window"]), H200).source
    assert not any(word in window for word in ("change", "sees(", "seed(", "tanh", "tile_lists"))
    capped = render(MAIN, problem_of(SCORINGS["soft cap"]), H200).source
    assert "tanh.approx.f32" in capped and "sees(" not in capped and "begin_tile" not in capped
    exact = render(variant_of("main", "3xf16"), problem_of(SCORINGS["soft cap"], "3xf16"), H200).source
    assert "tanhf(" in exact and "tanh.approx" not in exact


@pytest.mark.parametrize("name", ["lengths", "documents", "mask"])
def test_heads_in_turn_see_the_same_keys(name):
    with pytest.raises(Illegal, match="heads in turn walk the same"):
        WALKS["in turn"].check(problem_of(SCORINGS[name]), H200)


def test_the_last_blocks_start_first_only_where_later_rows_see_more():
    heaviest = replace(MAIN, block_order="heaviest_first")
    told = [
        heaviest._blocks_differ(problem_of(scoring, causal=causal), H200) is not None
        for scoring, causal in (
            (Scoring(softcap=30.0), True),
            (PLAIN, False),
            (Scoring(window=(200, 0)), False),
            (Scoring(window=(3, 0)), True),
            (Scoring(chunk=64), True),
        )
    ]
    assert told == [False, True, False, True, True]


def test_a_window_decides_what_is_worth_trying():
    """Whether it decodes, and how many keys there are for tiles and stages, is a matter of the window."""
    sizes: dict[str, Any] = {
        "batch": 1,
        "seqlen_q": 1,
        "seqlen_k": 65536,
        "num_q_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 128,
    }
    whole, narrow = (problem_of(each, **sizes) for each in (PLAIN, Scoring(window=(15, 0))))
    assert decodes(whole) and not decodes(narrow)
    space = enumerate_space(Mma, problem_of(Scoring(window=(255, 0)), **sizes), H200)
    assert len(space) > 10
    assert all(variant.key_shares() * variant.bc <= 256 for variant in space.legal)


def work(scoring: Scoring, numbers: str = "bf16", **more: Any) -> BlockWork:
    problem = problem_of(scoring, numbers, seqlen_q=4096, seqlen_k=4096, head_dim=64, **more)
    counted = count_work(Mma(br=64, bc=64, parts=variant_of("main", numbers).parts), problem, H200)
    assert isinstance(counted, BlockWork)
    return counted


def test_a_window_is_paid_for_by_its_width():
    assert work(PLAIN).mean_tiles == 64
    assert 2.9 < work(Scoring(window=(127, 0))).mean_tiles <= 3
    assert work(Scoring(window=(1000, 0)), causal=True).mean_tiles < work(PLAIN, causal=True).mean_tiles


def test_changes_and_predicates_are_paid_for_pair_by_pair():
    plain, pairs = work(PLAIN).per_warp_tile, 32
    capped = work(Scoring(softcap=30.0)).per_warp_tile
    assert capped.exp == plain.exp and capped.ffma - plain.ffma == 4 * pairs  # tangents of what is small
    exact = work(Scoring(softcap=30.0), "3xf16").per_warp_tile
    assert 6 * pairs <= exact.ffma - work(PLAIN, "3xf16").per_warp_tile.ffma < 8 * pairs
    biased = work(Scoring(bias="f16")).per_warp_tile
    assert biased.accesses - plain.accesses == pairs
    hidden = work(Scoring(bias="u8")).per_warp_tile
    assert hidden.alu - plain.alu >= 3 * pairs
    assert work(Scoring(sinks=True)).per_warp_tile == plain


# -- as cards' compilers have them -----------------------------------------------------------------------


@pytest.mark.nvcc
@pytest.mark.parametrize("card", sampled(["t4", "a100", "rtx-4090", "h200", "b200"], 1, thorough=2))
@pytest.mark.parametrize("numbers", sampled(["f16", "3xf16"], 1))
@pytest.mark.parametrize(
    "name", sampled(["sums", "segments", "formulas", "hidden", "prefix", "always"], 1, thorough=2)
)
def test_scored_kernels_build(card, numbers, name, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    try:
        toolchain = cuda_toolchain(PRESETS[card].arch)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    problem = problem_of(SCORINGS[name], numbers, causal=True, head_dim=64, seqlen_q=512, seqlen_k=512)
    held = held_by(problem.dtype, problem.precision)
    for variant in draw(Mma, problem, preset(card), 1, random.Random(2), held):
        assert 0 < toolchain.build(render(variant, problem, preset(card))).registers <= 255


@needs_compiler
@pytest.mark.parametrize("name", ["a key x 1e37", "the last key NaN"])
def test_what_is_no_number_is_not_lost_where_it_is_all_that_a_row_sees_of_a_tile(name):
    """A polynomial exponential must keep it: a maximum of -inf, which ignores it, leaves nothing of sums."""
    problem = Problem(dtype="bf16", head_dim=32, scoring=Scoring(window=(5, 0), always=3))
    build = built(replace(WALKS["key warps"], poly_exp=3), problem)
    (found,) = adversarial_findings(SimRunner(H200), build, [case_named(name, "bf16")])
    assert found.kept, found.words()
