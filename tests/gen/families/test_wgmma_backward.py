"""Gradients by Hopper's warpgroups on an emulated card, beside float64: masks, changes of scores, lengths."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.gradients import slope_of_change
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.families.wgmma_backward.registers import needed_registers, needed_registers_of_rows
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import repeats_bits
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.cases import Case
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.validate import check_case, validate
from flashgen.tuner.predict.cost_model import predict

from tests.gen.families.test_packed import SCORINGS
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler
from tests.support.given_gradients import given_of

H200 = PRESETS["h200"]
PROBLEM = Problem(backward=True, dtype="bf16", num_q_heads=4, num_kv_heads=2)
SMALL = WgmmaBackward(bc=64, br=32, rows=64, keys=32)
APART = replace(SMALL, apart=True)
IN_PARTS_THAT_STAY = WgmmaBackward(
    br=128, schedule="ahead", parts=2, kept="registers", dq_path="bulk", meeting="late", turns="free"
)
COLUMNS = "sums by the copy engine, shared by columns"
APART_AHEAD = "apart, products of the next tile behind sums"
APART_STAYS = "apart, blocks stay"
AHEAD = "scores of the next tile ahead"
CLUSTER = "sums in a cluster, shared by rows"
COLUMNS_IN_CLUSTER = "sums in a cluster, shared by columns, tiles ahead"
PARTS = "tiles in parts, keys and values in registers"
LATE = "others awaited once keys' sums are started, rows of keys"
LATE_PARTS = "others awaited beside the next tile"
SHARED_SM = "two blocks on an SM, rows of keys"
STAYS, STAYS_IN_PARTS = "blocks stay, heads by sections", "blocks stay, parts, others awaited late"
HANDED_ON, HANDED_ON_IN_PARTS = "sums handed on, by columns", "sums handed on, by rows, in parts"
ENDS, ENDS_BEHIND = "ends of sums in order", "ends of sums in order, finished behind, in parts"
ENDS_UP = "ends of sums in order, up, by columns that are no whole shares"
WRITTEN, WRITTEN_LATE = "keys written by consumers", "keys written by consumers, others awaited late"
MADE_FIRST = "weights made first, sums handed on"
ACROSS, ACROSS_STAYS = "sums across, 80 rows at a time", "sums across, blocks stay"
WAYS: dict[str, tuple[WgmmaBackward, Problem]] = {
    "f16": (SMALL, replace(PROBLEM, dtype="f16", head_dim=64, head_dim_v=64)),
    "two consumers, weights first": (
        WgmmaBackward(keys=48, schedule="weights_first", order="heaviest_first"),
        replace(PROBLEM, head_dim=128, head_dim_v=128),
    ),
    MADE_FIRST: (
        WgmmaBackward(schedule="made_first", dq_path="bulk", turns="free", sums="handed_on", walk="up"),
        replace(PROBLEM, head_dim=128, head_dim_v=96),
    ),
    "weights made first, without sums": (
        WgmmaBackward(schedule="made_first", meeting="at_once", keys=48),
        replace(PROBLEM, dtype="f16", head_dim=96, head_dim_v=128),
    ),
    "other columns of values, other stages": (
        replace(SMALL, br=48, q_stages=1, dout_stages=3, keys=48, k_stages=1, v_stages=3, rows=128),
        replace(PROBLEM, head_dim=40, head_dim_v=72),
    ),
    "apart": (replace(APART, br=48), replace(PROBLEM, head_dim=72, head_dim_v=40)),
    "apart, wide rows": (APART, replace(PROBLEM, head_dim=256, head_dim_v=256)),
    APART_AHEAD: (
        replace(APART, br=48, schedule="ahead"),
        replace(PROBLEM, head_dim=72, head_dim_v=40),
    ),
    "apart, a tile ahead, wide rows": (
        replace(APART, schedule="ahead", dout_stages=1),
        replace(PROBLEM, dtype="f16", head_dim=256, head_dim_v=256),
    ),
    APART_STAYS: (
        replace(APART, br=64, schedule="ahead", turns="free"),
        replace(PROBLEM, head_dim=72, head_dim_v=72),
    ),
    "apart, blocks stay, beside those of query rows, by sections": (
        replace(
            APART,
            br=64,
            schedule="ahead",
            turns="free",
            dout_stages=1,
            second="beside",
            order="by_section",
        ),
        replace(PROBLEM, dtype="f16", head_dim=256, head_dim_v=256),
    ),
    "sums by the copy engine, shared by rows": (
        WgmmaBackward(br=128, dq_path="bulk", schedule="together"),
        replace(PROBLEM, head_dim=64, head_dim_v=40),
    ),
    COLUMNS: (
        WgmmaBackward(dq_path="bulk", ds_stages=1, schedule="weights_first"),
        replace(PROBLEM, head_dim=96, head_dim_v=72),
    ),
    AHEAD: (
        WgmmaBackward(dq_path="bulk", schedule="ahead"),
        replace(PROBLEM, head_dim=104, head_dim_v=72),
    ),
    PARTS: (
        WgmmaBackward(br=128, schedule="ahead", parts=2, kept="registers", dq_path="bulk"),
        replace(PROBLEM, head_dim=64, head_dim_v=40),
    ),
    "tiles in parts, values in registers": (
        WgmmaBackward(br=128, schedule="ahead", parts=2, kept="values", dq_path="atomics", ds_stages=1),
        replace(PROBLEM, dtype="f16", head_dim=40, head_dim_v=64),
    ),
    "keys and values in registers": (
        replace(SMALL, br=48, kept="registers"),
        replace(PROBLEM, head_dim=72, head_dim_v=40),
    ),
    "scores of the next tile ahead, sums by threads": (
        WgmmaBackward(dq_path="atomics", schedule="ahead", ds_stages=1, q_stages=3, dout_stages=1),
        replace(PROBLEM, dtype="f16", head_dim=96, head_dim_v=96),
    ),
    "scores of the next tile ahead, without sums": (
        WgmmaBackward(schedule="ahead", br=48, keys=48),
        replace(PROBLEM, head_dim=64, head_dim_v=64),
    ),
    "sums by threads": (
        WgmmaBackward(dq_path="atomics", order="heaviest_first"),
        replace(PROBLEM, dtype="f16", head_dim=128, head_dim_v=128),
    ),
    "apart, sums by the copy engine": (
        WgmmaBackward(bc=64, apart=True, dq_path="bulk", dout_stages=1),
        replace(PROBLEM, head_dim=256, head_dim_v=200),
    ),
    LATE: (
        WgmmaBackward(dq_path="bulk", schedule="weights_first", meeting="late", ranges="of_keys"),
        replace(PROBLEM, head_dim=96, head_dim_v=72),
    ),
    LATE_PARTS: (
        WgmmaBackward(
            br=128, schedule="ahead", parts=2, kept="registers", dq_path="bulk", meeting="late", dout_stages=3
        ),
        replace(PROBLEM, head_dim=64, head_dim_v=40),
    ),
    "late, parts by threads, rows of keys": (
        WgmmaBackward(
            br=128,
            schedule="ahead",
            parts=2,
            kept="values",
            dq_path="atomics",
            meeting="late",
            ranges="of_keys",
        ),
        replace(PROBLEM, dtype="f16", head_dim=40, head_dim_v=64),
    ),
    "late, sums by threads": (
        WgmmaBackward(dq_path="atomics", meeting="late", q_stages=1),
        replace(PROBLEM, dtype="f16", head_dim=128, head_dim_v=128),
    ),
    SHARED_SM: (
        WgmmaBackward(bc=64, br=64, dq_path="bulk", ranges="of_keys", min_blocks=2),
        replace(PROBLEM, head_dim=64, head_dim_v=64),
    ),
    STAYS: (
        WgmmaBackward(dq_path="bulk", schedule="weights_first", order="by_section", turns="fixed"),
        replace(PROBLEM, head_dim=96, head_dim_v=72),
    ),
    STAYS_IN_PARTS: (
        IN_PARTS_THAT_STAY,
        replace(PROBLEM, head_dim=64, head_dim_v=40),
    ),
    "blocks stay, two of an SM, sums by threads": (
        WgmmaBackward(
            bc=64, schedule="ahead", dq_path="atomics", ranges="of_keys", min_blocks=2, turns="free"
        ),
        replace(PROBLEM, dtype="f16", head_dim=64, head_dim_v=64),
    ),
    "blocks stay, one stage of all": (
        WgmmaBackward(
            dq_path="bulk", q_stages=1, dout_stages=1, ds_stages=1, order="heaviest_first", turns="fixed"
        ),
        replace(PROBLEM, head_dim=128, head_dim_v=128),
    ),
    ACROSS: (
        WgmmaBackward(br=80, dq_path="bulk"),
        replace(PROBLEM, head_dim=128, head_dim_v=96),
    ),
    ACROSS_STAYS: (
        WgmmaBackward(br=80, dq_path="bulk", turns="free", order="by_section", ranges="of_keys"),
        replace(PROBLEM, dtype="f16", head_dim=128, head_dim_v=128),
    ),
    "sums across, columns that are no whole shares": (
        WgmmaBackward(br=96, dq_path="bulk", ds_stages=1, turns="fixed"),
        replace(PROBLEM, head_dim=72, head_dim_v=40),
    ),
    "sums across by a lone consumer, too few rows for what is sent": (
        WgmmaBackward(bc=64, br=48, dq_path="bulk", q_stages=1, dout_stages=3),
        replace(PROBLEM, head_dim=104, head_dim_v=72),
    ),
    HANDED_ON: (
        WgmmaBackward(dq_path="bulk", turns="free", sums="handed_on", order="by_section"),
        replace(PROBLEM, head_dim=128, head_dim_v=128),
    ),
    HANDED_ON_IN_PARTS: (
        replace(IN_PARTS_THAT_STAY, ranges="of_keys", sums="handed_on", walk="up"),
        replace(PROBLEM, head_dim=64, head_dim_v=40),
    ),
    "handed on, one stage of all, by rows": (
        WgmmaBackward(
            br=128,
            dq_path="bulk",
            q_stages=1,
            dout_stages=1,
            ds_stages=1,
            turns="free",
            sums="handed_on",
        ),
        replace(PROBLEM, dtype="f16", head_dim=64, head_dim_v=48),
    ),
    "handed on, by columns that are no whole shares": (
        WgmmaBackward(dq_path="bulk", turns="free", sums="handed_on"),
        replace(PROBLEM, head_dim=96, head_dim_v=72),
    ),
    "handed on by a lone consumer": (
        WgmmaBackward(
            bc=64, schedule="ahead", dq_path="bulk", turns="free", sums="handed_on", order="heaviest_first"
        ),
        replace(PROBLEM, head_dim=64, head_dim_v=40),
    ),
    ENDS: (
        WgmmaBackward(dq_path="bulk", turns="free", sums="ends_in_order", order="by_section"),
        replace(PROBLEM, head_dim=128, head_dim_v=128),
    ),
    ENDS_BEHIND: (
        replace(IN_PARTS_THAT_STAY, ranges="of_keys", sums="ends_in_order", finisher="producer"),
        replace(PROBLEM, head_dim=64, head_dim_v=40),
    ),
    ENDS_UP: (
        WgmmaBackward(dq_path="bulk", schedule="made_first", turns="free", sums="ends_in_order", walk="up"),
        replace(PROBLEM, dtype="f16", head_dim=112, head_dim_v=72),
    ),
    "handed on, up, finished behind, columns that are no whole shares": (
        WgmmaBackward(dq_path="bulk", turns="free", sums="handed_on", walk="up", finisher="producer"),
        replace(PROBLEM, dtype="f16", head_dim=112, head_dim_v=96),
    ),
    WRITTEN: (
        replace(IN_PARTS_THAT_STAY, meeting="at_once", sums="handed_on", writer="consumers"),
        replace(PROBLEM, head_dim=64, head_dim_v=64),
    ),
    WRITTEN_LATE: (
        replace(
            IN_PARTS_THAT_STAY, ranges="of_keys", sums="ends_in_order", last_turn="shared", writer="consumers"
        ),
        replace(PROBLEM, dtype="f16", head_dim=48, head_dim_v=40),
    ),
    CLUSTER: (
        WgmmaBackward(br=128, dq_path="cluster", cluster=4, heads=2),
        replace(PROBLEM, head_dim=64, head_dim_v=40),
    ),
    COLUMNS_IN_CLUSTER: (
        WgmmaBackward(dq_path="cluster", cluster=2, schedule="ahead", sum_stages=1),
        replace(PROBLEM, head_dim=96, head_dim_v=72),
    ),
    "sums in a cluster of eight, half a row each": (
        WgmmaBackward(dq_path="cluster", cluster=8, ds_stages=1),
        replace(PROBLEM, dtype="f16", head_dim=128, head_dim_v=128),
    ),
    "sums in a cluster, parts, keys and values in registers": (
        WgmmaBackward(br=128, schedule="ahead", parts=2, kept="registers", dq_path="cluster", cluster=2),
        replace(PROBLEM, head_dim=48, head_dim_v=64),
    ),
    "sums in a cluster of single consumers": (
        WgmmaBackward(bc=64, br=64, dq_path="cluster", cluster=4, heads=4),
        replace(PROBLEM, head_dim=40, head_dim_v=40),
    ),
    "three consumers": (
        WgmmaBackward(bc=192, br=48, rows=192, order="heaviest_first"),
        replace(PROBLEM, head_dim=64, head_dim_v=64),
    ),
}
SCORED_BY = {
    "launch": SMALL,
    "apart": APART,
    "apart ahead": replace(APART, schedule="ahead"),
    "apart, stays": replace(APART, br=64, schedule="ahead", turns="free"),
    "bulk": replace(SMALL, br=64, rows=128, keys=64, dq_path="bulk"),
    "ahead": replace(SMALL, schedule="ahead"),
    "made first": replace(SMALL, schedule="made_first"),
    "weights first": replace(SMALL, schedule="weights_first"),
    "rows of keys": replace(SMALL, br=64, rows=128, keys=64, dq_path="bulk", ranges="of_keys"),
    "late": WgmmaBackward(
        br=128, schedule="ahead", parts=2, dq_path="bulk", meeting="late", ranges="of_keys"
    ),
    "across": replace(SMALL, br=48, rows=128, keys=64, dq_path="bulk"),
    "cluster": replace(SMALL, br=64, rows=128, keys=64, dq_path="cluster", cluster=2),
    "handed on": replace(
        SMALL, br=64, rows=128, keys=64, dq_path="bulk", turns="free", sums="handed_on", ranges="of_keys"
    ),
    "ends in order": replace(
        SMALL, br=64, rows=128, keys=64, dq_path="bulk", turns="free", sums="ends_in_order"
    ),
    "ends finished behind": replace(
        SMALL,
        br=64,
        rows=128,
        keys=64,
        dq_path="bulk",
        turns="free",
        sums="ends_in_order",
        finisher="producer",
        ranges="of_keys",
    ),
}
#: Where scores become steeper, weights are not made before their gradients are there.
ADDED = [
    name for name, each in SCORINGS.items() if slope_of_change(replace(PROBLEM, scoring=each).scores) is None
]
SCORED = [
    (way, name)
    for name in SCORINGS
    if name != "plain"
    for way in SCORED_BY
    if not way.endswith("first") or name in ADDED
]


def kernel_of(way: str, **asked: object) -> Kernel:
    variant, problem = WAYS[way]
    # Blocks that stay have several turns each on a card of few multiprocessors.
    limits = replace(H200, num_sms=2) if variant.persistent else H200
    return render(variant, replace(problem, **asked), limits)  # type: ignore[arg-type]


def check(kernel: Kernel, *, depth="quick", sanitize: bool = False, seed: int = 1) -> float:
    device = SimDevice("emulated", H200, sanitize)
    return validate(device.open(), device.toolchain().build(kernel), seed=seed, depth=depth)


@needs_compiler
@pytest.mark.parametrize(
    ("way", "causal"), sampled([(way, causal) for way in WAYS for causal in (True, False)], 2, thorough=7)
)
def test_gradients_are_those_of_float64(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal)
    assert 0.0 < check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 0, thorough=1))
def test_gradients_are_right_at_all_lengths(way: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert check(kernel, depth="full") < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled([AHEAD, "f16"], 0, thorough=1))
def test_sections_of_heads_are_of_any_size(way: str) -> None:
    """Three heads of eight or so are a section, and the last one is smaller."""
    variant, problem = WAYS[way]
    kernel = render(replace(variant, order="by_section"), replace(problem, causal=True), H200)
    smaller, changed = re.subn(r"(const int section = ).*;", r"\1min(3, all_heads);", kernel.source)
    assert changed == len([each for each in kernel.launches if each.role in ("kernel", "queries")])
    assert check(kernel) < problem.tolerance
    assert check(replace(kernel, source=smaller)) < problem.tolerance


@needs_compiler
@pytest.mark.parametrize(("way", "name"), sampled(SCORED, 1, thorough=5))
def test_masks_and_changes_of_scores_are_differentiated(way: str, name: str) -> None:
    problem = replace(PROBLEM, head_dim=32, head_dim_v=32, scoring=SCORINGS[name], causal=name != "score")
    assert check(render(SCORED_BY[way], problem, H200)) < problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    "way",
    sampled(
        ["f16", "apart", APART_AHEAD, "sums by threads", AHEAD, HANDED_ON, HANDED_ON_IN_PARTS], 1, thorough=2
    ),
)
def test_nothing_is_read_or_written_out_of_bounds(way: str) -> None:
    check(kernel_of(way, scoring=Scoring(window=(9, 5), softcap=5.0)), sanitize=True)


#: Has sums of a head's first tile of rows added to those of the head before.
PLACE_OF_HEAD_BEFORE = (
    "if (other_head) place = query_sum_at(query_sums_of(args, batch, head)",
    "if (other_head) place = query_sum_at(query_sums_of(args, batch, head - 1)",
)


@needs_compiler
@pytest.mark.parametrize(
    ("way", "right", "wrong"),
    sampled(
        [
            ("f16", "? kInfinity : lse * kLog2e", "? 0.0f : lse"),
            ("f16", "head < (kv_head + 1) * group", "head < kv_head * group + 1"),
            ("f16", "if (is_partial(args, batch, first, ", "if (false && is_partial(args, batch, first, "),
            ("f16", "first_row -= first_row % kPassingRows", "first_row += 16"),
            ("f16", "smem.lse[0]), q_full", "smem.lse[0]) / 2, q_full"),
            (
                COLUMNS,
                "named_barrier_sync(kGradientsBarrier, kConsumers * kWarpgroup);\n      float",
                "float",
            ),
            (COLUMNS, "[share_column / kChunk]", "[0]"),
            (COLUMNS, "if (lane == 0) tma_wait_read<0>();", ""),
            (AHEAD, "if (other_head) first = first_row, ++head;", ""),
            (APART_AHEAD, "if (!is_first) named_barrier_sync(weights_empty, 2 * kWarpgroup);", ""),
            (APART_AHEAD, "named_barrier_sync(weights_full, 2 * kWarpgroup);", ""),
            (APART_AHEAD, "wgmma_wait<0>();\n        hold(s);", "hold(s);"),
            (APART_AHEAD, "first += kPassingRows;", ""),
            (APART_STAYS, "named_barrier_sync(weights_empty, 2 * kWarpgroup);  // the other", "// the other"),
            (APART_STAYS, "if (of_head > 0) kept_phase ^= 1;", ""),
            (PARTS, "const int column = part * kWeighedRows + ", "const int column = "),
            (PARTS, "[ds_stage][consumer] + 1 * kWeighedRows * kChunk", "[ds_stage][consumer]"),
            (PARTS, "lane / 16) ^ row % 8) * 8", "lane / 16)) * 8"),
            (AHEAD, *PLACE_OF_HEAD_BEFORE),
            (
                MADE_FIRST,
                "wgmma_wait<0>();\n        hold(gradient);",
                "wgmma_wait<1>();\n        hold(gradient);",
            ),
            (LATE, "barrier_wait(&smem.gradients_full[ds_pipe.stage], ds_pipe.phase);", ""),
            (LATE, "row >= see.begin && ", "row > see.begin && "),
            (LATE, "const RowRange see = h ? rows_of_other", "const RowRange see = h ? rows_of_own"),
            (LATE, "row = max(row, key + 1 - (", "row = max(row, key + 2 - ("),
            (LATE, "gradients_full[i], kArrivals * 4 * kConsumers)", "gradients_full[i], kArrivals * 4)"),
            (LATE_PARTS, "barrier_wait(&smem.gradients_full[ds_pipe.stage], ds_pipe.phase);", ""),
            (
                LATE_PARTS,
                "add_shares(args, place, first_before + ",
                "add_shares(args, place + 16 * kD, first + ",
            ),
            (
                LATE_PARTS,
                "gradients_full[i], kArrivals * 4 * kConsumers)",
                "gradients_full[i], kArrivals * 4)",
            ),
            (LATE_PARTS, *PLACE_OF_HEAD_BEFORE),
            (SHARED_SM, "own_key + 8, first_row, end_row", "own_key + 8, first_row, end_row - 1"),
            (CLUSTER, "sums_pipe.step += before;", ""),
            (COLUMNS_IN_CLUSTER, "if (!turn.is_first) add(place);", ""),
            (CLUSTER, "__popc(step.senders) * ", "kCluster * "),
            (CLUSTER, "if (step.senders >> block & 1) add", "if (true) add"),
            (CLUSTER, "barrier_wait(&smem.sums_room[stage], phases >> stage & 1);", ""),
            (CLUSTER, "release(&smem.kept_empty);", "if (turn.is_first) release(&smem.kept_empty);"),
            (
                COLUMNS_IN_CLUSTER,
                "place_in_block(all + first % kBlockSums * 512, block)",
                "place_in_block(all, block)",
            ),
            (
                COLUMNS_IN_CLUSTER,
                "        kept_phase ^= 1;\n      }\n      int same",
                "      }\n      int same",
            ),
            (
                ACROSS,
                "  }\n  if (owed != nullptr) add_shares(owed, smem.shares[consumer][warp % 4]);\n",
                "  }\n",
            ),
            (ACROSS, "owed = sums + 1LL * first * kSumColumns;", "owed = sums;"),
            (ACROSS, "step_of_keys(keys, step) + tile * kTile", "step_of_keys(keys, 0)"),
            (ACROSS, "descriptor(smem.k[consumer * kShareTiles])", "descriptor(smem.k[0])"),
            (ACROSS, "row / 2 * 4 + row % 2 + column_tile % 2 * 2", "row / 2 * 4 + row % 2"),
            (ACROSS, "place[e % 2 * 16 + e / 2 * 128]", "place[e % 2 * 16]"),
            (ACROSS_STAYS, "fence_proxy_async();\n        named_barrier_sync", "named_barrier_sync"),
            (STAYS, "number < count; number += gridDim.x", "number < count; number += 2 * gridDim.x"),
            (STAYS, "    kept_phase ^= 1;\n    }\n    int same", "    }\n    int same"),
            (STAYS, "barrier_wait(&smem.kept_empty, kept_phase ^ 1);", ""),
            (STAYS_IN_PARTS, "*turns_taken(args) = 0;", "*turns_taken(args) = 1;"),
            (STAYS_IN_PARTS, "atomicAdd(turns_taken(args), 1)", "atomicAdd(turns_taken(args), 2)"),
            (STAYS_IN_PARTS, "first_key = number % tiles * kBc;", "first_key = 0;"),
            (STAYS_IN_PARTS, "ds_pipe.advance();\n", "\n"),
            (HANDED_ON_IN_PARTS, "wait_for_number(next_keys, turn.keys_before);", ";"),
            (HANDED_ON, "begins = first >= turn.end_before", "begins = true"),
            (HANDED_ON, "first < turn.first_behind", "first <= turn.first_behind"),
            (HANDED_ON_IN_PARTS, "first >= turn.end_before", "first > turn.end_before"),
            (HANDED_ON, "    nth -= 2;\n", "    nth = number;\n"),
            (HANDED_ON, "write_keys(&maps.dk, moved.kept", "write_keys(&maps.dv, moved.kept"),
            (HANDED_ON, "sums + row * kD + column * 16, column,", "sums + row * kD, column,"),
            (HANDED_ON_IN_PARTS, "tile[piece / 8] + (first_of_warp + row)", "tile[piece / 8] + row"),
            (HANDED_ON, "      tma_wait<0>();\n", ""),
            (HANDED_ON, "if (become == kLast) {", "if (false) {"),
            (HANDED_ON, "smem.moved[pipe.stage].sums", "smem.moved[0].sums"),
            (HANDED_ON, "mover.ended = sums;", "mover.ended = turn.first_head.sums;"),
            (HANDED_ON, "smem.handed[mover.next_phase]", "smem.handed[0]"),
            (HANDED_ON, "head.sums += num_query_sums(args);", ""),
            (HANDED_ON, "head.next_keys += row_tiles_of(args);", ""),
            (ENDS_UP, "wait_for_any_number(next_keys);", ";"),
            (ENDS_UP, "mover.counted = begins ? turn.keys_before + 1 : 1;", "mover.counted = 1;"),
            (ENDS_UP, "wait_for_number(next_keys, turn.keys_before);", ";"),
            (ENDS_BEHIND, "first / kPassingRows, turn.keys_before + 1", "first / kPassingRows, 1"),
            (ENDS_BEHIND, "kArrivals * (4 * kConsumers + 1) + 2", "kArrivals * 4 * kConsumers + 2"),
            (ENDS_BEHIND, "if (row + 8 < rows)", "if (row < rows)"),
            (ENDS_BEHIND, "    __syncwarp();  // all lanes have read theirs\n", ""),
            (ENDS_BEHIND, "if (ends && !begins) {", "if (ends) {"),
            (ENDS_BEHIND, "const int head = nth / turn.of_head,", "const int head = 0,"),
            (WRITTEN, "    tell();  // nothing comes behind its tiles\n", ""),
            (
                WRITTEN,
                "smem.gradients[ds_stage][consumer] + warp",
                "smem.gradients[ds_stage ^ 1][consumer] + warp",
            ),
            (WRITTEN, "made.first_key + own + warp", "made.first_key + warp"),
            (WRITTEN, "staged + kDChunks * 64 * kChunk", "staged"),
            (WRITTEN_LATE, "named_barrier_sync(kSentBarrier + consumer, kWarpgroup);", ""),
            (WRITTEN_LATE, "named_barrier_sync(kSentBarrier + consumer", "named_barrier_sync(kSentBarrier"),
            (WRITTEN_LATE, "smem.handed[next_phase ^ 1]", "smem.handed[next_phase]"),
            ("apart", "if (--left > 0) named_barrier_arrive", "if (false) named_barrier_arrive"),
            ("apart", "factors[e] * (gradient[4 * i + e] - ", "factors[e] * (gradient[4 * i + e] + "),
        ],
        2,
        thorough=3,
    ),
)
def test_mistakes_are_found(way: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert right in kernel.source
    mistaken = replace(kernel, source=kernel.source.replace(right, wrong))
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        for seed in range(1, 5):
            check(mistaken, seed=seed)


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (256, 256)])
def test_legal_variants_render(dims: tuple[int, int]) -> None:
    problem = replace(PROBLEM, head_dim=dims[0], head_dim_v=dims[1])
    legal = enumerate_space(WgmmaBackward, problem, H200).legal
    assert len(legal) > 50
    for variant in legal[:: len(legal) // 10]:
        assert_tidy(render(variant, problem, H200).source, variant.name, longest=136)


def test_what_cannot_run_is_told() -> None:
    problem = replace(PROBLEM, head_dim=256, head_dim_v=256)
    with pytest.raises(Illegal, match=r"about 352 per thread of a consumer, of 384 threads each has 240"):
        render(WgmmaBackward(), problem, H200)
    with pytest.raises(Illegal, match=r"shared memory: needs 333824 bytes, sm_90 allows 232448"):
        render(WgmmaBackward(bc=64, apart=True, br=80, q_stages=3, dout_stages=3), problem, H200)
    with pytest.raises(Illegal, match="rows of 36 elements are not multiples of 16 bytes"):
        render(WgmmaBackward(), replace(PROBLEM, head_dim=36, head_dim_v=36), H200)
    with pytest.raises(Illegal, match="warpgroups multiply on sm_90 alone, this is sm_80"):
        render(WgmmaBackward(), PROBLEM, PRESETS["a100"])


def test_scores_are_made_ahead_where_there_is_room() -> None:
    with pytest.raises(Illegal, match="schedule=ahead: there is room for one tile of queries"):
        render(WgmmaBackward(schedule="ahead", q_stages=1), PROBLEM, H200)
    with pytest.raises(Illegal, match="schedule=made_first: apart, a warpgroup has nothing else to do"):
        render(replace(APART, schedule="made_first"), PROBLEM, H200)
    with pytest.raises(Illegal, match="schedule=ahead: apart, for dq_path=launch, not dq_path=bulk"):
        render(replace(APART, schedule="ahead", br=64, dq_path="bulk"), PROBLEM, H200)
    with pytest.raises(Illegal, match="blocks stay with schedule=ahead and turns=free"):
        render(replace(APART, turns="free"), PROBLEM, H200)
    with pytest.raises(Illegal, match="gradients of 64 keys leave by way of as many rows, not br=32"):
        render(replace(APART, schedule="ahead", turns="free"), PROBLEM, H200)
    wider = replace(PROBLEM, head_dim=192, head_dim_v=128)
    with pytest.raises(Illegal, match="for 192 columns of values as of keys, not 128"):
        render(replace(APART, br=64, schedule="ahead", turns="free"), wider, H200)
    with pytest.raises(Illegal, match="parts=2: schedule=together weighs a tile as a whole"):
        render(WgmmaBackward(parts=2), PROBLEM, H200)
    with pytest.raises(Illegal, match="parts=2: with dq_path=launch br=32 does the same"):
        render(WgmmaBackward(schedule="ahead", parts=2), PROBLEM, H200)
    with pytest.raises(Illegal, match="parts=2: 48 rows are no parts of whole steps of 16"):
        render(WgmmaBackward(br=48, schedule="ahead", parts=2), PROBLEM, H200)
    with pytest.raises(Illegal, match="kept=values: apart, registers are for what is added up"):
        render(replace(APART, kept="values"), PROBLEM, H200)


def test_sums_are_taken_by_whole_warpgroups() -> None:
    with pytest.raises(Illegal, match="2 warpgroups cannot share 64 rows of 64 columns in tiles of 64 by 64"):
        render(WgmmaBackward(dq_path="bulk"), replace(PROBLEM, head_dim=64, head_dim_v=64), H200)
    with pytest.raises(Illegal, match="dq_path=bulk: no launch keeps query rows, of which keys=32 is"):
        render(WgmmaBackward(dq_path="bulk", keys=32), replace(PROBLEM, head_dim=128, head_dim_v=128), H200)
    with pytest.raises(Illegal, match="about 248 per thread of a consumer"):
        render(replace(APART, br=64, dq_path="atomics"), replace(PROBLEM, head_dim=256, head_dim_v=256), H200)
    kernel = kernel_of("sums by threads")
    assert [each.role for each in kernel.launches] == ["statistics", "kernel", "postprocess"]


def test_sums_are_made_across_where_rows_are_no_tiles() -> None:
    wide = replace(PROBLEM, head_dim=128, head_dim_v=128)
    with pytest.raises(Illegal, match="of which only dq_path=bulk makes gradients of 16 bits across"):
        render(WgmmaBackward(br=80, dq_path="atomics"), wide, H200)
    with pytest.raises(Illegal, match="made across by schedule=together, not apart"):
        render(WgmmaBackward(br=80, dq_path="bulk", schedule="made_first"), wide, H200)
    with pytest.raises(Illegal, match="meeting=late: with br=80 consumers await each other at once"):
        render(WgmmaBackward(br=80, dq_path="bulk", meeting="late"), wide, H200)
    with pytest.raises(Illegal, match="br=48 makes sums across"):
        handed_on = WgmmaBackward(br=48, dq_path="bulk", turns="free", sums="handed_on")
        render(handed_on, replace(PROBLEM, head_dim=72, head_dim_v=72), H200)
    with pytest.raises(Illegal, match="2 warpgroups cannot share 80 rows of 64 columns"):
        render(WgmmaBackward(br=80, dq_path="bulk"), replace(PROBLEM, head_dim=64, head_dim_v=64), H200)
    # A head's sums are of whole tiles of rows, and of whole sixteens of columns: 72, filled up to 80.
    kernel = render(WgmmaBackward(br=80, dq_path="bulk"), replace(PROBLEM, head_dim=72, head_dim_v=72), H200)
    sums = 4 * 12 * 160 * 80
    assert kernel.workspace_bytes({"batch": 3, "num_q_heads": 4, "seqlen_q": 100}) == sums + 4 * 2 * 12 * 160


def test_blocks_that_hand_on_and_start_together_are_not_expected_to_be_fast() -> None:
    wide = replace(PROBLEM, head_dim=128, head_dim_v=128)
    sections = WgmmaBackward(dq_path="bulk", turns="free", sums="handed_on", order="by_section")
    together = replace(sections, order="by_head", walk="up")
    assert together.starts_together(wide) and not sections.starts_together(wide)
    assert replace(sections, walk="up").starts_together(wide)
    assert not together.starts_together(replace(wide, causal=True))
    assert predict(together, wide, H200).median_us > 1.1 * predict(sections, wide, H200).median_us


def test_clusters_add_up_where_blocks_can_share() -> None:
    wide = replace(PROBLEM, head_dim=64, head_dim_v=64)
    clusters = WgmmaBackward(br=128, dq_path="cluster", cluster=4)
    with pytest.raises(Illegal, match="dq_path=cluster: of one block there is no cluster"):
        render(replace(clusters, cluster=1), wide, H200)
    with pytest.raises(Illegal, match="cluster=2: rows are copied to all its blocks where these make all"):
        render(replace(clusters, dq_path="launch", cluster=2), wide, H200)
    with pytest.raises(Illegal, match="heads=2: with dq_path=launch a block takes a tile of keys"):
        render(WgmmaBackward(heads=2), wide, H200)
    with pytest.raises(Illegal, match="sum_stages=1: with dq_path=launch blocks send each other nothing"):
        render(WgmmaBackward(sum_stages=1), wide, H200)
    with pytest.raises(Illegal, match="cluster=8: blocks cannot share 4 times 16 rows of 40 columns"):
        render(
            WgmmaBackward(bc=64, dq_path="cluster", cluster=8),
            replace(PROBLEM, head_dim=40, head_dim_v=40),
            H200,
        )
    with pytest.raises(Illegal, match="order=heaviest_first: a cluster takes all tiles of a head"):
        render(replace(clusters, order="heaviest_first"), wide, H200)
    with pytest.raises(Illegal, match="dq_path=cluster: apart, columns of sums are made by turns"):
        render(WgmmaBackward(bc=64, br=128, apart=True, dq_path="cluster", cluster=4), wide, H200)
    with pytest.raises(
        Illegal, match="dq_path=cluster: a cluster walks all keys of a head, packed sequences"
    ):
        render(clusters, replace(wide, varlen="uniform:64-512"), H200)


def test_clusters_leave_no_sums_to_another_launch() -> None:
    kernel = kernel_of(CLUSTER)
    assert [each.role for each in kernel.launches] == ["statistics", "kernel"]
    assert repeats_bits(kernel.launches)
    assert "Sums begin at nothing" not in kernel.source
    # Four blocks for two heads of keys each.
    assert kernel.launch.blocks_per_cluster == 4
    assert kernel.launch.grid_of({"batch": 3, "num_kv_heads": 3}) == 4 * 5


#: Whole tiles of rows that see none of the keys, under a causal mask; several turns, which few rows see.
EDGES = [
    Case(2, 4, 2, 390, 40, "uniform", "bnhd", want_lse=True),
    Case(1, 2, 2, 5, 1100, "normal", "padded", want_lse=True),
    Case(1, 4, 2, 300, 1300, "normal", "bnhd", want_lse=True),
]


def test_sums_are_handed_on_without_another_launch() -> None:
    kernel = kernel_of(HANDED_ON)
    assert [each.role for each in kernel.launches] == ["statistics", "kernel"]
    assert repeats_bits(kernel.launches)
    assert "Sums begin at nothing" not in kernel.source
    # Of each tile of 64 rows of twelve heads a number more than the sums, which regions of 256 bytes have.
    handed, added = (
        each.workspace_bytes({"batch": 3, "num_q_heads": 4, "seqlen_q": 700})
        for each in (kernel, render(replace(WAYS[HANDED_ON][0], sums="any_order"), WAYS[HANDED_ON][1], H200))
    )
    assert handed - added == -(-12 * 11 * 4 // 256) * 256


def test_sums_are_handed_on_where_turns_are_in_order() -> None:
    handed, problem = WAYS[HANDED_ON]
    for others in ({"turns": "fixed"}, {"turns": "one"}, {"dq_path": "launch", "turns": "one"}):
        with pytest.raises(Illegal, match="sums=handed_on: for dq_path=bulk and turns=free"):
            render(replace(handed, **others), problem, H200)
    with pytest.raises(Illegal, match="sums=handed_on: 72 columns are no whole shares of 64"):
        render(handed, replace(problem, head_dim=72, head_dim_v=72), H200)
    with pytest.raises(Illegal, match="104 columns of 16 rows are no whole swizzles, of 16 columns"):
        render(handed, replace(problem, head_dim=104), H200)
    with pytest.raises(Illegal, match="walk=up: for sums that are handed on, against the order of keys"):
        render(replace(handed, sums="any_order", walk="up"), problem, H200)
    with pytest.raises(
        Illegal, match="finisher=producer: with sums=any_order a launch makes gradients of all"
    ):
        render(replace(handed, sums="any_order", finisher="producer"), problem, H200)


def test_bits_are_the_same_where_all_sums_are_in_order() -> None:
    for finisher in ("consumers", "producer"):
        handed = replace(WAYS[HANDED_ON][0], finisher=finisher)
        for sums, same in (("handed_on", True), ("ends_in_order", False)):
            kernel = render(replace(handed, sums=sums), WAYS[HANDED_ON][1], H200)
            assert [each.role for each in kernel.launches] == ["statistics", "kernel"]
            assert kernel.is_deterministic is same


def test_consumers_have_keys_written_where_there_is_room() -> None:
    written, problem = WAYS[WRITTEN]
    assert (
        predict(written, problem, H200).median_us
        < predict(replace(written, writer="producer"), problem, H200).median_us
    )
    maps = {each.array: each.rows for each in kernel_of(WRITTEN).launches[1].tensor_maps}
    assert (maps["dk"], maps["dv"], maps["k"]) == (16, 16, 128)
    with pytest.raises(
        Illegal, match="writer=consumers: with sums=any_order consumers have gradients of keys"
    ):
        render(replace(written, sums="any_order"), problem, H200)
    with pytest.raises(Illegal, match="writer=consumers: for schedule=ahead and ds_stages=2"):
        render(replace(written, ds_stages=1), problem, H200)
    wide = replace(problem, head_dim=96, head_dim_v=96)
    with pytest.raises(
        Illegal, match="writer=consumers: 64 rows of gradients of scores have no room for 256"
    ):
        render(replace(written, br=64, parts=1, kept="shared"), wide, H200)


def test_sections_are_wide_where_blocks_follow_each_other() -> None:
    """And where L2 holds so few heads that many blocks of one begin at once."""
    long = replace(PROBLEM, head_dim=128, head_dim_v=128, seqlen_q=8192, seqlen_k=8192, num_kv_heads=4)
    held = replace(WAYS[HANDED_ON][0], sections="held")
    wide = replace(held, sections="wide")
    # Four heads of L2's 60 MiB, and twelve.
    assert f"kSectionBytes = {36 << 20};" in render(held, long, H200).source
    assert f"kSectionBytes = {108 << 20};" in render(wide, long, H200).source
    with pytest.raises(Illegal, match="sections=wide: order=by_head has no sections; order=by_section has"):
        replace(wide, order="by_head").check(long, H200)
    with pytest.raises(Illegal, match="sections=wide: where sums=any_order blocks of a head are anywhere"):
        replace(wide, sums="any_order").check(long, H200)
    assert wide.advice(long, H200) is None
    told = "sections=wide: 132 blocks are of 72 heads as it is"
    assert wide.advice(replace(long, seqlen_q=512), H200) == f"combination: {told}"


def test_sections_have_as_many_heads_each() -> None:
    """64 heads of which L2 holds nine: eight sections, not seven and one of a lone head."""
    even = replace(WAYS[HANDED_ON][0], br=128, sections="even")
    held = replace(even, sections="held")
    long = replace(PROBLEM, head_dim=64, head_dim_v=64, seqlen_q=8192, seqlen_k=8192, num_kv_heads=4)
    many = replace(long, batch=16)
    line = "section = (all_heads + sections - 1) / sections;"
    assert line in render(even, many, H200).source
    assert line not in render(held, many, H200).source
    assert even.advice(many, H200) is None
    told = "combination: sections=even: 72 heads are whole sections of 9 as it is"
    assert even.advice(replace(long, batch=18), H200) == told
    with pytest.raises(Illegal, match="sections=even: order=by_head has no sections"):
        replace(even, order="by_head").check(many, H200)
    assert predict(even, many, H200).median_us < predict(held, many, H200).median_us


def test_narrow_sections_have_half_the_heads() -> None:
    narrow = replace(WAYS[HANDED_ON][0], br=128, sums="ends_in_order", sections="narrow")
    held = replace(narrow, sections="held")
    many = replace(
        PROBLEM, head_dim=64, head_dim_v=64, seqlen_q=8192, seqlen_k=8192, num_kv_heads=4, batch=16
    )
    assert f"kSectionBytes = {36 << 20};" in render(held, many, H200).source
    assert f"kSectionBytes = {18 << 20};" in render(narrow, many, H200).source
    assert predict(narrow, many, H200).median_us < predict(held, many, H200).median_us
    assert narrow.advice(many, H200) is None
    told = "combination: sections=narrow: under masks heavy tiles of more heads come first"
    assert narrow.advice(replace(many, causal=True), H200) == told
    with pytest.raises(Illegal, match="sections=narrow: order=by_head has no sections"):
        replace(narrow, order="by_head").check(many, H200)


@needs_compiler
@pytest.mark.parametrize("way", sampled([HANDED_ON, ENDS_BEHIND], 1, thorough=2))
def test_even_sections_are_of_any_size(way: str) -> None:
    """Eight heads or so of which L2 holds three: three sections, the last one smaller."""
    variant, problem = WAYS[way]
    variant = replace(variant, order="by_section", sections="even")
    kernel = render(variant, replace(problem, causal=True), replace(H200, num_sms=2))
    fewer = re.sub(r"(const int most = ).*;", r"\1min(3, all_heads);", kernel.source)
    assert fewer != kernel.source
    assert check(replace(kernel, source=fewer)) < problem.tolerance


def test_a_warp_finishes_where_it_has_time() -> None:
    problem = replace(PROBLEM, head_dim=64, head_dim_v=64, seqlen_q=8192, seqlen_k=8192, causal=True)
    behind = replace(WAYS[ENDS_BEHIND][0], order="by_section")
    assert behind.advice(problem, H200) is None
    told = "combination: finisher=producer: a warp makes gradients of 64 columns in the time of 3072 rows"
    assert str(behind.advice(replace(problem, seqlen_q=2048), H200)).startswith(told)
    told = "combination: finisher=producer: rows end with each tile of keys under a causal mask alone"
    assert str(replace(behind, walk="up").advice(problem, H200)).startswith(told)
    everything = replace(behind, ranges="of_rows")
    assert str(everything.advice(replace(problem, causal=False), H200)).startswith(told)


def test_the_like_of_a_variant_makes_the_same_bits() -> None:
    causal = replace(WAYS[ENDS_BEHIND][1], causal=True)
    like = WAYS[ENDS_BEHIND][0].with_same_bits(causal)
    assert (like.sums, like.walk, like.finisher) == ("handed_on", "up", "consumers")
    assert render(like, causal, H200).is_deterministic
    assert like.with_same_bits(causal) == like
    wide = replace(WAYS[ENDS][0], sections="wide").with_same_bits(WAYS[ENDS][1])
    assert (wide.sums, wide.walk, wide.sections) == ("handed_on", "down", "held")


def test_blocks_that_hand_on_start_apart_unless_their_order_is_held() -> None:
    handed, problem = WAYS[HANDED_ON]
    held = {name: value for name, value in handed.to_dict().items() if name not in ("order", "walk")}

    def left(problem: Problem, **others: object) -> set[tuple[object, object]]:
        legal = enumerate_space(WgmmaBackward, problem, H200, held | others).legal
        return {(each["order"], each["walk"]) for each in (v.to_dict() for v in legal)}

    assert left(problem) == {("by_section", "down")}
    assert left(problem, order="by_head") == {("by_head", "down")}
    # Under a causal mask those of later keys begin with later rows, of which a tile has fewer than of keys.
    causal = replace(problem, causal=True)
    assert left(causal) == {(order, "up") for order in ("by_head", "heaviest_first", "by_section")}
    assert left(replace(causal, head_dim=64, head_dim_v=64), bc=64) == {
        (order, "up") for order in ("heaviest_first", "by_section")
    }
    assert left(causal, walk="down") == {(order, "down") for order in ("heaviest_first", "by_section")}


#: What has blocks of a way write rows that see no keys.
WRITES_ALL = {
    CLUSTER: ("if (turn.is_first || turn.is_last) return {0,", "if (false) return {0,"),
    **dict.fromkeys(
        (HANDED_ON, HANDED_ON_IN_PARTS, ENDS_BEHIND),
        ("*reinterpret_cast<Elements*>(dq + x) = Elements{};", ""),
    ),
}


@needs_compiler
@pytest.mark.parametrize("case", sampled(EDGES, 1, thorough=3))
@pytest.mark.parametrize("way", WRITES_ALL)
def test_blocks_write_gradients_of_all_rows(way: str, case: Case) -> None:
    """Also of those that see no keys; clusters' of some of the keys in each of several turns."""
    kernel = kernel_of(way, causal=True)
    device, rng = SimDevice("emulated", H200), np.random.default_rng(3)
    build = device.toolchain().build(kernel)
    assert check_case(device.open(), build, case, rng) < kernel.problem.tolerance
    wrong = kernel.source.replace(*WRITES_ALL[way])
    assert wrong != kernel.source
    if case is EDGES[0]:
        build = device.toolchain().build(replace(kernel, source=wrong))
        with pytest.raises((WrongResult, CorruptedMemory)):
            check_case(device.open(), build, case, rng)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", [COLUMNS_IN_CLUSTER, HANDED_ON])
