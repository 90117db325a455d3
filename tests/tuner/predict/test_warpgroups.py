"""Predictions of warpgroups' kernels: who takes which tiles, what copies cost, and how float32 is split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.work import GroupWork
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.work import count_work
from flashgen.tuner.predict.cost_model import predict
from flashgen.tuner.predict.prediction import stretch

H200 = PRESETS["h200"]
CAUSAL = Problem(
    dtype="bf16",
    batch=2,
    num_q_heads=32,
    num_kv_heads=8,
    seqlen_q=512,
    seqlen_k=8192,
    head_dim=128,
    head_dim_v=128,
    causal=True,
)


def us(variant: Wgmma, problem: Problem) -> float:
    return predict(variant, problem, H200).median_us


def test_the_blocks_of_a_cluster_take_a_tile_each() -> None:
    """As measured: 187, 188 and 189 us."""
    alone, of_rows, of_heads = Wgmma(), Wgmma(cluster=2), Wgmma(cluster=2, cluster_over="heads")
    assert us(of_rows, CAUSAL) == pytest.approx(us(alone, CAUSAL), rel=0.02)
    assert us(of_heads, CAUSAL) == pytest.approx(us(alone, CAUSAL), rel=0.02)


def test_heads_start_section_by_section() -> None:
    """Ten heads of a tile of four and one of one, on ten slots. All at once, the short ones end together; of
    sections of eight, the last two long ones start after all short ones of the first."""
    even = (10 * 4 + 10 * 1) / 10
    assert stretch((4, 1), 10, 10, 10) == 5 / even
    assert stretch((4, 1), 10, 10, 8) == pytest.approx(8 / even)
    assert stretch((4, 1), 10, 10, 16) == stretch((4, 1), 10, 10, 10)
    # Of more heads than are simulated, whole sections are left out.
    assert 1 <= stretch((4, 1), 5000, 10, 16) < 1.01


def test_a_section_that_holds_all_heads_ends_sooner_than_sixteen_of_twenty() -> None:
    """As measured: 21.5 and 25.8 us."""
    problem = Problem(
        dtype="bf16", batch=1, num_q_heads=20, num_kv_heads=20, seqlen_q=1005, seqlen_k=1005, causal=True
    )
    problem = replace(problem, head_dim=128, head_dim_v=128)
    all_heads = Wgmma(bc=144, persistent=False, section=0)
    assert us(all_heads, problem) < 0.97 * us(replace(all_heads, section=16), problem)


def test_tiles_of_few_keys_wait_for_the_one_who_copies_them() -> None:
    """As measured of windows of 45 keys: 90 us by tiles of 16 keys, 76 us by tiles of 48."""
    problem = Problem(
        dtype="f16",
        batch=142,
        num_q_heads=14,
        num_kv_heads=2,
        seqlen_q=78,
        seqlen_k=78,
        head_dim=112,
        head_dim_v=112,
        scoring=Scoring(window=(22, 22)),
    )
    few = Wgmma(br=64, bc=16, q_stages=2, k_stages=4, v_stages=4)
    more = Wgmma(br=64, bc=48, o_apart=True, schedule="chained")
    assert us(few, problem) > 1.05 * us(more, problem)
    assert predict(few, problem, H200).parts_us["copies"] > predict(more, problem, H200).parts_us["copies"]


def test_whole_tiles_are_split_in_fewer_rounds_where_rows_do_not_divide_among_warps() -> None:
    """Eight units of rows for three warps, two read together: by rows each takes two rounds, of whole tiles
    four thirds. As measured: 2.16 and 2.41 ms at a head dim of 64; at 128, where both take as many, 3.79 and
    3.56."""

    def rounds(split_by: str, d: int, bc: int) -> float:
        problem = Problem(dtype="f32", head_dim=d, head_dim_v=d)
        work = count_work(Wgmma(bc=bc, split_by=split_by), problem, H200)
        assert isinstance(work, GroupWork)
        return work.split_rounds

    assert rounds("rows", 64, 64) == 4 and rounds("tiles", 64, 64) == pytest.approx(1.3 * 8 / 3)
    assert rounds("rows", 128, 48) == 4 and rounds("tiles", 128, 48) == pytest.approx(1.3 * 4)
    problem = Problem(dtype="f32", head_dim=64, head_dim_v=64)
    assert us(Wgmma(bc=64, split_by="tiles"), problem) < us(Wgmma(bc=64), problem)
