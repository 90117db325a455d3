"""Queries, keys and values of e4m3 by warps, on emulated cards, held to float64 of those numbers."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.arguments import make_arguments
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import EIGHT, Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards import beside
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.adversarial import prove_promise
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.predict import cost_model

from tests.support.covering import draw, each_value, mma_e4m3_settings
from tests.support.depth import sampled
from tests.support.emulated import assert_all_right, assert_tidy, needs_compiler, trusting

#: Cards whose warps multiply eight bits, and one where compilers make f16 of them.
L4, RTX_5090, H200 = (PRESETS[name] for name in ("l4", "rtx-5090", "h200"))
EIGHT_BITS = Problem(
    dtype="e4m3",
    batch=2,
    num_q_heads=4,
    num_kv_heads=2,
    seqlen_q=70,
    seqlen_k=150,
    head_dim=64,
    causal=True,
)
FEW = Mma(br=16, bc=32, rows_per_warp=16, pack_heads=True)
#: Of each way that differs in how tiles come and results leave: variant, card.
WAYS = {
    "one warp a row": (Mma(br=32, bc=32, rows_per_warp=16), L4),
    "two tiles a warp": (Mma(br=64, bc=64, rows_per_warp=32, block_order="heaviest_first"), RTX_5090),
    "keys left over": (Mma(br=32, bc=40, rows_per_warp=16, stages=3, layout="swizzled"), L4),
    "one stage": (Mma(br=32, bc=56, rows_per_warp=16, stages=1, rescale="always", poly_exp=4), L4),
    "Q in shared memory": (Mma(br=32, bc=48, layout="swizzled", q_in_registers=False), RTX_5090),
    "heads in turn": (Mma(br=32, bc=32, q_in_registers=False, heads=2), L4),
    "heads packed": (replace(FEW, q_in_registers=False), L4),
    "keys over warps": (replace(FEW, key_warps=4, bc=16), L4),
    "keys over blocks": (replace(FEW, splits=2, key_warps=2), RTX_5090),
    "by the workspace": (replace(FEW, workspace_splits=4, pack_heads=False), L4),
    "all at once": (replace(FEW, workspace_splits=2, key_warps=2, merge="at_once"), L4),
}
#: Layouts that a way of its own takes.
ASKED = {
    "pages": {"page_size": 16},
    "small pages": {"page_size": 7},
    "packed": {"varlen": "uniform:1-40/uniform:3-150"},
    "packed pages": {"varlen": "uniform:1-40/uniform:3-150", "page_size": 64},
}


def kernel_of(way: str, **asked) -> Kernel:
    variant, limits = WAYS[way]
    return render(variant, replace(EIGHT_BITS, **asked), limits)


def error_of(kernel: Kernel, way: str, *, depth="quick", sanitize: bool = False, seed: int = 1) -> float:
    device = SimDevice("emulated", WAYS[way][1], sanitize)
    build = device.toolchain().build(kernel)
    return validate(device.open(), build, seed=seed, depth=depth, problem=kernel.problem)


# -- numerics -------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("way", sampled(list(WAYS), 3, thorough=11))
def test_every_way_is_right(way: str) -> None:
    kernel = kernel_of(way)
    assert 0 < error_of(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_the_full_suite(way: str) -> None:
    kernel = kernel_of(way, causal=way != "heads in turn")
    assert error_of(kernel, way, depth="full", seed=2) < kernel.problem.tolerance


#: Tests that share the cover, so that several workers can.
SHARDS = 8


@functools.cache
def settings() -> list:
    return each_value(mma_e4m3_settings([L4, RTX_5090, H200]), 0)


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("shard", range(SHARDS))
def test_any_value_of_a_parameter_is_right(shard: int) -> None:
    assert_all_right(list(enumerate(settings(), 1))[shard::SHARDS])


@needs_compiler
@pytest.mark.parametrize(
    ("way", "asked"),
    sampled(
        [
            (way, asked)
            for asked in ASKED
            for way in WAYS
            if way not in ("heads in turn", "all at once") or (asked == "pages" and way == "all at once")
        ],
        1,
        thorough=10,
    ),
)
def test_keys_in_any_layout_are_right(way: str, asked: str) -> None:
    kernel = kernel_of(way, **ASKED[asked])
    assert error_of(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "scoring"),
    sampled(
        [
            (way, scoring)
            for way in ("one warp a row", "Q in shared memory", "keys over warps")
            for scoring in (
                Scoring(window=(20, 0), sinks=True),
                Scoring(softcap=20.0),
                Scoring(alibi=True),
                Scoring(bias="f16"),
                Scoring(score="score + table[h, q - k] * b", mask="(q * 7 + k) % 5 > 1"),
            )
        ],
        1,
        thorough=8,
    ),
    ids=str,
)
def test_masks_and_scores_are_those_of_any_family(way: str, scoring: Scoring) -> None:
    kernel = kernel_of(way, scoring=scoring)
    assert error_of(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "dims"),
    sampled([("keys left over", (72, 40)), ("Q in shared memory", (48, 80)), ("one stage", (16, 24))], 1),
)
def test_nothing_is_read_or_written_out_of_bounds(way: str, dims: tuple[int, int]) -> None:
    variant, limits = WAYS[way]
    problem = replace(EIGHT_BITS, head_dim=dims[0], head_dim_v=dims[1])
    kernel = render(replace(variant, layout="padded"), problem, limits)
    assert error_of(kernel, way, sanitize=True) < problem.tolerance


CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)


def attend(kernel: Kernel, way: str, q, k, v, *, scale: float):
    device = SimDevice("emulated", WAYS[way][1])
    o, lse = device.open().attend(device.toolchain().build(kernel), q, k, v, scale=scale, want_lse=True)
    return o.astype(np.float64), lse


@needs_compiler
@pytest.mark.parametrize("way", sampled(["one warp a row", "Q in shared memory", "by the workspace"], 1))
def test_every_number_is_what_it_was(way: str) -> None:
    """The values of a single key come back, all 256 codes; and keys as scores, by one element of q."""
    kernel = kernel_of(way, head_dim=128, head_dim_v=128, causal=False)
    q = np.zeros((1, 2, 128, 128), CODES.dtype)
    q[:, :, range(128), range(128)] = 1
    keys = CODES.reshape(1, 2, 1, 128)
    no_numbers = np.isnan(keys.astype(np.float32))
    some = np.where(no_numbers, np.float32(1), keys.astype(np.float32)).astype(CODES.dtype)
    for scale in (0.2, -0.2):
        o, lse = attend(kernel, way, q, some, keys, scale=scale)
        expected = np.broadcast_to(keys.astype(np.float64), o.shape)
        assert ((o == expected) | np.isnan(expected)).all() and (np.isnan(o) == np.isnan(expected)).all()
        wanted = some.astype(np.float32)[:, :, 0] * np.float32(scale)
        np.testing.assert_allclose(lse, wanted, rtol=1e-6)
    # A row whose key is no number has none.
    o, lse = attend(kernel, way, q, keys, some, scale=0.2)
    assert np.isnan(lse[:, :, 127]).all()


@needs_compiler
@pytest.mark.parametrize("way", sampled(["one warp a row", "keys over blocks", "by the workspace"], 1))
def test_outputs_are_multiplied_by_the_scale_of_values(way: str, monkeypatch) -> None:
    """Of rows that are computed again as well."""
    kernel = kernel_of(way)
    rng = np.random.default_rng(1)
    q, k, v = reference.random_inputs(
        "normal", (1, 4, 33, 64), (1, 2, 50, 64), scale=0.1, rng=rng, dtype="e4m3"
    )
    q[:, :, 5] = 448
    k[:, :, 7] = 448
    plain, _ = attend(kernel, way, q, k, v, scale=10.0)
    monkeypatch.setattr(beside, "make_arguments", functools.partial(make_arguments, value_scale=-4.0))
    scaled, _ = attend(kernel, way, q, k, v, scale=10.0)
    np.testing.assert_array_equal(scaled, -4 * plain)
    assert numpy_dtype("bf16") == numpy_dtype(kernel.problem.output_dtype) and np.abs(plain).max() > 0.1
    np.testing.assert_array_equal(plain[:, :2, 5], np.broadcast_to(v[:, :1, 7], plain[:, :2, 5].shape))


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["one warp a row", "Q in shared memory", "keys over warps"])
def test_promises_hold_on_adversarial_inputs(way: str) -> None:
    device = SimDevice("emulated", WAYS[way][1])
    assert prove_promise(device.open(), device.toolchain().build(kernel_of(way)), "few") > 30


@needs_compiler
@pytest.mark.parametrize(
    ("way", "right", "wrong"),
    sampled(
        [
            ("one warp a row", "0x3120", "0x3210"),
            ("one warp a row", "lane / 8 % 2 * 16", "lane / 8 % 2 * 8"),
            ("one warp a row", "warp.q[i][step * 4 + f]", "warp.q[i][f]"),
            ("Q in shared memory", "lane / 16 * 16", "lane / 16 * 8"),
            ("Q in shared memory", "element.__x ^= 0x80;", ""),
            ("heads in turn", "args.value_scale);", "0.5f);"),
            ("keys over warps", "kSigns : 0u", "0u : 0u"),
            ("keys over blocks", "warp.o[i][n + 1][2 * h], warp.o[i][n][2 * h + 1]", "0.0f, 0.0f"),
            ("by the workspace", "args.value_scale / row_sum", "0.5f / row_sum"),
        ],
        2,
        thorough=9,
    ),
)
def test_the_suite_finds_mistakes(way: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way)
    assert right in kernel.source
    kernel = replace(kernel, source=kernel.source.replace(right, wrong))
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        error_of(kernel, way)


@needs_compiler
def test_columns_that_no_copy_fills_are_zeros() -> None:
    """A step of 32 columns, of which sixteen are there: what shared memory held before counts for nothing."""
    way, shape = "one warp a row", (1, 2, 40, 48)
    rng = np.random.default_rng(2)
    q, k, v = reference.random_inputs("normal", shape, shape, scale=0.2, rng=rng, dtype="e4m3")
    kernel = kernel_of(way, head_dim=48, head_dim_v=48, causal=False)
    # Rows that become no number would be computed again.
    kernel = replace(kernel, source=trusting(kernel.source))
    assert np.isfinite(attend(kernel, way, q, k, v, scale=0.2)[0]).all()
    filled = "zero_k_columns(smem.k[stage]);"
    assert filled in kernel.source
    kernel = replace(kernel, source=kernel.source.replace(filled, ""))
    assert np.isnan(attend(kernel, way, q, k, v, scale=0.2)[0]).any()


# -- what may run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits", sampled([L4, RTX_5090, H200, PRESETS["b200"]], 1, thorough=1), ids=lambda x: x.name
)
@pytest.mark.parametrize("dims", [(16, 24), (128, 128), (8, 256)], ids=str)
def test_legal_variants_render(limits, dims: tuple[int, int]) -> None:
    problem = replace(EIGHT_BITS, head_dim=dims[0], head_dim_v=dims[1])
    for asked in ({}, {"page_size": 16}, {"scoring": Scoring(window=(9, 0), softcap=9.0)}):
        its = replace(problem, **asked)
        for variant in draw(Mma, its, limits, 20, random.Random(1)):
            assert_tidy(render(variant, its, limits).source, variant.name, longest=165 if asked else 140)


@pytest.mark.parametrize(
    ("problem", "variant", "limits", "message"),
    [
        (EIGHT_BITS, Mma(), PRESETS["a100"], "tensor cores multiply e4m3 from sm_89 on, this is sm_80"),
        (
            replace(EIGHT_BITS, head_dim=36),
            Mma(),
            L4,
            "alignment: rows of 36 elements are not multiples of 8 bytes",
        ),
        (
            replace(EIGHT_BITS, head_dim_v=20),
            Mma(),
            L4,
            "alignment: rows of 20 elements are not multiples of 8 bytes",
        ),
        (replace(EIGHT_BITS, head_dim=48), Mma(layout="swizzled"), L4, "a row of 48 elements is not made of"),
        (EIGHT_BITS, Mma(parts="f16"), L4, "parts=f16: e4m3 is multiplied whole"),
    ],
)
def test_rules(problem: Problem, variant: Mma, limits, message: str) -> None:
    with pytest.raises(Illegal, match=message):
        render(variant, problem, limits)


def test_steps_are_whole_anyway() -> None:
    told = Mma(d_steps="whole").advice(Problem(dtype="e4m3"), L4)
    assert told is not None and "d_steps=whole: all steps are, beside keys of e4m3" in told


@pytest.mark.parametrize("limits", [L4, RTX_5090, H200], ids=lambda x: x.name)
def test_the_instructions_are_asked_for(limits) -> None:
    kernel = render(Mma(), EIGHT_BITS, limits)
    assert kernel.oldest_arch == 89
    assert "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32" in kernel.source


def test_weights_of_eight_bits_are_allowed_and_not_made() -> None:
    """A class that takes less takes these kernels, too."""
    eight = replace(EIGHT_BITS, precision=EIGHT)
    same = render(Mma(), eight, L4).source.replace(eight.stem, EIGHT_BITS.stem)
    assert same == render(Mma(), EIGHT_BITS, L4).source


def best_us(family, problem: Problem, limits) -> float:
    legal = enumerate_space(family, problem, limits).legal
    chosen = random.Random(1).sample(list(legal), min(400, len(legal)))
    return min(cost_model.predict(variant, problem, limits).median_us for variant in chosen)


def test_the_cost_model_counts_the_rate_of_eight_bits() -> None:
    """Half of the products take half of the time where warps multiply eight bits; elsewhere none does, and
    warpgroups are ahead."""
    whole = Problem(dtype="e4m3", head_dim=64)
    half = replace(whole, dtype="f16")
    for limits in (L4, RTX_5090):
        assert best_us(Mma, whole, limits) < 0.9 * best_us(Mma, half, limits)
    on_hopper = best_us(Mma, whole, H200)
    assert on_hopper > best_us(Mma, half, H200)
    assert best_us(Wgmma, whole, H200) < 0.8 * on_hopper


@pytest.mark.nvcc
@pytest.mark.parametrize("way", sampled(["one warp a row", "two tiles a warp", "keys over blocks"], 1))
def test_nvcc_takes_it(way: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    variant, limits = WAYS[way]
    for each in (limits, H200):
        try:
            toolchain = cuda_toolchain(each.arch)
        except FlashgenError as missing:
            pytest.skip(str(missing))
        build = toolchain.build(render(variant, EIGHT_BITS, each))
        assert build.spill_bytes == 0 or each is not limits
