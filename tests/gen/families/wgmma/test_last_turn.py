"""Hopper kernels whose blocks that stay share the keys of the tiles left for a last turn, on emulated cards
of few multiprocessors, where small problems have turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
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
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.predict.cost_model import predict

from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, check, inputs, is_caught, needs_compiler
from tests.support.scorings import drawn_values

H200 = preset("h200")
#: Blocks that stay: three, as there are multiprocessors.
FEW = replace(H200, num_sms=3)
BRAIN = Problem(dtype="bf16", head_dim=24, head_dim_v=24)
HALF = Problem(dtype="f16", head_dim=40, head_dim_v=72)
CAUSAL = replace(BRAIN, causal=True)
SHARED = Wgmma(br=64, bc=16, last_turn="shared")
#: By what meets the end of a share: where Q lies and outputs leave from, schedules, several consumers, tails;
#: and by what becomes of scores, of arrays that come in step with keys, of what counts beside the keys.
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
    "wide rows": (replace(BRAIN, head_dim=136, head_dim_v=136), {}),
    "pairs": (CAUSAL, {}),
    "pairs, outputs apart": (replace(HALF, causal=True), {"br": 128, "bc": 32, "o_apart": True}),
    "pairs, chained": (CAUSAL, {"schedule": "chained", "bc": 48, "q_in_registers": True, "o_apart": True}),
    "packed heads": (replace(BRAIN, num_kv_heads=4), {"pack_heads": True}),
    "pairs of packed heads": (
        replace(HALF, num_kv_heads=4, causal=True),
        {"pack_heads": True, "q_in_registers": True, "br": 128, "bc": 32, "schedule": "chained"},
    ),
    "a bias, by the copy engine": (
        replace(HALF, scoring=Scoring(bias="f16")),
        {"br": 128, "bc": 64, "bias_stages": 2, "o_apart": True, "schedule": "chained"},
    ),
    "a bias, by each warp": (replace(CAUSAL, scoring=Scoring(bias="bf16")), {"schedule": "chained"}),
    "a table of distances": (replace(BRAIN, scoring=Scoring(score="score + table[h, q - k]")), {}),
    "slopes along products": (replace(HALF, scoring=Scoring(alibi=True)), {"br": 128, "bc": 32}),
    "small caps": (
        replace(CAUSAL, scoring=Scoring(softcap=30.0)),
        {"tangent": "cubic", "br": 128, "bc": 32, "rescale": "lazy"},
    ),
    "sinks": (replace(CAUSAL, scoring=Scoring(sinks=True)), {"o_apart": True}),
    "sinks of packed heads": (
        replace(BRAIN, num_kv_heads=8, causal=True, scoring=Scoring(sinks=True)),
        {"pack_heads": True},
    ),
    "sinks beside capped scores": (
        replace(HALF, scoring=Scoring(sinks=True, softcap=20.0)),
        {"q_in_registers": True, "o_apart": True, "bc": 48},
    ),
}
#: Heads, rows and keys: of tiles of 64 rows a last turn of one, of two, of none, and no whole turn at all;
#: keys for many shares, for fewer tiles than shares, for one.
SHAPES = ((4, 50, 333), (5, 64, 77), (6, 64, 100), (2, 64, 400), (4, 9, 30), (4, 64, 2))
#: Of several tiles of rows, which are pairs under a causal mask: odd and even, more keys than rows and fewer.
LONG = ((2, 333, 333), (1, 600, 600), (3, 200, 420), (2, 450, 130), (5, 129, 129))


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
    """Under the other mask, too, which callers build the same text with."""
    problem, limits = WAYS[way][0], replace(FEW, num_sms=multiprocessors)
    kernel = render(variant_of(way), problem, limits)
    for causal in (problem.causal, not problem.causal):
        built = SimDevice("few", limits).toolchain().build(kernel.with_mask(causal))
        scores = replace(problem, causal=causal).scores
        for heads, rows, keys in (*SHAPES, *LONG):
            case = inputs(problem, rows, keys, 0.25, heads=heads, kv_heads=1)
            sizes = replace(problem, batch=1, num_q_heads=heads, num_kv_heads=1)
            values = drawn_values(sizes, rows, keys)
            runs = [
                SimRunner(limits, seed=n).attend(built, *case, scale=0.25, want_lse=True, values=values)
                for n in range(3)
            ]
            assert len({(o.tobytes(), lse.tobytes()) for o, lse in runs if lse is not None}) == 1
            o, lse = runs[0]
            expected = reference.attention(*case, scale=0.25, scores=scores, values=values)
            assert np.abs(o.astype(np.float64) - expected.o).max() < 2e-2
            assert lse is not None and np.allclose(lse, expected.lse, atol=2e-3)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("min(block, takers) * share", "min(block, takers - 1) * share"),
        ("+ min(block, extra)", ""),
        ("key_tile < longer", "key_tile <= longer"),
        ("next.share.hands_on = next.share.last_tile < tiles;", ""),
        ("next.share.last_tile < tiles;", "next.share.last_tile <= tiles;"),
        ("next.share.givers = int(blockIdx.x) - turn.block_of(from);", "next.share.givers = 1;"),
        ("next.share.givers = int(blockIdx.x) - turn.block_of(from);", "next.share.givers = 0;"),
        ("done = ~from_own;", "done = ~begin;"),
        ("min(end - from, tiles)", "tiles"),
        ("from_own - from;", "0;"),
        ("(takes_first ? of_last : 0)", "0"),
        ("next.q_tile = takes_first ? first : last;", "next.q_tile = last;"),
        ("takes_first && first == last ? 0 : ", ""),
        ("place(turns * blocks + nth)", "place(nth)"),
        ("done % 2 == 0 && q_tile == first ? 2 : 1", "done % 2 == 0 ? 2 : 1"),
        ("done % 2 == 0 && q_tile == first ? 2 : 1", "false ? 2 : 1"),
        ("done % 2 == 0 ? q_tiles - 1 - first : first", "done >= 0 ? q_tiles - 1 - first : first"),
        ("done % 2 == 1 ? first : last;", "done < 0 ? first : last;"),
        ("last_tile = min(share.last_tile, last_tile);", ""),
        ("first_tile = min(share.first_tile, last_tile);", "first_tile = 0;"),
        ("int(blockIdx.x) - i, softmax", "int(blockIdx.x) - 1, softmax"),
        ("wait_for_number(handed_number(args, block, consumer), 1);", ""),
        ("named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);  // all have left theirs", ""),
        ("*handed_number(args, 0, i) = 0;", ";"),
        ("own[h] * softmax.sum[h]", "softmax.sum[h]"),
        ("own[0] != 1.0f || own[1] != 1.0f", "own[0] != 1.0f"),
        ("fmaf(others[1], four.z,", "fmaf(others[0], four.z,"),
        ("softmax.max[h] = row_max;\n    softmax.sum[h] = fmaf(others", "softmax.sum[h] = fmaf(others"),
    ],
)
def test_mistakes_are_caught(right, wrong):
    shapes = [(50, 333, 0.3), (330, 330, 0.3), (200, 130, 0.3), (64, 2, 0.3)]
    assert is_caught(kernel_of("pairs"), right, wrong, FEW, shapes, heads=5, kv_heads=1)


@pytest.mark.thorough
@needs_compiler
def test_sinks_that_count_in_each_share_are_noticed():
    kernel, right = kernel_of("sinks"), "tile.share.hands_on ? -kInfinity : "
    assert right in kernel.source
    device = SimDevice("few", FEW)
    built = device.toolchain().build(replace(kernel, source=kernel.source.replace(right, "")))
    with pytest.raises(WrongResult):
        validate(device.open(), built, seed=1, depth="quick")


def test_there_is_room_for_the_keys_of_any_pair():
    """As the text counts it, of the first two pairs: whatever a head's rows and keys."""
    counted = "max(first, count_key_tiles(args, q_tiles - 2) + count_key_tiles(args, 1)) + 2"
    assert counted in kernel_of("pairs").source

    def tiles(q_tile: int, rows: int, keys: int, group: int) -> int:
        return max(1, -(-max(0, min(keys, ((q_tile + 1) * 64 - 1) // group + 1 + keys - rows)) // 16))

    for rows, keys, group in product(range(1, 700, 13), range(1, 900, 17), (1, 3, 8)):
        last = -(-rows * group // 64) - 1
        seen = [tiles(i, rows, keys, group) for i in range(last + 1)]
        pairs = [seen[i] + seen[last - i] for i in range(last // 2 + 1)]
        second = tiles(last - 1, rows, keys, group) + tiles(1, rows, keys, group)
        assert max(pairs) <= max(pairs[0], second) + 2


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("way", ["outputs in the place of Q", "Q in registers"])
def test_q_is_given_up_behind_a_share(way):
    """Else whose rows come next, another share's, never come."""
    kernel, given_up = kernel_of(way), "if (leader) barrier_arrive(&smem.q_empty[q_pipe.stage]);"
    before = kernel.source.partition("if (tile.share.hands_on) {")[0].count(given_up)
    assert is_caught(kernel, given_up, "", FEW, [(64, 333, 0.3)], before, heads=5, kv_heads=1)


def test_texts_are_tidy():
    for way in WAYS:
        kernel = kernel_of(way)
        assert_tidy(kernel.source, way, longest=120 if kernel.problem.scores.is_plain else 175)
        clear, main = kernel.launches
        assert main.max_blocks == FEW.blocks_at_once(variant_of(way).min_blocks, 1)
        assert (clear.role, clear.max_blocks) == ("clear", 1) and main.dependent
        assert main.shares_turn and not kernel_of_whole(way).launch.shares_turn


def kernel_of_whole(way: str) -> Kernel:
    return render(replace(variant_of(way), last_turn="whole"), WAYS[way][0], FEW)


def test_there_is_room_for_what_blocks_hand_on():
    kernel = kernel_of("outputs apart")
    assert kernel.workspace is not None and kernel.workspace.sizes == ()
    of_threads = 72 // 2 + 4
    assert [each.floats.value({}) for each in kernel.workspace.regions] == [
        FEW.num_sms * 2,
        FEW.num_sms * 2 * 128 * of_threads,
    ]


@pytest.mark.parametrize(
    ("problem", "changes", "message"),
    [
        (BRAIN, {"persistent": False}, "last_turn=shared: blocks of one tile have no turns"),
        (
            replace(BRAIN, scoring=Scoring(lengths=True)),
            {},
            "last_turn=shared: made for arrays of one length",
        ),
        (replace(BRAIN, scoring=Scoring(window=(9, 0))), {}, "with no mask but a causal one"),
        (replace(CAUSAL, scoring=Scoring(prefix=9)), {}, "with no mask but a causal one"),
        (replace(BRAIN, scoring=Scoring(mask="q % 3 == k % 3")), {}, "with no mask but a causal one"),
        (replace(BRAIN, page_size=16), {}, "made for arrays of one length"),
        (replace(BRAIN, varlen="uniform:1-100"), {}, "made for arrays of one length"),
        (
            replace(BRAIN, scoring=Scoring(alibi=True)),
            {"far_keys": "left_out"},
            "far_keys=left_out: not made for blocks of several heads, nor for such as share keys",
        ),
        (Problem(head_dim=64), {"bc": 64}, "last_turn=shared: not made for f32"),
        (BRAIN, {"cluster": 2}, "cluster=2: last_turn=shared is for blocks that take tiles alone"),
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
        (16, 8192, 2000, "2000 keys are too few for what it takes to put results together"),
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
