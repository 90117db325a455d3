"""Masks and changes of scores in Hopper kernels: on the emulated card, beside float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.expression import Kind, Name, apply, loads_of, with_buffers
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.work import GroupWork
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import PLAIN, Scoring
from flashgen.gen.scoring.scores import KEY, QUERY, SCORE
from flashgen.gen.variant import Illegal
from flashgen.gen.work import count_work
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference

from tests.support import formulas
from tests.support.covering import Setting
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

H200 = preset("h200")
HEADS = {"num_q_heads": 4, "num_kv_heads": 2}
#: The largest errors, by type.
NUMBERS = {"f16": 2e-3, "bf16": 2e-2, "e4m3": 2e-2, "f32": 1e-5}
MAIN = Wgmma(br=128, bc=32)
#: Both schedules, each kind of cluster, one tile for a block and several, and each way of passing on Q,
#: weights and outputs.
WALKS = {
    "overlapped": MAIN,
    "chained": replace(MAIN, schedule="chained", order_of_groups="exponentials", bc=16),
    "three groups": replace(MAIN, br=192, order_of_groups="products", rescale="always", persistent=False),
    "neighbours": replace(MAIN, br=64, cluster=2, section=0, persistent=False),
    "heads": replace(MAIN, cluster=2, cluster_over="heads", k_stages=1, v_stages=1),
    "tail": replace(MAIN, br=64, bc=48, tail=16, poly_exp=4),
    "apart": replace(MAIN, o_apart=True, p_in_shared=True, k_stages=3, v_stages=3),
    "in registers": replace(MAIN, q_in_registers=True, q_stages=2, schedule="chained"),
    "by tiles": replace(MAIN, split_by="tiles"),
    "in front": replace(MAIN, split="in_front", schedule="chained", bc=48),
}
#: Those of float32 alone.
OF_PARTS = ("by tiles", "in front")
#: Of rows and keys: ragged; rows that see nothing under a causal mask; more keys; blocks of which no row sees
#: any, or few rows of the last.
SHAPES = ((150, 170), (200, 75), (70, 300), (129, 40))


CAPPED = Scoring(softcap=30.0)


def problem_of(scoring: Scoring, dtype: str = "bf16", *, causal: bool = False, **more: Any) -> Problem:
    sizes = {"batch": 2, "head_dim": 16, "seqlen_q": 300, "seqlen_k": 300, **HEADS, **more}
    return Problem(dtype=dtype, scoring=scoring, causal=causal, **sizes)


def assert_right(found, expected: reference.Reference, dtype: str = "bf16") -> None:
    assert_close(found, expected, NUMBERS[dtype])


def cases():
    """Every scoring by every walk and type, so ordered that any even share has some of each."""
    every = [
        (name, walk, dtype, causal)
        for name in SCORINGS
        for walk in WALKS
        for dtype in NUMBERS
        for causal in (False, True)
        if causal or name != "prefix"
        if is_legal(WALKS[walk], problem_of(SCORINGS[name], dtype, causal=causal))
    ]
    random.Random(1).shuffle(every)
    return every


@needs_compiler
@pytest.mark.parametrize(("name", "walk", "dtype", "causal"), sampled(cases(), 5, thorough=40))
def test_masks_and_changes_are_right(name, walk, dtype, causal):
    problem = problem_of(SCORINGS[name], dtype, causal=causal)
    for rows, keys in SHAPES:
        values = drawn_values(problem, rows, keys)
        assert_right(*attend(built(WALKS[walk], problem), rows, keys, values), dtype)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "walk", "causal"), sampled(cases_by_steps(WALKS, problem_of), 3, thorough=20)
)
def test_keys_at_every_so_many_are_seen(name, walk, causal):
    problem = problem_of(OF_STEPS[name], causal=causal)
    for found, expected in attended_by_steps(built(WALKS[walk], problem)):
        assert_right(found, expected)


@needs_compiler
@pytest.mark.parametrize(("walk", "num_sms"), [("apart", 3), ("heads", 5), ("overlapped", 64)])
def test_blocks_that_stay_take_every_tile_of_a_window_once(walk, num_sms):
    """Several rounds to and fro, the last one of fewer tiles than blocks."""
    problem = problem_of(Scoring(window=(70, 0), sinks=True), causal=True)
    limits = replace(H200, num_sms=num_sms)
    build = SimDevice("h200", limits).toolchain().build(render(WALKS[walk], problem, limits))
    for rows, keys in ((500, 500), (129, 300)):
        assert_right(*attend(build, rows, keys, drawn_values(problem, rows, keys)))


@needs_compiler
@pytest.mark.parametrize("walk", sampled([walk for walk in WALKS if walk not in OF_PARTS], 1))
def test_keys_hidden_by_a_large_number_leave_nothing(walk):
    problem = problem_of(Scoring(bias="f32"), "f16", batch=1)
    rows, keys = 20, 150
    for bias in hiding_biases(problem.num_q_heads, rows, keys):
        found, expected = attend(built(WALKS[walk], problem), rows, keys, {"bias": bias})
        assert_right(found, expected, "f16")


@needs_compiler
@pytest.mark.parametrize(("name", "walk", "dtype", "causal"), sampled(cases()[:120], 1, thorough=15))
def test_the_suite_holds(name, walk, dtype, causal):
    problem = problem_of(SCORINGS[name], dtype, causal=causal)
    assert check(Setting(WALKS[walk], problem, H200), seed=3) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("name", "walk"),
    sampled([(n, w) for n in SCORINGS for w in ("overlapped", "tail", "neighbours")], 0, thorough=10),
)
def test_nothing_is_read_that_is_not_there(name, walk):
    problem = problem_of(SCORINGS[name], causal=name == "prefix")
    if not is_legal(WALKS[walk], problem):
        pytest.skip("no such kernel")
    build = built(WALKS[walk], problem, sanitize=True)
    for rows, keys in ((150, 77), (3, 5)):
        assert_right(*attend(build, rows, keys, drawn_values(problem, rows, keys), sanitize=True))


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "e4m3"], 1))
@pytest.mark.parametrize("name", sampled(SCORINGS, 1, thorough=5))
def test_rows_computed_again_obey_it_all(name, dtype):
    problem = problem_of(SCORINGS[name], dtype, causal=name == "prefix")
    build = built(MAIN, problem, distrusting=True)
    for rows, keys in SHAPES[:2]:
        assert_right(*attend(build, rows, keys, drawn_values(problem, rows, keys)), dtype)


def masked_at_random(seed: int) -> Scoring:
    """A mask that nobody would write, by which each row sees some key."""
    rng = random.Random(seed)
    names = {name: f"{name}s" for name in formulas.BUFFERS}
    drawn = with_buffers(formulas.drawn(rng, Kind.BOOL, 3), names)
    drawn = drawn.with_names({SCORE.name: Name("slope", Kind.FLOAT)})  # masks know no score
    used = {load.buffer for load in loads_of(drawn)}
    return Scoring(
        mask=apply("or", drawn, apply("eq", KEY, QUERY % 7)).python(),
        buffers=tuple(
            (names[each], dtype) for each, dtype in formulas.BUFFERS.items() if names[each] in used
        ),
        scalars=tuple(each for each in formulas.SCALARS.items() if each[0] in drawn.names()),
    )


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "f32"], 1))
@pytest.mark.parametrize("seed", sampled(range(40), 2, thorough=12))
def test_random_masks_hide_what_they_say(seed, dtype):
    problem = problem_of(masked_at_random(seed), dtype)
    build = built(MAIN, problem)
    for rows, keys in SHAPES[:2]:
        assert_right(*attend(build, rows, keys, drawn_values(problem, rows, keys)), dtype)


# -- one thing each --------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "f32"], 1))
def test_scores_beyond_float32_are_computed_again(dtype):
    """Some rows of a tile, under a window, a bias and sinks."""
    problem = problem_of(Scoring(window=(20, 0), bias="f32", sinks=True), dtype)
    q, k, v = inputs(problem, 70, 90, SCALE, batch=2)
    q[:, :, ::5] = (q[:, :, ::5].astype(np.float32) * 1e6).astype(q.dtype)
    found, expected = attend(built(MAIN, problem), 70, 90, drawn_values(problem, 70, 90), (q, k, v))
    assert np.abs(found[0].astype(np.float64) - expected.o).max() <= NUMBERS[dtype]
    assert np.allclose(found[1], expected.lse, rtol=1e-6, atol=NUMBERS[dtype])


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["overlapped", "chained", "neighbours", "three groups"], 1))
def test_tiles_that_no_row_sees_may_be_no_numbers(walk):
    """Before a window, and behind it."""
    problem = problem_of(Scoring(window=(15, 9)))
    case = inputs(problem, 130, 700, SCALE, batch=2)
    for array in case[1:]:
        array[:, :, : 700 - 130 - 15 - 32] = np.nan
    values = {"window_left": 15, "window_right": 9}
    assert_right(*attend(built(WALKS[walk], problem), 130, 700, values, case))


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "e4m3", "f32"], 1))
@pytest.mark.parametrize("walk", sampled(["chained", "overlapped", "neighbours", "tail", "apart"], 1))
def test_what_is_behind_a_batch_s_keys_may_be_no_number(walk, dtype):
    problem = problem_of(Scoring(lengths=True), dtype)
    if not is_legal(WALKS[walk], problem):
        pytest.skip("no such kernel")
    lengths = np.array([107, 178])
    case = inputs(problem, 130, 180, SCALE, batch=2)
    for array in case[1:]:
        array[0, :, 107:] = np.nan
        array[1, :, 178:] = np.inf
    assert_right(*attend(built(WALKS[walk], problem), 130, 180, {"lengths": lengths}, case), dtype)


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["overlapped", "chained", "three groups"], 1))
def test_rows_that_see_nothing_have_the_sink_alone(walk):
    """Some rows of a warpgroup, all of one, and all of a block."""
    problem = problem_of(Scoring(documents=3, sinks=True))
    begins, ends = np.zeros((2, 400), int), np.full((2, 400), 145)
    ends[0, :9], ends[1, :200] = 0, 0
    begins[:, 240:] = 70
    begins[1, 300:] = 145
    sinks = np.array([0.5, -np.inf, 3.0, -2.0])
    values = {"document_begin": begins, "document_end": ends, "sinks": sinks}
    found, expected = attend(built(WALKS[walk], problem), 400, 145, values)
    assert_right(found, expected)
    np.testing.assert_allclose(found[1][0, 0, :9], 0.5, rtol=1e-6)
    assert np.isneginf(found[1][:, 1, :9]).all()


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "f32"], 1))
def test_an_additive_mask_of_minus_infinity_hides(dtype):
    problem = problem_of(Scoring(bias="f32"), dtype)
    bias = np.zeros((2, 4, 70, 90), np.float32)
    bias[:, :, np.arange(70)[:, None] < np.arange(90) - 20] = -np.inf
    bias[0, :, 5] = -np.inf
    bias[1, :, :, :40] = -np.inf
    found, expected = attend(built(MAIN, problem), 70, 90, {"bias": bias})
    assert_right(found, expected, dtype)
    assert (found[0][0, :, 5] == 0).all() and np.isneginf(found[1][0, :, 5]).all()


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "f32"], 1))
def test_a_negative_scale_and_none_are_changed_scores_too(dtype):
    """Also where raw scores change, in units of a scale that is next to nothing."""
    for scoring in (Scoring(softcap=2.0, alibi=True), Scoring(alibi=True, bias="f32")):
        problem = problem_of(scoring, dtype)
        values = drawn_values(problem, 70, 90)
        for scale in (-0.3, 0.0, 1e-36):
            assert_right(*attend(built(MAIN, problem), 70, 90, values, scale=scale), dtype)


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["overlapped", "chained", "tail"], 1))
@pytest.mark.parametrize("dtype", sampled(["bf16", "f32"], 1))
def test_small_scores_and_large_ones_are_capped_alike(dtype, walk):
    """Warps whose tiles have small ones alone, large ones in some, or nothing else."""
    problem = problem_of(Scoring(softcap=2.5), dtype)
    if not is_legal(WALKS[walk], problem):
        pytest.skip("no such kernel")
    q, k, v = inputs(problem, 150, 170, SCALE, batch=2)
    q[:, :, 16:80] = (q[:, :, 16:80].astype(np.float32) * 0.05).astype(q.dtype)
    k[:, :, 60:100] = (k[:, :, 60:100].astype(np.float32) * 30).astype(k.dtype)
    assert_right(*attend(built(WALKS[walk], problem), 150, 170, {"softcap": 2.5}, (q, k, v)), dtype)


#: The tangents within exponents that float32 has.
FINE = ("quintic", "septic", "nonic")
#: Further ways of float32 that launches in front split.
IN_FRONT = {
    "in front, overlapped": replace(MAIN, split="in_front", bc=48, order_of_groups="exponentials"),
    "in front, three groups": replace(MAIN, split="in_front", br=192, bc=64, persistent=False),
}
#: What is asked beside a soft cap: whole tiles and partial ones, listed ones, some that meet an array.
BESIDE_A_CAP = {
    "alone": Scoring(softcap=2.5),
    "window and sinks": Scoring(softcap=2.5, window=(90, 5), sinks=True),
    "documents": Scoring(softcap=2.5, mask="doc[b, q] == doc[b, k]"),
    "boolean": Scoring(softcap=2.5, bias="u8"),
    "slopes": Scoring(softcap=2.5, alibi=True),
}


@needs_compiler
@pytest.mark.parametrize(
    ("tangent", "beside", "walk", "dtype"),
    sampled(
        [
            (tangent, beside, walk, dtype)
            for dtype in ("bf16", "e4m3", "f16", "f32")
            for tangent in ("cubic", "unit", "quintic", "mixed", "septic", "nonic")
            for beside, scoring in BESIDE_A_CAP.items()
            for walk in ("tail", "overlapped", "chained", "three groups", "by tiles", "in front", *IN_FRONT)
            if is_legal(
                replace({**WALKS, **IN_FRONT}[walk], rescale="lazy", tangent=tangent),
                problem_of(scoring, dtype),
            )
        ],
        4,
        thorough=24,
    ),
)
def test_tangents_are_right_however_they_are_taken(tangent, beside, walk, dtype):
    problem = problem_of(BESIDE_A_CAP[beside], dtype)
    variant = replace({**WALKS, **IN_FRONT}[walk], rescale="lazy", tangent=tangent)
    q, k, v = inputs(problem, 150, 270, SCALE, batch=2)
    q[:, :, 16:100] = (q[:, :, 16:100].astype(np.float32) * 0.05).astype(q.dtype)
    k[:, :, 60:100] = (k[:, :, 60:100].astype(np.float32) * 30).astype(k.dtype)
    values = {**drawn_values(problem, 150, 270), "softcap": 2.5}
    assert_right(*attend(built(variant, problem), 150, 270, values, (q, k, v)), dtype)


@needs_compiler
@pytest.mark.parametrize(
    ("tangent", "walk"),
    sampled([(each, walk) for each in FINE for walk in ("overlapped", "by tiles", "in front", *IN_FRONT)], 2),
)
def test_tangents_of_float32_are_right_at_any_scale(tangent, walk):
    """Also of scores so large or small that units are at their ends, and of caps that make none small."""
    problem = problem_of(Scoring(softcap=2.5), "f32")
    build = built(replace({**WALKS, **IN_FRONT}[walk], tangent=tangent), problem)
    q, k, v = inputs(problem, 70, 170, SCALE, batch=2)
    q[:, :, 16:60] *= np.float32(0.05)
    for scale in (-0.3, 0.0, 1e-36, 4.0, 1e30):
        assert_right(*attend(build, 70, 170, {"softcap": 2.5}, (q, k, v), scale=scale), "f32")
    for softcap in (1e-30, -2.5, 1e9):
        assert_right(*attend(build, 70, 170, {"softcap": softcap}, (q, k, v)), "f32")
    for queries, keys in ((1e-20, 1.0), (1e17, 1e17), (0.0, 1.0)):
        case = q * np.float32(queries), k * np.float32(keys), v
        assert_right(*attend(build, 70, 170, {"softcap": 2.5}, case), "f32")


@needs_compiler
@pytest.mark.parametrize(
    ("tangent", "walk", "causal"),
    sampled(
        [
            (tangent, walk, causal)
            for tangent in FINE
            for walk in ("chained", "in front", *IN_FRONT)
            for causal in (False, True)
        ],
        1,
        thorough=8,
    ),
)
def test_tangents_of_float32_hold_the_suite(tangent, walk, causal):
    problem = problem_of(CAPPED, "f32", causal=causal)
    variant = replace({**WALKS, **IN_FRONT}[walk], tangent=tangent)
    assert 0 < check(Setting(variant, problem, H200), seed=3) <= problem.tolerance


def test_tangents_are_a_choice_where_scores_take_one():
    capped, sloped = problem_of(Scoring(softcap=30.0)), problem_of(Scoring(softcap=30.0, alibi=True))
    for tangent in ("unit", "mixed", "cubic", "quintic"):
        variant = replace(MAIN, tangent=tangent)
        assert is_legal(variant, capped)
        assert is_legal(variant, sloped) == (tangent in ("unit", "mixed"))
        for problem in (problem_of(PLAIN), problem_of(Scoring(alibi=True))):
            with pytest.raises(Illegal, match="no hyperbolic tangent of a multiple of scores"):
                render(variant, problem, H200)
        fine = problem_of(Scoring(softcap=30.0), "f32")
        if tangent == "quintic":
            assert is_legal(variant, fine)
            continue
        with pytest.raises(Illegal, match="f32 has tangents of its own precision"):
            render(variant, fine, H200)
    for tangent in FINE[1:]:
        variant = replace(MAIN, tangent=tangent)
        with pytest.raises(Illegal, match="bf16 bears tangents of fewer powers"):
            render(variant, capped, H200)
        assert is_legal(variant, problem_of(Scoring(softcap=30.0), "f32"))
        with pytest.raises(Illegal, match="more becomes than a tangent"):
            render(variant, problem_of(Scoring(softcap=30.0, alibi=True), "f32"), H200)
        with pytest.raises(Illegal, match="not made for rescale=always"):
            render(replace(variant, rescale="always"), problem_of(Scoring(softcap=30.0), "f32"), H200)
    with pytest.raises(Illegal, match="more becomes than a tangent"):
        render(replace(MAIN, tangent="cubic"), sloped, H200)
    with pytest.raises(Illegal, match="not made for rescale=always"):
        render(replace(MAIN, tangent="cubic", rescale="always"), capped, H200)
    by_turns = replace(MAIN, tangent="mixed")
    assert "within exponents" in str(by_turns._tangents_are_within_exponents(capped, H200))
    assert by_turns._tangents_are_within_exponents(sloped, H200) is None


def test_tangents_are_paid_for_by_how_they_are_taken():
    def counted(
        tangent: str, scoring: Scoring = CAPPED, dtype: str = "bf16", split: str = "in_place", **more: Any
    ) -> GroupWork:
        problem = problem_of(scoring, dtype, seqlen_q=4096, seqlen_k=4096, head_dim=64, **more)
        found = count_work(Wgmma(br=128, bc=64, tangent=tangent, split=split), problem, H200)
        assert isinstance(found, GroupWork)
        return found

    scores = counted("cubic").scores
    assert counted("unit").asked_functions == scores and counted("unit").asked_slots == 2 * scores
    assert counted("mixed").asked_functions == scores / 2 and counted("mixed").asked_slots == 3.5 * scores
    assert counted("cubic").asked_functions == 0 and counted("cubic").asked_slots == 2.25 * scores
    assert counted("quintic").asked_slots == 3.25 * scores
    for i, tangent in enumerate(FINE):
        for split, slots in (("in_place", 4.25), ("in_front", 3.25)):
            fine = counted(tangent, dtype="f32", split=split)
            assert fine.asked_slots == (slots + i) * scores and fine.asked_functions == 0
            assert fine.asked_slots < counted("polynomial", dtype="f32", split=split).asked_slots
    narrow = Scoring(softcap=30.0, window=(60, 0))  # of which no tile is whole
    assert counted("cubic", narrow, causal=True) == counted("unit", narrow, causal=True)


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "f32"], 1))
def test_rows_of_zeros_are_changed_too(dtype):
    """Of queries without a unit to be brought in."""
    problem = problem_of(Scoring(alibi=True, bias="f32"), dtype)
    q, k, v = inputs(problem, 70, 90, SCALE, batch=2)
    q[:, :, ::3] = 0
    assert_right(*attend(built(MAIN, problem), 70, 90, drawn_values(problem, 70, 90), (q, k, v)), dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "f32"], 1))
def test_what_is_added_to_a_row_may_hide_it(dtype):
    problem = problem_of(Scoring(score="score + of_row[b, h, q]"), dtype)
    of_row = np.random.default_rng(1).uniform(-3, 3, (2, 4, 70))
    of_row[:, 1, ::4] = -np.inf
    found, expected = attend(built(MAIN, problem), 70, 90, {"of_row": of_row.astype(np.float32)})
    assert_right(found, expected, dtype)
    assert np.isneginf(found[1][:, 1, ::4]).all()


# -- ramps, which products take along -----------------------------------------------------------------------

ALIBI = Scoring(alibi=True)
SIXTEEN_BITS = [walk for walk in WALKS if walk not in OF_PARTS]


def sloped(walk: str, slopes, dtype: str = "bf16", *, scale: float = SCALE, queries: float = 1.0, rows=150):
    """What a kernel makes of causal ALiBi with such slopes by batch and head, and the reference."""
    problem = problem_of(ALIBI, dtype, causal=True)
    q, k, v = inputs(problem, rows, 170, scale or SCALE, batch=2)
    q = (q.astype(np.float32) * queries).astype(q.dtype)
    values = {"slopes": np.array(slopes, np.float32)}
    return attend(built(WALKS[walk], problem), rows, 170, values, (q, k, v), scale=scale)


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["bf16", "f16", "e4m3"], 1))
@pytest.mark.parametrize("walk", sampled(SIXTEEN_BITS, 1))
def test_steps_that_ride_on_products_are_of_float32(walk, dtype):
    """Where queries are zeros nothing else is left of scores: by log-sum-exps, to float32's precision."""
    if not is_legal(WALKS[walk], problem_of(ALIBI, dtype, causal=True)):
        pytest.skip("no such kernel")
    slopes = np.array([[8.0, 1 / 3, 1e-3, 2.0**-30], [-0.7, 0.0, 1e-12, 1000 / 7]])
    found, expected = sloped(walk, slopes, dtype, queries=0.0)
    assert_right(found, expected, dtype)
    largest = 1 + np.abs(slopes)[..., None] * 170  # of a row's scores
    exponentials = 1e-4 if WALKS[walk].poly_exp else 2e-6
    assert (np.abs(found[1] - expected.lse) <= 2.0**-22 * largest + exponentials).all()


