"""Gradients on emulated cards, beside float64: all families, masks and changes of scores, ragged lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flashgen.gen.families.mma_backward.family import MmaBackward
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal, Variant
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import CorruptedMemory, FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.gradients import gradients
from flashgen.tuner.evaluate.validate import validate

from tests.gen.families.test_packed import SCORINGS
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler
from tests.support.given_gradients import given_of, largest_share

GTX_1080, A100 = PRESETS["gtx-1080"], PRESETS["a100"]
PROBLEM = Problem(backward=True, head_dim=32, num_q_heads=4, num_kv_heads=2)
SMALL = SimtBackward(br=32, bc=16, threads_per_block=64, lanes=8, vec=2)
TENSOR = MmaBackward(bc=32, br=16, key_warps=2, rows=32, keys=32, row_warps=1)
SUMMED = MmaBackward(bc=32, br=16, key_warps=2, dq_path="atomics")
#: Variants of every family, with types, head dims and cards for them.
WAYS: dict[str, tuple[Variant, Problem, str]] = {
    "simt": (SMALL, PROBLEM, "gtx-1080"),
    "simt, other columns of values": (
        replace(SMALL, br=16, bc=32, vec=4),
        replace(PROBLEM, head_dim=40, head_dim_v=24),
        "gtx-1080",
    ),
    "simt, one column": (replace(SMALL, vec=1), replace(PROBLEM, head_dim=1, head_dim_v=3), "gtx-1080"),
    "simt, wide rows": (
        SimtBackward(br=8, bc=8, threads_per_block=64, lanes=8),
        replace(PROBLEM, head_dim=256, head_dim_v=256),
        "gtx-1080",
    ),
    "mma": (TENSOR, replace(PROBLEM, dtype="bf16"), "a100"),
    "mma, f16 in swizzled rows, one stage": (
        replace(TENSOR, layout="swizzled", stages=1, bc=64, keys=16),
        replace(PROBLEM, dtype="f16", head_dim=64, head_dim_v=64),
        "a100",
    ),
    "mma, other columns of values": (
        replace(TENSOR, row_warps=2),
        replace(PROBLEM, dtype="bf16", head_dim=40, head_dim_v=24),
        "h200",
    ),
    "mma, sums in memory": (
        replace(SUMMED, br=32),
        replace(PROBLEM, dtype="bf16"),
        "a100",
    ),
    "mma, four sums at once, columns shared": (
        replace(SUMMED, br=64, column_warps=2, layout="swizzled"),
        replace(PROBLEM, dtype="bf16", head_dim=64, head_dim_v=64),
        "h200",
    ),
    "mma, wide rows": (
        replace(TENSOR, br=32, column_warps=2, rows=16, keys=16, row_warps=1),
        replace(PROBLEM, dtype="bf16", head_dim=256, head_dim_v=256),
        "a100",
    ),
    "mma, wide rows, sums in memory": (
        replace(SUMMED, br=64, column_warps=4, stages=1),
        replace(PROBLEM, dtype="f16", head_dim=200, head_dim_v=160),
        "h200",
    ),
    "mma, columns that warps share unevenly": (
        replace(SUMMED, br=32, column_warps=2, stages=1),
        replace(PROBLEM, dtype="f16", head_dim=80, head_dim_v=33),
        "h200",
    ),
    "mma, products eight deep": (
        TENSOR,
        replace(PROBLEM, dtype="f16", head_dim=40, head_dim_v=24),
        "t4",
    ),
    "mma, products eight deep, sums in memory": (
        replace(SUMMED, column_warps=2, br=32, stages=1),
        replace(PROBLEM, dtype="f16", head_dim=64, head_dim_v=64),
        "t4",
    ),
    "mma, float32 in parts": (TENSOR, PROBLEM, "a100"),
    "mma, float32 in parts, wide rows": (
        replace(TENSOR, br=32, column_warps=2, stages=1, rows=16, keys=16),
        replace(PROBLEM, head_dim=200, head_dim_v=144),
        "h200",
    ),
    "mma, float32 in parts, all gradients shared": (
        replace(TENSOR, br=32, column_warps=2, stages=1, gradient_warps=2),
        replace(PROBLEM, head_dim=64, head_dim_v=48),
        "h200",
    ),
    "mma, gradients of rows that warps share unevenly": (
        replace(TENSOR, rows=32, row_warps=2, keys=16, gradient_warps=2),
        replace(PROBLEM, dtype="bf16", head_dim=80, head_dim_v=24),
        "a100",
    ),
    "mma, float32 in parts, sums in memory": (
        replace(SUMMED, br=32, layout="swizzled"),
        replace(PROBLEM, head_dim=64, head_dim_v=33),
        "h200",
    ),
    "mma, float32 in parts, columns shared, sums in memory": (
        replace(SUMMED, bc=64, br=32, column_warps=2),
        replace(PROBLEM, head_dim=48, head_dim_v=80),
        "a100",
    ),
    "mma, float32 in parts, products eight deep": (
        TENSOR,
        replace(PROBLEM, head_dim=7, head_dim_v=24),
        "t4",
    ),
    "mma, odd columns": (TENSOR, replace(PROBLEM, dtype="bf16", head_dim=33, head_dim_v=7), "a100"),
}
SCORED = [
    (way, name)
    for name in SCORINGS
    if name != "plain"
    for way in ("simt", "mma", "mma, four sums at once, columns shared", "mma, float32 in parts")
]


def kernel_of(way: str, **asked: object) -> Kernel:
    variant, problem, card = WAYS[way]
    return render(variant, replace(problem, **asked), PRESETS[card])  # type: ignore[arg-type]


def check(kernel: Kernel, *, depth="quick", sanitize: bool = False, seed: int = 1) -> float:
    limits = next(each for each in PRESETS.values() if each.arch == kernel.arch)
    device = SimDevice("emulated", limits, sanitize)
    return validate(device.open(), device.toolchain().build(kernel), seed=seed, depth=depth)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", sampled(WAYS, 2, thorough=5))
def test_gradients_are_those_of_float64(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal)
    assert 0.0 < check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", sampled(WAYS, 0, thorough=2))
def test_gradients_are_right_at_all_lengths(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal)
    for seed in range(2):
        assert check(kernel, depth="full", seed=seed) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(("way", "name"), sampled(SCORED, 2, thorough=10))
def test_masks_and_changes_of_scores_are_differentiated(way: str, name: str) -> None:
    kernel = kernel_of(way, scoring=SCORINGS[name], causal=name != "score")
    assert check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 1, thorough=5))
def test_nothing_is_read_or_written_out_of_bounds(way: str) -> None:
    check(kernel_of(way, scoring=Scoring(window=(9, 5), softcap=5.0)), sanitize=True)


def differentiate(way: str, rows: int = 70, keys: int = 90):
    """What a kernel makes of some inputs, and what it should."""
    kernel = kernel_of(way, causal=True)
    problem, device = kernel.problem, SimDevice("emulated", GTX_1080)
    rng, scale = np.random.default_rng(0), 32**-0.5
    shapes = ((2, 4, rows, 32), (2, 2, keys, 32))
    q, k, v = reference.random_inputs("normal", *shapes, scale=scale, rng=rng, dtype=problem.dtype)
    given = given_of(q, k, v, rng, scale=scale, scores=problem.scores)
    found = device.open().differentiate(device.toolchain().build(kernel), given, scale=scale)
    return found, gradients(q, k, v, given["dout"], scale=scale, scores=problem.scores)


@needs_compiler
@pytest.mark.parametrize("way", sampled(["simt", "mma", "mma, float32 in parts"], 2))
def test_every_run_has_the_same_bits(way: str) -> None:
    (first, _), (second, _) = differentiate(way), differentiate(way)
    assert all(first[name].tobytes() == second[name].tobytes() for name in ("dq", "dk", "dv"))


@needs_compiler
@pytest.mark.parametrize(("way", "share"), [("simt", 5e-6), ("mma", 1e-2), ("mma, float32 in parts", 5e-6)])
def test_gradients_are_within_such_a_share_of_each_head(way: str, share: float) -> None:
    found, wanted = differentiate(way, rows=130, keys=260)
    for name, each in wanted.items():
        assert largest_share(found[name], each.value) <= share


def test_gradients_are_the_slopes_of_what_the_reference_computes() -> None:
    """The reference's own gradients, by differences of its outputs."""
    rng, problem = np.random.default_rng(3), replace(PROBLEM, causal=True, scoring=Scoring(softcap=2.0))
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 4, 5, 3), (1, 2, 7, 3), (1, 2, 7, 3)))
    dout, dlse = rng.standard_normal((1, 4, 5, 3)), rng.standard_normal((1, 4, 5))
    asked = {"scale": 0.7, "scores": problem.scores, "values": {"softcap": 2.0}}
    wanted = gradients(q, k, v, dout, dlse=dlse, **asked)

    def total(*inputs: np.ndarray) -> float:
        found = reference.attention(*inputs, **asked)
        return float((found.o * dout).sum() + (found.lse * dlse).sum())

    for place, name in enumerate(("dq", "dk", "dv")):
        for at in [(0, 0, 4, 1), (0, 1, 2, 0), (0, 1, 3, 2)]:
            slope = _slope(total, (q, k, v), place, at)
            assert wanted[name].value[at] == pytest.approx(slope, rel=1e-6, abs=1e-8)


