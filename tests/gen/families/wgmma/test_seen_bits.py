"""What a mask hides of single keys as bits, which are left with the lists of tiles, in Hopper kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.work import GroupWork
from flashgen.gen.launch import LISTS_ROLE
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scored_tiles import lists as of_lists
from flashgen.gen.scored_tiles.lists import THREADS, words_of_scores
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.gen.work import count_work
from flashgen.tuner.cards.emulated import SimDevice

from tests.support.array_layouts import LAYOUTS, SCORINGS, problem_of, values_laid
from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import check, needs_compiler
from tests.support.scored_attention import assert_close, attend, built, is_legal
from tests.support.scorings import drawn_values

H200 = preset("h200")
TOLERANCES = {"f16": 2e-3, "bf16": 2e-2, "e4m3": 2e-2}
MAIN = Wgmma(br=128, bc=64, seen_bits=True)
WALKS = {
    "overlapped": MAIN,
    "chained": replace(MAIN, schedule="chained", order_of_groups="products", bc=48),
    "three groups": replace(MAIN, br=192, order_of_groups="exponentials", persistent=False, bc=96),
    "neighbours": replace(MAIN, br=64, cluster=2, persistent=False, bc=32),
    "four groups": replace(MAIN, br=256, bc=80, k_stages=3, schedule="chained"),
    "apart": replace(MAIN, o_apart=True, p_in_shared=True, bc=112),
    "many keys": replace(MAIN, br=64, bc=144, q_in_registers=True, poly_exp=4),
    "shares": replace(MAIN, br=64, splits=2, persistent=False, bc=16),
    "shares in memory": replace(MAIN, br=64, workspace_splits=3, persistent=False, q_in_registers=True),
    "eight bits": replace(MAIN, bc=96, rescale="always"),
    "stages beside": replace(MAIN, bias_stages=2),
}
#: Masks that are no intervals, alone and beside what else is asked of scores.
MASKS = {
    "array": Scoring(bias="u8"),
    "array in a window": Scoring(bias="u8", window=(90, 20)),
    "array in a chunk, capped": Scoring(bias="u8", chunk=50, softcap=2.0),
    "array of batches": SCORINGS["of batches"],
    "formula": Scoring(mask="q // 50 == k // 50 or k < 3"),
    "formula of heads": Scoring(mask="k % (64 * (h + 1)) < 40 + b", sinks=True),
    "several arrays": SCORINGS["several"],
}


def cases(walks=WALKS, dtypes=TOLERANCES):
    """Every legal mask, walk and type."""
    return [
        (name, walk, dtype)
        for i, name in enumerate(MASKS)
        for j, walk in enumerate(walks)
        for k, dtype in enumerate(dtypes)
        if (i + j + k) % 2 == 0 and is_legal(walks[walk], problem_of(MASKS[name], dtype))
    ]


@needs_compiler
@pytest.mark.parametrize(("name", "walk", "dtype"), sampled(cases(), 8, thorough=10))
@pytest.mark.parametrize("causal", [False, True])
def test_masks_are_right(name: str, walk: str, dtype: str, causal: bool) -> None:
    problem = problem_of(MASKS[name], dtype, causal=causal)
    build = built(WALKS[walk], problem)
    for rows, keys in ((150, 173), (320, 90), (3, 5)):
        assert_close(*attend(build, rows, keys, drawn_values(problem, rows, keys)), TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("walk", sampled(["overlapped", "three groups", "neighbours"], 1))
def test_arrays_may_lie_anyhow(walk: str, layout: str) -> None:
    problem = problem_of(MASKS["array"])
    found = attend(built(WALKS[walk], problem), 150, 173, values_laid(problem, 150, 173, layout))
    assert_close(*found, TOLERANCES["bf16"])


@needs_compiler
@pytest.mark.parametrize("share", [0.0, 0.001, 0.999, 1.0])
def test_few_or_many_keys_are_hidden(share: float) -> None:
    """Tiles that are seen whole, those that nobody sees, and rows that see nothing."""
    problem = problem_of(MASKS["array"])
    rows, keys = 300, 333
    shape = drawn_values(problem, rows, keys)["bias"].shape
    mask = (np.random.default_rng(3).random(shape) < share).astype(np.uint8) * 7  # whatever is not zero
    mask[:, 1, 130:140] = 0
    found = attend(built(WALKS["three groups"], problem), rows, keys, {"bias": mask})
    assert_close(*found, TOLERANCES["bf16"])


@needs_compiler
@pytest.mark.parametrize("share", sampled([0.0001, 0.02], 1))
def test_a_cluster_may_have_to_ask_again_and_again(share: float) -> None:
    """More tiles than its blocks have flags for: those that are listed are in the order of their keys."""
    problem = problem_of(MASKS["array"])
    rows, keys = 40, 2 * 32 * 8 * 16 + 203
    shape = drawn_values(problem, rows, keys)["bias"].shape
    mask = (np.random.default_rng(5).random(shape) < share).astype(np.uint8)
    found = attend(built(WALKS["shares"], problem), rows, keys, {"bias": mask})
    assert_close(*found, TOLERANCES["bf16"])


@needs_compiler
@pytest.mark.parametrize("layout", ["elements", "batches alike", "heads alike", "all alike"])
def test_where_lists_are_many_each_block_makes_some_by_itself(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Of 24 lists, or as many fewer as see alike, with room for three that have a cluster each."""
    monkeypatch.setattr(of_lists, "MOST_BLOCKS", 3 * of_lists.BITS_BLOCKS)
    problem = problem_of(MASKS["array"], batch=2)
    rows, keys = 300, 173
    build = SimDevice("h200", H200).toolchain().build(render(WALKS["overlapped"], problem, H200))
    found = attend(build, rows, keys, values_laid(problem, rows, keys, layout))
    assert_close(*found, TOLERANCES["bf16"])