@needs_compiler
@pytest.mark.parametrize("scale", sampled([-0.3, 0.0, 1e-36, 4.0], 1))
@pytest.mark.parametrize("walk", sampled(SIXTEEN_BITS, 1))
def test_steps_are_in_units_of_any_scale(walk, scale):
    for slopes in (2.0 ** -np.arange(8.0).reshape(2, 4), 8.0 * np.ones((2, 4)), np.full((2, 4), 2.0**-8)):
        assert_right(*sloped(walk, slopes, scale=scale))


@needs_compiler
@pytest.mark.parametrize("walk", sampled(SIXTEEN_BITS, 1))
def test_a_ramp_turns_with_the_causal_flag(walk):
    """A source is built with no causal mask, too, where steps are others behind the diagonal."""
    kernel = render(WALKS[walk], problem_of(ALIBI, causal=True), H200)
    assert "make_ramp" in kernel.source and "#define FLASHGEN_CAUSAL 1" in kernel.source
    source = kernel.source.replace("#define FLASHGEN_CAUSAL 1", "#define FLASHGEN_CAUSAL 0")
    turned = replace(kernel, source=source, problem=problem_of(ALIBI))
    build = SimDevice("h200", H200).toolchain().build(turned)
    for rows, keys in SHAPES:
        assert_right(*attend(build, rows, keys, drawn_values(turned.problem, rows, keys)))


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["apart", "heads", "overlapped", "in registers"], 1))
def test_blocks_that_stay_make_a_ramp_for_every_tile(walk):
    """Of other heads and rows, by steps that are others for each row."""
    scoring = Scoring(score="score + 0.1 * gain[b, h, q] * (k - q)")
    problem = problem_of(scoring, causal=True)
    limits = replace(H200, num_sms=3)
    kernel = render(WALKS[walk], problem, limits)
    assert "make_ramp" in kernel.source
    build = SimDevice("h200", limits).toolchain().build(kernel)
    for rows, keys in ((500, 500), (129, 300)):
        assert_right(*attend(build, rows, keys, drawn_values(problem, rows, keys)))


