"""Kernels on a real card: right over a sample of the space, timed sensibly, faults recognised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.arguments import make_arguments
from flashgen.gen.families import family_named
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import PRESETS, DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.variant import Variant
from flashgen.tuner.build.compile import CompilePool
from flashgen.tuner.cards.cuda import CudaDevice, CudaRunner
from flashgen.tuner.cards.device import Build
from flashgen.tuner.cards.dtypes import bits_dtype, numpy_dtype
from flashgen.tuner.errors import BuildError, CorruptedMemory, LaunchError
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.measure import median, spread
from flashgen.tuner.evaluate.validate import validate

from tests.support.covering import draw

PROBLEMS = [
    Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=1000, seqlen_k=1000, head_dim=d, causal=causal)
    for d, causal in ((64, False), (64, True), (128, False), (40, True), (1, False), (7, True), (256, False))
]
#: For tensor cores: each class, odd head dims, values of another width.
TENSOR_PROBLEMS = [
    Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=1000, seqlen_k=1000, **fields)
    for fields in (
        {"dtype": "f16", "head_dim": 64},
        {"dtype": "f16", "head_dim": 40, "causal": True},
        {"dtype": "f16", "head_dim": 7, "head_dim_v": 9},
        {"dtype": "bf16", "head_dim": 128, "causal": True},
        {"dtype": "bf16", "head_dim": 192, "head_dim_v": 128},
        {"precision": "tf32", "head_dim": 64},
        {"precision": "tf32", "head_dim": 16, "head_dim_v": 24, "causal": True},
        {"precision": "3xtf32", "head_dim": 64, "causal": True},
        {"precision": "3xtf32", "head_dim": 128},
        {"precision": "3xf16", "head_dim": 64, "causal": True},
        {"precision": "3xf16", "head_dim": 128},
        {"precision": "3xf16", "head_dim": 40, "head_dim_v": 24},
    )
]
#: For warpgroups that multiply float32 in parts.
PARTS_PROBLEMS = [
    Problem(precision="3xf16", batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=1000, seqlen_k=1000, **fields)
    for fields in ({"head_dim": 64, "causal": True}, {"head_dim": 96, "head_dim_v": 40}, {"head_dim": 128})
]
SAMPLE = 6
TIMED = Problem(batch=4, num_q_heads=16, num_kv_heads=16, seqlen_q=2048, seqlen_k=2048, head_dim=64)


@pytest.fixture(scope="module")
def runner(device: CudaDevice) -> Iterator[CudaRunner]:
    runner = device.open()
    yield runner
    runner.close()


def sample(
    problem: Problem,
    limits: DeviceLimits,
    count: int,
    family: type[Variant] | None = None,
    held: dict[str, Any] | None = None,
) -> list[Variant]:
    """Legal variants drawn by chance: the whole space takes long to enumerate."""
    plain = problem.dtype == "f32" and problem.precision in ("auto", "ieee")
    family = family or (Simt if plain else family_named("mma"))
    return draw(family, problem, limits, count, random.Random(0), held)


def build_all(device: CudaDevice, variants: list[Variant], problem: Problem) -> list[Build]:
    with CompilePool(device.toolchain()) as pool:
        futures = [pool.submit(render(v, problem, device.limits)) for v in variants]
        results = [f.result() for f in futures]
    builds = []
    for result in results:
        assert not isinstance(result, BuildError), str(result)
        builds.append(result)
    return builds


def default_build(device: CudaDevice, problem: Problem = TIMED) -> Build:
    """A kernel whose main launch writes the outputs."""
    return build_all(device, sample(problem, device.limits, 1, held={"workspace_splits": 1}), problem)[0]


def broken(device: CudaDevice, build: Build, *edits: tuple[str, str]) -> Build:
    """The kernel with its source changed."""
    source = build.kernel.source
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new, 1)
    return device.toolchain().build(replace(build.kernel, source=source))


def with_body(device: CudaDevice, build: Build, statement: str) -> Build:
    """The kernel with a statement before all others."""
    view = "  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);\n"
    return broken(device, build, (view, view + statement + "\n"))


def require_arithmetic(device: CudaDevice, problem: Problem) -> None:
    """Skips where the card's tensor cores do not multiply the problem's numbers."""
    plain = problem.dtype == "f32" and problem.precision in ("auto", "ieee")
    needed = 0 if plain else 75 if "f16" in (problem.dtype, problem.precision.removeprefix("3x")) else 80
    if device.limits.arch < needed:
        pytest.skip(f"needs sm_{needed}, this is {device.limits.sm}")


def test_limits_agree_with_the_preset(device: CudaDevice) -> None:
    limits = device.limits
    alike = [p for p in PRESETS.values() if p.arch == limits.arch]
    for each in alike:
        assert (limits.smem_per_block, limits.smem_per_sm) == (each.smem_per_block, each.smem_per_sm)
        assert limits.max_threads_per_sm == each.max_threads_per_sm
        assert limits.max_blocks_per_sm == each.max_blocks_per_sm
    assert limits.num_sms > 0 and limits.clock_mhz > 500 and limits.dram_gbps > 50 and limits.l2_bytes > 2**18


@pytest.mark.parametrize("problem", PROBLEMS + TENSOR_PROBLEMS, ids=lambda p: p.name)
def test_sampled_variants_are_right(device: CudaDevice, runner: CudaRunner, problem: Problem) -> None:
    require_arithmetic(device, problem)
    variants = sample(problem, device.limits, SAMPLE)
    assert variants
    for seed, build in enumerate(build_all(device, variants, problem)):
        error = validate(runner, build, seed=seed, depth="quick", problem=problem)
        assert 0 < error < problem.tolerance, build.kernel.variant.name


@pytest.mark.parametrize("problem", PARTS_PROBLEMS, ids=lambda p: p.name)
def test_sampled_variants_in_parts_are_right(
    device: CudaDevice, runner: CudaRunner, problem: Problem
) -> None:
    if device.limits.arch != 90:
        pytest.skip(f"needs sm_90, this is {device.limits.sm}")
    variants = sample(problem, device.limits, SAMPLE, family=family_named("wgmma"))
    assert variants
    for seed, build in enumerate(build_all(device, variants, problem)):
        error = validate(runner, build, seed=seed, depth="full" if seed == 0 else "quick", problem=problem)
        assert 0 < error < problem.tolerance, build.kernel.variant.name


@pytest.mark.parametrize("problem", [PROBLEMS[1], *TENSOR_PROBLEMS[1::3]], ids=lambda p: p.name)
def test_full_suite_on_one_variant(device: CudaDevice, runner: CudaRunner, problem: Problem) -> None:
    require_arithmetic(device, problem)
    error = validate(runner, default_build(device, problem), seed=1, depth="full", problem=problem)
    assert 0 < error < problem.tolerance


@pytest.mark.parametrize("tensor", ["q", "k", "v", "o"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_offsets_beyond_32_bits(device: CudaDevice, runner: CudaRunner, tensor: str, dtype: str) -> None:
    """A second batch whose elements lie past 2**31, by its stride."""
    cuda, element = runner._cuda, numpy_dtype(dtype)
    shape, items, gap = (2, 1, 33, 64), 33 * 64, 2**31 + 64
    needed = element.itemsize * (gap + items)
    if cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free device memory")
    heads = {"num_q_heads": 1, "num_kv_heads": 1}
    problem = Problem(dtype=dtype, batch=2, **heads, seqlen_q=33, seqlen_k=33, head_dim=64)
    require_arithmetic(device, problem)
    build = default_build(device, problem)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32).astype(element) for _ in "qkv")
    expected, _ = runner.attend(build, q, k, v, scale=0.1)
    far = cuda.mem_alloc(needed)
    near = {name: cuda.to_device(x) for name, x in (("q", q), ("k", k), ("v", v), ("o", np.zeros_like(q)))}
    if tensor != "o":
        for batch, part in enumerate({"q": q, "k": k, "v": v}[tensor]):
            cuda.memcpy_htod(int(far) + element.itemsize * gap * batch, np.ascontiguousarray(part))
    pointers = {name: int(far) if name == tensor else int(near[name]) for name in "qkvo"}
    strides = {name: (gap if name == tensor else items, items, 64) for name in "qkvo"}
    arguments = make_arguments(problem, pointers, strides, scale=0.1)
    runner._launcher(build, problem.name, arguments)()
    cuda.Context.synchronize()
    found = np.empty(shape, element)
    for batch in range(2):
        stride = gap if tensor == "o" else items
        cuda.memcpy_dtoh(found[batch], pointers["o"] + element.itemsize * stride * batch)
    np.testing.assert_array_equal(found, expected)


def test_occupancy_is_a_share(device: CudaDevice, runner: CudaRunner) -> None:
    assert 0 < runner.occupancy(default_build(device)) <= 1


# -- timing -------------------------------------------------------------------------------------------


def test_times_are_steady_and_scale(device: CudaDevice, runner: CudaRunner) -> None:
    build = default_build(device)
    first, second = (runner.measure(build, TIMED) for _ in range(2))
    assert len(first.times_us) >= 5 and spread(first.times_us) < 0.1
    assert abs(median(first.times_us) / median(second.times_us) - 1) < 0.05
    doubled = runner.measure(build, replace(TIMED, batch=2 * TIMED.batch))
    assert 1.7 < median(doubled.times_us) / median(first.times_us) < 2.3
    # No kernel beats the card: twice the peak, for the clocks may boost.
    assert TIMED.flops / median(first.times_us) * 1e-6 < 2 * device.limits.fp32_tflops


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_kernels_are_timed_on_finite_inputs(
    device: CudaDevice, runner: CudaRunner, dtype: str
) -> None:
    problem = replace(TIMED, dtype=dtype)
    require_arithmetic(device, problem)
    timing = runner.measure(default_build(device, problem), problem)
    assert len(timing.times_us) >= 3
    assert runner._tensors is not None
    output = np.empty(problem.batch * 16 * 2048 * 64, bits_dtype(numpy_dtype(dtype)))
    q_bytes = output.nbytes
    runner._cuda.memcpy_dtoh(output, int(runner._tensors.memory) + 3 * q_bytes)
    values = output.view(numpy_dtype(dtype)).astype(np.float32)
    assert np.isfinite(values).all() and 0 < np.abs(values).max() < 5


def test_beaten_kernel_is_stopped(device: CudaDevice, runner: CudaRunner) -> None:
    timing = runner.measure(default_build(device), TIMED, best_us=1.0)
    assert timing.stopped_early and len(timing.times_us) == 1


def test_interleaved_times_agree_with_those_alone(device: CudaDevice, runner: CudaRunner) -> None:
    builds = build_all(device, sample(TIMED, device.limits, 3), TIMED)
    alone = [median(runner.measure(b, TIMED).times_us) for b in builds]
    together = runner.measure_interleaved(builds, TIMED, rounds=11)
    for one, timing in zip(alone, together, strict=True):
        assert len(timing.times_us) == 11
        assert abs(median(timing.times_us) / one - 1) < 0.1


# -- faults that the context survives -----------------------------------------------------------------


def test_wrong_scale_is_caught(device: CudaDevice, runner: CudaRunner) -> None:
    build = broken(device, default_build(device), ("args.scale", "1.01f * args.scale"))
    with pytest.raises(WrongResult):
        validate(runner, build, seed=0)


def test_unwritten_output_is_caught(device: CudaDevice, runner: CudaRunner) -> None:
    build = with_body(device, default_build(device), "  if (blockIdx.x == 0) return;")
    with pytest.raises(CorruptedMemory, match="not written"):
        validate(runner, build, seed=0)


def test_stray_write_is_caught(device: CudaDevice, runner: CudaRunner) -> None:
    build = with_body(device, default_build(device), "  if (threadIdx.x == 0) args.o[-1] = 0.0f;")
    with pytest.raises(CorruptedMemory, match="the first 1 elements before o"):
        validate(runner, build, seed=0)


def test_too_much_shared_memory_is_refused_and_survived(device: CudaDevice, runner: CudaRunner) -> None:
    build = default_build(device)
    launch = replace(build.kernel.launch, smem_bytes=device.limits.smem_per_sm + 1024)
    # An artifact of another name: the runner keeps loaded kernels by it.
    copy = build.artifact.with_suffix(".copy.cubin")
    copy.write_bytes(build.artifact.read_bytes())
    greedy = replace(build, kernel=replace(build.kernel, launches=(launch,)), artifact=copy)
    try:
        with pytest.raises(LaunchError):
            validate(runner, greedy, seed=0)
    finally:
        copy.unlink()
    assert runner.alive
    assert validate(runner, build, seed=0) > 0
