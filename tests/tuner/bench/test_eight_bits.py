"""Kernels of eight bits beside sixteen in the benchmark, by a stand-in for PyTorch and its clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families import FAMILIES
from flashgen.gen.problem import EIGHT, Problem
from flashgen.gen.render import render
from flashgen.tuner.bench import emitted
from flashgen.tuner.bench.ceilings import Ceilings, bound_of
from flashgen.tuner.bench.figures import BEST, OURS, OURS_16_BITS
from flashgen.tuner.bench.inputs import Inputs
from flashgen.tuner.bench.plan import BenchOptions, make_plan
from flashgen.tuner.bench.run import run_bench
from flashgen.tuner.shelf import library
from flashgen.tuner.suites import SUITES

from tests.support.tuned_kernels import H200, tuned

from .test_bench import MODULE, Card, clock, fake, options

__all__ = ["clock", "fake"]

#: Sixteen bits of the same shape ship for no card.
SIXTEEN = Problem(
    dtype="bf16", batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=12, seqlen_k=12, head_dim=40, causal=True
)
SHORT = replace(SIXTEEN, dtype="e4m3", precision=EIGHT)
SIXTEEN_MODULE = MODULE.replace('torch.attention("ours"', 'torch.attention("sixteen"').replace(
    "    cubin =", '    assert {x.dtype for x in (q, k, v)} == {"bfloat16"}\n    cubin ='
)
EIGHT_MODULE = (
    MODULE.partition("def attention")[0]
    + """
def attention(q, k, v, causal=None, out=None, scales=None):
    assert {x.dtype for x in (q, k, v)} == {"float8_e4m3fn"}
    # The largest of q and k are halved in turns, k's first.
    assert [448 / abs(x).max() for x in (q, k, v)] in ([16, 16, 1], [16, 32, 1])
    meant = [torch.Tensor(x.array * scale) for x, scale in zip((q, k, v), scales, strict=True)]
    out = torch.full(q.shape, 0.0, dtype="bfloat16", device="cuda") if out is None else out
    assert out.dtype == "bfloat16"
    out.array[...] = torch.attention("ours", *meant, causal).array
    return out