def test_the_same_bits_are_made_every_run(way: str, causal: bool) -> None:
    """In whatever order blocks come along; of keys for two turns and more."""
    kernel = kernel_of(way, causal=causal)
    problem, rng = kernel.problem, np.random.default_rng(0)
    shapes = ((1, 4, 150, problem.head_dim), (1, 2, 300, problem.head_dim))
    q, k, v = reference.random_inputs("normal", *shapes, scale=0.1, rng=rng, dtype=problem.dtype)
    v = np.ascontiguousarray(v[..., : problem.head_dim_v])
    given = given_of(q, k, v, rng, scale=0.1, scores=problem.scores)
    build = SimDevice("emulated", H200).toolchain().build(kernel)
    first, *others = (SimRunner(H200, seed=seed).differentiate(build, given, scale=0.1) for seed in range(4))
    for other in others:
        assert all(other[name].tobytes() == first[name].tobytes() for name in ("dq", "dk", "dv"))


@needs_compiler
@pytest.mark.parametrize("head_dim_v", sampled([64, 40], 1))
def test_rows_are_summed_each_by_itself(head_dim_v: int) -> None:
    """Tensor cores multiply eight rows of outputs with eight of gradients: what one is, is nothing to the
    others, nor are rows that are read in place of those that are not there."""
    problem = replace(PROBLEM, head_dim=64, head_dim_v=head_dim_v)
    rng = np.random.default_rng(7)
    shapes = ((1, 4, 75, 64), (1, 2, 40, 64))
    q, k, v = reference.random_inputs("normal", *shapes, scale=0.1, rng=rng, dtype=problem.dtype)
    given = given_of(q, k, np.ascontiguousarray(v[..., :head_dim_v]), rng, scale=0.1)
    build = SimDevice("emulated", H200).toolchain().build(render(SMALL, problem, H200))
    before = SimRunner(H200).differentiate(build, given, scale=0.1)["dq"]
    infinite = {12: np.inf, 74: -np.inf}
    for row, number in infinite.items():
        given["dout"][:, :, row] = number
    after = SimRunner(H200).differentiate(build, given, scale=0.1)["dq"]
    others = [row for row in range(75) if row not in infinite]
    assert after[:, :, others].tobytes() == before[:, :, others].tobytes()
    assert not np.isfinite(after[:, :, list(infinite)].astype(np.float32)).any()


