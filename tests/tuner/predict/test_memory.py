"""What passes through device memory: what L2 writes back, and what blocks bring each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.work import BlockWork, Walk, count_work
from flashgen.tuner.predict.block_model import TENSOR_COEFFICIENTS, dram_bytes
from flashgen.tuner.predict.cost_model import predict
from flashgen.tuner.predict.prediction import reread_part, written_back_bytes

H200 = PRESETS["h200"]
DECODING = Problem(
    dtype="bf16",
    batch=1,
    num_q_heads=32,
    num_kv_heads=8,
    seqlen_q=1,
    seqlen_k=4096,
    head_dim=128,
    head_dim_v=128,
)
SHARED = Mma(pack_heads=True, br=16, key_warps=4, splits=8, bc=32, layout="swizzled", stages=3)
MANY = replace(DECODING, batch=32, seqlen_k=8192, causal=True)
IN_TILES_OF_16 = Mma(pack_heads=True, br=16, key_warps=4, bc=16, layout="swizzled", stages=3, min_blocks=2)


def test_what_takes_a_place_in_l2_has_something_written_back() -> None:
    """As much as comes, up to what L2 holds; outputs leave as much behind."""
    outputs = 32 * 128 * 2
    assert written_back_bytes(DECODING, H200, 1e6) == 1e6 - outputs
    assert written_back_bytes(DECODING, H200, 1e12) == H200.l2_bytes - outputs
    long = replace(DECODING, seqlen_q=65536, seqlen_k=65536)
    assert written_back_bytes(long, H200, 1e12) == 0


@pytest.mark.parametrize(
    ("batch", "keys", "measured"), [(1, 4096, 12.4), (1, 8192, 18.3), (64, 1024, 74.2), (32, 8192, 246.5)]
)
def test_one_query_takes_what_its_keys_do(batch: int, keys: int, measured: float) -> None:
    """Microseconds of an H200, of kernels like these."""
    variant = SHARED if batch == 1 else IN_TILES_OF_16
    found = predict(variant, replace(DECODING, batch=batch, seqlen_k=keys), H200).median_us
    assert found == pytest.approx(measured, rel=0.12)


def test_readers_at_once_bring_each_other_most_of_what_they_read() -> None:
    assert reread_part(1, 1, 0.1) == 1
    assert reread_part(8, 8, 0.1) == pytest.approx(0.1)
    assert reread_part(8, 1, 0.1) == 1
    assert reread_part(8, 2, 0.0) == pytest.approx(3 / 7)  # four times, of eight, once was needed
    parts = [reread_part(8, at_once, 0.1) for at_once in (1, 2, 4, 8, 16)]
    assert parts == sorted(parts, reverse=True) and parts[-1] == parts[-2]


def test_packed_rows_of_one_head_share_its_keys_unless_these_leave_l2_first() -> None:
    """Sixteen rows of four heads in four tiles: an H200 took 407 us for four times 1.07 GB, not 920; with
    keys that are evicted first, in two tiles, twice what it takes for one."""
    problem = replace(MANY, seqlen_q=16)
    work = count_work(IN_TILES_OF_16, problem, H200)
    assert isinstance(work, BlockWork)
    moved = dram_bytes(work, problem, H200, 2, TENSOR_COEFFICIENTS.out_of_step)
    assert 1.1 * problem.min_bytes < moved < 1.6 * problem.min_bytes < dram_bytes(work, problem, H200, 2)
    evicting = Mma(pack_heads=True, br=48, layout="swizzled", stages=3, evict_first=True, min_blocks=2)
    times = [predict(evicting, replace(MANY, seqlen_q=rows), H200).median_us for rows in (8, 16)]
    assert times[1] / times[0] == pytest.approx(535.4 / 268.7, rel=0.1)
    assert predict(IN_TILES_OF_16, problem, H200).median_us < times[1]


def test_copies_whose_passes_cross_pages_look_up_each_row() -> None:
    """Three warps bring six rows at a time: 269 us became 385 with pages of 16 keys, 279 with those of 128;
    four warps with tiles of their own, of two rows at a time, had 275, 286 and 282."""
    three = Mma(pack_heads=True, br=48, layout="swizzled", stages=3, evict_first=True, min_blocks=2)
    problem = replace(MANY, seqlen_q=8)
    times = {
        (variant, size): predict(variant, replace(problem, page_size=size), H200).median_us
        for variant in (three, IN_TILES_OF_16)
        for size in (0, 16, 128)
    }
    assert times[three, 16] / times[three, 0] == pytest.approx(385.3 / 268.7, rel=0.1)
    assert times[three, 128] == times[three, 0]
    assert times[IN_TILES_OF_16, 16] == times[IN_TILES_OF_16, 0]
    assert times[three, 16] > times[IN_TILES_OF_16, 16]


def test_a_block_with_a_tile_is_not_like_one_without() -> None:
    work = count_work(Mma(), replace(DECODING, seqlen_q=2048), H200)
    assert isinstance(work, BlockWork)
    walks = {
        tiles: replace(work, walks=tuple(Walk(1, each, each, each) for each in tiles))
        for tiles in ((4, 4), (5, 4), (6, 4), (1, 0), (0, 0))
    }
    assert [each.is_even for each in walks.values()] == [True, True, False, False, True]
