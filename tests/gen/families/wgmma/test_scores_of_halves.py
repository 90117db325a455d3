"""Kernels of e4m3 whose scores are pairs of f16: numerics at all scales, what f16 has no room for, rules."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.registers import needed_registers
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import EIGHT, Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import scores_of
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.adversarial import prove_promise
from flashgen.tuner.predict.cost_model import predict

from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import assert_breaks, assert_tidy, check, needs_compiler

H200 = preset("h200")
FLOATS = Wgmma(br=64, bc=64, weights="e4m3", values="in_front", powers="straight", promotion="segments")
PAIRS = replace(FLOATS, score_type="f16")
ASKED = Problem(dtype="e4m3", head_dim=64, head_dim_v=64, precision=EIGHT)
#: By what is new of each: masks, schedules, several consumers, narrow and wide columns, shared heads;
#: more keys in a tile than scores in floats leave registers for.
WAYS: dict[str, tuple[Wgmma, Problem]] = {
    "causal": (replace(PAIRS, br=128), replace(ASKED, causal=True)),
    "chained": (
        replace(PAIRS, br=128, bc=96, schedule="chained", order_of_groups="products"),
        replace(ASKED, head_dim=32, head_dim_v=144, causal=True),
    ),
    "summed by tiles": (
        replace(PAIRS, promotion="tiles", persistent=False, schedule="chained", bc=32),
        replace(ASKED, head_dim=48, head_dim_v=80, num_q_heads=6, num_kv_heads=2),
    ),
    "narrow": (PAIRS, replace(ASKED, head_dim=16, head_dim_v=16)),
    "many keys": (replace(PAIRS, br=256, bc=128, o_apart=True), replace(ASKED, causal=True)),
    "wide": (replace(PAIRS, br=128, bc=96), replace(ASKED, head_dim=32, head_dim_v=256, causal=True)),
}


def attended(kernel: Kernel, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float):
    """Outputs and log-sum-exps, and those in float64 of the same numbers."""
    arrays = [x.astype(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]
    floats = (x.astype(np.float32) for x in arrays)
    expected = reference.attention(*floats, scale=scale, scores=scores_of(causal=False))
    device = SimDevice("h200", H200)
    o, lse = device.open().attend(device.toolchain().build(kernel), *arrays, scale=scale, want_lse=True)
    return o.astype(np.float64), lse, expected


def distance(o: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(o - expected) / np.linalg.norm(expected))


def drawn(seed: int, keys: int = 333) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((1, 2, rows, 64)).astype(np.float32) for rows in (128, keys, keys))


# -- numerics -------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 4, thorough=len(WAYS)))
def test_outputs_are_those_of_float64(way):
    variant, problem = WAYS[way]
    assert 0 < check(Setting(variant, problem, H200), seed=5) <= problem.tolerance


@needs_compiler
def test_outputs_are_right_at_all_lengths():
    assert 0 < check(Setting(*WAYS["causal"], H200), seed=3, depth="full") <= ASKED.tolerance


@needs_compiler
def test_nothing_is_read_or_written_out_of_bounds():
    check(Setting(*WAYS["summed by tiles"], H200), seed=1, sanitize=True)


@needs_compiler
def test_the_promise_is_kept():
    """On scores and values that are no numbers, too, and on rows with keys that weigh next to nothing."""
    device = SimDevice("h200", H200)
    assert prove_promise(device.open(), device.toolchain().build(render(PAIRS, ASKED, H200)), "few") > 50


@needs_compiler
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("factor", [1 / 400, 1.0, 90.0])
def test_inputs_may_be_in_any_units(factor, sign):
    """Sums of products that f16 has no room for by far are brought into its range."""
    q, k, v = drawn(1)
    o, lse, expected = attended(
        render(PAIRS, ASKED, H200), q * factor, k * factor, v, sign * 0.125 / factor**2
    )
    assert distance(o, expected.o) < 0.05
    assert np.abs(lse - expected.lse).max() < 0.02


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 1e-12])
def test_without_a_scale_all_keys_weigh_as_much(scale):
    q, k, v = drawn(2)
    o, lse, expected = attended(render(PAIRS, ASKED, H200), q, k, v, scale)
    assert distance(o, expected.o) < 0.03
    assert np.abs(lse - expected.lse).max() < 0.02


@needs_compiler
@pytest.mark.parametrize("scale", [30.0, 5e4])
def test_rows_of_large_scores_are_computed_again(scale):
    """f16 keeps too few bits of them: those rows are as exact as outputs can be."""
    q, k, v = drawn(3)
    o, lse, expected = attended(render(PAIRS, ASKED, H200), q, k, v, scale)
    assert distance(o, expected.o) < 3e-3
    assert (np.abs(lse - expected.lse) < 1e-6 * np.abs(expected.lse)).all()


@needs_compiler
def test_sums_that_pass_below_and_come_back_are_noticed():
    """Half of a row's products with a key are far below f16's range, the other half farther above."""
    q, k, v = drawn(4)
    q, k = q / 16, k / 16
    q[..., 3, :32], q[..., 3, 32:], k[..., 9, :] = -384.0, 448.0, 448.0
    v[..., 9, :] = 7.0
    kernel, errors = render(PAIRS, ASKED, H200), []
    for source in (kernel.source, kernel.source.replace("    notice_overflow(s, softmax);\n", "")):
        o, _, expected = attended(replace(kernel, source=source), q, k, v, 0.125)
        errors.append(distance(o[:, :, 3], expected.o[:, :, 3]))
    assert errors[0] < 0.03 and errors[1] > 0.3


MISTAKES: dict[str, tuple[str, str]] = {
    "a maximum that lags too far": ("<= 0.75f)", "<= 2.0f)"),
    "numbers beyond the largest": ("(kWeightExponent + 7.0f) - 0.457f", "(kWeightExponent + 8.0f)"),
    "numbers of another row": ("base[i % 2]", "base[0]"),
    "weights too small that do not end at zero": (
        "larger_halves(fma_halves(s[i], twice(steps), base[i % 2]), kZeros)",
        "fma_halves(s[i], twice(steps), base[i % 2])",
    ),
    "bases rounded down once more": ("floorf(base + 0.03125f)", "floorf(base - 0.5f)"),
    "pairs of other keys": ("two[0], two[2], 0x6420", "two[0], two[1], 0x6420"),
    "the first of a pair's keys hidden": ("(pair & 0xffffu) | 0xfc000000u", "(pair & 0xffff0000u) | 0xfc00u"),
    "a pair hidden by its first key alone": ("t * 8 + 1 >= end", "t * 8 >= end"),
    "masks of one row": ("min(end, row + 8 * h +", "min(end, row +"),
    "bounds of half the keys": (
        "s[2 * t + h], s[2 * t + 2 + h]);\n    const",
        "s[2 * t + h], s[2 * t + h]);\n    const",
    ),
    "Q not brought down": ("if (q_factor != 1.0f) fit_q", "if (q_factor < 0.0f) fit_q"),
    "Q's sign kept": ("(args.scale < 0.0f ? -1.0f : 1.0f)", "1.0f"),
}


@needs_compiler
@pytest.mark.parametrize("mistake", sampled(MISTAKES, 4, thorough=len(MISTAKES)))
def test_mistakes_are_caught(mistake):
    right, wrong = MISTAKES[mistake]
    kernel = render(replace(PAIRS, br=128, schedule="chained"), replace(ASKED, causal=True), H200)
    assert_breaks(kernel, right, wrong, H200)


# -- what is counted, sources and rules -----------------------------------------------------------------


def test_pairs_take_half_the_registers_and_fewer_instructions():
    floats, pairs = (each.work(ASKED, H200) for each in (FLOATS, PAIRS))
    assert (floats.paired, pairs.paired) == (0.0, pairs.straight)
    assert needed_registers(FLOATS, ASKED) - needed_registers(PAIRS, ASKED) == FLOATS.bc // 4
    problem = replace(ASKED, seqlen_q=8192, seqlen_k=8192)
    slow, fast = (predict(replace(each, br=192), problem, H200).median_us for each in (FLOATS, PAIRS))
    assert fast < slow


@pytest.mark.parametrize("way", WAYS)
def test_sources_are_tidy(way):
    variant, problem = WAYS[way]
    kernel = render(variant, problem, H200)
    assert kernel.sm == "sm_90a" and kernel.is_deterministic
    assert_tidy(kernel.source, way, longest=180)


@pytest.mark.parametrize(
    ("problem", "variant", "message"),
    [
        (ASKED, replace(PAIRS, powers="rounded"), "score_type=f16: powers=rounded take scores of more bits"),
        (replace(ASKED, scoring=Scoring(alibi=True)), PAIRS, "score_type=f16: not made for scores that are"),
        (
            replace(ASKED, scoring=Scoring(window=(9, 0))),
            PAIRS,
            "score_type=f16: not made for scores that are",
        ),
        (ASKED, replace(PAIRS, q_in_registers=True), "score_type=f16: Q is brought into range in shared"),
        (ASKED, replace(PAIRS, rescale="always"), "rescale=always: maxima of score_type=f16 are looked for"),
    ],
)
def test_rules(problem, variant, message):
    with pytest.raises(Illegal, match=message):
        render(variant, problem, H200)