def test_the_workspace_is_filled_up_to_whole_tiles() -> None:
    kernel = kernel_of("f16")
    # Two numbers of each of 12 heads' 128 rows: 100, filled up to tiles of 32.
    assert kernel.workspace_bytes({"batch": 3, "num_q_heads": 4, "seqlen_q": 100}) == 2 * 4 * 12 * 128


#: Tiles that fill registers: of each shape the widest that the rules allow.
FULL = {
    "64": (WgmmaBackward(br=128, keys=128), 64, 64),
    "64, three consumers": (WgmmaBackward(bc=192, br=64, rows=192), 64, 64),
    "128": (WgmmaBackward(br=80, keys=128, k_stages=1), 128, 128),
    "128, weights first": (WgmmaBackward(schedule="weights_first"), 128, 128),
    "64, sums": (WgmmaBackward(br=128, dq_path="bulk"), 64, 64),
    "128, sums": (WgmmaBackward(dq_path="bulk", schedule="weights_first"), 128, 128),
    "128, ahead": (WgmmaBackward(dq_path="bulk", schedule="ahead"), 128, 128),
    "128, ahead, sums by threads": (WgmmaBackward(dq_path="atomics", schedule="ahead"), 128, 128),
    "64, parts": (
        WgmmaBackward(br=128, schedule="ahead", parts=2, kept="registers", dq_path="bulk"),
        64,
        64,
    ),
    "64, parts, late": (
        WgmmaBackward(
            br=128,
            schedule="ahead",
            parts=2,
            kept="registers",
            dq_path="bulk",
            meeting="late",
            ranges="of_keys",
        ),
        64,
        64,
    ),
    "128, across": (WgmmaBackward(br=80, dq_path="bulk", turns="free"), 128, 128),
    "128, late": (WgmmaBackward(dq_path="bulk", meeting="late"), 128, 128),
    "64, two blocks": (WgmmaBackward(bc=64, br=64, dq_path="bulk", min_blocks=2), 64, 64),
    "64, parts, late, stays": (
        WgmmaBackward(
            br=128,
            schedule="ahead",
            parts=2,
            kept="registers",
            dq_path="bulk",
            meeting="late",
            turns="free",
        ),
        64,
        64,
    ),
    "128, stays": (WgmmaBackward(dq_path="bulk", turns="free", order="by_section"), 128, 128),
    "128, made first, handed on": (
        WgmmaBackward(dq_path="bulk", schedule="made_first", turns="free", sums="handed_on"),
        128,
        128,
    ),
    "128, handed on": (WgmmaBackward(dq_path="bulk", turns="free", sums="handed_on"), 128, 128),
    "64, parts, late, handed on": (
        WgmmaBackward(
            br=128,
            schedule="ahead",
            parts=2,
            kept="values",
            dq_path="bulk",
            meeting="late",
            turns="free",
            sums="handed_on",
        ),
        64,
        64,
    ),
    "96, values in registers": (WgmmaBackward(schedule="ahead", kept="values", dq_path="bulk"), 96, 96),
    "64, cluster": (WgmmaBackward(br=128, dq_path="cluster", cluster=4), 64, 64),
    "64, cluster, parts": (
        WgmmaBackward(br=128, schedule="ahead", parts=2, kept="registers", dq_path="cluster", cluster=2),
        64,
        64,
    ),
    # With two of them ptxas serializes its products.
    "128, cluster, a stage of sums": (
        WgmmaBackward(dq_path="cluster", cluster=4, heads=2, sum_stages=1),
        128,
        128,
    ),
    "256, sums": (WgmmaBackward(bc=64, apart=True, dq_path="bulk", dout_stages=1), 256, 256),
    "256": (WgmmaBackward(bc=64, apart=True, keys=64, k_stages=1, v_stages=1), 256, 256),
}


