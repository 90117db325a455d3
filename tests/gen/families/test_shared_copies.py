"""Blocks of a cluster, with neighbouring keys, get rows that pass by from each other's copies: each brings a
part of a tile to all, and all go on together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.gen.work import LaunchesWork, count_work
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.validate import validate

from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, check, needs_compiler

H200 = PRESETS["h200"]
#: Two clusters of two, or one of four: blocks take turns.
FEW = replace(H200, num_sms=4)
PROBLEM = Problem(backward=True, dtype="bf16", num_q_heads=4, num_kv_heads=2, head_dim=64, head_dim_v=64)
CAUSAL = replace(PROBLEM, causal=True)
SHARED = WgmmaBackward(br=128, dq_path="bulk", turns="fixed", cluster=2)
ALONE = replace(SHARED, bc=64, br=64)
#: By who copies what, where consumers give rows up, and which rows pass by.
WAYS: dict[str, tuple[WgmmaBackward, Problem]] = {
    "a box of a chunk each": (replace(SHARED, br=64), replace(PROBLEM, head_dim=128, head_dim_v=128)),
    "three chunks of two blocks": (ALONE, replace(PROBLEM, head_dim=136, head_dim_v=40)),
    "one box": (ALONE, replace(PROBLEM, head_dim=24, head_dim_v=40, dtype="f16")),
    "four blocks": (replace(ALONE, cluster=4), CAUSAL),
    "by sections, sums by threads": (replace(ALONE, order="by_section", dq_path="atomics"), CAUSAL),
    "tiles ahead": (replace(ALONE, schedule="ahead", dout_stages=3), CAUSAL),
    "tiles ahead in parts, late": (
        replace(SHARED, schedule="ahead", parts=2, kept="registers", meeting="late", ranges="of_keys"),
        CAUSAL,
    ),
    "weights made first": (replace(SHARED, schedule="made_first", order="heaviest_first"), CAUSAL),
    "a window": (
        replace(ALONE, ranges="of_keys", order="heaviest_first"),
        replace(PROBLEM, scoring=Scoring(window=(70, 9))),
    ),
    "documents and a soft cap": (ALONE, replace(PROBLEM, scoring=Scoring(documents=3, softcap=20.0))),
    "a bias and sinks": (ALONE, replace(CAUSAL, scoring=Scoring(bias="f16", sinks=True))),
    "keys out of reach": (
        replace(ALONE, far_keys="left_out"),
        replace(CAUSAL, scoring=Scoring(alibi=True)),
    ),
}


def kernel_of(way: str) -> Kernel:
    variant, problem = WAYS[way]
    return render(variant, problem, FEW)


@needs_compiler
@pytest.mark.parametrize("way", sampled(sorted(WAYS), 4))
@pytest.mark.parametrize("limits", [FEW, H200], ids=["turns", "one turn"])
def test_the_suite(way, limits) -> None:
    variant, problem = WAYS[way]
    assert 0 < check(Setting(variant, problem, limits), seed=5) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(sorted(WAYS), 0, thorough=3))
def test_the_full_suite(way) -> None:
    variant, problem = WAYS[way]
    assert 0 < check(Setting(variant, problem, FEW), seed=6, depth="full") <= problem.tolerance


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("way", ["a box of a chunk each", "tiles ahead"])
def test_kernels_pass_the_sanitizer(way) -> None:
    variant, problem = WAYS[way]
    check(Setting(variant, problem, FEW), seed=1, sanitize=True)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    ("way", "right", "wrong"),
    [
        ("four blocks", "block < kCluster; ++block)", "block < 1; ++block)"),
        ("four blocks", "4 * kConsumers * kCluster);", "4 * kConsumers);"),
        ("four blocks", "(1 << kCluster) - 1", "1"),
        ("three chunks of two blocks", "i += kCluster) {", "i += kCluster + 1) {"),
        ("a box of a chunk each", "int i = int(blockIdx.x) % kCluster;", "int i = 0;"),
        ("four blocks", "first_key += int(blockIdx.x) % kCluster * kBc;", ""),
        ("a window", "end_key = min(first_key + kClusterKeys,", "end_key = min(first_key + kBc,"),
        ("four blocks", "number += gridDim.x / kCluster", "number += gridDim.x"),
        ("four blocks", "int number = blockIdx.x / kCluster;", "int number = blockIdx.x;"),
        ("four blocks", "for the last time.\n  cluster_sync();", "for the last time."),
    ],
)
def test_mistakes_are_noticed(way, right, wrong) -> None:
    kernel = kernel_of(way)
    assert right in kernel.source
    device = SimDevice("few", FEW)
    built = device.toolchain().build(replace(kernel, source=kernel.source.replace(right, wrong)))
    with pytest.raises(FlashgenError):
        validate(device.open(), built, seed=1, depth="quick")


@pytest.mark.parametrize("way", WAYS)
def test_copies_bring_each_box_once_to_all_blocks(way) -> None:
    kernel = kernel_of(way)
    assert_tidy(kernel.source, way, longest=180)
    main = kernel.launch
    assert main.cluster == WAYS[way][0].cluster and main.max_blocks == FEW.num_sms
    # Of rows that pass by, not of keys that stay.
    assert kernel.source.count("share_rows<kPassingRows") == kernel.source.count("load_rows<kBc") == 2
    assert "load_rows<kPassingRows" not in kernel.source
    alone = render(replace(WAYS[way][0], cluster=1), WAYS[way][1], FEW).source
    assert not any(word in alone for word in ("kCluster", "multicast", "share_rows", "cluster_sync"))


def test_grids_are_of_whole_clusters() -> None:
    main = kernel_of("one box").launch
    sizes = {"batch": 1, "num_kv_heads": 1, "seqlen_k": 3 * 64, "num_q_heads": 1, "seqlen_q": 1}
    assert main.grid_of(sizes) == 4
    assert main.grid_of(sizes | {"seqlen_k": 0}) == 0
    assert main.grid_of(sizes | {"seqlen_k": 9999}) == FEW.num_sms


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        ({"turns": "one"}, {}, "cluster=2: with turns=one its blocks may take keys that lie apart"),
        ({"turns": "free"}, {}, "cluster=2: with turns=free its blocks may take keys that lie apart"),
        ({"dq_path": "launch"}, {}, "where these make all gradients, as dq_path=bulk has it"),
        ({"apart": True, "bc": 64}, {}, "where each warpgroup needs both queries and gradients of outputs"),
        ({"br": 64}, {"dtype": "f32"}, "as they lie in arrays, not in parts of f32"),
        ({}, {"varlen": "uniform:1-100"}, "by tiles of one length, not of packed sequences"),
    ],
)
def test_what_cannot_be_copied_to_all_is_told(changes, asked, message) -> None:
    with pytest.raises(Illegal, match=message):
        render(replace(SHARED, **changes), replace(PROBLEM, **asked), FEW)


def test_the_model_counts_what_passes_by_once() -> None:
    def from_l2(cluster: int) -> float:
        work = count_work(replace(SHARED, cluster=cluster), PROBLEM, H200)
        assert isinstance(work, LaunchesWork)
        return work.launches[0].work.per_tile.l2_bytes

    one, two, four = map(from_l2, (1, 2, 4))
    assert one - two == 2 * (two - four) > 0