def _slope(total: Callable[..., float], inputs: tuple[np.ndarray, ...], place: int, at) -> float:
    steps = []
    for step in (1e-5, -1e-5):
        moved = [each.copy() for each in inputs]
        moved[place][at] += step
        steps.append(total(*moved))
    return (steps[0] - steps[1]) / 2e-5


@needs_compiler
@pytest.mark.parametrize(
    ("way", "right", "wrong"),
    sampled(
        [
            ("simt", "s * (gradient - delta)", "s * gradient"),
            ("mma", "s * (gradient - delta)", "s * gradient"),
            ("simt", "sum_k, args.scale", "sum_k, 1.0f"),
            ("simt", "head < (kv_head + 1) * group", "head < kv_head * group + 1"),
            ("mma", "const int count = of_head * group", "const int count = of_head"),
            ("simt", "key >= seen.begin && key < seen.end", "key >= seen.begin"),
            ("mma", "if (is_partial(args, batch, first, ", "if (false && is_partial(args, batch, first, "),
            ("simt", "first_row -= first_row % kBr", "first_row += kBr - first_row % kBr"),
            ("mma", ": Walk{head + 1, first_row}", ": Walk{head, first_row}"),
            ("mma", "kInfinity : lse * kLog2e", "kInfinity : lse"),
            ("mma, sums in memory", "(tile + 1LL) * kBlockSums : num_query_sums(args)", "0LL : 0LL"),
            ("mma, four sums at once, columns shared", "warp % kSumWarps * 16", "warp % kSumWarps * 8"),
            ("mma, float32 in parts", "weights.small[i][u], b + 2 * j", "weights.big[i][u], b_small + 2 * j"),
            ("mma, float32 in parts", "fmaf(weights.units[i][e % 4 / 2]", "fmaf(weights.units[i][0]"),
        ],
        4,
        thorough=10,
    ),
)
def test_mistakes_are_found(way: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert right in kernel.source
    with pytest.raises((WrongResult, CorruptedMemory)):
        check(replace(kernel, source=kernel.source.replace(right, wrong)))


@pytest.mark.parametrize(
    ("family", "card", "dtype"),
    [(SimtBackward, "gtx-1080", "f32"), (SimtBackward, "h200", "f32"), (MmaBackward, "a100", "bf16")],
)
def test_legal_variants_render(family: type[Variant], card: str, dtype: str) -> None:
    problem = Problem(backward=True, dtype=dtype, head_dim=128, head_dim_v=64)
    legal = enumerate_space(family, problem, PRESETS[card]).legal
    assert len(legal) > 5
    for variant in legal[:: max(1, len(legal) // 10)]:
        assert_tidy(render(variant, problem, PRESETS[card]).source, variant.name, longest=132)


def test_what_cannot_run_is_told() -> None:
    with pytest.raises(Illegal, match=r"shared memory: needs \d+ bytes, sm_61 allows 49152"):
        render(SimtBackward(), Problem(backward=True), GTX_1080)
    with pytest.raises(Illegal, match="computes backward, this problem is forward"):
        render(SMALL, Problem(), GTX_1080)
    with pytest.raises(Illegal, match="tensor cores multiply bf16 from sm_80 on, this is sm_75"):
        render(TENSOR, replace(PROBLEM, dtype="bf16"), PRESETS["t4"])
    with pytest.raises(Illegal, match="dq_path=atomics: no launch keeps query rows, of which rows=32 is"):
        render(replace(SUMMED, rows=32), replace(PROBLEM, dtype="bf16"), A100)
    with pytest.raises(Illegal, match="no launch keeps query rows, of which gradient_warps=2 is"):
        render(replace(SUMMED, gradient_warps=2), replace(PROBLEM, dtype="bf16"), A100)
    with pytest.raises(Illegal, match="gradient_warps=2: 16 columns, in steps of 16, are too few"):
        render(replace(TENSOR, gradient_warps=2), replace(PROBLEM, dtype="bf16", head_dim=16), A100)
    with pytest.raises(Illegal, match="column_warps=4: 32 columns, in steps of 16, are too few"):
        render(replace(SUMMED, column_warps=4, br=64), replace(PROBLEM, dtype="bf16"), A100)


@pytest.mark.parametrize("way", ["simt", "mma"])
def test_the_workspace_is_told_by_the_launcher_and_the_kernel_alike(way: str) -> None:
    kernel = kernel_of(way)
    # Two numbers a row, each of both rounded up to 256 bytes.
    assert kernel.workspace_bytes({"batch": 3, "num_q_heads": 4, "seqlen_q": 100}) == 2 * 4 * 1216
    assert f"{kernel.entry}_workspace_bytes(" in kernel.source
    assert [each.role for each in kernel.launches] == ["statistics", "queries", "kernel"]


@pytest.mark.nvcc
@pytest.mark.parametrize("card", sampled(["gtx-1080", "t4", "a100", "h200", "b200"], 1))
def test_kernels_build_without_spills(card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    limits = PRESETS[card]
    try:
        toolchain = cuda_toolchain(limits.arch)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    plain = Problem(backward=True, causal=True)
    built = [(SimtBackward(br=32, bc=32, threads_per_block=128), plain)]
    if limits.arch >= 80:
        wide = replace(plain, dtype="bf16", head_dim=128, head_dim_v=128)
        built.append((MmaBackward(br=32), wide))
        built.append((MmaBackward(column_warps=2, dq_path="atomics"), wide))
        built.append((MmaBackward(br=32, keys=32, dq_path="launch"), plain))
    for variant, problem in built:
        build = toolchain.build(render(variant, problem, limits))
        assert 0 < build.registers <= 255 and build.spill_bytes == 0