# -- texts, rules, costs ---------------------------------------------------------------------------------


def test_ramps_ride_where_tensor_cores_have_time():
    """And where a row's steps are the same for all tiles."""

    def rides(head_dim: int, dtype: str = "bf16", *, causal: bool = True) -> bool:
        problem = problem_of(ALIBI, dtype, causal=causal, head_dim=head_dim)
        return "make_ramp" in render(Wgmma(br=64, bc=32), problem, H200).source

    assert rides(64) and rides(64, "f16") and rides(80, "e4m3")
    assert not rides(128) and not rides(64, "f32") and not rides(64, causal=False)


@pytest.mark.parametrize("name", SCORINGS)
def test_sources_read_well(name):
    for walk, dtype in zip(("overlapped", "neighbours", "three groups", "by tiles"), NUMBERS, strict=True):
        problem = problem_of(SCORINGS[name], dtype, causal=True)
        if is_legal(WALKS[walk], problem):
            kernel = render(WALKS[walk], problem, H200)
            assert_tidy(kernel.source.replace(kernel.entry, "attention"), f"{name}, {walk}", longest=175)


def test_what_is_not_asked_is_not_there():
    window = render(MAIN, problem_of(SCORINGS["window"]), H200).source
    assert not any(word in window for word in ("change", "sees(", "sink", "tanh", "tile_lists"))
    capped = render(MAIN, problem_of(SCORINGS["soft cap"]), H200).source
    assert "tanh.approx.f32" in capped and "sees(" not in capped and "hide_first" not in capped
    exact = render(MAIN, problem_of(SCORINGS["soft cap"], "f32"), H200).source
    assert "tanhf(" in exact and "tanh.approx" not in exact


