"""Keys and values of e4m3 beside queries of 16 bits, on emulated cards, held to float64 of those numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.cards.key_scales import scaled_keys
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.adversarial import prove_promise
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.predict import cost_model

from tests.support.covering import draw
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

CACHED = Problem(
    dtype="bf16",
    kv_dtype="e4m3",
    batch=3,
    num_q_heads=4,
    num_kv_heads=2,
    seqlen_q=4,
    seqlen_k=150,
    head_dim=32,
    causal=True,
)
DECODING = replace(CACHED, batch=32, num_q_heads=32, num_kv_heads=8, seqlen_q=1, seqlen_k=8192, head_dim=128)
DECODING = replace(DECODING, head_dim_v=128, causal=False)
FEW = Mma(br=16, bc=32, rows_per_warp=16, pack_heads=True)
#: Of each way that differs in how keys come and become f16: variant, card.
WAYS = {
    "one warp a row": (Mma(br=32, bc=32, rows_per_warp=16), "h200"),
    "two tiles a warp": (Mma(br=64, bc=64, rows_per_warp=32, block_order="heaviest_first"), "h200"),
    "keys left over": (Mma(br=32, bc=40, rows_per_warp=16, stages=3), "h200"),
    "one stage": (Mma(br=32, bc=56, rows_per_warp=16, stages=1, rescale="always", poly_exp=4), "h200"),
    "heads packed": (replace(FEW, layout="swizzled"), "h200"),
    "keys over warps": (replace(FEW, key_warps=4, bc=16), "h200"),
    "keys over blocks": (replace(FEW, splits=2, key_warps=2, evict_first=True), "h200"),
    "blocks alone": (replace(FEW, splits=4, pack_heads=False), "h200"),
    "by bits": (replace(FEW, key_warps=2), "a100"),
    "by bits, in halves": (Mma(br=32, bc=48, rows_per_warp=16, stages=1), "t4"),
}
#: What differs in rows of queries and keys: whole steps, parts of them, less than an access.
DIMS = ((32, 32), (128, 64), (72, 40), (36, 22), (7, 3))
ASKED = {
    "dense": {},
    "pages": {"page_size": 16},
    "small pages": {"page_size": 7},
    "packed": {"varlen": "uniform:1-4/uniform:3-150"},
    "packed pages": {"varlen": "uniform:1-4/uniform:3-150", "page_size": 64},
}


def kernel_of(way: str, **asked) -> Kernel:
    variant, card = WAYS[way]
    problem = replace(CACHED, dtype="f16" if card == "t4" else "bf16")
    dims = asked.pop("dims", (32, 32))
    return render(variant, replace(problem, head_dim=dims[0], head_dim_v=dims[1], **asked), PRESETS[card])


def check(kernel: Kernel, way: str, *, depth="quick", sanitize: bool = False, seed: int = 1) -> float:
    device = SimDevice("emulated", PRESETS[WAYS[way][1]], sanitize)
    build = device.toolchain().build(kernel)
    return validate(device.open(), build, seed=seed, depth=depth, problem=kernel.problem)


def can_take(way: str, dims: tuple[int, int]) -> bool:
    """Swizzles want rows of whole parts, hints whole accesses of 16 bytes."""
    return dims == (32, 32) if way == "keys over blocks" else dims[1] % 64 == 0 or way != "heads packed"


@needs_compiler
@pytest.mark.parametrize(
    ("way", "dims"),
    sampled([(way, dims) for dims in DIMS for way in WAYS if can_take(way, dims)], 1, thorough=14),
)
def test_any_head_dims_are_right(way: str, dims: tuple[int, int]) -> None:
    variant, _ = WAYS[way]
    if way == "heads packed" and dims[0] == 32:
        dims = (64, 64)
    kernel = kernel_of(way, dims=dims)
    assert check(kernel, way) < kernel.problem.tolerance
    assert kernel.variant == variant


@needs_compiler
@pytest.mark.parametrize(
    ("way", "asked"), sampled([(way, asked) for asked in ASKED for way in WAYS], 1, thorough=14)
)
def test_keys_in_any_layout_are_right(way: str, asked: str) -> None:
    dims = (64, 64) if way == "heads packed" else (32, 32)
    kernel = kernel_of(way, dims=dims, **ASKED[asked])
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 0, thorough=4))
def test_the_full_suite(way: str) -> None:
    dims = (64, 64) if way == "heads packed" else (32, 32)
    for seed, dtype in enumerate(("f16", "bf16") if WAYS[way][1] != "t4" else ("f16",)):
        kernel = kernel_of(way, dims=dims, dtype=dtype)
        assert check(kernel, way, depth="full", seed=seed) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "scoring"),
    sampled(
        [
            (way, scoring)
            for way in ("one warp a row", "keys over blocks", "by bits")
            for scoring in (
                Scoring(window=(20, 0), sinks=True),
                Scoring(softcap=20.0),
                Scoring(alibi=True),
                Scoring(bias="f16"),
                Scoring(score="score + table[h, q - k] * b", mask="(q * 7 + k) % 5 > 1"),
            )
        ],
        0,
    ),
    ids=str,
)
def test_masks_and_scores_are_those_of_scaled_keys(way: str, scoring: Scoring) -> None:
    kernel = kernel_of(way, scoring=scoring)
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "asked"), sampled([("keys over warps", "pages"), ("keys left over", "dense")], 0)
)
def test_nothing_is_read_or_written_out_of_bounds(way: str, asked: str) -> None:
    kernel = kernel_of(way, dims=(72, 40), **ASKED[asked])
    assert check(kernel, way, sanitize=True) < kernel.problem.tolerance


def attend(kernel: Kernel, q, k, v, card: str, *, scale: float = 0.2, **values):
    """What a kernel makes of arrays (batch, heads, rows, columns), and what it should, with their lse."""
    device = SimDevice("emulated", PRESETS[card])
    o, lse = device.open().attend(
        device.toolchain().build(kernel), q, k, v, scale=scale, want_lse=True, values=values
    )
    problem = kernel.problem
    expected = reference.attention(
        q, *scaled_keys(problem, k, v, values), scale=scale, scores=problem.scores, values=values
    )
    return o.astype(np.float64), lse, expected


CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)


@needs_compiler
@pytest.mark.parametrize(
    ("card", "dtype"), sampled([("h200", "f16"), ("h200", "bf16"), ("a100", "bf16"), ("t4", "f16")], 1)
)
def test_every_number_is_what_it_was(card: str, dtype: str) -> None:
    """The values of a single key come back, all 256 codes; and keys as scores, by one element of q."""
    stages = 1 if card == "t4" else 2
    variant = Mma(br=64, bc=16, rows_per_warp=16, stages=stages)
    problem = replace(CACHED, dtype=dtype, head_dim=128, head_dim_v=128, causal=False)
    kernel = render(variant, problem, PRESETS[card])
    q = np.zeros((1, 2, 128, 128), np.float32)
    q[:, :, range(128), range(128)] = 1.0
    keys = CODES.reshape(1, 2, 1, 128)
    no_numbers = np.isnan(keys.astype(np.float32))
    assert np.count_nonzero(no_numbers) == 2
    some = np.where(no_numbers, np.float32(1), keys.astype(np.float32)).astype(CODES.dtype)
    o, lse, _ = attend(
        kernel, q.astype(ml_dtypes.bfloat16 if dtype == "bf16" else np.float16), some, keys, card
    )
    expected = np.broadcast_to(keys.astype(np.float64), o.shape)
    assert ((o == expected) | np.isnan(expected)).all() and (np.isnan(o) == np.isnan(expected)).all()
    wanted = some.astype(np.float32)[:, :, 0] * np.float32(0.2)
    np.testing.assert_allclose(lse, wanted, rtol=1e-6)
    # A row whose key is no number has none.
    o, lse, _ = attend(
        kernel, q.astype(ml_dtypes.bfloat16 if dtype == "bf16" else np.float16), keys, some, card
    )
    assert np.isnan(lse[:, :, 127]).all()


@needs_compiler
def test_scales_are_of_each_head_or_there_are_none() -> None:
    kernel = kernel_of("keys over blocks")
    rng = np.random.default_rng(3)
    shapes = ((3, 4, 4, 32), (3, 2, 150, 32))
    q, k, v = reference.random_inputs(
        "normal", *shapes, scale=0.2, rng=rng, dtype="bf16", key_dtype="e4m3", one_sign=True
    )
    many = rng.uniform(-2, 2, (3, 2)).astype(np.float32)
    for scales in (
        {},
        {"k_scale": many, "v_scale": many[0]},
        {"k_scale": many[1]},
        {"k_scale": np.zeros((3, 2), np.float32), "v_scale": many},
        {"v_scale": np.zeros(2, np.float32)},
    ):
        o, lse, expected = attend(kernel, q, k, v, "h200", **scales)
        assert np.abs(o - expected.o).max() < 2e-2 * max(1.0, np.abs(expected.o).max())
        assert np.abs(lse - expected.lse).max() < 1e-3
    o, _, _ = attend(kernel, q, k, v, "h200", v_scale=np.zeros(2, np.float32))
    assert (o == 0).all()
    with pytest.raises(ValueError, match=r"k_scale is of the shape \(5,\)"):
        attend(kernel, q, k, v, "h200", k_scale=np.ones(5, np.float32))


@needs_compiler
@pytest.mark.parametrize("way", sampled(["keys over warps", "by bits"], 1))
def test_rows_of_bf16_may_be_of_any_size(way: str) -> None:
    """Products are of f16, whose range each row of Q is brought to."""
    kernel = kernel_of(way, causal=False)
    rng = np.random.default_rng(5)
    q, k, v = reference.random_inputs(
        "normal", (1, 4, 6, 32), (1, 2, 90, 32), scale=1, rng=rng, dtype="f32", one_sign=True
    )
    sizes = np.array([1e30, 1.0, 1e-30, 0.0, 3e20, 2e-38], np.float32)
    q *= sizes[:, None]
    q, k, v = q.astype(ml_dtypes.bfloat16), k.astype(CODES.dtype), v.astype(CODES.dtype)
    for scale in (1e-30, 1.0, 1e25):
        o, lse, expected = attend(kernel, q, k, v, WAYS[way][1], scale=scale)
        sound = np.abs(expected.lse) < 1e4
        assert np.abs(o - expected.o)[sound].max() < 2e-2 * np.abs(v.astype(np.float64)).max()
        assert (np.abs(lse - expected.lse)[sound] <= 1e-3 * np.maximum(1, np.abs(expected.lse[sound]))).all()
        assert np.isfinite(o).all()


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("way", ["keys over warps", "by bits"])
def test_promises_hold_on_adversarial_inputs(way: str, dtype: str) -> None:
    """Elements of q beyond f16 beside others, too: of these the row is computed again."""
    kernel = kernel_of(way, dtype=dtype, dims=(64, 64))
    device = SimDevice("emulated", PRESETS[WAYS[way][1]])
    assert prove_promise(device.open(), device.toolchain().build(kernel), "few") > 50


@needs_compiler
@pytest.mark.parametrize(
    ("way", "right", "wrong"),
    sampled(
        [
            ("keys over warps", "args.scale *= scale_of_keys(args, batch, kv_head);", ""),
            ("keys over warps", "scale_of_values(args, batch, kv_head);", "scale_of_values(args, batch, 0);"),
            ("one warp a row", "0x3120", "0x3210"),
            ("one warp a row", "s[i][t][e] *= warp.unit[i][e / 2];", "s[i][t][e] *= 1.0f;"),
            ("by bits", "0x5c005c00u", "0x58005800u"),
            ("keys over blocks", "warp.o[i][n + 1][2 * h], warp.o[i][n][2 * h + 1]", "0.0f, 0.0f"),
        ],
        0,
    ),
)
def test_the_suite_finds_mistakes(way: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way)
    assert right in kernel.source
    kernel = replace(kernel, source=kernel.source.replace(right, wrong))
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        check(kernel, way)


@pytest.mark.parametrize(
    ("card", "dtype", "dims"),
    sampled(
        [
            ("t4", "f16", (64, 64)),
            ("a100", "bf16", (40, 72)),
            ("l4", "bf16", (128, 128)),
            ("h200", "f16", (33, 8)),
            ("h200", "bf16", (7, 7)),
            ("h200", "bf16", (128, 128)),
            ("h200", "bf16", (256, 128)),
        ],
        1,
    ),
)
def test_legal_variants_render(card: str, dtype: str, dims: tuple[int, int]) -> None:
    limits = PRESETS[card]
    problem = replace(CACHED, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1])
    for asked in ({}, {"page_size": 16}, {"scoring": Scoring(window=(9, 0), softcap=9.0)}):
        its = replace(problem, **asked)
        for variant in draw(Mma, its, limits, 20, random.Random(1)):
            assert_tidy(render(variant, its, limits).source, variant.name, longest=165 if asked else 130)


def test_what_a_search_proposes_renders_and_reads_half_of_the_bytes() -> None:
    limits = PRESETS["h200"]
    whole = replace(DECODING, kv_dtype="")
    space = enumerate_space(Mma, DECODING, limits)
    assert 20 < len(space) < 2000
    for variant in random.Random(0).sample(list(space.legal), 20):
        assert_tidy(render(variant, DECODING, limits).source, variant.name, longest=130)
    times = [
        min(
            cost_model.predict(v, problem, limits).median_us
            for v in enumerate_space(Mma, problem, limits).legal
        )
        for problem in (DECODING, whole)
    ]
    assert times[0] < times[1] / 1.7
    assert DECODING.min_bytes < 0.51 * whole.min_bytes


def test_types_are_part_of_a_problem() -> None:
    assert DECODING.name == "bf16_kve4m3_d128_b32_h32_kv8_n1_m8192"
    assert Problem.from_dict(DECODING.to_dict()) == DECODING and DECODING.to_dict()["kv_dtype"] == "e4m3"
    assert "kv_dtype" not in Problem().to_dict()
    assert Problem(dtype="f16", kv_dtype="f16") == Problem(dtype="f16")
    assert (DECODING.key_dtype, DECODING.tolerance) == ("e4m3", replace(DECODING, kv_dtype="").tolerance)
    with pytest.raises(ValueError, match="kv_dtype 'f16' is not served beside bf16; choose e4m3 or bf16"):
        Problem(dtype="bf16", kv_dtype="f16")


def test_what_other_keys_do_not_go_with_is_told() -> None:
    h200 = PRESETS["h200"]
    with pytest.raises(Illegal, match="family wgmma does not take keys of e4m3 beside queries of bf16"):
        render(Wgmma(), DECODING, h200)
    with pytest.raises(Illegal, match="family mma does not take keys of e4m3 beside queries of f32"):
        render(Mma(), replace(DECODING, dtype="f32"), h200)
    with pytest.raises(Illegal, match="q_in_registers=False: beside keys of e4m3"):
        render(Mma(q_in_registers=False), DECODING, h200)


@pytest.mark.nvcc
@pytest.mark.parametrize("card", sampled(["t4", "a100", "l4", "h200"], 1))
def test_nvcc_takes_it(card: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    try:
        toolchain = cuda_toolchain(PRESETS[card].arch)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    limits = PRESETS[card]
    problem = replace(DECODING, dtype="f16" if card == "t4" else "bf16")
    variant = replace(FEW, key_warps=2, stages=1 if card == "t4" else 2)
    build = toolchain.build(render(variant, problem, limits))
    assert build.registers <= 255 and build.spill_bytes == 0


@pytest.mark.parametrize(("card", "oldest"), [("a100", 80), ("l4", 89), ("h200", 89)])
def test_the_instruction_that_widens_is_asked_for(card: str, oldest: int) -> None:
    kernel = render(FEW, replace(DECODING, dtype="bf16"), PRESETS[card])
    assert kernel.oldest_arch == oldest
    assert ("e4m3x2" in kernel.source) == (oldest == 89)
