"""Keys that slopes leave no weight, left out by kernels: on emulated cards, beside float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal, Variant
from flashgen.gen.work import count_work
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import reference
from flashgen.tuner.predict.prior import prior_of

from tests.support.emulated import inputs, needs_compiler
from tests.support.scored_attention import SCALE, assert_close, attend, built, is_legal

H200 = preset("h200")
#: The largest errors, by type.
NUMBERS = {"f16": 2e-3, "bf16": 2e-2, "f32": 5e-5}
MAIN = Wgmma(br=128, bc=32, far_keys="left_out")
TENSOR = Mma(br=64, bc=32, far_keys="left_out")
THREADS = Simt(br=64, bc=32, far_keys="left_out")
#: On Hopper both schedules, blocks of one tile and of several, Q in registers and a narrow last tile; warps
#: that multiply by tensor cores, float32 in both kinds of parts, and CUDA cores.
WALKS: dict[str, tuple[Variant, str]] = {
    "overlapped": (MAIN, "h200"),
    "chained": (replace(MAIN, schedule="chained", order_of_groups="products", bc=16), "h200"),
    "three groups": (replace(MAIN, br=192, rescale="always", persistent=False), "h200"),
    "one group": (replace(MAIN, br=64, section=0, persistent=False, q_in_registers=True), "h200"),
    "tail": (replace(MAIN, br=64, bc=48, tail=16), "h200"),
    "warps": (TENSOR, "a100"),
    "warps, one stage": (replace(TENSOR, br=128, stages=1, layout="swizzled", parts="f16"), "t4"),
    "threads": (THREADS, "gtx-1080"),
    "threads, two stages": (replace(THREADS, br=32, stages=2, block_order="heaviest_first"), "a100"),
}
#: Of rows and keys: ragged; more rows than keys, of which some see nothing under a causal mask; more keys.
SHAPES = ((300, 300), (200, 75), (70, 500))
#: What there may be beside slopes, and what may not.
BESIDE = {
    "window": Scoring(alibi=True, window=(90, 20)),
    "sinks": Scoring(alibi=True, sinks=True),
    "first keys": Scoring(alibi=True, window=(90, 20), always=2),
}
#: Slopes under which rows reach a few keys, some hundred, and all.
STEEP, SLIGHT, LEVEL = 8.0, 0.3, 0.0


def problem_of(dtype: str = "bf16", *, causal: bool = False, **more: Any) -> Problem:
    sizes = {
        "batch": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "seqlen_q": 300,
        "seqlen_k": 300,
    }
    return Problem(dtype=dtype, scoring=Scoring(alibi=True), causal=causal, **{**sizes, **more})


def slopes_of(problem: Problem, *of_heads: float) -> dict[str, np.ndarray]:
    """The same slopes in each batch, in turns of these."""
    found = np.resize(np.array(of_heads, np.float32), problem.num_q_heads)
    return {"slopes": np.tile(found, (problem.batch, 1))}


def case_of(problem: Problem, rows: int, keys: int):
    heads = {"heads": problem.num_q_heads, "kv_heads": problem.num_kv_heads}
    return inputs(problem, rows, keys, SCALE, batch=problem.batch, **heads)


def cases():
    every = [(w, d, c) for w in WALKS for d in NUMBERS for c in (False, True)]
    return [
        (walk, dtype, causal)
        for walk, dtype, causal in every
        if is_legal(WALKS[walk][0], problem_of(dtype, causal=causal), WALKS[walk][1])
    ]


@needs_compiler
@pytest.mark.parametrize(("walk", "dtype", "causal"), cases())
def test_what_is_left_out_is_not_missed(walk: str, dtype: str, causal: bool) -> None:
    problem = problem_of(dtype, causal=causal)
    variant, card = WALKS[walk]
    build = built(variant, problem, card)
    for slopes in ((STEEP, SLIGHT, LEVEL, 1.0), (STEEP,)):
        for rows, keys in SHAPES:
            found, expected = attend(build, rows, keys, slopes_of(problem, *slopes))
            assert_close(found, expected, NUMBERS[dtype] + 2.0 * expected.change_error)


@needs_compiler
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("name", ("window", "sinks"))
@pytest.mark.parametrize("walk", ("overlapped", "three groups", "warps", "threads"))
def test_windows_and_sinks_stand_beside_it(walk: str, name: str, causal: bool) -> None:
    variant, card = WALKS[walk]
    dtype = "f32" if walk == "threads" else "bf16"
    problem = replace(problem_of(dtype, causal=causal), scoring=BESIDE[name])
    build, rng = built(variant, problem, card), np.random.default_rng(2)
    for slopes in ((STEEP, SLIGHT, LEVEL, 1.0), (STEEP,)):
        for rows, keys in SHAPES:
            sinks = {"sinks": rng.standard_normal(4, np.float32)} if name == "sinks" else {}
            window = {"window_left": 90, "window_right": 20} if name == "window" else {}
            found, expected = attend(build, rows, keys, {**slopes_of(problem, *slopes), **sinks, **window})
            assert_close(found, expected, NUMBERS[dtype] + 2.0 * expected.change_error)


@needs_compiler
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("walk", ("overlapped", "warps", "threads"))
def test_keys_out_of_reach_are_not_read(walk: str, causal: bool) -> None:
    """Values that are no numbers would reach every row that walks their tile, whatever their weight."""
    left_out, card = WALKS[walk]
    dtype = "f32" if walk == "threads" else "bf16"
    problem, rows = problem_of(dtype, causal=causal), 512
    q, k, v = case_of(problem, rows, rows)
    spoiled = np.array(v)
    spoiled[:, :, 300:332] = np.nan
    for variant, sees in ((left_out, False), (replace(left_out, far_keys="walked"), True)):
        found, _ = attend(
            built(variant, problem, card), rows, rows, slopes_of(problem, STEEP), (q, k, spoiled)
        )
        o = np.asarray(found[0], np.float32)
        assert np.isfinite(o[:, :, :128]).all() or not causal
        # Rows from 384 on are of another tile than those keys, which are more than their reach away.
        assert np.isnan(o[:, :, 384:]).any() == sees
        assert np.isnan(o[:, :, 256:384]).any()


@needs_compiler
def test_steep_slopes_do_not_hide_what_outweighs_them() -> None:
    """A key far off that is long enough counts, as does one for a row that is."""
    problem, rows = problem_of(causal=True), 400
    q, k, v = (np.array(x, np.float32) for x in case_of(problem, rows, rows))
    k[:, :, 7] *= 400.0  # its score at some rows is larger by more than the slopes take
    q[:, :, 390] *= 100.0
    case = inputs(problem, rows, rows, SCALE, batch=2, heads=4, kv_heads=2)
    case = tuple(x.astype(kept.dtype) for x, kept in zip((q, k, v), case, strict=True))
    for slopes in ((1.0,), (0.25, 4.0)):
        found, expected = attend(built(MAIN, problem), rows, rows, slopes_of(problem, *slopes), case)
        assert_close(found, expected, NUMBERS["bf16"])
        far = np.asarray(found[0], np.float64)[:, :, 200:] - np.asarray(v, np.float64)[:, :, 7:8].repeat(2, 1)
        assert (np.abs(far).max(-1) < 0.02).any()  # rows of which it has all the weight


@needs_compiler
@pytest.mark.parametrize(
    "spoil",
    (
        pytest.param(lambda q, k: k.__setitem__((0, 0, 3), np.inf), id="an infinite key"),
        pytest.param(lambda q, k: k.__setitem__((1, 1, 5, 2), np.nan), id="a key that is no number"),
        pytest.param(lambda q, k: q.__setitem__((0, 2, 250), np.nan), id="a row that is no number"),
        pytest.param(lambda q, k: (q.__imul__(1e24), k.__imul__(1e-24)), id="keys too short to be squared"),
        pytest.param(lambda q, k: (q.__imul__(1e-24), k.__imul__(1e24)), id="rows too short to be squared"),
    ),
)
def test_all_keys_are_in_reach_of_what_tells_nothing(spoil) -> None:
    """The bits are those of a kernel that walks all keys, where lengths are no numbers or have no square."""
    problem, rows = problem_of(causal=True), 300
    q, k, v = case_of(problem, rows, rows)
    q, k = np.array(q), np.array(k)
    spoil(q, k)
    slopes = slopes_of(problem, 0.05, STEEP)
    found, walked = (
        attend(built(variant, problem), rows, rows, slopes, (q, k, v))[0]
        for variant in (MAIN, replace(MAIN, far_keys="walked"))
    )
    for mine, theirs in zip(found, walked, strict=True):
        mine, theirs = (np.asarray(x, np.float32) for x in (mine, theirs))
        known = np.isfinite(theirs)
        assert (np.isfinite(mine) == known).all()
        assert np.allclose(mine[known], theirs[known], rtol=2e-2, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("slope", (0.0, -0.5, float("nan"), 1e-30))
def test_slopes_that_press_nothing_down_leave_nothing_out(slope: float) -> None:
    problem = problem_of()
    case = case_of(problem, 200, 300)
    slopes = slopes_of(problem, slope)
    mine, theirs = (
        attend(built(variant, problem), 200, 300, slopes, case)[0]
        for variant in (MAIN, replace(MAIN, far_keys="walked"))
    )
    for a, b in zip(mine, theirs, strict=True):
        assert np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), equal_nan=True)


@needs_compiler
def test_nothing_beside_the_workspace_is_touched() -> None:
    problem = problem_of(causal=True)
    build = built(MAIN, problem, sanitize=True)
    for rows, keys in (*SHAPES, (64, 1), (1, 64), (130, 3)):
        found, expected = attend(build, rows, keys, slopes_of(problem, STEEP, SLIGHT), sanitize=True)
        assert_close(found, expected, NUMBERS["bf16"])


def test_the_workspace_has_what_is_found() -> None:
    problem = problem_of(seqlen_q=1000, seqlen_k=500)
    workspace = MAIN.workspace(problem, H200)
    assert workspace is not None
    sizes = {name: getattr(problem, name) for name in workspace.sizes}
    lengths, reaches = (each.floats.value(sizes) for each in workspace.regions)
    assert lengths == 2 * 2 * -(-500 // 16) and reaches == 2 * 4 * -(-1000 // 64)
    assert [each.role for each in MAIN.launches(problem, H200)] == ["key_lengths", "reach", "kernel"]


@pytest.mark.parametrize(
    ("walk", "more", "changed", "words"),
    (
        ("overlapped", {"scoring": Scoring(alibi=True, softcap=30.0)}, {}, "slopes alone must press"),
        ("overlapped", {"scoring": Scoring(alibi=True, chunk=8)}, {}, "slopes alone must press"),
        ("threads", {"dtype": "f32", "scoring": BESIDE["first keys"]}, {}, "no neighbours of the others"),
        ("warps", {"scoring": Scoring()}, {}, "slopes alone must press them down"),
        ("threads", {"scoring": Scoring(alibi=True, lengths=True)}, {}, "slopes alone must press"),
        ("overlapped", {}, {"cluster": 2}, "nor for such as share keys"),
        ("overlapped", {}, {"pack_heads": True, "persistent": False}, "blocks of several heads"),
        ("overlapped", {}, {"splits": 2, "persistent": False}, "nor for such as share keys"),
        ("warps", {}, {"heads": 2, "q_in_registers": False}, "blocks of several heads"),
        ("warps", {}, {"key_warps": 2, "br": 16}, "such as share keys"),
        ("threads", {"dtype": "f32"}, {"workspace_splits": 2}, "such as share keys"),
        ("warps", {"page_size": 16}, {}, "lie there whole"),
        ("threads", {"dtype": "f32", "varlen": "uniform:8-99"}, {}, "lie there whole"),
    ),
)
def test_where_it_is_not_made(walk: str, more: dict[str, Any], changed: dict[str, Any], words: str) -> None:
    variant, card = WALKS[walk]
    problem = replace(problem_of("f32" if walk == "threads" else "bf16"), **more)
    with pytest.raises(Illegal, match=words):
        replace(variant, **changed).check(problem, preset(card))


@pytest.mark.parametrize("walk", ("overlapped", "warps", "threads"))
def test_less_is_walked(walk: str) -> None:
    heads = {"num_q_heads": 32, "num_kv_heads": 32, "head_dim": 64}
    dtype = "f32" if walk == "threads" else "bf16"
    problem = problem_of(dtype, causal=True, **heads, seqlen_q=8192, seqlen_k=8192)
    variant, card = WALKS[walk]
    left, walked = (
        count_work(replace(variant, far_keys=each), problem, preset(card)) for each in ("left_out", "walked")
    )
    assert left.launches_in_front == 2 and left.bytes_in_front > 0 == walked.bytes_in_front
    prior = prior_of(problem, preset(card))
    assert prior(variant) < 0.7 * prior(replace(variant, far_keys="walked"))


#: What makes the reach of some rows too short.
WRONG = {
    "no length": ("(most - own + depth) / slope", "(depth - own) / slope"),
    "own score": ("(most - own + depth) / slope", "(most + own + depth) / slope"),
    "some keys' lengths": ("longest = fmaxf(longest, length_of", "longest = fmaxf(0.0f, length_of"),
    "one lane's rows": ("reach = largest_of_warp(reach);", ""),
    "rows before all keys": ("+ float(next - place)", ""),
    "the first of a block's rows": ("(place + kBr - 1 + reach)", "(place + reach)"),
    "the last rows' reach": ("reach = max(reach, reaches_of", "reach = max(0, reaches_of"),
}


def missed(kernel: Kernel) -> float:
    """The largest error of a kernel: one row of a block's first 64 is long, and a key far off outweighs all
    others for it, of which its own scores little, or is hardly one; and where rows stand before all keys."""
    problem, device, worst = kernel.problem, SimDevice("emulated", preset("gtx-1080")), 0.0
    build, rng = device.toolchain().build(kernel), np.random.default_rng(7)
    for rows, keys, slope, scores in (
        (320, 320, 0.5, {25: 75.0}),
        (320, 320, 0.5, {25: 75.0, 141: -50.0}),
        (300, 40, 4.0, {}),
    ):
        shapes = ((2, heads, length, 16) for heads, length in ((4, rows), (2, keys), (2, keys)))
        q, k, v = (0.5 * rng.standard_normal(shape, np.float32) for shape in shapes)
        q[:, :, 141] *= 4.0
        row = q[:, ::2, 141]
        for key, score in scores.items():
            k[:, :, key] = row * (score / SCALE / (row**2).sum(-1, keepdims=True))
        values = slopes_of(problem, slope)
        found = device.open().attend(build, q, k, v, scale=SCALE, want_lse=True, values=values)
        expected = reference.attention(q, k, v, scale=SCALE, scores=problem.scores, values=values)
        worst = max(worst, float(np.abs(found[0] - expected.o).max()))
    return worst


@needs_compiler
@pytest.mark.parametrize("what", (None, *WRONG))
def test_a_reach_that_is_too_short_is_noticed(what: str | None) -> None:
    variant = replace(THREADS, br=128, bc=8, threads_per_block=128)
    kernel = render(variant, problem_of("f32"), preset("gtx-1080"))
    if what is None:
        assert missed(kernel) < 1e-4
        return
    right, wrong = WRONG[what]
    assert right in kernel.source
    assert missed(replace(kernel, source=kernel.source.replace(right, wrong))) > 1e-2
