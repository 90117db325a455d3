"""Hopper kernels of caches in pages, whose tiles several warps copy: numerics, mistakes, rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.predict.cost_model import predict

from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, check, needs_compiler

H200 = preset("h200")
PAGED = Problem(dtype="bf16", head_dim=64, page_size=16, num_q_heads=4, num_kv_heads=2)
TWO = Wgmma(br=64, bc=64, copiers=2)
FOUR = replace(TWO, copiers=4)
WAYS: dict[str, tuple[Wgmma, Problem]] = {
    "blocks that stay": (FOUR, replace(PAGED, causal=True)),
    "pages of eight": (replace(TWO, bc=48, k_stages=3), replace(PAGED, page_size=8)),
    "pages of a tile's half": (TWO, replace(PAGED, page_size=32, causal=True)),
    "clusters": (replace(TWO, bc=128, cluster=2), PAGED),
    "packed heads": (replace(FOUR, pack_heads=True), replace(PAGED, seqlen_q=8, causal=True)),
    "packed sequences": (FOUR, replace(PAGED, varlen="uniform:0-130", causal=True)),
    "shares of keys": (
        replace(TWO, schedule="chained", persistent=False, workspace_splits=2),
        replace(PAGED, head_dim=128, head_dim_v=128, dtype="f16"),
    ),
    "a window": (replace(FOUR, br=128), replace(PAGED, causal=True, scoring=Scoring(window=(40, 0)))),
}


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 4, thorough=len(WAYS)))
def test_outputs_are_those_of_float64(way):
    variant, problem = WAYS[way]
    assert 0 < check(Setting(variant, problem, H200), seed=5) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(["blocks that stay", "packed sequences"], 1, thorough=2))
def test_outputs_are_right_at_all_lengths(way):
    """Tiles of rows that see no key among them, whose queries alone come."""
    variant, problem = WAYS[way]
    limits = replace(H200, num_sms=2)
    assert 0 < check(Setting(variant, problem, limits), seed=3, depth="full") <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(["clusters", "packed heads"], 1, thorough=2))
def test_nothing_is_read_or_written_out_of_bounds(way):
    variant, problem = WAYS[way]
    check(Setting(variant, problem, H200), seed=1, sanitize=True)


#: Where the text stands, and a mistake in its place.
MISTAKES = {
    "all warps the same pieces": ("threadIdx.x / 32 * kLanes + threadIdx.x % 32", "threadIdx.x % 32"),
    "more pieces than there are": ("kLanes = kPieces / kCopiers", "kLanes = kPieces"),
    "fewer warps": ("if (warp < kCopiers)", "if (warp < kCopiers - 1)"),
    "each warp tells": ("const bool leads = threadIdx.x == 0;", "const bool leads = threadIdx.x % 32 == 0;"),
    "stages still in use": ("    barrier_wait(&smem.k_empty[k_pipe.stage], k_pipe.phase ^ 1);\n", ""),
}


@needs_compiler
@pytest.mark.parametrize("mistake", sampled(MISTAKES, 2, thorough=len(MISTAKES)))
def test_mistakes_are_caught(mistake):
    right, wrong = MISTAKES[mistake]
    device = SimDevice("h200", replace(H200, num_sms=2))
    kernel = render(FOUR, replace(PAGED, causal=True), device.limits)
    assert right in kernel.source
    build = device.toolchain().build(replace(kernel, source=kernel.source.replace(right, wrong)))
    with pytest.raises(FlashgenError):
        for seed in range(4):
            validate(device.open(), build, seed=seed)


@pytest.mark.parametrize("way", WAYS)
def test_sources_are_tidy(way):
    variant, problem = WAYS[way]
    assert_tidy(render(variant, problem, H200).source, way, longest=180)


def test_a_warp_asks_for_fewer_boxes():
    one, four = (replace(TWO, bc=128, copiers=n).work(PAGED, H200) for n in (1, 4))
    assert one.copies == 4 * four.copies > 0
    problem = replace(PAGED, head_dim=128, head_dim_v=128, seqlen_q=4096)
    few, many = (predict(Wgmma(bc=128, copiers=n), problem, H200).median_us for n in (1, 4))
    assert many < few


def test_producers_that_bring_queries_besides_keep_more_registers():
    problem = replace(PAGED, head_dim=128, head_dim_v=128, causal=True)

    def given(**values: object) -> tuple[int, int]:
        source = render(Wgmma(**values), problem, H200).source
        kept = int(source.split("give_registers<")[1].split(">")[0])
        return kept, int(source.split("take_registers<")[1].split(">")[0])

    assert given() == given(copiers=4, pack_heads=True) == (24, 240)
    # With 24 ptxas spills 116 bytes of each of their threads, with 40 still 8.
    assert given(copiers=4) == (56, 224)


@pytest.mark.parametrize(
    ("problem", "variant", "message"),
    [
        (replace(PAGED, page_size=0), TWO, "copiers=2: one thread copies whole tiles"),
        (
            replace(PAGED, dtype="f32", precision="3xf16"),
            replace(TWO, bc=32),
            "copiers=2: the producer's other warps have tiles of f32 to turn",
        ),
        (
            replace(PAGED, dtype="e4m3"),
            TWO,
            "copiers=2: the producer's other warps have tiles of e4m3 to turn",
        ),
        (replace(PAGED, page_size=64), TWO, "copiers=2: 1 pieces of a tile are not as many for each"),
        (replace(PAGED, page_size=32), replace(FOUR, bc=96), "copiers=4: 3 pieces of a tile are not"),
    ],
)
def test_rules(problem, variant, message):
    with pytest.raises(Illegal, match=message):
        render(variant, problem, H200)