def test_other_products_are_begun_where_there_are_any() -> None:
    late, wide = WgmmaBackward(dq_path="bulk", meeting="late"), replace(PROBLEM, head_dim=128, head_dim_v=128)
    assert "gradients_full" in render(late, wide, H200).source
    for others, told in (
        ({"dq_path": "launch"}, "with dq_path=launch consumers await each other at once"),
        ({"schedule": "ahead"}, "schedule=ahead with a tile as a whole has no part to begin"),
        ({"ds_stages": 1}, "ds_stages=1 leaves a tile no room"),
        ({"bc": 64}, "a lone consumer awaits nobody"),
        ({"bc": 64, "apart": True}, "apart, warpgroups await each other's weights as well"),
    ):
        with pytest.raises(Illegal, match="meeting=late: .*" + told):
            render(replace(late, **others), wide, H200)


def test_rows_of_keys_are_found_where_masks_ask() -> None:
    of_keys, causal = WgmmaBackward(br=128, dq_path="bulk", ranges="of_keys"), replace(PROBLEM, causal=True)
    assert "keys_of(" not in render(of_keys, causal, H200).source
    assert render(of_keys, PROBLEM, H200)  # of no use, but legal
    assert "without a mask all rows see all keys" in (of_keys.advice(PROBLEM, H200) or "")
    with pytest.raises(Illegal, match="ranges=of_keys: with dq_path=launch no block has the same keys"):
        render(replace(of_keys, dq_path="launch"), causal, H200)
    with pytest.raises(Illegal, match="ranges=of_keys: where tiles come in parts or weights go to others"):
        render(replace(of_keys, bc=64, apart=True), causal, H200)