def refusal(variant: Wgmma, problem: Problem) -> str:
    with pytest.raises(Illegal) as refused:
        variant.check(problem, H200)
    return str(refused.value)


def test_heads_that_see_others_walk_for_themselves():
    hidden = problem_of(Scoring(mask="k % (h + 2) != 1"), seqlen_q=500)
    assert "each sees others" in refusal(WALKS["heads"], hidden)
    assert is_legal(WALKS["heads"], problem_of(Scoring(dilation=3), seqlen_q=500))


def test_lists_of_tiles_have_no_narrow_end():
    assert "lists of tiles" in refusal(WALKS["tail"], problem_of(Scoring(dilation=3)))


def test_advice_asks_for_the_keys_that_a_block_walks():
    long: dict[str, Any] = {"seqlen_q": 8192, "seqlen_k": 8192, "head_dim": 64}
    narrow = problem_of(Scoring(window=(127, 0)), causal=True, **long)
    many_stages = Wgmma(bc=128, k_stages=4, v_stages=4)
    assert "255 keys are 2 tiles" in str(many_stages._stages_are_used(narrow, H200))
    assert many_stages._stages_are_used(problem_of(PLAIN, causal=True, **long), H200) is None
    assert "128 keys apart" in str(Wgmma(cluster=2)._neighbours_have_as_much_to_do(narrow, H200))
    capped = problem_of(Scoring(softcap=30.0), causal=True, **long)
    assert "under this mask" in str(Wgmma(section=4)._sections_fill_l2(narrow, H200))
    wide = problem_of(Scoring(window=(4095, 0)), causal=True, **long)
    assert "under this mask" not in str(Wgmma(section=4)._sections_fill_l2(wide, H200))
    assert "under this mask" not in str(Wgmma(section=4)._sections_fill_l2(capped, H200))


