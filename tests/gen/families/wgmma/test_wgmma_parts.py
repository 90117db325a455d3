"""Hopper kernels that multiply float32 as f16 in two parts: on the emulated card, rules, what is counted."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.scores import scores_of
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import compare
from flashgen.tuner.predict.cost_model import predict
from flashgen.tuner.prove.sanitizers import for_sanitizer

from tests.support.covering import OF_PARTS, PARTS_HEAD_DIMS, Setting, draw, parts_settings, traits
from tests.support.emulated import COURSES, assert_tidy, check, inputs, is_caught, needs_compiler

H200 = preset("h200")
PARTED = Problem(precision="3xf16", head_dim=16, head_dim_v=16)
#: Kernels that were timed on an H200, batch 4, 16 heads, 4096 rows, without a mask: head dim, ms.
MEASURED = [
    (64, Wgmma(br=192, bc=48, schedule="chained", order_of_groups="products", k_stages=4, v_stages=4), 1.710),
    (64, Wgmma(br=192, bc=48, q_stages=2, k_stages=3, v_stages=3), 1.789),
    (64, Wgmma(br=128, bc=64), 2.250),
    (64, Wgmma(br=128, bc=96), 1.902),
    (64, Wgmma(br=128, bc=112, schedule="chained"), 1.886),
    (96, Wgmma(br=128, bc=64), 2.976),
    (80, Wgmma(br=128, bc=64), 2.857),
    (128, Wgmma(br=128, bc=48, order_of_groups="products"), 3.509),
    (128, Wgmma(br=128, bc=48, schedule="chained", order_of_groups="products"), 3.543),
    (32, Wgmma(br=256, bc=32), 1.288),
    (32, Wgmma(br=192, bc=64), 1.289),
    (32, Wgmma(br=128, bc=128), 1.283),
    (160, Wgmma(br=64, bc=32, schedule="chained"), 9.489),
    (64, Wgmma(br=192, bc=64, order_of_groups="products", k_stages=4, v_stages=4, split_by="tiles"), 1.575),
    (128, Wgmma(br=128, bc=32, schedule="chained", k_stages=3, v_stages=3, split_by="tiles"), 3.613),
    (128, Wgmma(br=128, bc=48, schedule="chained", order_of_groups="products", split_by="tiles"), 3.786),
]


# -- numerics -------------------------------------------------------------------------------------------


def of_each_head_dim() -> list[Setting]:
    """A kernel for each pair of head dims, that together have many values; a card tries the whole cover."""
    settings, chosen, unseen = parts_settings([H200]), [], set()
    for setting in settings:
        unseen |= traits(setting)
    for d, dv in PARTS_HEAD_DIMS:
        served = [s for s in settings if (s.problem.head_dim, s.problem.head_dim_v) == (d, dv)]
        chosen.append(max(served, key=lambda setting: len(unseen & traits(setting))))
        unseen -= traits(chosen[-1])
    return chosen


@pytest.mark.thorough
@needs_compiler
def test_every_head_dim_is_right():
    for seed, setting in enumerate(of_each_head_dim()):
        assert 0 < check(setting, seed) <= setting.problem.tolerance, setting.name


@pytest.mark.thorough
def test_the_cover_has_all_that_is_made_for_float32():
    singles = set().union(*map(traits, parts_settings([H200])))
    assert singles >= {("split_by", "rows"), ("split_by", "tiles"), ("causal", False), ("causal", True)}
    assert singles >= {("dims", dims) for dims in PARTS_HEAD_DIMS}


@needs_compiler
def test_the_full_suite():
    problem = replace(PARTED, head_dim=40, head_dim_v=24, causal=True)
    variant = Wgmma(br=128, bc=16, schedule="chained", order_of_groups="products", k_stages=3, v_stages=3)
    assert 0 < check(Setting(variant, problem, H200), seed=3, depth="full") <= problem.tolerance


@needs_compiler
def test_kernels_pass_the_sanitizer():
    problem = replace(PARTED, head_dim=72, head_dim_v=8, causal=True)
    check(Setting(Wgmma(br=64, bc=32, k_stages=1, v_stages=2), problem, H200), seed=1, sanitize=True)


@needs_compiler
def test_a_kernel_is_right_in_any_order():
    """To the bit; a block that stays for several tiles and warpgroups that see no key; rows that see none, a
    negative scale, and none."""
    problem, limits = replace(PARTED, causal=True), replace(H200, num_sms=2)
    variant = Wgmma(br=128, bc=32, schedule="chained", order_of_groups="products", q_stages=2)
    built = SimDevice("h200", limits).toolchain().build(render(variant, problem, limits))
    for rows, keys, scale in ((170, 177, 0.25), (150, 45, -0.3), (33, 50, 0.0)):
        q, k, v = inputs(problem, rows, keys, scale, "rising")
        results = [
            SimRunner(limits, seed=seed).attend(built, q, k, v, scale=scale, want_lse=True)
            for seed in range(8)
        ]
        assert len({(o.tobytes(), lse.tobytes()) for o, lse in results if lse is not None}) == 1
        o, lse = results[0]
        expected = reference.attention(q, k, v, scale=scale, scores=scores_of(causal=True))
        compare(o, lse, expected, v, problem, f"{rows} rows, {keys} keys")


@needs_compiler
@pytest.mark.parametrize("split_by", ["rows", "tiles"])
def test_racecheck_gets_the_same_kernel_with_more_arrivals(split_by):
    kernel = render(Wgmma(br=128, bc=32, k_stages=2, v_stages=2, split_by=split_by), PARTED, H200)
    q, k, v = inputs(PARTED, 150, 165, 0.25, "rising")
    results = []
    for tool in ("memcheck", "racecheck"):
        built = SimDevice("h200", H200).toolchain().build(for_sanitizer(kernel, tool))
        assert (built.kernel is kernel) == (tool == "memcheck")
        o, lse = SimRunner(H200).attend(built, q, k, v, scale=0.25, want_lse=True)
        assert lse is not None
        results.append((o.tobytes(), lse.tobytes()))
    assert results[0] == results[1]


@needs_compiler
@pytest.mark.parametrize("bc", [16, 48])
def test_each_eight_keys_have_a_unit(bc):
    """Of V, and of K with a Q that keeps scores of ordinary size; in tiles of one size, and of several."""
    built = SimDevice("h200", H200).toolchain().build(render(Wgmma(br=64, bc=bc), PARTED, H200))
    runner, rng = SimRunner(H200), np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, n, 16)) for n in (48, 80, 80))
    for course, sizes in COURSES.items():
        factors = np.repeat(sizes, 16)[:, None]
        for arrays in ((q, k, v * factors), (q / (factors.max() or 1.0), k * factors, v)):
            floats = [array.astype(np.float32) for array in arrays]
            o, _ = runner.attend(built, *floats, scale=0.25)
            expected = reference.attention(*floats, scale=0.25).o
            distance = np.linalg.norm(o - expected)
            assert distance <= PARTED.tolerance * np.linalg.norm(expected), course


@needs_compiler
@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
def test_tiny_queries_of_huge_keys_are_right(scale):
    """And a scale of zero, which makes all keys alike, however large."""
    built = SimDevice("h200", H200).toolchain().build(render(Wgmma(br=64, bc=32), PARTED, H200))
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 1, n, 16)).astype(np.float32) for n in (48, 80, 80))
    arrays = q * np.float32(1e-28), k * np.float32(1e28), v
    o, _ = SimRunner(H200).attend(built, *arrays, scale=scale)
    expected = reference.attention(*arrays, scale=scale).o
    assert np.linalg.norm(o - expected) <= PARTED.tolerance * np.linalg.norm(expected)


# -- mistakes -------------------------------------------------------------------------------------------

FENCE = "  fence_proxy_async();\n"


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("      barrier_wait(&smem.k_raw_full[stage], k_pipe.phase);\n", ""),
        (f"{FENCE}  __syncwarp();\n  if (lane", "  __syncwarp();\n  if (lane"),
        ("        __syncwarp();\n      }\n#pragma", "      }\n#pragma"),
        (f"{FENCE}  named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);", FENCE),
        (f"{FENCE}  named_barrier_sync(kConsumer", "  named_barrier_sync(kConsumer"),
        ("barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);\n    v_unit", "v_unit"),
        ("barrier_init(&smem.k_full[i], kArrivals * kSplitters)", "barrier_init(&smem.k_full[i], 1)"),
        ("barrier_init(&smem.k_empty[i], kArrivals * 4 *", "barrier_init(&smem.k_empty[i], kArrivals *"),
    ],
    ids=[
        "not arrived",
        "no fence",
        "read again",
        "others' queries",
        "queries without fence",
        "values not waited for",
        "split by one warp",
        "left by one warp",
    ],
)
def test_mistakes_between_those_that_split_and_those_that_multiply_are_caught(right, wrong):
    # Rows of three chunks are read twice, those of two once.
    columns = 136 if "}\n#pragma" in right else 16
    problem, limits = replace(PARTED, head_dim=columns, head_dim_v=16), replace(H200, num_sms=1)
    kernel = render(Wgmma(br=128, bc=32, k_stages=2, v_stages=2), problem, limits)
    assert is_caught(kernel, right, wrong, limits, ((150, 165, 0.2), (150, 13, 0.2)))


# -- what is counted ------------------------------------------------------------------------------------


def predicted(head_dim: int, variant: Wgmma) -> float:
    problem = Problem(precision="3xf16", head_dim=head_dim, head_dim_v=head_dim)
    return predict(variant, problem, H200).median_us / 1e3


@pytest.mark.parametrize(("head_dim", "variant", "ms"), MEASURED, ids=lambda value: str(value)[:12])
def test_predictions_are_near_to_what_was_measured(head_dim, variant, ms):
    assert 0.88 < predicted(head_dim, variant) / ms < 1.12


def test_predictions_rank_kernels():
    for (d, first, ms), (other, second, other_ms) in combinations(MEASURED, 2):
        if d == other and max(ms, other_ms) > 1.06 * min(ms, other_ms):
            assert (predicted(d, first) < predicted(d, second)) == (ms < other_ms), (first, second)


def test_work_is_of_three_products_and_of_splitting():
    problem = replace(PARTED, head_dim=64, head_dim_v=64)
    variant = Wgmma(br=192, bc=48)
    parted, half = (variant.work(each, H200) for each in (problem, Problem(dtype="f16")))
    assert parted.score_cycles == 3 * half.score_cycles and parted.output_cycles == 3 * half.output_cycles
    assert parted.tile_bytes == 2 * half.tile_bytes
    by_tiles = replace(variant, split_by="tiles", k_stages=3, v_stages=3).work(problem, H200)
    assert (by_tiles.split_rounds, by_tiles.split_waits, parted.split_waits) == (2, 1 / 3, 1)
    # Six groups of eight keys are one round of three warps, seven take another.
    rounds = [Wgmma(bc=bc).work(problem, H200).split_rounds for bc in (16, 48, 64, 96, 112)]
    assert rounds == [2, 2, 4, 4, 6] and half.split_rounds == half.split_slots == half.splitter_slots == 0
    wide = [Wgmma(br=64, bc=48).work(replace(problem, head_dim=d), H200) for d in (128, 160)]
    assert [each.split_rounds for each in wide] == [1 + 2 * 1, 1 + 2 * 1.25]
    # Tiles come, are read and written whatever the number of warpgroups, each of which reads them thrice.
    few = replace(variant, br=64).work(problem, H200)
    assert few.wavefronts - parted.wavefronts == pytest.approx(3 * 2 * 48 * 256 / 128 * (1 - 1 / 3))
    assert few.splitter_slots == 3 * parted.splitter_slots > 0


# -- sources and rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [replace(PARTED, head_dim=64, head_dim_v=64), replace(PARTED, head_dim=40, head_dim_v=136, causal=True)],
    ids=lambda problem: problem.name,
)
def test_legal_variants_render(problem):
    variants = draw(Wgmma, problem, H200, 10, random.Random(1), OF_PARTS)
    assert variants
    for variant in variants:
        kernel = render(variant, problem, H200)
        assert kernel.sm == "sm_90a"
        assert [each.array for each in kernel.launch.tensor_maps] == ["q", "k", "v"]
        assert_tidy(kernel.source, variant.name)


@pytest.mark.parametrize(
    ("changes", "variant", "message"),
    [
        ({"precision": "ieee"}, Wgmma(bc=48), "arithmetic: .* in parts of f16, precision ieee is asked for"),
        ({"precision": "tf32"}, Wgmma(bc=48), "arithmetic: .* in parts of f16, precision tf32"),
        ({"precision": "3xtf32"}, Wgmma(bc=48), "arithmetic: .* in parts of f16, precision 3xtf32"),
        ({"head_dim": 18, "head_dim_v": 16}, Wgmma(bc=48), "alignment: rows of 18 elements"),
        ({"head_dim_v": 20}, Wgmma(bc=48), "alignment: 20 columns of values are not a multiple of 8"),
        ({}, Wgmma(bc=48, cluster=2), "combination: cluster=2: each block splits f32 for itself"),
        ({}, Wgmma(bc=48, o_apart=True), "combination: o_apart=True: not made for f32"),
        ({}, Wgmma(bc=48, p_in_shared=True), "combination: p_in_shared=True: not made for f32"),
        ({}, Wgmma(bc=48, q_in_registers=True), "combination: q_in_registers=True: not made for f32"),
        ({}, Wgmma(bc=48, poly_exp=4), "combination: poly_exp=4: not made for f32"),
        ({}, Wgmma(bc=48, tail=16), "combination: tail=16: not made for f32"),
        (
            {},
            Wgmma(bc=48, v_stages=1, split_by="tiles"),
            "combination: split_by=tiles: with 1 stage of K or V",
        ),
        (
            {"dtype": "bf16", "precision": "auto"},
            Wgmma(split_by="tiles"),
            "combination: .*: bf16 is not split",
        ),
        (
            {"head_dim": 128, "head_dim_v": 128},
            Wgmma(bc=80),
            "registers: about 224 per computing thread, 216 allowed",
        ),
        (
            {"head_dim": 8, "head_dim_v": 8},
            Wgmma(br=192, bc=16, min_blocks=2),
            "registers: the warpgroup that copies keeps 72, a launch of 2 blocks of 512 threads per SM",
        ),
    ],
)
def test_rules(changes, variant, message):
    with pytest.raises(Illegal, match=message):
        render(variant, replace(PARTED, **changes), H200)


@pytest.mark.parametrize("precision", ["auto", "3xf16"])
def test_some_variant_serves_float32(precision):
    for head_dim in range(8, 161, 8):
        problem = Problem(precision=precision, head_dim=head_dim, head_dim_v=head_dim)
        Wgmma(br=64, bc=16).check(problem, H200)