def test_blocks_stay_where_sums_are_in_memory() -> None:
    stays, wide = WgmmaBackward(dq_path="bulk", turns="fixed"), replace(PROBLEM, head_dim=128, head_dim_v=128)
    kernel = render(stays, wide, H200)
    assert kernel.launch.max_blocks == H200.num_sms
    assert kernel.launch.grid_of({"batch": 3, "num_kv_heads": 64, "seqlen_k": 1000}) == H200.num_sms
    with pytest.raises(Illegal, match="turns=fixed: for whole consumers of 16-bit keys that add"):
        render(replace(stays, dq_path="launch"), wide, H200)
    with pytest.raises(Illegal, match="turns=fixed: tiles of packed sequences are a plan's"):
        render(stays, replace(wide, varlen="uniform:64-512"), H200)
    with pytest.raises(Illegal, match="about 248 per thread of a consumer"):
        render(replace(stays, dq_path="atomics"), wide, H200)


def test_blocks_share_an_sm_where_there_is_room() -> None:
    two = WgmmaBackward(bc=64, br=64, dq_path="bulk", min_blocks=2)
    kernel = render(two, PROBLEM, H200)
    assert "__launch_bounds__(kThreads, 2)" in kernel.source and "take_registers<232>()" in kernel.source
    with pytest.raises(Illegal, match=r"min_blocks=2: \d+ bytes of shared memory leave room for 1"):
        render(replace(two, br=128), PROBLEM, H200)
    with pytest.raises(Illegal, match="min_blocks=2: for blocks of 16-bit keys that add"):
        render(replace(two, dq_path="launch"), PROBLEM, H200)


