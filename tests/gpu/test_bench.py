"""The benchmark on a real card: contenders agree with float64, and ceilings are a card's."""

from __future__ import annotations

import pytest
from flashgen.tuner.bench.figures import OURS
from flashgen.tuner.bench.peers import torch_installed
from flashgen.tuner.bench.plan import BenchOptions
from flashgen.tuner.bench.run import run_bench
from flashgen.tuner.suites import workload_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch_installed(), reason="PyTorch is not installed"),
]
NAMES = ("bf16_d64_causal_b2_h8_n1024", "f32_d64_b2_h8_n512", "bf16_d128_b2_h8_kv2_n1_m4096")


def test_contenders_are_timed_beside_a_kernel(device, tmp_path):
    workloads = tuple(map(workload_named, NAMES))
    contenders = ("flash", "cudnn", "mem-eff", "math")
    run = run_bench(
        BenchOptions(device=device, workloads=workloads, out=tmp_path, contenders=contenders, jobs=4)
    )
    for row in run.rows:
        for name, cell in row.cells.items():
            # A nearest kernel that is not for this card has a reason too.
            assert (cell.ms is not None and cell.ms > 0) or cell.reason, (row.name, name)
            if cell.ms is not None:
                assert cell.error is not None and cell.error < row.problem.tolerance, (row.name, name)
        assert any(cell.ms for name, cell in row.cells.items() if name != OURS)
    rates = run.ceilings.rates
    # The cost model's own figures of the card, within a factor of two.
    limits = device.limits
    assert 0.5 < rates["copy"] / (limits.dram_gbps * 1e9) < 1.1
    assert 0.5 < rates["ffma"] / (limits.fp32_tflops * 1e12) < 1.1
    assert rates["gemm_bf16"] > rates["gemm_f32"]
    if limits.arch == 90:
        assert rates["wgmma_bf16"] > rates["mma_bf16"] > rates["mma_tf32"] > rates["ffma"]
    assert 0.1 < rates["ex2"] * 16 / rates["ffma"] < 2
    assert all(0.5 < us < 500 for times in run.host_us.values() for us in times.values())