@needs_compiler
@pytest.mark.parametrize("walk", sampled(["three groups", "neighbours", "shares in memory"], 1))
def test_the_suite_holds(walk: str) -> None:
    problem = problem_of(MASKS["array"])
    assert check(Setting(WALKS[walk], problem, H200), seed=3) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 1, thorough=3))
def test_nothing_beside_an_array_is_read(layout: str) -> None:
    problem = problem_of(MASKS["array"])
    build = built(WALKS["three groups"], problem, sanitize=True)
    for rows, keys in ((150, 77), (3, 5)):
        values = values_laid(problem, rows, keys, layout)
        assert_close(*attend(build, rows, keys, values, sanitize=True), TOLERANCES["bf16"])


@pytest.mark.parametrize(
    ("bc", "words"), [(16, 1), (48, 1), (64, 1), (80, 2), (96, 2), (128, 2), (144, 3), (256, 4)]
)
def test_a_thread_has_a_bit_for_each_score(bc: int, words: int) -> None:
    assert words_of_scores(bc) == words and 32 * (words - 1) < bc / 2 <= 32 * words
    kernel = render(replace(MAIN, bc=bc, br=64), problem_of(MASKS["array"]), H200)
    assert f"constexpr int kSeenWords = {words};" in kernel.source


def test_lists_hold_what_all_heads_need_once() -> None:
    problem = problem_of(MASKS["array"])
    kernel = render(WALKS["three groups"], problem, H200)
    sizes = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 300, "seqlen_k": 1000}
    tiles, key_tiles, words = 2, 11, 3 * 128 * 2
    of_head = 2 * tiles * (1 + key_tiles * (1 + words))
    strides = {f"bias_stride_{axis}": step for axis, step in enumerate((300000, 0, 1000))}
    assert kernel.num_list_ints(sizes) == 4 * of_head
    assert kernel.num_list_ints(sizes, strides) == of_head
    assert kernel.num_list_ints(sizes, {**strides, "bias_stride_1": 16}) == 4 * of_head
    assert kernel.num_list_ints(sizes, {**strides, "bias_stride_0": 0}) == of_head / 2
    lists = kernel.tile_lists
    assert lists is not None
    assert (lists.batch_strides, lists.head_strides) == (("bias_stride_0",), ("bias_stride_1",))
    # Of a formula that names heads nothing can be known.
    by_formula = render(MAIN, problem_of(MASKS["formula of heads"]), H200).tile_lists
    assert by_formula is not None and by_formula.by_head and by_formula.head_strides == ()
    plain = render(replace(MAIN, seen_bits=False), problem, H200)
    assert plain.num_list_ints(sizes, strides) == 2 * 3 * (1 + 16)


def test_no_stages_and_no_tiles_ahead_are_needed() -> None:
    problem = problem_of(MASKS["array"], head_dim=64)
    kernel, plain = (
        render(MAIN, problem, H200),
        render(Wgmma(br=128, bc=64), replace(problem, scoring=Scoring()), H200),
    )
    assert kernel.launch.smem_bytes == plain.launch.smem_bytes
    assert "kAhead" not in kernel.source and "hide_last" not in kernel.source
    assert next(each for each in kernel.launches if each.role == LISTS_ROLE).threads == THREADS
    asked = [count_work(replace(MAIN, seen_bits=bits), problem, H200) for bits in (False, True)]
    assert all(isinstance(each, GroupWork) for each in asked)
    assert asked[1].asked_slots < asked[0].asked_slots and asked[1].asked_wavefronts == 0


@pytest.mark.parametrize(
    ("variant", "problem", "reason"),
    [
        (MAIN, problem_of(Scoring(window=(50, 0))), "no mask is asked pair by pair"),
        (MAIN, problem_of(Scoring(bias="f16")), "no mask is asked pair by pair"),
        (replace(MAIN, bc=32), problem_of(Scoring(bias="u8"), "f32"), "not made for f32"),
        (
            MAIN,
            problem_of(Scoring(mask="doc[b, q] == doc[b, k]"), varlen="uniform:1-300"),
            "packed sequences",
        ),
        (replace(MAIN, bias_stages=2), problem_of(Scoring(bias="u8")), "no array is read for a mask"),
    ],
)
def test_other_kernels_have_no_bits(variant: Wgmma, problem: Problem, reason: str) -> None:
    with pytest.raises(Illegal, match=reason):
        variant.check(problem, H200)