def test_elements_of_arrays_take_registers_where_they_pass_by() -> None:
    capped, table, bias, of_keys = (
        replace(PROBLEM, scoring=each)
        for each in (
            Scoring(softcap=30.0),
            Scoring(score="score + table[h, q - k]"),
            Scoring(bias="bf16"),
            Scoring(score="score + table[h, k]"),
        )
    )
    together = WgmmaBackward(bc=64, dq_path="bulk")
    ahead = replace(together, schedule="ahead")
    of_ranges = replace(together, ranges="of_keys")
    handed_on = replace(together, turns="free", sums="handed_on")
    for variant, more in ((handed_on, 8), (together, 12), (of_ranges, 16), (ahead, 8)):
        needed = needed_registers(variant, capped)
        assert needed_registers(variant, table) == needed_registers(variant, bias) == needed + more
        # What is read of keys that stay is read once.
        assert needed_registers(variant, of_keys) == needed == needed_registers(variant, PROBLEM) + 8
    apart = WgmmaBackward(bc=64, apart=True)
    assert needed_registers(apart, table) == needed_registers(apart, capped)
    # By the other launch's blocks keys pass.
    rows = WgmmaBackward(keys=96)
    needed = needed_registers_of_rows(rows, capped)
    assert {needed_registers_of_rows(rows, each) for each in (table, bias, of_keys)} == {needed - 8 + 72}
    wide = replace(capped, head_dim=128, head_dim_v=128)
    render(together, wide, H200)
    with pytest.raises(Illegal, match="about 260 per thread of a consumer, of 256 threads each has 255"):
        render(together, replace(wide, scoring=table.scoring), H200)


