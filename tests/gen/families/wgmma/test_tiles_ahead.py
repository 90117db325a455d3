"""Arrays that come to shared memory ahead of the scores that meet them, in Hopper kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.shared_memory import CHUNK_BYTES, pitch, tiles_ahead
from flashgen.gen.limits import preset
from flashgen.gen.render import render
from flashgen.gen.scored_tiles.arrays import tile_arrays
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.shared_memory.banks import NUM_BANKS, wavefronts

from tests.support.array_layouts import (
    LAYOUTS,
    SCORINGS,
    assert_right,
    in_all_ways,
    problem_of,
    values_laid,
)
from tests.support.depth import sampled
from tests.support.emulated import needs_compiler
from tests.support.scored_attention import assert_close, attend, built

H200 = preset("h200")
TOLERANCES = {"f16": 2e-3, "bf16": 2e-2, "e4m3": 2e-2, "f32": 1e-5}
MAIN = Wgmma(br=128, bc=64)
#: Too wide for anything beside its stages.
ROOMLESS = replace(MAIN, bc=176)
WALKS = {
    "overlapped": MAIN,
    "chained": replace(MAIN, schedule="chained", order_of_groups="products", bc=48),
    "three groups": replace(MAIN, br=192, order_of_groups="exponentials", persistent=False, bc=32),
    "neighbours": replace(MAIN, br=64, cluster=2, persistent=False),
    "heads": replace(MAIN, cluster=2, cluster_over="heads", bc=16),
    "tail": replace(MAIN, bc=80, tail=16),
    "apart": replace(MAIN, o_apart=True, p_in_shared=True, bc=112),
    "one ahead": replace(MAIN, bc=256, p_in_shared=True, k_stages=3, v_stages=3),
}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "walk", "dtype", "layout"), sampled(in_all_ways(WALKS, TOLERANCES), 3, thorough=12)
)
def test_arrays_may_lie_anyhow(name, walk, dtype, layout):
    assert_right(WALKS[walk], problem_of(SCORINGS[name], dtype), layout, TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("name", sampled(SCORINGS, 0, thorough=4))
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 0, thorough=3))
def test_nothing_beside_an_array_is_read(name, layout):
    problem = problem_of(SCORINGS[name])
    build = built(MAIN, problem, sanitize=True)
    for rows, keys in ((150, 77), (3, 5)):
        values = values_laid(problem, rows, keys, layout)
        assert_close(*attend(build, rows, keys, values, sanitize=True), TOLERANCES["bf16"])


def test_as_many_tiles_come_ahead_as_there_is_room_for():
    biased = problem_of(SCORINGS["bf16"], head_dim=128)
    none = problem_of(Scoring(softcap=2.0), head_dim=128)
    wide = replace(MAIN, bc=128)
    assert [tiles_ahead(each, biased, H200) for each in (MAIN, replace(wide, o_apart=True), ROOMLESS)] == [
        2,
        1,
        0,
    ]
    assert tiles_ahead(MAIN, none, H200) == 0
    more = wide.smem_bytes(biased, H200) - wide.smem_bytes(none, H200)
    assert more == 2 * 128 * 128 * 2
    assert wide.smem_bytes(biased, H200) <= H200.smem_per_block
    shared = replace(MAIN, br=64, min_blocks=2)
    assert 2 * (shared.smem_bytes(biased, H200) + H200.smem_reserved_per_block) <= H200.smem_per_sm


def test_without_room_arrays_are_read_where_they_are():
    biased = problem_of(SCORINGS["bf16"], head_dim=128)
    source = render(ROOMLESS, biased, H200).source
    assert "tiles ahead" in (ROOMLESS.advice(biased, H200) or "")
    assert "tiles ahead" not in (MAIN.advice(biased, H200) or "")
    assert "kAhead" not in source and "bias_at(args, batch, head, row, start, behind)" in source


def test_arrays_at_a_pair_s_own_row_and_key_come_ahead():
    def names(**asked):
        return [each.name for each in tile_arrays(problem_of(Scoring(**asked)).scores)]

    assert names(bias="f32") == ["bias"]
    assert names(score="score + t[q, h, k]") == ["t"]
    assert names(score="score + t[h, q, k] * t[b, q, k]") == ["t", "t1"]
    assert names(score="score + t[h, k]") == []  # a row serves all rows
    assert names(score="score + t[h, q - k]") == []
    assert names(score="score + t[q, k]", mask="t[q, k - 1] > 0", buffers=(("t", "f32"),)) == []
    assert names(score="score + t[q, k]", mask="t[q, k] > 0", buffers=(("t", "f32"),)) == ["t"]
    assert names(mask="t[q, k] > 0", buffers=(("t", "i32"),)) == []


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("bc", [16, 48, 64, 80, 128, 176])
def test_rows_that_are_read_together_are_in_different_banks(bc, item_bytes):
    """Pairs of two columns by the four lanes of each row; of 16 bits, as ldmatrix reads them."""
    variant = replace(MAIN, bc=bc)
    row_pitch, row_bytes = pitch(variant, item_bytes), bc * item_bytes
    rows_alike = 4 if item_bytes == 4 else 8

    def place(row: int, x: int) -> int:
        swizzled = x ^ row % rows_alike * (CHUNK_BYTES // rows_alike) if row_bytes % CHUNK_BYTES == 0 else x
        return row * row_pitch + swizzled

    for column in range(0, bc, 8):
        pairs = [place(lane // 4, (column + lane % 4 * 2) * item_bytes) for lane in range(32)]
        width = 2 if item_bytes == 4 else 1
        assert wavefronts([pair // 4 for pair in pairs], width) == width
    assert NUM_BANKS * 4 == CHUNK_BYTES