def test_exponentials_by_polynomial_are_tried_where_changes_ask_for_more_functions():
    variant = Wgmma(poly_exp=4)
    long: dict[str, Any] = {"head_dim": 128, "seqlen_q": 4096, "seqlen_k": 4096}
    for scoring in (PLAIN, Scoring(alibi=True), Scoring(softcap=30.0)):
        assert "products take longer" in str(
            variant._exponentials_are_many(problem_of(scoring, **long), H200)
        )
    asked = problem_of(Scoring(score="score * exp(-0.01 * abs(q - k)) + sigmoid(score)"), **long)
    assert variant._exponentials_are_many(asked, H200) is None


def work(scoring: Scoring, dtype: str = "bf16", **more: Any) -> GroupWork:
    problem = problem_of(scoring, dtype, seqlen_q=4096, seqlen_k=4096, head_dim=64, **more)
    counted = count_work(Wgmma(br=128, bc=64), problem, H200)
    assert isinstance(counted, GroupWork)
    return counted


def test_a_window_is_paid_for_by_its_width():
    assert work(PLAIN).tiles == 64
    assert 2.9 < work(Scoring(window=(127, 0))).tiles <= 3
    assert max(work(Scoring(window=(127, 0))).walks) == 4
    assert work(Scoring(window=(1000, 0)), causal=True).tiles < work(PLAIN, causal=True).tiles