@pytest.mark.nvcc
@pytest.mark.parametrize("tiles", sampled(FULL, 0, thorough=4))
def test_tiles_that_fill_registers_do_not_spill(
    tiles: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, d, dv = FULL[tiles]
    problem = replace(PROBLEM, head_dim=d, head_dim_v=dv, causal=True)
    assert spilled(variant, problem, tmp_path, monkeypatch) == 0


def spilled(variant: WgmmaBackward, problem: Problem, cache: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the bytes that a compiler spills; skips the test where there is none."""
    monkeypatch.setenv("FLASHGEN_CACHE", str(cache))
    try:
        toolchain = cuda_toolchain(90)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    return toolchain.build(render(variant, problem, H200)).spill_bytes


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "scoring", [Scoring(score="score + table[h, q - k]"), Scoring(bias="bf16")], ids=["table", "bias"]
)
@pytest.mark.parametrize(
    ("d", "others"), [(64, {"br": 128, "kept": "values", "ranges": "of_keys"}), (128, {})]
)
def test_tiles_with_elements_of_arrays_do_not_spill(
    scoring: Scoring, d: int, others: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = WgmmaBackward(schedule="ahead", parts=2, dq_path="bulk", turns="free", sums="handed_on")
    problem = replace(PROBLEM, head_dim=d, head_dim_v=d, causal=True, scoring=scoring)
    assert spilled(replace(variant, **others), problem, tmp_path, monkeypatch) == 0
