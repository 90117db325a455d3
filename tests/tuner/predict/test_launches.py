"""Predictions of kernels of several launches: those of gradients."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from flashgen.gen.families.mma.work import WIDE_FLOPS
from flashgen.gen.families.mma_backward.family import MmaBackward
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.families.wgmma.work import WGMMA_FLOPS_PER_CLOCK
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.limits import PRESETS, WARP
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Variant
from flashgen.gen.work import LaunchesWork
from flashgen.tuner.predict.block_model import predict_blocks
from flashgen.tuner.predict.cost_model import predict
from flashgen.tuner.predict.launches_model import GROUP_GRADIENT_COEFFICIENTS
from flashgen.tuner.predict.prediction import next_launch_us

H200 = PRESETS["h200"]
PROBLEM = Problem(dtype="bf16", head_dim=64, backward=True)
SIMT, MMA = SimtBackward(br=64, bc=64, threads_per_block=256, lanes=16), MmaBackward()
WAYS: dict[str, tuple[Variant, Problem]] = {
    "mma": (MMA, PROBLEM),
    "simt": (SIMT, replace(PROBLEM, dtype="f32")),
    "wgmma": (WgmmaBackward(), PROBLEM),
}
SUMMED = MmaBackward(dq_path="atomics", key_warps=2, column_warps=2)


def work_of(variant: Variant, problem: Problem) -> LaunchesWork:
    found = variant.work(problem, H200)
    assert isinstance(found, LaunchesWork)
    return found


@pytest.mark.parametrize(
    ("variant", "problem", "products"),
    [
        *((*way, 7) for way in WAYS.values()),
        (SUMMED, PROBLEM, 5),
        (WgmmaBackward(br=128, dq_path="bulk"), PROBLEM, 5),
        (WgmmaBackward(bc=64, apart=True, dq_path="bulk"), replace(PROBLEM, head_dim=128, head_dim_v=128), 5),
        (WgmmaBackward(dq_path="bulk", ds_stages=1), replace(PROBLEM, dtype="f32"), 15),
    ],
    ids=[*WAYS, "sums in memory", "sums by wgmma", "sums by wgmma, apart", "sums by wgmma, of parts"],
)
def test_products_are_counted(variant: Variant, problem: Problem, products: int) -> None:
    """Of all pairs of rows and keys: five of the gradients, and two computed again where none is summed."""
    flops = 0.0
    for launch in work_of(variant, problem).launches:
        mean = launch.work.mean
        per_block = {
            "simt-backward": WARP * 2 * mean.ffma,
            "mma-backward": WIDE_FLOPS * mean.products,
            "wgmma-backward": WGMMA_FLOPS_PER_CLOCK / 4 * mean.tensor,
        }
        flops += launch.work.blocks * per_block[variant.family]
    assert flops == pytest.approx(problem.flops * products / 5, rel=0.002)


@pytest.mark.parametrize(("variant", "problem"), WAYS.values(), ids=WAYS)
def test_walks_follow_what_rows_see(variant: Variant, problem: Problem) -> None:
    def tiles(asked: Problem) -> list[float]:
        return [each.work.blocks * each.work.mean_tiles for each in work_of(variant, asked).launches]

    full, half = tiles(problem), tiles(replace(problem, causal=True))
    window = tiles(replace(problem, causal=True, scoring=Scoring(window=(127, 0))))
    for whole, causal, near in zip(full, half, window, strict=True):
        assert 0.5 < causal / whole < 0.53
        assert near / whole < 3 * 192 / 4096
    grouped = replace(problem, num_kv_heads=4)
    assert [each.work.heads for each in work_of(variant, grouped).launches] == [64, 16]
    assert tiles(grouped) == full


@pytest.mark.parametrize(("variant", "problem"), WAYS.values(), ids=WAYS)
def test_a_time_is_that_of_all_launches(variant: Variant, problem: Problem) -> None:
    found = predict(variant, problem, H200)
    us = [each.median_us for each in (predict(variant, replace(problem, batch=n), H200) for n in (4, 8))]
    assert us[0] == found.median_us and 1.8 < us[1] / us[0] < 2.1
    causal = predict(variant, replace(problem, causal=True), H200).median_us
    assert 0.45 < causal / found.median_us < 0.7
    assert found.limiter in found.parts_us and found.median_us > max(found.parts_us.values()) / 2
    peak = prod((H200.num_sms, H200.mma_flops_per_sm, H200.clock_mhz)) * 1e6
    assert problem.flops * 7 / 5 / (found.median_us * 1e-6) < peak


@pytest.mark.parametrize(("variant", "problem"), [WAYS["mma"], WAYS["simt"]], ids=["mma", "simt"])
def test_packed_sequences_are_counted_each_by_itself(variant: Variant, problem: Problem) -> None:
    def tiles(asked: Problem) -> list[float]:
        return [each.work.blocks * each.work.mean_tiles for each in work_of(variant, asked).launches]

    alike = replace(problem, varlen="same")
    assert tiles(alike) == tiles(problem)
    some = replace(problem, batch=2, varlen="list:1024,2048", seqlen_q=2048, seqlen_k=2048)
    alone = [tiles(replace(problem, batch=1, seqlen_q=n, seqlen_k=n)) for n in (1024, 2048)]
    assert tiles(some) == pytest.approx([sum(each) for each in zip(*alone, strict=True)])


def test_what_times_of_an_h200_say_of_ways_to_sum_and_of_orders() -> None:
    """Head dims of half a chunk are slower where the copy engine adds up (838 and 806 us at 112), others are
    not; and blocks of a head start together but under a mask, where others may fill the gaps."""

    def us(problem: Problem, **changes: object) -> float:
        return predict(replace(WgmmaBackward(dq_path="bulk"), **changes), problem, H200).median_us

    whole = replace(PROBLEM, head_dim=128, head_dim_v=128, batch=32, seqlen_q=512, seqlen_k=512)
    half = replace(whole, head_dim=112, head_dim_v=112)
    assert us(half) > 1.02 * us(half, dq_path="atomics")
    assert us(whole) < 1.01 * us(whole, dq_path="atomics")
    assert us(whole, order="by_section") > 1.01 * us(whole)
    causal = replace(whole, causal=True)
    assert us(causal, order="by_section") <= us(causal)


def test_blocks_beside_others_fill_what_these_leave_idle() -> None:
    """Of 1024 blocks on 132 multiprocessors those leave a quarter of the eighth turn."""
    wide = replace(PROBLEM, head_dim=256, head_dim_v=256, batch=2, num_q_heads=8, num_kv_heads=8)
    wide = replace(wide, seqlen_q=8192, seqlen_k=8192)
    apart = WgmmaBackward(bc=64, apart=True, v_stages=1)

    def saved(problem: Problem) -> float:
        """As a share of the launch of query rows, without what it takes to begin the next one."""
        behind, beside = (
            predict(replace(apart, second=each), problem, H200) for each in ("behind", "beside")
        )
        of_rows, _ = work_of(apart, problem).launches
        registers = min(of_rows.registers, H200.max_registers_per_thread)
        assert H200.blocks_per_sm(of_rows.threads, registers, of_rows.smem_bytes) == 1
        alone = predict_blocks(of_rows.work, problem, H200, 1, GROUP_GRADIENT_COEFFICIENTS).median_us
        return (behind.median_us - beside.median_us - next_launch_us(H200)) / alone

    assert saved(wide) == pytest.approx(1 - 1024 / 132 / 8, rel=0.05)
    # As many blocks as fill eight turns leave nobody idle; under a mask some take longer than others.
    assert saved(replace(wide, batch=1, num_q_heads=33, num_kv_heads=33, seqlen_q=4096)) < 1e-6
    assert saved(replace(wide, causal=True)) > saved(wide)


def test_blocks_beside_others_take_no_less_than_these() -> None:
    """However few there are."""
    few = replace(PROBLEM, batch=1, num_q_heads=8, num_kv_heads=8, seqlen_q=512, seqlen_k=512)
    behind, beside = (predict(WgmmaBackward(second=each), few, H200) for each in ("behind", "beside"))
    assert behind.median_us / 2 < beside.median_us < behind.median_us
