"""Hopper kernels of few query rows: heads that share keys packed into a tile's rows, keys split."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.wgmma.family import Wgmma
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
BRAIN = Problem(dtype="bf16", head_dim=24, head_dim_v=24, causal=True)
HALF = Problem(dtype="f16", head_dim=40, head_dim_v=72)
ALONE = Wgmma(br=64, bc=16, persistent=False)
#: Of each way in which rows are packed and keys split.
WAYS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "packed": (BRAIN, {"pack_heads": True}),
    "packed, staying": (HALF, {"pack_heads": True, "br": 128, "persistent": True}),
    "packed, clusters": (BRAIN, {"pack_heads": True, "cluster": 2, "persistent": True}),
    "packed, q in registers": (HALF, {"pack_heads": True, "br": 192, "q_in_registers": True, "section": 0}),
    "splits": (BRAIN, {"splits": 2}),
    "splits, tail": (HALF, {"splits": 4, "br": 128, "bc": 32, "tail": 16, "schedule": "chained"}),
    "both": (BRAIN, {"pack_heads": True, "splits": 3, "br": 128, "bc": 32}),
    "both, chained": (HALF, {"pack_heads": True, "splits": 8, "bc": 32, "schedule": "chained"}),
    "both, weights in shared memory": (BRAIN, {"pack_heads": True, "splits": 6, "p_in_shared": True}),
    "workspace": (BRAIN, {"workspace_splits": 3, "section": 4}),
    "workspace, packed": (HALF, {"pack_heads": True, "workspace_splits": 8, "bc": 32, "tail": 16}),
    "both, all blocks": (replace(HALF, causal=True), {"pack_heads": True, "splits": 16, "poly_exp": 4}),
}
SCORINGS = {
    "window": Scoring(window=(33, 0)),
    "window to both sides, first keys": Scoring(window=(9, 5), always=2),
    "sinks": Scoring(sinks=True),
    "sinks, soft cap, window": Scoring(sinks=True, softcap=20.0, window=(40, 3)),
    "lengths": Scoring(lengths=True),
    "chunk": Scoring(chunk=16),
    "tree": Scoring(tree=True),
    "alibi": Scoring(alibi=True),
    "by head and row": Scoring(score="score + table[h, q - k] * b", sinks=True),
}


def variant_of(way: str) -> Wgmma:
    return replace(ALONE, **WAYS[way][1])


@needs_compiler
@pytest.mark.parametrize("way", sampled(sorted(WAYS), 4))
def test_the_suite(way):
    problem = WAYS[way][0]
    assert 0 < check(Setting(variant_of(way), problem, H200), seed=3) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(sorted(WAYS), 0, thorough=4))
def test_the_full_suite(way):
    problem = WAYS[way][0]
    assert 0 < check(Setting(variant_of(way), problem, H200), seed=4, depth="full") <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize("name", sampled(sorted(SCORINGS), 2, thorough=3))
@pytest.mark.parametrize("way", sampled(["packed, staying", "splits", "both"], 1))
def test_masks_and_sinks(way, name):
    problem = replace(WAYS[way][0], causal=name == "tree", scoring=SCORINGS[name])
    assert 0 < check(Setting(variant_of(way), problem, H200), seed=5) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize("varlen", sampled(["uniform:1-100", ""], 1))
@pytest.mark.parametrize("way", sampled(["both", "packed, staying", "packed, clusters", "splits"], 1))
def test_caches_in_pages(way, varlen):
    if "cluster" in WAYS[way][1] and varlen:
        pytest.skip("plans of packed sequences list blocks one by one")
    problem = replace(WAYS[way][0], page_size=16, varlen=varlen)
    assert 0 < check(Setting(variant_of(way), problem, H200), seed=7) <= problem.tolerance


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    "scoring",
    [Scoring(alibi=True), Scoring(bias="bf16"), Scoring(documents=3), Scoring(mask="(q * 7 + k) % 5 > 1")],
    ids=["alibi", "bias", "documents", "mask"],
)
def test_split_keys_with_changes_by_row_and_head(scoring):
    problem = replace(BRAIN, scoring=scoring)
    assert 0 < check(Setting(replace(ALONE, splits=2, bc=32), problem, H200), seed=6) <= problem.tolerance


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("way", ["packed, staying", "splits", "both"])
def test_kernels_pass_the_sanitizer(way):
    for scoring in (Scoring(), Scoring(window=(9, 5), sinks=True)):
        problem = replace(WAYS[way][0], scoring=scoring)
        check(Setting(variant_of(way), problem, H200), seed=1, sanitize=True)


@needs_compiler
@pytest.mark.parametrize(
    "way", sampled(["both", "both, all blocks", "packed, clusters", "workspace, packed"], 1)
)
def test_kernels_are_right_in_any_order_to_the_bit(way):
    """With more tiles than blocks that share them, and with blocks that have no key."""
    problem, variant = WAYS[way][0], variant_of(way)
    built = SimDevice("h200", H200).toolchain().build(render(variant, problem, H200))
    for rows, keys in ((1, variant.bc * (2 * variant.key_shares() + 1) + 3), (37, 40), (9, 2)):
        case = inputs(problem, rows, keys, 0.25, heads=6)
        runs = [SimRunner(H200, seed=n).attend(built, *case, scale=0.25, want_lse=True) for n in range(4)]
        assert len({(o.tobytes(), lse.tobytes()) for o, lse in runs if lse is not None}) == 1
        expected = reference.attention(*case, scale=0.25, scores=problem.scores).o
        assert np.abs(runs[0][0].astype(np.float64) - expected).max() < 2e-2


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cluster_sync();  // every block's partial result is there", ""),
        ("named_barrier_sync(kAllConsumersBarrier, kConsumers * kWarpgroup);", ""),
        ("cluster_sync();  // a block's shared memory goes with it", ""),
        (
            "first_tile += num_tiles * split / kSplits;",
            "first_tile += num_tiles * split / kSplits + (split > 1);",
        ),
        ("last_tile = first_tile + num_tiles * (split + 1) / kSplits;", ""),
        ("+ row % group * head_stride", "+ row % group * head_stride * (row < 60)"),
        (
            "first_row + row < num_rows && piece * 8 < kD);",
            "first_row + row < num_rows - 1 && piece * 8 < kD);",
        ),
        ("first_row + row < num_rows && piece * 8 < kD);", "first_row + row < num_rows);"),
        ("__pipeline_wait_prior(0);", ""),
        ("__pipeline_commit();", ""),
        ("__pipeline_wait_prior(0);\n  fence_proxy_async();", "__pipeline_wait_prior(0);"),
    ],
)
def test_mistakes_are_caught(right, wrong):
    variant = replace(ALONE, pack_heads=True, splits=3, br=128, bc=32)
    kernel = render(variant, BRAIN, H200)
    assert is_caught(kernel, right, wrong, H200, [(45, 350, 0.3), (3, 900, 0.3), (70, 70, 0.3)], heads=6)


def test_texts_are_tidy():
    for problem, changes in WAYS.values():
        variant = replace(ALONE, **changes)
        kernel = render(variant, problem, H200)
        assert_tidy(kernel.source, variant.name)
        packed = re.search(r"CUtensorMap (.*);", kernel.source)
        assert packed is not None
        names = ["k", "v"] if variant.pack_heads else ["q", "k", "v"]
        assert packed[1].split(", ") == names
        assert kernel.launch.splits == variant.splits and kernel.launch.pack_heads == variant.pack_heads


@pytest.mark.parametrize(
    ("problem", "changes", "message"),
    [
        (
            replace(BRAIN, dtype="e4m3", head_dim=32, head_dim_v=32),
            {"pack_heads": True},
            "combination: pack_heads=True: not made for e4m3",
        ),
        (Problem(), {"splits": 2}, "combination: splits=2: not made for f32"),
        (BRAIN, {"splits": 2, "persistent": True}, "combination: splits=2: what blocks make together takes"),
        (BRAIN, {"splits": 2, "cluster": 2}, r"combination: cluster=2: .* split keys already \(splits=2\)"),
        (
            BRAIN,
            {"pack_heads": True, "cluster": 2, "cluster_over": "heads"},
            "combination: cluster=2: heads that share keys are packed already",
        ),
        (
            BRAIN,
            {"pack_heads": True, "q_stages": 2, "persistent": True},
            "combination: q_stages=2: rows of packed heads are brought by those who need them",
        ),
        (
            replace(BRAIN, scoring=Scoring(mask="(q * 7 + k) % 5 > 1")),
            {"pack_heads": True},
            "combination: pack_heads=True: not made for lists of tiles of keys",
        ),
        (
            replace(BRAIN, scoring=Scoring(bias="bf16")),
            {"pack_heads": True},
            "combination: pack_heads=True: rows of bias come to shared memory by those of a head",
        ),
        (
            BRAIN,
            {"splits": 2, "br": 128, "k_stages": 1, "v_stages": 1},
            "shared memory: splits=2: a partial result of 23040 bytes takes the place of tiles of 20480",
        ),
    ],
)
def test_what_cannot_run_is_told(problem, changes, message):
    with pytest.raises(Illegal, match=message):
        render(replace(ALONE, **changes), problem, H200)


def test_the_model_knows_what_packing_and_splitting_are_for():
    grouped = replace(
        BRAIN, head_dim=128, head_dim_v=128, num_q_heads=32, num_kv_heads=8, causal=False, seqlen_k=8192
    )
    few, alone = replace(ALONE, pack_heads=True, bc=64, min_blocks=2), replace(ALONE, bc=64, min_blocks=2)
    sixteen = replace(grouped, batch=32, seqlen_q=16)
    assert predict(few, sixteen, H200).median_us < 0.6 * predict(alone, sixteen, H200).median_us
    one = replace(grouped, batch=1, seqlen_q=1, seqlen_k=131072)
    assert predict(replace(few, splits=16), one, H200).median_us < 0.2 * predict(few, one, H200).median_us
