"""Gradients by blocks that stay for several tiles of keys and share the rows of those left for a last turn,
on emulated cards of few multiprocessors, where small problems have turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.wgmma_backward import family, slices
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.families.wgmma_backward.slices import SLICE_TILES, slices_of_left, tiles_left
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.predict.cost_model import predict

from tests.gen.families.test_packed import SCORINGS
from tests.support.depth import sampled
from tests.support.emulated import needs_compiler
from tests.support.given_gradients import given_of

H200 = preset("h200")
#: Three blocks, as there are multiprocessors.
FEW = replace(H200, num_sms=3)
PROBLEM = Problem(backward=True, dtype="bf16", num_q_heads=4, num_kv_heads=2)
LONG = replace(
    PROBLEM,
    batch=2,
    num_q_heads=16,
    num_kv_heads=16,
    seqlen_q=8192,
    seqlen_k=8192,
    head_dim=128,
    head_dim_v=128,
)
SHARED = WgmmaBackward(br=128, dq_path="bulk", turns="free", last_turn="shared")
HANDED_ON = replace(SHARED, br=64, sums="handed_on", order="by_section")
#: By what meets the end of a share: whose queries' sums come in which order, who writes, what is kept.
WAYS: dict[str, tuple[WgmmaBackward, dict[str, Any]]] = {
    "by the copy engine": (SHARED, {"head_dim": 64}),
    "by threads": (replace(SHARED, dq_path="atomics"), {"head_dim": 40, "head_dim_v": 72, "dtype": "f16"}),
    "by sections": (replace(SHARED, order="by_section"), {"head_dim": 48, "head_dim_v": 64}),
    "ahead, in parts": (
        replace(SHARED, br=128, schedule="ahead", parts=2, kept="registers", meeting="late"),
        {"head_dim": 64, "head_dim_v": 40},
    ),
    "rows of keys": (replace(SHARED, ranges="of_keys", dq_path="atomics"), {"head_dim": 24}),
    "a lone consumer": (replace(SHARED, bc=64, br=64, order="heaviest_first"), {"head_dim": 32}),
    "handed on, down": (HANDED_ON, {"head_dim": 128}),
    "handed on, up": (
        replace(HANDED_ON, walk="up", schedule="made_first", order="by_head"),
        {"head_dim": 128, "head_dim_v": 48},
    ),
    "handed on, rows of keys": (
        replace(HANDED_ON, br=128, schedule="ahead", parts=2, meeting="late", ranges="of_keys"),
        {"head_dim": 64},
    ),
}
#: Heads of queries and of keys, rows, keys: of tiles of 128 keys a last turn of one and of two on three
#: multiprocessors, of none, no whole turn, and rows for fewer shares than there might be.
SHAPES = (
    (4, 4, 300, 100),
    (4, 2, 200, 500),
    (2, 1, 333, 640),
    (6, 3, 100, 100),
    (2, 1, 333, 222),
    (5, 5, 64, 90),
)


@pytest.fixture(autouse=True)
def free_slices(monkeypatch):
    """Slices that take nothing beside their rows, of which emulated problems have few."""
    for module in (family, slices):
        monkeypatch.setattr(module, "SLICE_TILES", 0)


def asked_of(way: str, **asked: Any) -> tuple[WgmmaBackward, Problem]:
    variant, sizes = WAYS[way]
    return variant, replace(PROBLEM, **{"head_dim_v": sizes["head_dim"]} | sizes | asked)


def kernel_of(way: str, **asked: Any) -> Kernel:
    return render(*asked_of(way, **asked), FEW)


def check(kernel: Kernel, *, depth: Any = "quick", sanitize: bool = False) -> float:
    device = SimDevice("emulated", FEW, sanitize)
    return validate(device.open(), device.toolchain().build(kernel), seed=2, depth=depth)


@needs_compiler
@pytest.mark.parametrize(
    ("way", "causal"), sampled([(way, causal) for way in WAYS for causal in (False, True)], 4, thorough=9)
)
def test_gradients_are_those_of_float64(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal)
    assert 0.0 < check(kernel) < kernel.problem.tolerance


def given(kernel: Kernel, shape: tuple[int, int, int, int], seed: int, **asked: Any) -> dict[str, Any]:
    heads, kv_heads, rows, keys = shape
    problem, rng = kernel.problem, np.random.default_rng(seed)
    shapes = ((1, heads, rows, problem.head_dim), (1, kv_heads, keys, problem.head_dim))
    q, k, v = reference.random_inputs("normal", *shapes, scale=0.2, rng=rng, dtype=problem.dtype)
    if (more := problem.head_dim_v - problem.head_dim) > 0:
        v = np.concatenate([v, v[..., :more]], axis=-1)
    v = np.ascontiguousarray(v[..., : problem.head_dim_v])
    return given_of(q, k, v, rng, scale=0.2, scores=problem.scores, **asked)


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest difference as a share of the largest number."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(np.abs(one - other).max() / np.abs(other).max())


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("way", "causal"), sampled([(way, causal) for way in WAYS for causal in (False, True)], 2, thorough=9)
)
def test_shares_add_up_in_any_order_of_blocks(
    way: str, causal: bool, shape: tuple[int, int, int, int]
) -> None:
    """To what one block makes of a tile; keys' and values' gradients to the same bits in every run, those of
    queries too where sums are handed on."""
    kernel = kernel_of(way, causal=causal)
    whole = render(replace(WAYS[way][0], last_turn="whole"), kernel.problem, FEW)
    arrays, toolchain = given(kernel, shape, seed=5), SimDevice("emulated", FEW).toolchain()
    wanted = SimRunner(FEW, seed=0).differentiate(toolchain.build(whole), arrays, scale=0.2)
    build = toolchain.build(kernel)
    first, *others = (SimRunner(FEW, seed=seed).differentiate(build, arrays, scale=0.2) for seed in range(3))
    assert all(apart(first[name], wanted[name]) < 0.02 for name in ("dq", "dk", "dv"))
    same = ("dq", "dk", "dv") if kernel.variant.hands_on_sums else ("dk", "dv")
    for other in others:
        assert all(other[name].tobytes() == first[name].tobytes() for name in same)


def is_legal(way: str, name: str) -> bool:
    """Changes of scores take registers, and steeper ones are differentiated where they are made."""
    variant, problem = asked_of(way, scoring=SCORINGS[name])
    return not any(each.verdict(variant, problem, FEW) for each in variant.rules() if not each.advisory)


SCORED = [(way, name) for way in WAYS for name in SCORINGS if is_legal(way, name)]


@needs_compiler
@pytest.mark.parametrize(("way", "name"), sampled(SCORED, 1, thorough=6))
def test_masks_and_changes_of_scores_are_differentiated(way: str, name: str) -> None:
    kernel = kernel_of(way, scoring=SCORINGS[name], causal=name != "score")
    assert check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 1, thorough=3))
def test_nothing_is_read_or_written_out_of_bounds(way: str) -> None:
    check(kernel_of(way, scoring=Scoring(window=(150, 70))), sanitize=True)


#: Of a way the right text and a wrong one.
MISTAKES = (
    ("by threads", "wait_for_number(added, slice.nth);", ""),
    ("by threads", "leave_number(added, slice.nth + 1)", "leave_number(added, 1)"),
    ("by threads", "add_handed(sum_v, handed + kD / 8 * kWarpgroup);", "add_handed(sum_v, handed);"),
    ("by threads", "*slices_added(args, 0, i) = 0;", "*slices_added(args, 0, i) = 1;"),
    ("by threads", "first_row += begin * kPassingRows;", ""),
    ("by threads", "if (slice.is_last()) return true;", "if (slice.nth == 0) return true;"),
    ("by threads", "tiles - left + left * best}", "tiles}"),
    ("by threads", "+ tile * kConsumers + consumer;", "+ tile * kConsumers;"),
    ("handed on, down", "turn.is_last ? 2 : 0", "2"),
    (
        "handed on, down",
        "of_head = all * (slice.nth + 1) / slice.count - begin;",
        "of_head = all / slice.count;",
    ),
    ("handed on, down", "tell();  // of a slice", "// of a slice"),
    ("handed on, up", "if (nth >= turn.kept) break;", "if (nth >= 2) break;"),
)


@needs_compiler
@pytest.mark.parametrize(("way", "right", "wrong"), sampled(MISTAKES, 2, thorough=11))
def test_mistakes_are_found(way: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way)
    assert kernel.source.count(right) == 1
    wrong_kernel = replace(kernel, source=kernel.source.replace(right, wrong))
    whole = render(replace(kernel.variant, last_turn="whole"), kernel.problem, FEW)
    arrays, toolchain = given(kernel, (2, 1, 300, 640), seed=7), SimDevice("emulated", FEW).toolchain()
    wanted = SimRunner(FEW, seed=0).differentiate(toolchain.build(whole), arrays, scale=0.2)
    build = toolchain.build(wrong_kernel)
    try:
        runs = [SimRunner(FEW, seed=seed).differentiate(build, arrays, scale=0.2) for seed in range(6)]
    except FlashgenError:
        return
    assert any(apart(made[name], wanted[name]) > 0.1 for made in runs for name in ("dq", "dk", "dv"))


def test_last_turns_are_of_blocks_that_take_turns_in_their_order() -> None:
    """Or some would wait for one that has no multiprocessor yet, on which they wait."""
    problem = replace(PROBLEM, head_dim=64, head_dim_v=64)
    with pytest.raises(Illegal, match="last_turn=shared: turns=one has no last one of fewer blocks"):
        replace(SHARED, turns="one").check(problem, FEW)
    with pytest.raises(Illegal, match="turns=fixed has blocks wait for others that may not have begun"):
        replace(SHARED, turns="fixed").check(problem, FEW)


def test_tiles_are_cut_as_blocks_have_done_soonest(monkeypatch) -> None:
    """By the turns that slices are, and what each takes beside its rows."""
    monkeypatch.setattr(slices, "SLICE_TILES", SLICE_TILES)
    assert tiles_left(HANDED_ON, LONG, 132) == 68
    # Of 68 tiles a slice for each block takes 1 turn of 1, 2 of 1/2, 2 of 1/3 or 3 of 1/4.
    assert [slices_of_left(HANDED_ON, LONG, left, 132) for left in (0, 4, 33, 68, 131)] == [1, 4, 4, 3, 1]
    short = replace(LONG, batch=32, seqlen_q=512, seqlen_k=512)
    assert [slices_of_left(HANDED_ON, short, left, 132) for left in (4, 44, 66, 68)] == [4, 3, 2, 1]
    assert HANDED_ON.advice(LONG, H200) is None
    told = "last_turn=shared: 132 blocks have done no sooner with slices of the 68 tiles that are left"
    assert HANDED_ON.advice(short, H200) == f"combination: {told}"
    causal = replace(HANDED_ON, walk="up").advice(replace(LONG, causal=True), H200)
    assert "where tiles differ in length" in str(causal)


def test_predictions_are_of_parts_of_a_turn() -> None:
    """Of 15.5 turns the last takes 2/3, and what slices take besides."""
    whole = predict(replace(HANDED_ON, last_turn="whole"), LONG, H200).median_us
    shared = predict(HANDED_ON, LONG, H200).median_us
    assert 16 / (15 + 2 / 3) > whole / shared > 16 / 15.75


def test_the_workspace_has_room_for_what_is_handed_on() -> None:
    kernel, whole = (
        kernel_of("by threads"),
        render(replace(SHARED, dq_path="atomics", last_turn="whole"), asked_of("by threads")[1], FEW),
    )
    sizes = {"batch": 1, "num_q_heads": 4, "seqlen_q": 300}
    more = kernel.workspace_bytes(sizes) - whole.workspace_bytes(sizes)
    # Three tiles of two consumers, each of 64 keys: sums, and numbers filled up to 64.
    assert more == 4 * (64 + 64 + 3 * 2 * 64 * (40 + 72))
