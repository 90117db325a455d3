"""The worker process on a real card: kernels that fault, hang and trap, and what comes after them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from flashgen.gen.families import family_named
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.cuda import CudaDevice
from flashgen.tuner.cards.device import Build
from flashgen.tuner.evaluate.outcome import Status
from flashgen.tuner.evaluate.worker import Worker

PROBLEM = Problem(batch=2, num_q_heads=4, num_kv_heads=4, seqlen_q=512, seqlen_k=512, head_dim=64)
VIEW = "  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);\n"
DEADLINE_S = 8.0


@pytest.fixture(scope="module")
def worker(device: CudaDevice) -> Iterator[Worker]:
    with Worker(device, deadline_s=DEADLINE_S) as worker:
        yield worker


def build(device: CudaDevice, statement: str = "") -> Build:
    """A legal kernel, with a statement before all others."""
    for settings in (
        {},
        {"br": 32, "bc": 32, "threads_per_block": 64},
        {"br": 32, "bc": 32, "min_blocks": 1},
    ):
        try:
            kernel = render(Simt(**settings), PROBLEM, device.limits)
        except Illegal:
            continue
        assert VIEW in kernel.source
        source = kernel.source.replace(VIEW, f"{VIEW}{statement}\n")
        return device.toolchain().build(replace(kernel, source=source))
    pytest.fail(f"no legal kernel for {device.limits.name}")


def assert_right(worker: Worker, device: CudaDevice) -> None:
    outcome = worker.evaluate(build(device), PROBLEM)
    assert outcome.status is Status.OK, outcome.reason
    figures = outcome.measurement
    assert figures is not None and not figures.predicted
    assert 0 < figures.error < 2e-6 and 0 < figures.occupancy <= 1 and figures.tflops > 0.01


def test_right_kernel(worker: Worker, device: CudaDevice) -> None:
    assert_right(worker, device)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_right_kernel_of_16_bits(worker: Worker, device: CudaDevice, dtype: str) -> None:
    needed = 75 if dtype == "f16" else 80
    if device.limits.arch < needed:
        pytest.skip(f"needs sm_{needed}, this is {device.limits.sm}")
    problem = replace(PROBLEM, dtype=dtype)
    kernel = render(family_named("mma")(), problem, device.limits)
    outcome = worker.evaluate(device.toolchain().build(kernel), problem)
    assert outcome.status is Status.OK, outcome.reason
    figures = outcome.measurement
    assert figures is not None and 1e-5 < figures.error < problem.tolerance and figures.tflops > 0.01


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("  if (threadIdx.x == 0) *(volatile float*)8 = 1.0f;", "illegal"),
        ('  if (threadIdx.x == 0) asm volatile("trap;");', "fail|trap|unspecified"),
        ("  if (threadIdx.x == 0) *(volatile float*)((char*)args.o + 1) = 1.0f;", "misaligned"),
        (
            "  reinterpret_cast<volatile float*>(shared_bytes)[1 << 22] = 1.0f;",
            "illegal|out of range|fail",
        ),
    ],
    ids=["illegal address", "trap", "misaligned", "shared memory out of bounds"],
)
def test_faults_are_outcomes(worker: Worker, device: CudaDevice, statement: str, reason: str) -> None:
    outcome = worker.evaluate(build(device, statement), PROBLEM)
    assert outcome.status is Status.LAUNCH_FAILED
    assert re.search(reason, outcome.reason), outcome.reason
    assert_right(worker, device)


def test_a_write_past_the_output_costs_the_process(worker: Worker, device: CudaDevice) -> None:
    """What else it hit, nobody knows: the tensors that are timed, perhaps."""
    past = (
        "  if (threadIdx.x == 0 && blockIdx.x == 0)\n"
        "    args.o[args.o_stride_batch * (args.batch - 1) + args.o_stride_head * (args.num_q_heads - 1) +\n"
        "           args.o_stride_row * (args.seqlen_q - 1) + 67] = 7.0f;"
    )
    outcome = worker.evaluate(build(device, past), PROBLEM)
    assert outcome.status is Status.WRONG, outcome.reason
    assert worker.life.process is None
    assert_right(worker, device)


def test_a_worker_killed_from_outside_is_replaced(worker: Worker, device: CudaDevice) -> None:
    built = build(device)
    assert_right(worker, device)
    process = worker.life.process
    assert process is not None

    def kill() -> None:
        while process.phase != "validate":
            time.sleep(0.001)
        process.popen.kill()

    thread = threading.Thread(target=kill)
    process.phase = "wait"
    thread.start()
    outcome = worker.evaluate(built, PROBLEM)
    thread.join(10)
    assert outcome.status is Status.OK, outcome.reason
    assert worker.life.process is not None and worker.life.process is not process


def test_endless_loop_is_killed(worker: Worker, device: CudaDevice) -> None:
    loop = "  while (true) { if (*(volatile const float*)args.q == 1234.5f && clock64() == 0) break; }"
    started = time.monotonic()
    outcome = worker.evaluate(build(device, loop), PROBLEM)
    assert outcome.status is Status.TIMED_OUT and "validate" in outcome.reason
    assert time.monotonic() - started < DEADLINE_S + 10
    assert_right(worker, device)


def test_finals(worker: Worker, device: CudaDevice) -> None:
    builds = [
        build(device),
        build(device, '  if (threadIdx.x == 0) asm volatile("trap;");'),
        build(device, "  ;"),
    ]
    outcomes = worker.finals(builds, PROBLEM, [1e-7] * 3, rounds=7)
    assert [o.status for o in outcomes] == [Status.OK, Status.LAUNCH_FAILED, Status.OK]
    first, last = outcomes[0].measurement, outcomes[2].measurement
    assert first is not None and last is not None and len(first.times_us) == len(last.times_us) == 7
    assert abs(first.median_us / last.median_us - 1) < 0.1
