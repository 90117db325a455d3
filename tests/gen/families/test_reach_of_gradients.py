"""Keys that slopes leave no weight, passed by no rows of kernels of gradients: emulated, beside float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.gen.work import count_work
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import CorruptedMemory
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.gradients import gradients
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.predict.prior import prior_of

from tests.gen.families.test_reach import LEVEL, SLIGHT, slopes_of
from tests.gen.families.test_wgmma_backward import SCORED_BY
from tests.gen.families.test_wgmma_backward_parts import WAYS as IN_PARTS
from tests.support.emulated import needs_compiler
from tests.support.given_gradients import given_of, largest_share

H200 = preset("h200")
SCALE = 0.2
PROBLEM = Problem(
    batch=2,
    num_q_heads=4,
    num_kv_heads=2,
    seqlen_q=300,
    seqlen_k=300,
    head_dim=32,
    dtype="bf16",
    backward=True,
    scoring=Scoring(alibi=True),
)
#: Blocks that add up queries' gradients by the copy engine, and by threads, of one tile and of several, in
#: any order and in one, either way; and float32 in parts.
WALKS: dict[str, WgmmaBackward] = {
    "bulk": SCORED_BY["bulk"],
    "atomics": replace(SCORED_BY["bulk"], dq_path="atomics", order="by_section", turns="fixed"),
    "late": SCORED_BY["late"],
    "handed on": SCORED_BY["handed on"],
    "handed on, up": replace(SCORED_BY["handed on"], walk="up", order="heaviest_first"),
    "parts": IN_PARTS["narrow, sums by threads"][0],
}
WALKS = {name: replace(variant, far_keys="left_out") for name, variant in WALKS.items()}
#: Of rows and keys: ragged; more rows than keys, of which some see nothing under a causal mask; more keys.
SHAPES = ((300, 300), (200, 75), (70, 500))
#: Slopes under which rows reach some thirty keys; steeper ones leave queries and keys no gradient.
STEEP = 1.0
#: Those that far keys may be left out of; slopes have theirs by a launch of its own.
GRADIENTS = ("dq", "dk", "dv")
#: Errors that are allowed, as a share of each head.
SHARES = {"bf16": 1e-2, "f32": 5e-6}


def problem_of(walk: str, **more: Any) -> Problem:
    dtype = "f32" if walk == "parts" else "bf16"
    return replace(PROBLEM, dtype=dtype, **more)


def kernel_of(walk: str, **more: Any) -> Kernel:
    # Blocks that stay have several turns each on a card of few multiprocessors.
    return render(WALKS[walk], problem_of(walk, **more), replace(H200, num_sms=2))


def as_it_is(q: np.ndarray, k: np.ndarray) -> None:
    """Leaves arrays as they are."""


def with_a_long_key(q: np.ndarray, k: np.ndarray) -> None:
    k[:, :, 7] *= 400.0


def with_a_long_key_and_a_short_row(q: np.ndarray, k: np.ndarray) -> None:
    k[:, :, 7] *= 400.0
    q[:, :, 200] *= 1e-3


def with_a_row_of_a_far_key(q: np.ndarray, k: np.ndarray) -> None:
    """One row is long, and a key far off outweighs all others for it, and hardly any for other rows."""
    q[:, :, 301] *= 8.0
    row = q[:, ::2, 301].astype(np.float32)
    k[:, :, 25] = (row * (150.0 / SCALE / (row**2).sum(-1, keepdims=True))).astype(k.dtype)


def given_for(
    problem: Problem,
    rows: int,
    keys: int,
    values: Mapping[str, np.ndarray],
    spoil: Callable[[np.ndarray, np.ndarray], None] = as_it_is,
) -> dict[str, Any]:
    """What gradients are taken of: random inputs, spoiled in place."""
    rng, d = np.random.default_rng(3), problem.head_dim
    shapes = ((2, 4, rows, d), (2, 2, keys, d))
    arrays = reference.random_inputs("normal", *shapes, scale=SCALE, rng=rng, dtype=problem.dtype)
    q, k, v = map(np.array, arrays)
    spoil(q, k)
    return given_of(q, k, v, rng, scale=SCALE, scores=problem.scores, values=values)


def error_of(build: Build, given: dict[str, Any], values: Mapping[str, np.ndarray]) -> float:
    """The largest error of a gradient's head, as a share of the head."""
    found = SimDevice("emulated", H200).open().differentiate(build, given, scale=SCALE, values=values)
    asked = {"scale": SCALE, "scores": build.kernel.problem.scores, "values": values}
    shares = [0.0]
    for name, each in gradients(given["q"], given["k"], given["v"], given["dout"], **asked).items():
        if name in GRADIENTS:
            shares.append(largest_share(found[name], each.value))
    return max(shares) if np.isfinite(shares).all() else float("inf")


