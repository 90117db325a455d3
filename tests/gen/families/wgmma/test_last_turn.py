"""Hopper kernels whose blocks that stay share the keys of the tiles left for a last turn, on emulated cards
of few multiprocessors, where small problems have turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.evaluate import reference
from flashgen.tuner.predict.cost_model import predict

from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, check, inputs, is_caught, needs_compiler

H200 = preset("h200")
#: Blocks that stay: three, as there are multiprocessors.
FEW = replace(H200, num_sms=3)
BRAIN = Problem(dtype="bf16", head_dim=24, head_dim_v=24)
HALF = Problem(dtype="f16", head_dim=40, head_dim_v=72)
SHARED = Wgmma(br=64, bc=16, last_turn="shared")
#: By what meets the end of a share: where Q lies and outputs leave from, schedules, several consumers, tails.
WAYS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "outputs in the place of Q": (BRAIN, {}),
    "outputs apart": (HALF, {"o_apart": True, "br": 128, "bc": 32}),
    "chained": (HALF, {"schedule": "chained", "br": 128, "order_of_groups": "products", "o_apart": True}),
    "Q in registers": (BRAIN, {"q_in_registers": True, "rescale": "always"}),
    "Q in registers, outputs apart": (HALF, {"q_in_registers": True, "o_apart": True, "bc": 48}),
    "the next Q early": (BRAIN, {"q_stages": 2, "br": 192, "order_of_groups": "exponentials"}),
    "weights in shared memory": (BRAIN, {"p_in_shared": True, "br": 256, "bc": 32}),
    "a narrow last tile": (HALF, {"tail": 16, "bc": 64, "schedule": "chained"}),
    "two blocks on a multiprocessor": (BRAIN, {"min_blocks": 2, "poly_exp": 4}),
}
#: Heads, rows and keys: of tiles of 64 rows a last turn of one, of two, of none, and no whole turn at all;
#: keys for many shares, for fewer tiles than shares, for one.
SHAPES = ((4, 50, 333), (5, 64, 77), (6, 64, 100), (2, 64, 400), (4, 9, 30), (4, 64, 2))


def variant_of(way: str) -> Wgmma:
    return replace(SHARED, **WAYS[way][1])


def kernel_of(way: str) -> Kernel:
    return render(variant_of(way), WAYS[way][0], FEW)


@needs_compiler
@pytest.mark.parametrize("way", sampled(sorted(WAYS), 4))
def test_the_suite(way):
    problem = WAYS[way][0]
    assert 0 < check(Setting(variant_of(way), problem, FEW), seed=3) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(sorted(WAYS), 0, thorough=4))
def test_the_full_suite(way):
    problem = WAYS[way][0]
    assert 0 < check(Setting(variant_of(way), problem, FEW), seed=4, depth="full") <= problem.tolerance


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("way", ["outputs apart", "Q in registers"])
def test_kernels_pass_the_sanitizer(way):
    check(Setting(variant_of(way), WAYS[way][0], FEW), seed=1, sanitize=True)


@needs_compiler
@pytest.mark.parametrize("way", sampled(sorted(WAYS), 2, thorough=len(WAYS)))
@pytest.mark.parametrize("multiprocessors", [3, 4])
def test_all_turns_are_right_in_any_order_to_the_bit(way, multiprocessors):
    problem, limits = WAYS[way][0], replace(FEW, num_sms=multiprocessors)
    built = SimDevice("few", limits).toolchain().build(render(variant_of(way), problem, limits))
    for heads, rows, keys in SHAPES:
        case = inputs(problem, rows, keys, 0.25, heads=heads, kv_heads=1)
        runs = [SimRunner(limits, seed=n).attend(built, *case, scale=0.25, want_lse=True) for n in range(3)]
        assert len({(o.tobytes(), lse.tobytes()) for o, lse in runs if lse is not None}) == 1
        o, lse = runs[0]
        expected = reference.attention(*case, scale=0.25, scores=problem.scores)
        assert np.abs(o.astype(np.float64) - expected.o).max() < 2e-2
        assert lse is not None and np.allclose(lse, expected.lse, atol=2e-3)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("min(block, takers) / takers", "min(block, takers - 1) / takers"),
        ("(key_tile + 1) * takers - 1)", "(key_tile + 1) * takers)"),
        ("key_tile = min(end, before + key_tiles);", "key_tile = end;"),
        ("last_tile = min(share.last_tile, last_tile);", ""),
        ("first_tile = min(share.first_tile, last_tile);", "first_tile = 0;"),
        ("int(blockIdx.x) + nth};", "int(blockIdx.x)};"),
        ("result_of(args, first_block + nth_left)", "result_of(args, first_block)"),
        ("- first_block + 1;", "- first_block;"),
        ("if (turn.tiles == 0) return;", "return;"),
        ("turn.whole + nth_left,", "nth_left,"),
        ("tile = whole + nth;", "tile = nth;"),
    ],
)
def test_mistakes_are_caught(right, wrong):
    shapes = [(50, 333, 0.3), (200, 130, 0.3), (64, 2, 0.3)]
    assert is_caught(kernel_of("outputs apart"), right, wrong, FEW, shapes, heads=5, kv_heads=1)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("way", ["outputs in the place of Q", "Q in registers"])
def test_q_is_given_up_behind_a_share(way):
    """Else whose rows come next, another share's, never come."""
    kernel, given_up = kernel_of(way), "if (leader) barrier_arrive(&smem.q_empty[q_pipe.stage]);"
    before = kernel.source.partition("if (tile.place >= 0) {")[0].count(given_up)
    assert is_caught(kernel, given_up, "", FEW, [(64, 333, 0.3)], before, heads=5, kv_heads=1)


