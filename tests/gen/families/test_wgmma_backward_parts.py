"""Gradients of float32 in parts of f16 by Hopper's warpgroups, on an emulated card beside float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.gradients import gradients

from tests.gen.families.test_packed import SCORINGS
from tests.gen.families.test_wgmma_backward import ADDED, H200, check
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

PROBLEM = Problem(backward=True, dtype="f32", num_q_heads=4, num_kv_heads=2)
NARROW = WgmmaBackward(schedule="weights_first", dq_path="bulk", ds_stages=1)
WIDE = WgmmaBackward(parts=2, dq_path="atomics", ds_stages=1, q_stages=1, dout_stages=1)
WAYS: dict[str, tuple[WgmmaBackward, Problem]] = {
    "narrow": (NARROW, replace(PROBLEM, head_dim=64, head_dim_v=64)),
    "narrow, sums by threads": (
        replace(NARROW, schedule="together", dq_path="atomics", order="heaviest_first", q_stages=3),
        replace(PROBLEM, head_dim=40, head_dim_v=64),
    ),
    "narrow, one consumer": (
        replace(NARROW, bc=64, q_stages=1, dout_stages=3, order="by_section"),
        replace(PROBLEM, head_dim=24, head_dim_v=8, precision="3xf16"),
    ),
    "wide": (WIDE, replace(PROBLEM, head_dim=128, head_dim_v=128)),
    "wide, other columns of values": (WIDE, replace(PROBLEM, head_dim=96, head_dim_v=72)),
    "wide keys, sums by the copy engine": (
        replace(WIDE, bc=64, dq_path="bulk", q_stages=2),
        replace(PROBLEM, head_dim=80, head_dim_v=40),
    ),
    "wide values": (replace(WIDE, bc=64, dout_stages=2), replace(PROBLEM, head_dim=32, head_dim_v=104)),
}
SCORED = [
    (way, name)
    for name in SCORINGS
    if name != "plain"
    for way in ("narrow", "narrow, sums by threads", "wide, other columns of values")
    # Where scores become steeper, weights are not made before their gradients are there.
    if way != "narrow" or name in ADDED
]


def kernel_of(way: str, **asked: object) -> Kernel:
    variant, problem = WAYS[way]
    return render(variant, replace(problem, **asked), H200)  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.parametrize(
    ("way", "causal"), sampled([(way, causal) for way in WAYS for causal in (True, False)], 2, thorough=8)
)
def test_gradients_are_those_of_float64(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal)
    assert 0.0 < check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 0, thorough=2))
def test_gradients_are_right_at_all_lengths(way: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert check(kernel, depth="full") < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(("way", "name"), sampled(SCORED, 1, thorough=6))
def test_masks_and_changes_of_scores_are_differentiated(way: str, name: str) -> None:
    kernel = kernel_of(way, scoring=SCORINGS[name], causal=name != "score")
    assert check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    "way", sampled(["narrow, sums by threads", "wide, other columns of values"], 0, thorough=2)
)
def test_nothing_is_read_or_written_out_of_bounds(way: str) -> None:
    check(kernel_of(way, scoring=Scoring(window=(9, 5), softcap=5.0)), sanitize=True)


def differentiate(
    kernel: Kernel,
    rows: int,
    keys: int,
    factors: Mapping[str, float | np.ndarray] | None = None,
    scale: float = 0.125,
):
    """What a kernel makes of normal inputs times factors of their rows, and what it should."""
    problem, device = kernel.problem, SimDevice("emulated", H200)
    rng = np.random.default_rng(5)
    d, dv = problem.head_dim, problem.head_dim_v
    shapes = {"q": (2, 4, rows, d), "k": (2, 2, keys, d), "v": (2, 2, keys, dv), "dout": (2, 4, rows, dv)}
    drawn = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    given = {name: (each * (factors or {}).get(name, 1.0)).astype(np.float32) for name, each in drawn.items()}
    inputs = given["q"], given["k"], given["v"]
    expected = reference.attention(*inputs, scale=scale, scores=problem.scores)
    arrays = {**given, "o": expected.o.astype(np.float32), "lse": expected.lse.astype(np.float32)}
    found = device.open().differentiate(device.toolchain().build(kernel), arrays, scale=scale)
    return found, gradients(*inputs, given["dout"], scale=scale, scores=problem.scores)


def assert_near(found, wanted, share: float) -> None:
    for name, each in wanted.items():
        errors = np.linalg.norm(found[name].astype(np.float64) - each.value, axis=(2, 3))
        assert (errors <= share * np.linalg.norm(each.value, axis=(2, 3))).all(), name


@needs_compiler
@pytest.mark.parametrize(("way", "causal"), [("narrow", True), ("wide", False)])
def test_gradients_are_within_such_a_share_of_each_head(way: str, causal: bool) -> None:
    found, wanted = differentiate(kernel_of(way, causal=causal), 130, 260)
    assert_near(found, wanted, 5e-6)


@needs_compiler
@pytest.mark.parametrize(
    ("factors", "scale"),
    [
        ({"v": 1e-12, "dout": 1e-15}, 0.125),
        ({"v": 1e15, "dout": 1e12}, 0.125),
        ({"q": 1e-16, "k": 1e-14}, 0.125e30),
        ({"q": 1e16, "k": 1e-18}, 0.125e2),
        ({"q": 0.0}, 0.125),
    ],
)
def test_units_bring_any_magnitude_into_range(factors: dict[str, float], scale: float) -> None:
    found, wanted = differentiate(kernel_of("narrow, one consumer"), 70, 90, factors, scale)
    assert_near(found, wanted, 5e-6)


@needs_compiler
def test_rows_that_share_a_unit_may_be_of_other_magnitudes() -> None:
    """Rows of up to ten thousand times others: each is right beside what its own terms are."""
    rng = np.random.default_rng(7)
    rows, keys = (10.0 ** rng.uniform(-2, 2, (1, 1, n, 1)) for n in (70, 90))
    factors = {"k": keys / 100, "v": keys, "dout": rows}
    found, wanted = differentiate(kernel_of("narrow, one consumer"), 70, 90, factors)
    assert_near(found, wanted, 5e-6)
    for name, each in wanted.items():
        errors = np.linalg.norm(found[name] - each.value, axis=3)
        assert (errors <= 5e-6 * np.linalg.norm(each.spread, axis=3)).all(), name


@needs_compiler
def test_keys_of_little_weight_have_their_own_units() -> None:
    """What every other key adds is next to nothing: its gradients are right for themselves."""
    kernel = kernel_of("narrow, one consumer")
    far = np.where(np.arange(90) % 2, 1.0, 0.0)[None, None, :, None]
    device, rng = SimDevice("emulated", H200), np.random.default_rng(6)
    q = np.abs(rng.standard_normal((1, 2, 70, 24), dtype=np.float32)) + 1.0
    k = (rng.standard_normal((1, 2, 90, 24)) * 0.1 - far * 16.0).astype(np.float32)
    v = rng.standard_normal((1, 2, 90, 8), dtype=np.float32)
    dout = rng.standard_normal((1, 2, 70, 8), dtype=np.float32)
    expected = reference.attention(q, k, v, scale=0.125, scores=kernel.problem.scores)
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "o": expected.o.astype(np.float32)}
    arrays["lse"] = expected.lse.astype(np.float32)
    found = device.open().differentiate(device.toolchain().build(kernel), arrays, scale=0.125)
    wanted = gradients(q, k, v, dout, scale=0.125, scores=kernel.problem.scores)
    for name in ("dk", "dv"):
        value = wanted[name].value
        sizes = np.linalg.norm(value, axis=3)
        assert 0 < sizes[..., 1::2].max() < 1e-15 * sizes[..., ::2].max()
        errors = np.linalg.norm(found[name] - value, axis=3)
        # Scores of 160 are rounded themselves.
        assert (errors[..., 1::2] <= 1e-3 * sizes[..., 1::2].max()).all()


@needs_compiler
@pytest.mark.parametrize(
    ("way", "right", "wrong"),
    sampled(
        [
            ("narrow", "a, b + kSmall, true", "a, b, true"),
            ("narrow", "weights.big[step], b + kSmall, true", "weights.big[step], b, true"),
            ("narrow", "units[i / 2 % 2]", "units[0]"),
            ("narrow", "factors[i % 2]);\n    weights.big", "factors[0]);\n    weights.big"),
            ("narrow", "(piece ^ row % 8) * 16", "piece * 16"),
            ("narrow", "gradients.units[h] * inverse_of(unit)", "1.0f"),
            ("narrow", "if (lane == 0) tma_wait_read<0>();", ""),
            ("narrow", "(args.seqlen_k - 1) / kTileRows);", "first_key / kTileRows);"),
            ("narrow", "row < count && column < kWidth", "column < kWidth"),
            ("narrow", "(first + own_row) / 16, 0)", "first / 16, 0)"),
            ("narrow", "if (is_partial(args, batch, first, ", "if (false && is_partial(args, batch, first, "),
            (
                "narrow",
                "named_barrier_sync(consumers_barrier, kWarpgroup);\n      const float unit",
                "const float unit",
            ),
            ("narrow, sums by threads", "added[i + 1] * unit", "added[i] * unit"),
            ("wide", "tile[1] + place, small", "tile[1] + place, big"),
            ("wide", "place = (first_row + 16 * step", "place = (16 * step"),
            ("wide", "[consumer][own_row / kWeighedRows]", "[consumer][0]"),
            ("wide", "const int column = part * kWeighedRows + ", "const int column = "),
            ("wide", "q_desc + 1 * kNextChunk", "q_desc"),
            ("wide", "place + 64 * 16", "place"),
        ],
        2,
        thorough=6,
    ),
)
def test_mistakes_are_found(way: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert right in kernel.source
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        check(replace(kernel, source=kernel.source.replace(right, wrong)))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (24, 96)])
def test_legal_variants_render(dims: tuple[int, int]) -> None:
    problem = replace(PROBLEM, head_dim=dims[0], head_dim_v=dims[1])
    legal = enumerate_space(WgmmaBackward, problem, H200).legal
    assert len(legal) > 5
    for variant in legal[:: max(1, len(legal) // 10)]:
        assert_tidy(render(variant, problem, H200).source, variant.name, longest=132)


def test_what_cannot_run_is_told() -> None:
    narrow, wide = (
        replace(PROBLEM, head_dim=64, head_dim_v=64),
        replace(PROBLEM, head_dim=128, head_dim_v=128),
    )
    with pytest.raises(Illegal, match="dq_path=launch: float32 is added up in memory; family mma-backward"):
        render(replace(NARROW, dq_path="launch"), narrow, H200)
    with pytest.raises(Illegal, match="br=128: float32 is split into tiles of 64 rows"):
        render(replace(NARROW, br=128), narrow, H200)
    with pytest.raises(Illegal, match="parts=1: beside sums of 128 columns of float32, tiles come in 2"):
        render(replace(WIDE, parts=1), wide, H200)
    with pytest.raises(
        Illegal, match="schedule=weights_first: beside parts of float32 no registers are left"
    ):
        render(replace(WIDE, schedule="weights_first"), wide, H200)
    with pytest.raises(Illegal, match="kept=values: beside parts of float32 no registers are left"):
        render(replace(NARROW, kept="values"), narrow, H200)
    with pytest.raises(Illegal, match="ds_stages=2: who agrees on a unit of float32"):
        render(replace(NARROW, ds_stages=2), narrow, H200)
    with pytest.raises(Illegal, match="apart=true: weights of float32 are split where they are made"):
        render(replace(NARROW, bc=64, apart=True), narrow, H200)
    with pytest.raises(Illegal, match="about 248 per thread of a consumer, of 384 threads each has 232"):
        render(WIDE, replace(PROBLEM, head_dim=144, head_dim_v=144), H200)
    with pytest.raises(Illegal, match="family mma-backward takes any"):
        render(NARROW, replace(PROBLEM, head_dim=36, head_dim_v=36), H200)
    with pytest.raises(Illegal, match="of sequences of one length; family simt-backward takes packed ones"):
        render(NARROW, replace(narrow, varlen="uniform:5-50", batch=8, seqlen_q=50, seqlen_k=50), H200)
    with pytest.raises(Illegal, match="shared memory: needs 263168 bytes, sm_90 allows 232448"):
        render(replace(WIDE, q_stages=2), wide, H200)


def test_parts_are_in_the_workspace() -> None:
    kernel = kernel_of("narrow")
    roles = ["statistics", "query_tiles", "key_tiles", "kernel", "postprocess"]
    assert [each.role for each in kernel.launches] == roles
    sizes = {"batch": 3, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 100, "seqlen_k": 130}
    # Of 12 heads statistics of 128 rows and sums of 112; 4128 words of their two tiles and 6 heads' three.
    words = 2 * 12 * 128 + 12 * 112 * 64 + 2 * 12 * 2 * 4128 + 2 * 6 * 3 * 4128
    assert kernel.workspace_bytes(sizes) == 4 * words
    grids = [each.grid_of({name: sizes[name] for name in each.sizes_of_grid}) for each in kernel.launches]
    assert grids == [4 * 12, 2 * 12, 3 * 6, 2 * 6, 2 * 12]


#: Tiles that fill registers.
FULL = {
    "64": (NARROW, 64),
    "64, together": (replace(NARROW, schedule="together"), 64),
    "64, one consumer": (replace(NARROW, bc=64), 64),
    "40": (NARROW, 40),
    "80": (WIDE, 80),
    "96": (WIDE, 96),
    "128": (WIDE, 128),
    "128, one consumer": (replace(WIDE, bc=64, dq_path="bulk"), 128),
}


@pytest.mark.nvcc
@pytest.mark.parametrize("tiles", sampled(FULL, 0, thorough=3))
def test_tiles_that_fill_registers_do_not_spill(
    tiles: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    try:
        toolchain = cuda_toolchain(90)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    variant, d = FULL[tiles]
    build = toolchain.build(render(variant, replace(PROBLEM, head_dim=d, head_dim_v=d, causal=True), H200))
    assert build.spill_bytes == 0