def built(kernel: Kernel) -> Build:
    return SimDevice("emulated", H200).toolchain().build(kernel)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("walk", WALKS)
def test_what_is_left_out_is_not_missed(walk: str, causal: bool) -> None:
    build = built(kernel_of(walk, causal=causal))
    problem = build.kernel.problem
    for slopes in ((STEEP, SLIGHT, LEVEL, 0.5), (STEEP,)):
        values = slopes_of(problem, *slopes)
        for rows, keys in SHAPES:
            given = given_for(problem, rows, keys, values)
            assert error_of(build, given, values) < SHARES[problem.dtype], (slopes, rows, keys)


@needs_compiler
@pytest.mark.parametrize("walk", ["late", "handed on, up"])
def test_windows_stand_beside_it(walk: str) -> None:
    build = built(kernel_of(walk, causal=True, scoring=Scoring(alibi=True, window=(90, 20))))
    problem = build.kernel.problem
    values = slopes_of(problem, STEEP, 0.01) | {"window_left": 90, "window_right": 20}
    for rows, keys in SHAPES:
        assert error_of(build, given_for(problem, rows, keys, values), values) < SHARES["bf16"]


@needs_compiler
@pytest.mark.parametrize("walk", ["bulk", "handed on, up", "parts"])
def test_rows_out_of_reach_are_not_read(walk: str) -> None:
    """What is no number would reach the gradients of all keys that its row passes by."""
    left_out = kernel_of(walk, causal=True)
    walked = render(replace(WALKS[walk], far_keys="walked"), left_out.problem, H200)
    values = slopes_of(left_out.problem, STEEP)
    given = given_for(left_out.problem, 512, 512, values)
    given["dout"] = np.array(given["dout"])
    given["dout"][:, :, 500] = np.nan
    runner = SimDevice("emulated", H200).open()
    for kernel, is_read in ((left_out, False), (walked, True)):
        found = runner.differentiate(built(kernel), given, scale=SCALE, values=values)
        assert np.isnan(found["dv"].astype(np.float32)[:, :, :128]).any() == is_read
        assert np.isnan(found["dv"].astype(np.float32)[:, :, 448:]).any()


def largest_change(kernel: Kernel, given: dict[str, Any], values: Mapping[str, np.ndarray]) -> float:
    """How much the gradient of a head differs from what a kernel makes that walks all, at most, as a share of
    the head; infinity where some of it is not written."""
    runner = SimDevice("emulated", H200).open()
    walked = render(replace(kernel.variant, far_keys="walked"), kernel.problem, H200)
    theirs = runner.differentiate(built(walked), given, scale=SCALE, values=values)
    try:
        mine = runner.differentiate(built(kernel), given, scale=SCALE, values=values)
    except CorruptedMemory:
        return float("inf")
    worst = 0.0
    for name in GRADIENTS:
        worst = max(worst, largest_share(mine[name], theirs[name].astype(np.float64)))
    return worst


@needs_compiler
@pytest.mark.parametrize("spoil", [with_a_long_key, with_a_long_key_and_a_short_row, with_a_row_of_a_far_key])
def test_steep_slopes_do_not_hide_what_outweighs_them(spoil: Callable[[np.ndarray, np.ndarray], None]):
    kernel = kernel_of("handed on, up", causal=True)
    for slopes in ((1.0,), (0.25, 4.0)):
        values = slopes_of(kernel.problem, *slopes)
        assert largest_change(kernel, given_for(kernel.problem, 400, 400, values, spoil), values) < 1e-3


@needs_compiler
@pytest.mark.parametrize("slope", [0.0, -0.5, float("nan")])
def test_slopes_that_press_nothing_down_leave_nothing_out(slope: float) -> None:
    kernel = kernel_of("handed on, up", causal=True)
    walked = render(replace(kernel.variant, far_keys="walked"), kernel.problem, H200)
    values = slopes_of(kernel.problem, slope)
    given = given_for(kernel.problem, 200, 300, values)
    runner = SimDevice("emulated", H200).open()
    mine, theirs = (
        runner.differentiate(built(each), given, scale=SCALE, values=values) for each in (kernel, walked)
    )
    for name, each in mine.items():
        assert np.array_equal(each.astype(np.float32), theirs[name].astype(np.float32), equal_nan=True)


