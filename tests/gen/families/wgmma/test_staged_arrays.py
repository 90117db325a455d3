"""Biases and boolean masks that the copy engine brings to stages in shared memory, in Hopper kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.shared_memory import CHUNK_BYTES, staged_chunk, tiles_ahead
from flashgen.gen.launch import TensorMap
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.shared_memory.banks import wavefronts
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards.emulated import SimDevice

from tests.support.array_layouts import (
    LAYOUTS,
    SCORINGS,
    assert_right,
    in_all_ways,
    problem_of,
    values_laid,
)
from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import check, needs_compiler
from tests.support.scored_attention import assert_close, attend, built, is_legal
from tests.support.scorings import drawn_values

H200 = preset("h200")
TOLERANCES = {"f16": 2e-3, "bf16": 2e-2}
MAIN = Wgmma(br=128, bc=64, bias_stages=2)
WALKS = {
    "overlapped": MAIN,
    "chained": replace(MAIN, schedule="chained", order_of_groups="products", bc=48, bias_stages=3),
    "three groups": replace(MAIN, br=192, order_of_groups="exponentials", persistent=False, bc=32),
    "one stage": replace(MAIN, bc=128, bias_stages=1),
    "neighbours": replace(MAIN, br=64, cluster=2, persistent=False, bias_stages=4),
    "heads": replace(MAIN, cluster=2, cluster_over="heads", bc=16, bias_stages=1),
    "four groups": replace(MAIN, br=256, bc=80, k_stages=3, schedule="chained"),
    "apart": replace(MAIN, o_apart=True, p_in_shared=True, bc=112),
    "shares": replace(MAIN, br=64, splits=2, persistent=False, bc=96),
    "shares in memory": replace(MAIN, br=64, workspace_splits=3, persistent=False, q_in_registers=True),
    "two heads": replace(MAIN, bias_heads=2, schedule="chained", order_of_groups="products"),
    "four heads": replace(MAIN, br=256, bias_heads=4, persistent=False, bias_stages=1),
}
#: How arrays lie that the copy engine takes.
SUITING = ("whole pieces", "rows alike", "heads alike", "all alike")


@needs_compiler
@pytest.mark.parametrize(
    ("name", "walk", "dtype", "layout"), sampled(in_all_ways(WALKS, TOLERANCES), 6, thorough=10)
)
def test_arrays_may_lie_anyhow(name, walk, dtype, layout):
    assert_right(WALKS[walk], problem_of(SCORINGS[name], dtype), layout, TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("walk", sampled(WALKS, 2, thorough=4))
@pytest.mark.parametrize(
    "scoring",
    sampled(
        [
            Scoring(bias="bf16", window=(40, 0)),
            Scoring(bias="f32", window=(90, 20), softcap=2.0),
            Scoring(bias="f16", alibi=True, sinks=True),
            Scoring(bias="u8", chunk=50),
            Scoring(bias="bf16", documents=3),
        ],
        2,
        thorough=3,
    ),
)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_see_parts_of_tiles_of_arrays(walk, scoring, causal):
    problem = problem_of(scoring, causal=causal)
    if not is_legal(WALKS[walk], problem):
        pytest.skip("another rule leaves it out")
    build = built(WALKS[walk], problem)
    for rows, keys in ((150, 173), (320, 90)):
        assert_close(*attend(build, rows, keys, drawn_values(problem, rows, keys)), TOLERANCES["bf16"])


@needs_compiler
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_elements_of_minus_infinity_hide(dtype):
    """Single keys, whole tiles, and all that some rows see."""
    problem = problem_of(Scoring(bias=dtype))
    build = built(WALKS["three groups"], problem)
    rows, keys = 150, 176
    bias = np.array(drawn_values(problem, rows, keys)["bias"])
    bias[..., ::3] = -np.inf
    bias[..., :70, 64:] = -np.inf
    bias[:, 1, 30:40] = -np.inf
    found, expected = attend(build, rows, keys, {"bias": bias})
    assert np.isneginf(expected.lse).any()
    assert_close(found, expected, TOLERANCES["bf16"])


@needs_compiler
@pytest.mark.parametrize("name", sampled(SCORINGS, 1, thorough=4))
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 1, thorough=3))
def test_nothing_beside_an_array_is_read(name, layout):
    problem = problem_of(SCORINGS[name])
    build = built(MAIN, problem, sanitize=True)
    for rows, keys in ((150, 77), (3, 5)):
        values = values_laid(problem, rows, keys, layout)
        assert_close(*attend(build, rows, keys, values, sanitize=True), TOLERANCES["bf16"])


@cache
def without_elements(problem: Problem) -> Build:
    """A kernel that takes zeros for what the copy engine does not bring."""
    kernel = render(MAIN, problem, H200)
    element = "row < rows && key < keys ? __ldg(from + key) : T(0)"
    assert element in kernel.source
    kernel = replace(kernel, source=kernel.source.replace(element, "T(0)"))
    return SimDevice("h200", H200, False).toolchain().build(kernel)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_copy_engine_brings_what_lies_so(layout):
    problem = problem_of(Scoring(bias="bf16"))
    values = values_laid(problem, 150, 173, layout)
    found, expected = attend(without_elements(problem), 150, 173, values)
    if layout in SUITING:
        assert_close(found, expected, TOLERANCES["bf16"])
    else:
        assert np.abs(found[0].astype(np.float64) - expected.o).max() > 0.1


@needs_compiler
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (1, 1)])
@pytest.mark.parametrize("layout", ["whole pieces", "heads alike", "all alike", "words"])
def test_neighbouring_heads_bring_each_other_what_they_share(heads, layout):
    """Of whole clusters, of one that lacks heads, and of one that has one alone; some blocks stay."""
    problem = problem_of(Scoring(bias="bf16", window=(200, 60)), num_q_heads=heads[0], num_kv_heads=heads[1])
    for walk in ("two heads", "four heads"):
        found = attend(built(WALKS[walk], problem), 300, 173, values_laid(problem, 300, 173, layout))
        assert_close(*found, TOLERANCES["bf16"])


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["two heads", "four heads"], 1))
def test_the_suite_holds(walk):
    problem = problem_of(Scoring(bias="f16"), "f16")
    assert check(Setting(WALKS[walk], problem, H200), seed=3) <= problem.tolerance


def test_each_head_of_a_cluster_copies_a_share_of_rows():
    kernel = render(WALKS["four heads"], problem_of(Scoring(bias="bf16"), num_q_heads=6), H200)
    assert kernel.launch.tensor_maps[-1] == TensorMap("bias", 64, 64, 128)
    assert kernel.launch.blocks_per_cluster == 4
    sizes = {"batch": 3, "num_q_heads": 6, "num_kv_heads": 2, "seqlen_q": 300, "seqlen_k": 300}
    assert kernel.launch.grid_of(sizes) == 3 * 8 * 2  # two heads of eight are missing
    copies = kernel.source.count("tma_multicast(")
    assert copies == 2 and "kEveryHead, first_key" in kernel.source


def test_stages_take_the_place_of_tiles_ahead():
    problem = problem_of(SCORINGS["bf16"], head_dim=128)
    plain = replace(MAIN, bias_stages=0)
    assert [tiles_ahead(each, problem, H200) for each in (plain, MAIN)] == [2, 0]
    assert MAIN.smem_bytes(problem, H200) == plain.smem_bytes(problem, H200)
    source = render(MAIN, problem, H200).source
    assert "__pipeline_commit" not in source and "kAhead" not in source
    assert render(MAIN, problem, H200).launch.tensor_maps[-1] == TensorMap("bias", 128, 64, 128)
    assert not MAIN.advice(problem, H200)


@pytest.mark.parametrize(
    ("variant", "problem", "reason"),
    [
        (MAIN, problem_of(Scoring(softcap=2.0)), "no bias or mask is read"),
        (MAIN, problem_of(Scoring(bias="f32"), "f32"), "more to do than to copy"),
        (MAIN, problem_of(Scoring(bias="u8"), "e4m3"), "more to do than to copy"),
        (MAIN, problem_of(Scoring(bias="bf16"), varlen="uniform:1-300"), "lengths of their own"),
        (MAIN, problem_of(Scoring(score="score + t[h, q, k] * t[b, q, k]")), "t is read in several ways"),
        (replace(MAIN, tail=16), problem_of(Scoring(bias="bf16")), "not made for bias_stages=2"),
        (replace(MAIN, pack_heads=True), problem_of(Scoring(bias="bf16")), "packed|of a head"),
        (
            replace(MAIN, bias_stages=0, bias_heads=2),
            problem_of(Scoring(bias="bf16")),
            "each warp copies its own",
        ),
        (replace(MAIN, bias_heads=2, cluster=2), problem_of(Scoring(bias="bf16")), "by one way"),
        (replace(MAIN, bias_heads=2), problem_of(Scoring(bias="u8")), "each head may walk other keys"),
        (replace(MAIN, br=64, bc=16, bias_heads=4), problem_of(Scoring(bias="bf16")), "shares of 512 bytes"),
        (
            replace(MAIN, bc=176, bias_stages=4),
            problem_of(Scoring(bias="f32"), head_dim=128),
            "allows 232448",
        ),
    ],
)
def test_other_kernels_have_no_stages_of_arrays(variant, problem, reason):
    with pytest.raises(Illegal, match=reason):
        variant.check(problem, H200)


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("bc", [16, 48, 64, 80, 96, 112, 128, 176])
def test_rows_that_are_read_together_are_in_different_banks(bc, item_bytes):
    """Pairs of two columns by the four lanes of each row; of 16 bits, as ldmatrix reads them."""
    chunk = staged_chunk(replace(MAIN, bc=bc), item_bytes)
    assert bc * item_bytes % chunk == 0 and chunk <= CHUNK_BYTES

    def place(row: int, x: int) -> int:
        swizzle = row * chunk // 128 % (chunk // 16) * 16
        return x // chunk * 64 * chunk + row * chunk + (x % chunk ^ swizzle)

    for column in range(0, bc, 8):
        pairs = [place(lane // 4, (column + lane % 4 * 2) * item_bytes) for lane in range(32)]
        width = 2 if item_bytes == 4 else 1
        assert wavefronts([pair // 4 for pair in pairs], width) == width