def test_changes_are_paid_for_score_by_score():
    scores = work(PLAIN).scores
    assert work(PLAIN).asked_slots == 0 == work(Scoring(sinks=True)).asked_slots
    capped = work(Scoring(softcap=30.0))
    assert capped.asked_functions == 0 and capped.asked_slots == 5 * scores  # tangents of what is small
    assert work(Scoring(softcap=30.0), "f32").asked_slots > 5 * scores
    sloped = work(Scoring(alibi=True))
    assert sloped.asked_functions < scores / 4  # integers become floats once a row
    assert scores <= sloped.asked_slots < 1.4 * scores  # a multiply-add for each score, and some for each row
    ramped = work(ALIBI, causal=True)
    assert ramped.asked_slots <= scores / 4 and ramped.score_cycles == 5 / 4 * work(PLAIN).score_cycles
    assert ramped.wavefronts == work(PLAIN).wavefronts + 64 * 32 / 128
    assert work(Scoring(score="score + t[h, k * q]")).asked_wavefronts >= 4 * 8 * scores
    # What slides past a tile: each element is read once, lanes' side by side.
    assert work(Scoring(score="score + t[h, k - q]")).asked_wavefronts == 4 * (scores / 2 + 2)
    # What comes ahead passes through shared memory as a whole, to it and from it: of 32 lanes of four warps.
    assert work(Scoring(bias="f16")).asked_wavefronts == 2 * scores * 4 * 32 * 2 / 128


# -- as the card's compiler has them ---------------------------------------------------------------------


@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", sampled(["bf16", "e4m3", "f32"], 1))
@pytest.mark.parametrize(
    "name", sampled(["sums", "segments", "formulas", "hidden", "prefix", "always"], 1, thorough=2)
)
def test_scored_kernels_build(dtype, name, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    try:
        toolchain = cuda_toolchain(H200.arch)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    problem = problem_of(SCORINGS[name], dtype, causal=True, head_dim=64)
    assert 0 < toolchain.build(render(Wgmma(bc=64), problem, H200)).registers <= 255