#: What makes the reach of some rows too short.
WRONG = {
    "no length": ("(most - known + depth) / slope", "depth / slope"),
    "one lane's rows": ("reach = largest_of_warp(reach);", ""),
    "one row alone": (
        "atomicMax(reach_of(args, batch, kv_head), int(ceilf(reach)))",
        "reach_of(args, batch, kv_head)[0] = 1",
    ),
    "rows before all keys": (", float(next - place));", ", 0.0f);"),
    "rows behind": ("end_key + reach - first_place", "end_key - first_place"),
}


@needs_compiler
@pytest.mark.parametrize("what", [None, *WRONG])
def test_a_reach_that_is_too_short_is_noticed(what: str | None) -> None:
    """Of long keys, a long row, and rows that stand before all keys, whose weight sinks have."""
    kernel = kernel_of("handed on", causal=False, scoring=Scoring(alibi=True, sinks=True))
    if what is not None:
        right, wrong = WRONG[what]
        assert right in kernel.source
        kernel = replace(kernel, source=kernel.source.replace(right, wrong))
    worst = 0.0
    for rows, keys, slope, sink, spoil in (
        (320, 320, 0.5, -30.0, with_a_long_key),
        (320, 320, 0.42, -30.0, with_a_row_of_a_far_key),
        (300, 40, 4.0, 20.0, as_it_is),
    ):
        values = slopes_of(kernel.problem, slope) | {"sinks": np.full(4, sink, np.float32)}
        given = given_for(kernel.problem, rows, keys, values, spoil)
        worst = max(worst, largest_change(kernel, given, values))
    assert worst < 1e-3 if what is None else worst > 1e-2


@needs_compiler
def test_nothing_beside_the_workspace_is_touched() -> None:
    device = SimDevice("emulated", H200, sanitize=True)
    build = device.toolchain().build(kernel_of("handed on, up", causal=True))
    values = slopes_of(build.kernel.problem, STEEP, SLIGHT)
    for rows, keys in ((130, 3), (1, 64), (150, 150)):
        given = given_for(build.kernel.problem, rows, keys, values)
        device.open().differentiate(build, given, scale=SCALE, values=values)


def test_the_workspace_has_what_is_found() -> None:
    problem = problem_of("bulk", seqlen_q=1000, seqlen_k=500)
    workspace = WALKS["bulk"].workspace(problem, H200)
    assert workspace is not None
    sizes = {name: getattr(problem, name) for name in workspace.sizes}
    lengths, reach = (each.floats.value(sizes) for each in workspace.regions[-2:])
    assert lengths == 2 * 2 * -(-500 // 16) and reach == 2 * 2
    roles = [each.role for each in WALKS["bulk"].launches(problem, H200)]
    assert roles[:-1] == ["key_lengths", "reach", "statistics", "kernel", "postprocess"]


@pytest.mark.parametrize(
    ("more", "changed", "words"),
    [
        ({"scoring": Scoring(alibi=True, softcap=30.0)}, {}, "slopes alone must press"),
        ({"scoring": Scoring()}, {}, "slopes alone must press"),
        ({"varlen": "uniform:8-99"}, {}, "lie there whole"),
        ({}, {"dq_path": "launch"}, "rows, or clusters, take what they see"),
        ({}, {"dq_path": "cluster", "cluster": 2}, "rows, or clusters, take what they see"),
    ],
)
def test_where_it_is_not_made(more: dict[str, Any], changed: dict[str, Any], words: str) -> None:
    with pytest.raises(Illegal, match=words):
        replace(WALKS["bulk"], **changed).check(problem_of("bulk", **more), H200)


@pytest.mark.parametrize("walk", ["bulk", "handed on, up", "parts"])
def test_less_is_walked(walk: str) -> None:
    heads = {"num_q_heads": 32, "num_kv_heads": 32, "head_dim": 64}
    problem = problem_of(walk, causal=True, **heads, seqlen_q=8192, seqlen_k=8192)
    left, walked = (replace(WALKS[walk], far_keys=each) for each in ("left_out", "walked"))
    others = [count_work(each, problem, H200).others for each in (left, walked)]
    prior = prior_of(problem, H200)
    assert others[0] == others[1] + 2 and prior(left) < 0.7 * prior(walked)


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("walk", ["late", "handed on, up", "parts"])
def test_what_weighs_nothing_is_no_error(walk: str) -> None:
    """Gradients of keys that nobody has a weight for are nothing, not what is left of one."""
    assert (
        validate(
            SimDevice("emulated", H200).open(), built(kernel_of(walk, causal=True)), seed=1, depth="full"
        )
        > 0.0
    )
