"""Kernels of e4m3 whose values a launch in front turns into what products read: numerics, mistakes, rules."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.append import Append
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.parameters import SEGMENT_KEYS
from flashgen.gen.families.wgmma.registers import needed_registers, producer_registers
from flashgen.gen.launch import MAIN_ROLE, WALKED_TILES_ROLE
from flashgen.gen.limits import preset
from flashgen.gen.problem import EIGHT, Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import scores_of
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.adversarial import prove_promise
from flashgen.tuner.predict.cost_model import predict

from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import assert_breaks, assert_tidy, check, is_caught, needs_compiler

H200 = preset("h200")
HALF = Wgmma(br=64, bc=48, values="in_front")
SMALL_WEIGHTS = replace(HALF, bc=32, weights="e4m3")
KEPT = replace(SMALL_WEIGHTS, promotion="segments")
STRAIGHT = replace(KEPT, powers="straight")
PLAIN = Problem(dtype="e4m3", head_dim=64, head_dim_v=64)
ASKED = replace(PLAIN, precision=EIGHT)

#: By what is new of each: columns of less than a chunk and of more, heads that share keys, schedules, blocks
#: that stay and that do not, several consumers, scores of all kinds.
WAYS: dict[str, tuple[Wgmma, Problem]] = {
    "half": (HALF, replace(PLAIN, causal=True)),
    "half, narrow": (replace(HALF, bc=16, persistent=False), replace(PLAIN, head_dim=16, head_dim_v=16)),
    "half, odd chunks": (
        replace(HALF, br=192, bc=80, schedule="chained", o_apart=True),
        replace(PLAIN, head_dim=48, head_dim_v=80, num_q_heads=6, num_kv_heads=2),
    ),
    "half, wide": (
        replace(HALF, br=128, bc=64, order_of_groups="products"),
        replace(PLAIN, head_dim=256, head_dim_v=256, causal=True),
    ),
    "half, lengths": (HALF, replace(PLAIN, scoring=Scoring(lengths=True))),
    "half, lists": (replace(HALF, bc=32), replace(PLAIN, scoring=Scoring(mask="(q + k) % 3 > 0"))),
    "eight": (SMALL_WEIGHTS, replace(ASKED, causal=True)),
    "eight, narrow": (
        replace(SMALL_WEIGHTS, persistent=False),
        replace(ASKED, head_dim=16, head_dim_v=16),
    ),
    "eight, odd chunks": (
        replace(SMALL_WEIGHTS, br=128, bc=96, schedule="chained"),
        replace(ASKED, head_dim=48, head_dim_v=80, num_q_heads=6, num_kv_heads=2),
    ),
    "eight, scored": (
        SMALL_WEIGHTS,
        replace(ASKED, causal=True, scoring=Scoring(window=(40, 0), softcap=20.0, sinks=True)),
    ),
    "half, queries in registers": (
        replace(HALF, q_in_registers=True, o_apart=True),
        replace(PLAIN, head_dim=48, head_dim_v=80, causal=True),
    ),
    "kept, queries in registers": (
        replace(KEPT, bc=64, q_in_registers=True),
        replace(ASKED, scoring=Scoring(alibi=True)),
    ),
    "kept": (replace(KEPT, br=128), replace(ASKED, causal=True)),
    "kept, chained": (
        replace(KEPT, schedule="chained", rescale="always", order_of_groups="free"),
        replace(ASKED, head_dim=32, head_dim_v=144),
    ),
    "straight": (replace(STRAIGHT, br=128), replace(ASKED, causal=True)),
    "straight, apart": (
        replace(STRAIGHT, promotion="tiles", persistent=False, schedule="chained"),
        replace(ASKED, head_dim=48, head_dim_v=80, num_q_heads=6, num_kv_heads=2),
    ),
    "straight, apart and overlapped": (
        replace(STRAIGHT, promotion="tiles", bc=64, rescale="always"),
        replace(ASKED, head_dim=16, head_dim_v=16),
    ),
    "straight, chained": (
        replace(STRAIGHT, br=128, bc=96, schedule="chained", order_of_groups="products"),
        replace(ASKED, head_dim=32, head_dim_v=144, causal=True),
    ),
    "straight, sums alone": (
        replace(STRAIGHT, br=128, bc=64),
        replace(ASKED, head_dim=32, head_dim_v=256, causal=True),
    ),
    "straight, scored": (
        STRAIGHT,
        replace(ASKED, causal=True, scoring=Scoring(window=(40, 0), softcap=20.0, sinks=True, alibi=True)),
    ),
    "straight, lists": (STRAIGHT, replace(ASKED, scoring=Scoring(mask="(q + k) % 3 > 0", bias="f16"))),
    "kept, lists": (KEPT, replace(ASKED, scoring=Scoring(mask="(q + k) % 3 > 0", bias="f16"))),
}


@pytest.fixture
def short_segments(monkeypatch):
    """Sums are kept of a few tiles each."""
    monkeypatch.setattr("flashgen.gen.families.wgmma.family.SEGMENT_KEYS", 64)


# -- numerics -------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("way", sampled(WAYS, 6, thorough=len(WAYS)))
def test_outputs_are_those_of_float64(way):
    variant, problem = WAYS[way]
    assert 0 < check(Setting(variant, problem, H200), seed=5) <= problem.tolerance


@needs_compiler
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("way", sampled(["half", "eight", "kept", "straight"], 1, thorough=4))
def test_outputs_are_right_at_all_lengths(way):
    variant, problem = WAYS[way]
    assert 0 < check(Setting(variant, problem, H200), seed=3, depth="full") <= problem.tolerance


@needs_compiler
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    "way", sampled(["half, odd chunks", "eight, odd chunks", "kept", "straight"], 1, thorough=4)
)
def test_nothing_is_read_or_written_out_of_bounds(way):
    variant, problem = WAYS[way]
    check(Setting(variant, problem, H200), seed=1, sanitize=True)


@needs_compiler
@pytest.mark.usefixtures("short_segments")
def test_a_kernel_is_right_in_any_order():
    """To the bit: blocks that stay have room for sums of their own, and for those of no tile before."""
    problem, limits = replace(ASKED, causal=True, num_q_heads=4, num_kv_heads=2), replace(H200, num_sms=2)
    built = SimDevice("h200", limits).toolchain().build(render(replace(KEPT, br=128), problem, limits))
    rng, numbers = np.random.default_rng(4), ml_dtypes.float8_e4m3fn
    q, k, v = (
        rng.standard_normal(shape).astype(numbers)
        for shape in ((1, 4, 300, 64), (1, 2, 310, 64), (1, 2, 310, 64))
    )
    results = [SimRunner(limits, seed=seed).attend(built, q, k, v, scale=0.2) for seed in range(6)]
    assert len({o.tobytes() for o, _ in results}) == 1
    floats = (x.astype(np.float32) for x in (q, k, v))
    expected = reference.attention(*floats, scale=0.2, scores=scores_of(causal=True)).o
    distance = np.linalg.norm(results[0][0].astype(np.float64) - expected)
    assert distance <= 0.04 * np.linalg.norm(expected)


@needs_compiler
def test_segments_bound_what_tensor_cores_cut_off():
    """Of values that are all alike and of one sign, a sum of 8192 would lose a fifth of itself."""
    problem, numbers = replace(ASKED, head_dim=16, head_dim_v=16), ml_dtypes.float8_e4m3fn
    variant = replace(KEPT, bc=128)
    device = SimDevice("h200", H200)
    build = device.toolchain().build(render(variant, problem, H200))
    q, k = np.zeros((1, 1, 64, 16), numbers), np.zeros((1, 1, 8192, 16), numbers)
    o, _ = device.open().attend(build, q, k, np.full(k.shape, 1.875, numbers), scale=1.0)
    lost = 1 - o.astype(np.float64) / 1.875
    assert lost.min() > 0 and lost.max() < 0.04


# -- mistakes -------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[Wgmma, str, str]] = {
    "tiles in one place": (HALF, "* tiles + tile) * kVBytes", "* tiles) * kVBytes"),
    "heads in one place": (HALF, "* args.num_kv_heads + head)", "* args.num_kv_heads)"),
    "rows behind the last": (HALF, "first_key + row < args.seqlen_k", "true"),
    "halves not swizzled": (HALF, "column % kChunk / 8 ^ row % 8", "column % kChunk / 8"),
    "halves of other columns": (HALF, "pieces[place ^ 1]", "pieces[place ^ 2]"),
    "fewer bytes awaited": (HALF, "kVBytes = kBc *", "kVBytes = 16 + kBc *"),
    "keys behind the last": (SMALL_WEIGHTS, "first_key + key < args.seqlen_k", "true"),
    "keys in their own order": (SMALL_WEIGHTS, "j / 4 * 2 + j % 4 / 2 * 8 + j % 2", "j"),
    "columns not swizzled": (SMALL_WEIGHTS, "sixteen % 2 ^ (column + j) / 4 % 2", "sixteen % 2"),
    "read as if swizzled otherwise": (SMALL_WEIGHTS, "kSwizzle32 = 3ULL", "kSwizzle32 = 2ULL"),
    "columns exchanged": (SMALL_WEIGHTS, "0x7362 : 0x5140", "0x5140 : 0x7362"),
    "halves of four exchanged": (SMALL_WEIGHTS, "first, last, 0x5410", "last, first, 0x5410"),
    "sums forgotten": (KEPT, "if (has_kept) add_kept(args, o, softmax);", ""),
    "sums of no tile": (KEPT, "bool has_kept = false;", "bool has_kept = true;"),
    "sums against other maxima": (KEPT, " factor[j % 2], two[0])", " factor[0], two[0])"),
    "sums twice": (KEPT, "o[i] = 0.0f;", ";"),
    "sums of all blocks in one place": (KEPT, "blockIdx.x * kConsumers + threadIdx", "threadIdx"),
}


@needs_compiler
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("mistake", sampled(MISTAKES, 5, thorough=len(MISTAKES)))
def test_mistakes_are_caught(mistake):
    limits = replace(H200, num_sms=2)
    variant, right, wrong = MISTAKES[mistake]
    problem = replace(ASKED if variant.has_small_weights() else PLAIN, num_q_heads=4, num_kv_heads=2)
    kernel = render(variant, problem, limits)
    assert is_caught(kernel, right, wrong, limits, ((150, 333, 0.3), (150, 13, -0.2)))


STRAIGHT_MISTAKES: dict[str, tuple[str, str]] = {
    "ones that are twos": ("0x38383838u", "0x40404040u"),
    "ones in another column": ("i % 16 < 2 ?", "i % 16 / 2 == 1 ?"),
    "a maximum that lags too far": ("<= 0.75f)", "<= 2.0f)"),
    "numbers beyond the largest": ("(kWeightExponent + 7.0f) - 0.457f", "(kWeightExponent + 8.0f)"),
    "numbers of another row": ("base[i % 2]", "base[0]"),
    "weights too small that do not saturate": ("fma_saturated(s[2", "fmaf(s[2"),
    "half as steep": ("scale * (kSteps / 128.0f)", "scale * (kSteps / 256.0f)"),
    "pairs of other keys": ("two[0], two[2], 0x5410", "two[0], two[1], 0x5410"),
    "sums of one row": ("o[kDv / 2 + 2 * h]", "o[kDv / 2]"),
    "sums left to multiply": ("    sum -= sum;", ""),
    "no sums of the last tile": (
        "    v_pipe.advance();\n    take_sums(o, softmax);\n",
        "    v_pipe.advance();\n",
    ),
    "scores that are no number": ("larger_or_none(bounds[h],", "fmaxf(bounds[h],"),
}


@needs_compiler
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("mistake", sampled(STRAIGHT_MISTAKES, 4, thorough=len(STRAIGHT_MISTAKES)))
def test_mistakes_of_straight_powers_are_caught(mistake):
    right, wrong = STRAIGHT_MISTAKES[mistake]
    kernel = render(replace(STRAIGHT, br=128, schedule="chained"), replace(ASKED, causal=True), H200)
    assert_breaks(kernel, right, wrong, H200)


@needs_compiler
@pytest.mark.parametrize("rescale", ["lazy", "always"])
def test_straight_powers_keep_their_promise(rescale):
    """On scores and values that are no numbers, too, and on rows with keys that weigh next to nothing."""
    device = SimDevice("h200", H200)
    build = device.toolchain().build(render(replace(STRAIGHT, rescale=rescale), ASKED, H200))
    assert prove_promise(device.open(), build, "few") > 50


@needs_compiler
@pytest.mark.parametrize("score_type", ["f32", "f16"])
def test_a_key_that_outweighs_all_others_by_far_leaves_them_their_share(score_type):
    """It is met first, where weights leave room for maxima to grow only as far as their sum allows: 8191 keys
    that weigh e^-10 of it each have a quarter of the row."""
    rng, numbers = np.random.default_rng(11), ml_dtypes.float8_e4m3fn
    q = rng.standard_normal((1, 1, 64, 64), np.float32)
    k, v = (rng.standard_normal((1, 1, 8192, 64), np.float32) for _ in "kv")
    q[..., 0], k[..., 0], k[..., -1, :] = 4.0, 0.0, 0.0
    k[..., -1, 0] = 20.0
    arrays = [x.astype(numbers) for x in (q, k, v)]
    expected = reference.attention(
        *(x.astype(np.float32) for x in arrays), scale=0.125, scores=scores_of(causal=False)
    ).o
    kernel = render(replace(STRAIGHT, bc=128, score_type=score_type), ASKED, H200)
    bounded = "fminf(fmaxf(log2f(sum), 0.0f), 3.5f)"
    assert bounded in kernel.source
    device, errors = SimDevice("h200", H200), []
    for source in (kernel.source, kernel.source.replace(bounded, "3.5f")):
        build = device.toolchain().build(replace(kernel, source=source))
        o, _ = device.open().attend(build, *arrays, scale=0.125)
        errors.append(np.linalg.norm(o.astype(np.float64) - expected) / np.linalg.norm(expected))
    assert errors[0] < ASKED.tolerance and errors[1] > 2 * ASKED.tolerance


@needs_compiler
@pytest.mark.parametrize("score_type", ["f32", "f16"])
def test_straight_powers_are_right_on_average(score_type):
    """Of scores that lie evenly between powers of two the sums are too large and too small as often."""
    numbers = ml_dtypes.float8_e4m3fn
    q, k = np.zeros((1, 1, 64, 64), np.float32), np.zeros((1, 1, 4096, 64), np.float32)
    q[..., 0], q[..., 1] = 1.0, 2.0**-6
    scores = np.linspace(-4.0, 0.0, 4096, dtype=np.float32)
    k[0, 0, :, 0] = scores.astype(numbers).astype(np.float32)
    k[0, 0, :, 1] = (scores - k[0, 0, :, 0]) * 2**6
    v = np.ones((1, 1, 4096, 64), numbers)
    device = SimDevice("h200", H200)
    variant = replace(STRAIGHT, bc=128, score_type=score_type)
    build = device.toolchain().build(render(variant, ASKED, H200))
    q, k = q.astype(numbers), k.astype(numbers)
    o, lse = device.open().attend(build, q, k, v, scale=1.0, want_lse=True)
    expected = np.log(np.exp(k[0, 0, :, :2].astype(np.float64) @ [1.0, 2.0**-6]).sum())
    assert np.abs(lse - expected).max() < 2e-3
    assert np.abs(o.astype(np.float64) - 1).max() < 4e-2  # what tensor cores cut off of 2048 keys


# -- what is launched, and what is counted --------------------------------------------------------------


def test_a_launch_in_front_leaves_values_in_the_workspace():
    problem = replace(PLAIN, batch=3, num_q_heads=4, num_kv_heads=2, seqlen_q=70, seqlen_k=100, head_dim_v=80)
    sizes = {name: getattr(problem, name) for name in ("batch", "num_q_heads", "num_kv_heads")}
    sizes |= {"seqlen_q": 70, "seqlen_k": 100}
    half = render(HALF, problem, H200)
    assert [each.role for each in half.launches] == [WALKED_TILES_ROLE, MAIN_ROLE]
    assert [each.grid(problem) for each in half.launches] == [3 * 2 * 3, 3 * 4 * 2]
    assert [each.array for each in half.launch.tensor_maps] == ["q", "k", "o"]
    assert half.workspace_bytes(sizes) == 3 * 2 * 3 * 48 * 2 * 64 * 2  # chunks of 64 columns
    eight = replace(problem, precision=EIGHT)
    assert render(SMALL_WEIGHTS, eight, H200).workspace_bytes(sizes) == 3 * 2 * 4 * 32 * 80
    assert render(replace(SMALL_WEIGHTS, powers="straight"), eight, H200).workspace_bytes(sizes) == (
        3 * 2 * 4 * 32 * (80 + 8)
    )
    kept = render(KEPT, eight, H200).workspace_bytes(sizes)
    assert kept == 3 * 2 * 4 * 32 * 80 + 132 * 128 * 16 * (80 // 16 + 1)


def test_blocks_turn_nothing_and_consumers_have_what_that_took():
    assert producer_registers(HALF, PLAIN, H200) == 24 < 56
    assert replace(HALF, values="in_place").smem_bytes(PLAIN, H200) - HALF.smem_bytes(PLAIN, H200) == 6144
    # Queries in registers: four for every 32 columns.
    held = replace(HALF, q_in_registers=True)
    assert needed_registers(held, replace(PLAIN, head_dim=80)) - needed_registers(HALF, PLAIN) == 12
    wide = replace(ASKED, head_dim=256, head_dim_v=256)
    assert needed_registers(SMALL_WEIGHTS, wide) - needed_registers(KEPT, wide) == 128


def test_work_is_that_of_copies_and_of_the_launch_in_front():
    front, place = (replace(HALF, values=values).work(PLAIN, H200) for values in ("in_front", "in_place"))
    assert front.launches_in_front == 1 and place.launches_in_front == 0
    assert front.bytes_in_front == 3 * PLAIN.batch * PLAIN.num_kv_heads * PLAIN.seqlen_k * 64
    assert front.wavefronts < place.wavefronts and front.tile_bytes == 48 * (64 + 2 * 64)
    apart, kept = (each.work(ASKED, H200) for each in (SMALL_WEIGHTS, KEPT))
    assert apart.splitter_slots == kept.splitter_slots == 0
    assert apart.split_slots == 32 and kept.split_slots == 3.25 * 32 * 32 / SEGMENT_KEYS


def test_straight_powers_take_no_exponentials_and_eight_columns_more():
    rounded, straight = (each.work(ASKED, H200) for each in (KEPT, STRAIGHT))
    assert (rounded.straight, straight.straight) == (0.0, straight.scores)
    assert straight.output_cycles * 8 == rounded.output_cycles * 9
    problem = replace(ASKED, seqlen_q=8192, seqlen_k=8192)
    slow, fast = (
        predict(replace(each, br=192, bc=128), problem, H200).median_us for each in (KEPT, STRAIGHT)
    )
    assert fast < 0.8 * slow


def test_predictions_prefer_it_for_long_rows():
    long = replace(PLAIN, head_dim=256, head_dim_v=256, seqlen_q=4096, seqlen_k=4096)
    for rows, is_better in ((4096, True), (64, False)):
        place, front = (
            predict(Wgmma(br=64, bc=64, values=values), replace(long, seqlen_q=rows), H200).median_us
            for values in ("in_place", "in_front")
        )
        assert (front < place) == is_better


# -- sources and rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_sources_are_tidy(way):
    variant, problem = WAYS[way]
    kernel = render(variant, problem, H200)
    assert kernel.sm == "sm_90a" and kernel.is_deterministic
    assert_tidy(kernel.source, way, longest=180)


@pytest.mark.parametrize(
    ("problem", "variant", "message"),
    [
        (Problem(dtype="bf16"), HALF, "values=in_front: products read those of bf16 as they are"),
        (replace(PLAIN, varlen="uniform:8-64"), HALF, "values=in_front: made for queries and keys that lie"),
        (replace(PLAIN, page_size=16), HALF, "values=in_front: made for queries and keys that lie"),
        (replace(PLAIN, append=Append()), HALF, "values=in_front: made for queries and keys that lie"),
        (PLAIN, replace(HALF, promotion="segments"), "promotion=segments: sums of weights=f16 lose nothing"),
        (ASKED, replace(KEPT, persistent=False), "promotion=segments: room for sums is that of blocks that"),
        (ASKED, replace(HALF, powers="straight"), "powers=straight: weights=f16 have more bits than"),
        (ASKED, replace(STRAIGHT, values="in_place"), "powers=straight: the ones that sum weights stand"),
        (ASKED, replace(STRAIGHT, poly_exp=4), "poly_exp=4: powers=straight have no exponentials"),
    ],
)
def test_rules(problem, variant, message):
    with pytest.raises(Illegal, match=message):
        render(variant, problem, H200)