def test_texts_are_tidy():
    for way in WAYS:
        kernel = kernel_of(way)
        assert_tidy(kernel.source, way)
        main, combine = kernel.launches
        assert main.max_blocks == FEW.blocks_at_once(variant_of(way).min_blocks, 1)
        assert combine.role == "combine" and combine.max_blocks is None and combine.dependent
        assert main.shares_turn and not kernel_of_whole(way).launch.shares_turn


def kernel_of_whole(way: str) -> Kernel:
    return render(replace(variant_of(way), last_turn="whole"), WAYS[way][0], FEW)


def test_there_is_room_for_what_two_shares_of_each_block_make():
    kernel = kernel_of("outputs apart")
    results = 2 * FEW.num_sms
    stride = 72 + (8 - 72) % 32
    assert kernel.workspace is not None
    floats = kernel.workspace.floats.value(dict.fromkeys(kernel.workspace.sizes, 1))
    assert floats == -(-results * 128 * (stride + 5) // 64) * 64


@pytest.mark.parametrize(
    ("problem", "changes", "message"),
    [
        (BRAIN, {"persistent": False}, "last_turn=shared: blocks of one tile have no turns"),
        (replace(BRAIN, causal=True), {}, "last_turn=shared: made for rows that see all keys"),
        (replace(BRAIN, scoring=Scoring(alibi=True)), {}, "last_turn=shared: made for rows that see all"),
        (replace(BRAIN, scoring=Scoring(lengths=True)), {}, "last_turn=shared: made for rows that see all"),
        (replace(BRAIN, page_size=16), {}, "made for rows that see all keys of arrays of one length"),
        (
            replace(BRAIN, varlen="uniform:1-100"),
            {},
            "made for rows that see all keys of arrays of one length",
        ),
        (Problem(head_dim=64), {"bc": 64}, "last_turn=shared: not made for f32"),
        (BRAIN, {"cluster": 2}, "cluster=2: last_turn=shared is for blocks with a tile of one head each"),
        (BRAIN, {"pack_heads": True}, "pack_heads=True: last_turn=shared is for blocks with a tile of one"),
    ],
)
def test_what_cannot_run_is_told(problem, changes, message):
    with pytest.raises(Illegal, match=message):
        render(replace(SHARED, **changes), problem, FEW)


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "told"),
    [
        (16, 8192, 8192, None),
        (33, 4096, 8192, "1056 tiles leave 0 of 132 blocks a last one"),
        (8, 1024, 8192, "64 tiles leave 64 of 132 blocks a last one"),
        (16, 8192, 1024, "1024 keys are too few for what putting results together takes"),
    ],
)
def test_searches_share_where_blocks_would_be_idle(heads, rows, keys, told):
    problem = replace(BRAIN, head_dim=128, head_dim_v=128, num_q_heads=heads, num_kv_heads=heads)
    problem = replace(problem, batch=1, seqlen_q=rows, seqlen_k=keys)
    said = replace(SHARED, br=128, bc=64).advice(problem, H200)
    assert (said is None) if told is None else (said is not None and told in said)


def test_the_model_knows_what_sharing_is_for():
    """Of 10.4 turns, and of as many of few keys, where putting results together takes longer."""
    problem = replace(BRAIN, head_dim=128, head_dim_v=128, batch=1, num_q_heads=16, num_kv_heads=16)
    shared = Wgmma(br=192, bc=64, schedule="chained", k_stages=3, v_stages=3, last_turn="shared")
    whole = replace(shared, last_turn="whole")
    long, short = (replace(problem, seqlen_q=16384, seqlen_k=keys) for keys in (16384, 128))
    assert 0.93 < predict(shared, long, H200).median_us / predict(whole, long, H200).median_us < 0.97
    assert predict(shared, short, H200).median_us > predict(whole, short, H200).median_us