"""
)


def keep(out: Path, problem: Problem, module: str) -> None:
    library.write(out, H200.slug, tuned(problem, variant=FAMILIES["mma"]()), "// source", module)


def test_eight_bits_are_timed_beside_sixteen_of_the_same_values(fake) -> None:
    fake.behave(
        ms={"ours": 1.0, "sixteen": 1.5, "FLASH_ATTENTION": 3.0, "CUDNN_ATTENTION": 2.0, "flex": 4.0}
        | {"EFFICIENT_ATTENTION": 5.0, "MATH": 9.0},
        noise={"sixteen": 1e-4, "FLASH_ATTENTION": 1e-3},
    )
    keep(fake.out, SHORT, EIGHT_MODULE)
    keep(fake.out, SIXTEEN, SIXTEEN_MODULE)
    run = run_bench(options(fake.out, SHORT, contenders=("flash", "cudnn", "math", "fa3", OURS_16_BITS)))
    (row,) = run.rows
    times = {name: cell.ms for name, cell in row.cells.items() if cell.ms}
    assert times == {OURS: 1.0, "flash": 3.0, "cudnn": 2.0, "math": 9.0, OURS_16_BITS: 1.5}
    assert row.cells["fa3"].reason == "flash_attn_interface is not installed"
    # One of those that the best is chosen from.
    assert row.ratio(OURS_16_BITS) == row.ratio(BEST) == 1.5 and row.best == OURS_16_BITS
    # All errors are against the values before they were rounded.
    errors = {name: cell.error for name, cell in row.cells.items() if cell.error}
    assert errors["flash"] == pytest.approx(1e-3, rel=0.01)
    assert errors[OURS_16_BITS] == pytest.approx(1e-4, rel=0.01)
    assert 0.01 < errors[OURS] < 0.1
    assert row.error_ratio == pytest.approx(errors[OURS] / min(errors["cudnn"], errors["math"]))
    assert row.tflops == pytest.approx(SIXTEEN.flops / 1e9)
    assert row.peak_tflops == pytest.approx(2 * H200.tensor_tflops)
    # The caller's time is that of bfloat16 for PyTorch.
    assert {OURS, f"{OURS}, out made", "sdpa"} <= set(run.host_us["e4m3"])


def test_errors_alone_of_eight_bits_are_those_of_the_values_before(fake) -> None:
    fake.behave(noise={"sixteen": 1e-4, "CUDNN_ATTENTION": 1e-3})
    keep(fake.out, SHORT, EIGHT_MODULE)
    keep(fake.out, SIXTEEN, SIXTEEN_MODULE)
    run = run_bench(options(fake.out, SHORT, contenders=("cudnn", OURS_16_BITS), errors_alone=True))
    assert [(each.problem.dtype, each.inputs) for each in run.errors] == [
        ("e4m3", kind) for kind in ("normal", "normal", "uniform", "uniform")
    ]
    for each in run.errors:
        assert each.errors["cudnn"] == pytest.approx(1e-3, rel=0.01)
        assert each.errors[OURS_16_BITS] == pytest.approx(1e-4, rel=0.01)
        assert each.errors[OURS] > 0.01


def test_who_takes_scales_for_nothing_is_told(fake) -> None:
    keep(fake.out, SHORT, EIGHT_MODULE.replace("x.array * scale", "x.array / 100"))
    (row,) = run_bench(options(fake.out, SHORT, contenders=("cudnn",))).rows
    assert row.cells[OURS].reason.startswith("is wrong: its error is") and row.ms("cudnn")
    # Of sixteen bits as much is wrong that eight may lose.
    fake.behave(noise={"CUDNN_ATTENTION": 0.1})
    keep(fake.out, SHORT, EIGHT_MODULE.replace("causal).array", "causal).array * 1.1"))
    (row,) = run_bench(options(fake.out, SHORT, contenders=("cudnn",))).rows
    assert row.ours and row.cells["cudnn"].reason == "is wrong: its error is 1.0e-01"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "made").mkdir()
    yield tmp_path / "made"


def test_the_kernel_of_sixteen_bits_is_the_one_that_calls_get(tmp_path, folder: Path) -> None:
    keep(tmp_path / "out", SHORT, EIGHT_MODULE)
    # None was tuned: emitted for the occasion.
    plan = make_plan(options(tmp_path / "out", SHORT), folder)
    made = Path(plan.steps[0][OURS_16_BITS])
    assert made.parent == folder and emitted.load(made).KERNELS[0].problem["dtype"] == "bf16"
    assert plan.contenders[0][OURS_16_BITS] == plan.contenders[0]["cudnn"] == 0
    keep(tmp_path / "out", SIXTEEN, SIXTEEN_MODULE)
    plan = make_plan(options(tmp_path / "out", SHORT), folder)
    assert Path(plan.steps[0][OURS_16_BITS]).parent.name == H200.slug
    # Who did not ask for it has none, nor has what is of sixteen bits itself.
    plan = make_plan(options(tmp_path / "out", SHORT, SIXTEEN, contenders=("flash",)), folder)
    assert plan.contenders == [{"flash": 0}] * 2 and plan.steps == [{}, {}]
    plan = make_plan(options(tmp_path / "out", SIXTEEN), folder)
    assert OURS_16_BITS not in plan.contenders[0]


def test_every_workload_of_eight_bits_has_a_kernel_of_its_own_and_one_of_sixteen(tmp_path) -> None:
    workloads = SUITES["eight"].workloads
    plan = make_plan(BenchOptions(device=Card(), workloads=workloads, out=tmp_path), tmp_path)  # type: ignore[arg-type]
    assert not plan.skip and all(row.exact for row in plan.rows)
    assert [Path(steps[OURS_16_BITS]).parent.name for steps in plan.steps] == [H200.slug] * len(workloads)


def test_a_module_as_it_is_emitted_is_given_scales(clock, tmp_path, monkeypatch) -> None:
    problem = replace(SHORT, head_dim=64, head_dim_v=64)
    path = tmp_path / "emitted.py"
    path.write_text(emit_module(render(FAMILIES["mma"](), problem, H200), device=H200.name))
    module = emitted.load(path)
    called = []
    monkeypatch.setattr(module, "attention", lambda *given, **options: called.append((given, options)))
    inputs = Inputs.draw(clock, problem)
    assert inputs.q.dtype == "bfloat16" and inputs.beside.problem.dtype == "bf16"
    assert inputs.beside.q is inputs.q and inputs.beside.beside.problem == inputs.beside.problem
    out = inputs.output(0.0)
    assert out.dtype == "bfloat16"
    emitted.call_of(module, inputs, out)()
    (((q, k, v), options_given),) = called
    assert options_given["scales"] == inputs.eight.scales and options_given["out"] is out
    assert [x.dtype for x in (q, k, v)] == ["float8_e4m3fn"] * 3


def test_products_of_sixteen_bits_bound_nothing_of_eight() -> None:
    problem = SUITES["eight"].problems["e4m3-d64-4096"]
    of_sixteen = Ceilings({"gemm_bf16": 700e12, "wgmma_bf16": 950e12, "ex2": 3.5e12, "copy": 4e12}, {})
    assert of_sixteen.flops(problem) is None and bound_of(problem, of_sixteen) is None
    measured = replace(of_sixteen, rates=of_sixteen.rates | {"wgmma_e4m3": 1900e12})
    bound = bound_of(problem, measured)
    # Straight lines may stand for exponentials, which would bound sixteen bits.
    assert bound and bound.ms_by_resource.keys() == {"flops", "bytes"}
    assert bound.resource == "flops" and bound.ms == pytest.approx(1e3 * problem.flops / 1900e12)
    exact = bound_of(replace(problem, precision="auto"), measured)
    assert exact and exact.resource == "exponentials"
