"""The emulated card: what a GPU leaves undefined must show, what it defines must hold."""

from __future__ import annotations

import math
import random
import re
import shutil
from dataclasses import replace
from functools import cache
from uuid import uuid4

import numpy as np
import pytest
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.space import enumerate_space
from flashgen.tuner.build.compile import run_compiler
from flashgen.tuner.build.toolchain import find_host_compiler
from flashgen.tuner.cards import emulated
from flashgen.tuner.cards.device import Build
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.validate import validate

from tests.support.depth import sampled

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

CARD = preset("gtx-1080")
SEEDS = range(8)

FRAME = """
#include <cuda_pipeline.h>

struct AttentionArgs {
  const float* q;
  const float* k;
  const float* v;
  float* o;
  float* lse;
  long long strides[12];
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;
};

extern "C" __global__ void tiny_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  float* shared = reinterpret_cast<float*>(shared_bytes);
  const int i = threadIdx.x, n = blockDim.x, lane = i %% 32;
  const float* q = args.q;
  float* o = args.o;
  %(body)s
}

extern "C" int tiny(const AttentionArgs* args, cudaStream_t stream) {
  const cudaError_t status =
      cudaFuncSetAttribute(tiny_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, %(smem)d);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(tiny_kernel, dim3(%(blocks)d), dim3(%(threads)d), parameters, %(smem)d, stream);
}
"""


def build(
    body: str,
    *,
    threads: int = 64,
    blocks: int = 1,
    smem: int = 1024,
    sanitize: bool = False,
    races: bool = False,
) -> Build:
    """A kernel of one's own: ``body`` reads q, k and v and writes o, all rows of one float."""
    source = FRAME % {"body": body, "threads": threads, "blocks": blocks, "smem": smem}
    kernel = Kernel(Problem(head_dim=1), Simt(), CARD.arch, source, "tiny", (Launch(threads, smem, None),))
    return SimDevice("gtx-1080", CARD, sanitize, races).toolchain().build(kernel)


def run(built: Build, rows: int = 64, *, seed: int = 0, sanitize: bool = False, q=None) -> np.ndarray:
    """o of one row per thread, where q is 0, 1, 2, ..."""
    q = np.arange(rows, dtype=np.float32) if q is None else q
    q = q.reshape(1, 1, -1, 1)
    o, _ = SimRunner(CARD, sanitize=sanitize, seed=seed).attend(built, q, q, q, scale=1.0)
    return o.ravel()


def results(body: str, **options) -> list[np.ndarray]:
    built = build(body, **options)
    return [run(built, seed=seed) for seed in SEEDS]


REVERSED = np.arange(63, -1, -1, dtype=np.float32)


# -- order ----------------------------------------------------------------------------------------------


def test_a_barrier_orders_writes_before_reads():
    for o in results("shared[i] = q[i]; __syncthreads(); o[i] = shared[n - 1 - i];"):
        np.testing.assert_array_equal(o, REVERSED)


def test_a_missing_barrier_shows():
    for o in results("shared[i] = q[i]; o[i] = shared[n - 1 - i];"):
        # Half of the threads run before the one whose value they read.
        assert 8 < np.isnan(o).sum() < 56


def test_a_missing_barrier_before_overwriting_shows():
    body = """
      shared[i] = q[i];
      __syncthreads();
      const float value = shared[n - 1 - i];
      %s
      shared[i] = -1.0f;
      o[i] = value;"""
    for o in results(body % "__syncthreads();"):
        np.testing.assert_array_equal(o, REVERSED)
    for o in results(body % ""):
        assert (o == -1.0).any()


def test_a_missing_warp_barrier_shows():
    slab = "shared[i] = q[i]; %s o[i] = shared[i / 32 * 32 + (lane ^ 1)];"
    expected = np.arange(64, dtype=np.float32).reshape(-1, 2)[:, ::-1].ravel()
    for o in results(slab % "__syncwarp();"):
        np.testing.assert_array_equal(o, expected)
    assert all(np.isnan(o).any() for o in results(slab % ""))


def test_a_warp_barrier_does_not_order_other_warps():
    cross = results("shared[i] = q[i]; __syncwarp(); o[i] = shared[n - 1 - i];")
    assert all(np.isnan(o).any() for o in cross)


#: Between a lane's reading of its neighbour's float and the neighbour's writing of it: what orders memory.
ORDERING = ("__syncwarp();", "__syncthreads();")
#: And what lanes do together that does not, though none goes on before all have come.
NOT_ORDERING = ("__any_sync(0xffffffffu, value > 5.0f);", "__shfl_xor_sync(0xffffffffu, value, 1);", "")
OVERWRITES = (
    "shared[i] = q[i]; __syncwarp(); const float value = shared[i ^ 1]; %s shared[i] = -value; o[i] = value;"
)


@pytest.mark.parametrize("between", ORDERING)
def test_ordered_accesses_are_no_race(between):
    o = run(build(OVERWRITES % between, races=True))
    np.testing.assert_array_equal(o.reshape(-1, 2)[:, ::-1].ravel(), np.arange(64))


@pytest.mark.parametrize("between", NOT_ORDERING)
def test_accesses_that_nothing_orders_are_a_race(between):
    built = build(OVERWRITES % between, races=True)
    with pytest.raises(
        LaunchError, match=r"race: block 0, thread \d+, .* (has read|has written): nothing in"
    ):
        run(built)


def test_writing_what_is_there_is_no_race():
    body = "shared[lane] = %s; __syncthreads(); o[i] = shared[lane];"
    np.testing.assert_array_equal(run(build(body % "1.0f", races=True)), np.ones(64))
    with pytest.raises(LaunchError, match="has written"):
        run(build(body % "q[i]", races=True))


def test_the_seed_alone_draws_the_order():
    # Threads take numbers in the order in which they run; only one of them runs at a time.
    built = build("if (i == 0) shared[0] = 0; __syncthreads(); o[i] = shared[0]++;")
    first = [run(built, seed=seed) for seed in SEEDS]
    again = [run(built, seed=seed) for seed in SEEDS]
    np.testing.assert_array_equal(first, again)
    assert len({o.tobytes() for o in first}) == len(first)
    assert all(sorted(o) == list(range(64)) for o in first)


def test_blocks_have_shared_memory_of_their_own():
    built = build(
        "shared[i] = q[blockIdx.x * n + i]; __syncthreads(); o[blockIdx.x * n + i] = shared[n - 1 - i];",
        blocks=40,
    )
    expected = np.arange(40 * 64, dtype=np.float32).reshape(40, 64)[:, ::-1].ravel()
    np.testing.assert_array_equal(run(built, 40 * 64), expected)


# -- warp-wide functions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("__shfl_sync(0xffffffff, q[i], 5)", lambda i: 5),
        ("__shfl_sync(0xffffffff, q[i], lane + 3, 8)", lambda i: i // 8 * 8 + (i + 3) % 8),
        ("__shfl_xor_sync(0xffffffff, q[i], 21)", lambda i: i ^ 21),
        ("__shfl_xor_sync(0xffffffff, q[i], 9, 8)", lambda i: i if (i ^ 9) // 8 > i // 8 else i ^ 9),
        ("__shfl_up_sync(0xffffffff, q[i], 3)", lambda i: i - 3 if i >= 3 else i),
        ("__shfl_up_sync(0xffffffff, q[i], 3, 16)", lambda i: i - 3 if i % 16 >= 3 else i),
        ("__shfl_down_sync(0xffffffff, q[i], 3)", lambda i: i + 3 if i < 29 else i),
        ("__shfl_down_sync(0xffffffff, q[i], 3, 4)", lambda i: i + 3 if i % 4 < 1 else i),
        ("float(__shfl_xor_sync(0xffffffff, (double)q[i], 1))", lambda i: i ^ 1),
        ("float(__ballot_sync(0xffffffff, lane == 3 || lane == 4))", lambda i: 24),
        ("float(__any_sync(0xffffffff, lane == 31))", lambda i: 1),
        ("float(__any_sync(0xffffffff, 0))", lambda i: 0),
        ("float(__all_sync(0xffffffff, lane < 31))", lambda i: 0),
        ("float(__all_sync(0xffffffff, lane < 32))", lambda i: 1),
        ("float(__reduce_max_sync(0xffffffff, (lane * 11 % 32) << 3))", lambda i: 31 << 3),
        ("float(__reduce_max_sync(0xffffffff, lane == 19 ? 1u << 31 : 0u))", lambda i: 2**31),
    ],
)
def test_warp_functions(call, source):
    o = run(build(f"o[i] = {call};", threads=32), 32)
    np.testing.assert_array_equal(o, [source(i) for i in range(32)])


def test_parts_of_a_warp_exchange_apart():
    # The lower half shuffles twice while the upper half shuffles once and votes.
    body = """
      float value = q[i];
      if (lane < 16) {
        value += __shfl_xor_sync(0x0000ffff, value, 1);
        value += __shfl_xor_sync(0x0000ffff, value, 2);
      } else {
        value = __shfl_sync(0xffff0000, value, 16 + (lane + 1) % 16);
        if (__any_sync(0xffff0000, value == 31.0f)) value = -value;
      }
      __syncwarp();
      o[i] = value;"""
    lower = [sum(4 * (i // 4) + j for j in range(4)) for i in range(16)]
    upper = [-(16 + (i + 1) % 16) for i in range(16)]
    built = build(body, threads=32)
    for seed in SEEDS:
        np.testing.assert_array_equal(run(built, 32, seed=seed), lower + upper)


def test_a_lane_outside_the_mask_has_nothing_to_give():
    body = "float value = 0; if (lane < 8) value = __shfl_sync(0xff, q[i], 8 + lane); o[i] = value;"
    o = run(build(body, threads=32), 32)
    assert np.isnan(o[:8]).all()
    assert (o[8:] == 0).all()


# -- barriers that not all reach ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (i < 24) return; __syncthreads(); o[i] = 0;",
            r"deadlock in block 0 of 64 threads: 24 have returned, 40 wait at __syncthreads in line \d+",
        ),
        (
            "if (i < 40) {\n __syncthreads();\n } else {\n __syncthreads();\n } o[i] = 0;",
            r"divergent __syncthreads in block 0: thread 0 waits at line (\d+), thread 40 at line \d+",
        ),
        (
            "if (lane == 7) __syncthreads(); else __syncwarp(); __syncthreads(); o[i] = 0;",
            r"2 wait at __syncthreads in line \d+, 62 wait at __syncwarp\(0xffffffff\) in line \d+",
        ),
        (
            "if (lane > 1) o[i] = __shfl_xor_sync(0xffffffff, q[i], 1);",
            r"4 have returned, 60 wait at __shfl_xor_sync\(0xffffffff\)",
        ),
        (
            "if (lane < 2) o[i] = __any_sync(0x6, 1);",
            r"called __any_sync in line \d+ with mask 0x00000006, which does not name its own lane 0",
        ),
    ],
)
def test_deadlocks_are_reported(body, message):
    with pytest.raises(LaunchError, match=message):
        run(build(body))


def test_the_line_of_a_deadlock_is_the_sources():
    built = build("if (i) return;\n__syncthreads();")
    with pytest.raises(LaunchError) as caught:
        run(built)
    found = re.search(r"line (\d+)", str(caught.value))
    assert found is not None
    assert "__syncthreads" in built.kernel.source.splitlines()[int(found[1]) - 1]


# -- asynchronous copies --------------------------------------------------------------------------------

COPY = "__pipeline_memcpy_async(shared + i, q + i, 4); __pipeline_commit();"


def test_an_asynchronous_copy_lands_when_waited_for():
    body = COPY + "%s __syncthreads(); o[i] = shared[n - 1 - i];"
    for o in results(body % "__pipeline_wait_prior(0);"):
        np.testing.assert_array_equal(o, REVERSED)
    for o in results(body % ""):
        assert np.isnan(o).all()


def test_a_wait_speaks_for_its_own_thread_only():
    assert all(
        np.isnan(o).any() for o in results(COPY + "__pipeline_wait_prior(0); o[i] = shared[n - 1 - i];")
    )


def test_a_copy_in_flight_spoils_what_its_target_held():
    body = "shared[i] = 1; __syncthreads();" + COPY + "__syncthreads(); o[i] = shared[i];"
    assert all(np.isnan(o).all() for o in results(body))


def test_a_wait_leaves_the_latest_groups_in_flight():
    body = """
      __pipeline_memcpy_async(shared + i, q + i, 4);
      __pipeline_commit();
      __pipeline_memcpy_async(shared + n + i, q + i, 4);
      __pipeline_commit();
      __pipeline_wait_prior(1);
      o[i] = shared[i] + (isnan(shared[n + i]) ? 100.0f : 0.0f);"""
    for o in results(body):
        np.testing.assert_array_equal(o, np.arange(64) + 100)


def test_an_uncommitted_copy_stays_in_flight():
    body = "__pipeline_memcpy_async(shared + i, q + i, 4); __pipeline_wait_prior(0); o[i] = shared[i];"
    assert all(np.isnan(o).all() for o in results(body))


def test_zero_fill_reads_nothing():
    body = """
      __pipeline_memcpy_async(shared + 4 * i, nullptr, 16, 16);
      __pipeline_memcpy_async(shared + 4 * n + 2 * i, q, 8, 4);
      __pipeline_commit();
      __pipeline_wait_prior(0);
      o[i] = shared[4 * i] + shared[4 * i + 3] + shared[4 * n + 2 * i] + shared[4 * n + 2 * i + 1];"""
    built = build(body, smem=2048)
    np.testing.assert_array_equal(run(built, q=np.full(64, 7, np.float32)), np.full(64, 7))


def test_misaligned_and_odd_copies_are_refused():
    with pytest.raises(LaunchError, match="16 bytes, 0 of them zeros: it copies 4, 8 or"):
        run(build("__pipeline_memcpy_async(shared + 4 * i, q + 1, 16); o[i] = 0;"))
    with pytest.raises(LaunchError, match="of 12 bytes"):
        run(build("__pipeline_memcpy_async(shared + 4 * i, q, 12); o[i] = 0;"))


# -- memory ---------------------------------------------------------------------------------------------


def test_uninitialized_shared_memory_is_nan_in_every_block():
    built = build(
        "const float before = shared[i]; shared[i] = 1; o[blockIdx.x * n + i] = isnan(before);", blocks=32
    )
    assert (run(built, 32 * 64) == 1).all()


def test_shared_memory_beyond_the_card_is_refused():
    with pytest.raises(LaunchError, match=r"50000 bytes of dynamic shared memory were asked for.*49152"):
        run(build("o[i] = 0;", smem=50000))


def test_shared_memory_must_be_asked_for():
    built = build("o[i] = 0;", smem=60000)
    source = built.kernel.source.replace("MemorySize, 60000)", "MemorySize, 1024)")
    unasked = SimDevice("v100", preset("v100")).toolchain().build(replace(built.kernel, source=source))
    q = np.zeros((1, 1, 64, 1), np.float32)
    runner = SimRunner(preset("v100"))
    with pytest.raises(LaunchError, match="60000 bytes of dynamic shared memory, 49152 allowed"):
        runner.attend(unasked, q, q, q, scale=1.0)
    runner.attend(built, q, q, q, scale=1.0)


def test_too_many_threads_are_refused():
    with pytest.raises(LaunchError, match="a block of 1056 threads, the card allows 1024"):
        run(build("o[i] = 0;", threads=1056))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("o[i] = 0; o[n] = 1;", "overwrote 4 bytes past o, the first of them byte 0 there"),
        ("o[i] = 0; o[-2] = 1;", "overwrote 4 bytes before o"),
        ("o[i] = 0; const_cast<float*>(q)[3] = 1;", "overwrote 4 bytes in q, the first of them byte 12"),
        ("if (i != 9) o[i] = 0;", r"left 1 of 64 elements of o unwritten, the first at \(0, 0, 9, 0\)"),
    ],
)
def test_stray_writes_are_noticed(body, message):
    with pytest.raises(CorruptedMemory, match=message):
        run(build(body))


def test_writes_beyond_shared_memory_are_noticed():
    with pytest.raises(LaunchError, match="wrote to byte 1024 of 1024 bytes of shared memory"):
        run(build("o[i] = 0; shared[256] = 1;"))


def test_a_row_of_nan_is_not_taken_for_an_unwritten_one():
    assert np.isnan(run(build("o[i] = q[i] * NAN;"))).all()


# -- the sanitizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("o[i] = q[i + 1];", r"out of bounds: read of 4 bytes at global memory, 0 bytes past the end of q"),
        ("o[i] = q[i - 2];", r"read of 4 bytes at global memory, [48] bytes before q"),
        ("o[i] = 0; o[i + 100 / n] = 0;", r"write of 4 bytes at global memory, 0 bytes past the end of o"),
        (
            "o[i] = 0; shared[256 + i % 4] = 0;",
            r"write of 4 bytes at byte 10\d\d of shared memory",
        ),
        ("o[i] = shared[10 * i];", r"read of 4 bytes at byte \d+ of shared memory"),
        (
            "o[i] = *(volatile float*)(const char*)(reinterpret_cast<const char*>(q) + 2);",
            r"load of misaligned address",
        ),
        (
            "o[i] = fmaxf(q[i], shared[i]);",
            r"block 0, thread \d+ computed with an uninitialized value.*before it returned",
        ),
        (
            "const float x = shared[i] + 1.0f; __syncthreads(); o[i] = isnan(x);",
            r"uninitialized value.*before __syncthreads in line \d+",
        ),
        ("o[i] = o[i] + 1.0f;", r"uninitialized value"),
        ("if (i < 32) __syncthreads(); o[i] = 0;", r"deadlock in block 0"),
    ],
)
def test_the_sanitizer_catches(body, message):
    built = build(body, sanitize=True)
    with pytest.raises(LaunchError, match=message) as caught:
        run(built, sanitize=True)
    if "out of bounds" in str(caught.value):
        assert re.search(r"\n  line \d+: .*(q\[|shared\[|o\[)", str(caught.value))


def test_the_sanitizer_leaves_good_kernels_alone():
    body = "__pipeline_memcpy_async(shared + i, q + i, 4); __pipeline_commit(); __pipeline_wait_prior(0);"
    body += "__syncthreads(); o[i] = __shfl_xor_sync(0xffffffff, shared[n - 1 - i], 1);"
    o = run(build(body, sanitize=True), sanitize=True)
    np.testing.assert_array_equal(o, [63 - (i ^ 1) for i in range(64)])


def test_the_sanitizer_knows_the_gaps_between_rows():
    built = build("o[i] = q[2 * i + 1];", sanitize=True)
    q = np.zeros((1, 1, 64, 2), np.float32)[..., :1]
    with pytest.raises(LaunchError, match="global memory, between the rows of q"):
        SimRunner(CARD, sanitize=True).attend(built, q, q, q, scale=1.0)


# -- arithmetic -----------------------------------------------------------------------------------------


def test_arithmetic_is_exact_float32():
    rng = np.random.default_rng(0)
    q = rng.standard_normal(64, dtype=np.float32)
    wide = q.astype(np.float64)
    fused = run(build("o[i] = fmaf(q[i], q[i], -1.0f);"), q=q)
    np.testing.assert_array_equal(fused, (wide * wide - 1).astype(np.float32))
    separate = run(build("o[i] = q[i] * q[i] - 1.0f;"), q=q)
    np.testing.assert_array_equal(separate, q * q - np.float32(1))
    assert (fused != separate).any()


@pytest.mark.parametrize("shift", [0, 8, 31, 32, 40])
def test_two_words_are_shifted_as_one(shift):
    o = run(build(f"o[i] = float(__funnelshift_r(0xabcdef01u, 0x23456789u, {shift}) >> 16);"))
    assert (o == ((0x23456789ABCDEF01 >> shift % 32) & 0xFFFFFFFF) >> 16).all()
    o = run(build(f"o[i] = float(__funnelshift_lc(0xabcdef01u, 0x23456789u, {shift}) >> 16);"))
    assert (o == ((0x23456789ABCDEF01 << min(shift, 32) >> 32) & 0xFFFFFFFF) >> 16).all()


# -- building -------------------------------------------------------------------------------------------


def test_builds_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    first, second = build("o[i] = 1;"), build("o[i] = 1;")
    assert (first.cached, second.cached) == (False, True)
    assert first.artifact == second.artifact
    assert not build("o[i] = 2;").cached
    assert (run(second) == 1).all()


def g_plus_plus_says(monkeypatch) -> list[str]:
    """What it prints of the headers that it includes, build by build."""
    if "g++" not in find_host_compiler().version:
        pytest.skip("needs g++")
    said: list[str] = []

    def compile_and_say(command, *how, **rest) -> str:
        said.append(run_compiler([*command, "-H"], *how, **rest))
        return said[-1]

    monkeypatch.setattr(emulated, "run_compiler", compile_and_say)
    return said


@pytest.mark.parametrize("sanitize", [False, True])
def test_kernels_are_compiled_behind_a_header_that_is_parsed_already(monkeypatch, sanitize):
    build("o[i] = 0;", sanitize=sanitize)  # what all kernels share
    said = g_plus_plus_says(monkeypatch)
    built = build(f"o[i] = 1; // {uuid4()}", sanitize=sanitize)
    assert len(said) == 1 and re.search(rf"^! .*/{emulated.PARSED_HEADER}$", said[0], re.MULTILINE)
    assert (run(built, sanitize=sanitize) == 1).all()


@pytest.mark.parametrize("state", ["spoiled", "gone"])
def test_a_parsed_header_that_is_of_no_use_does_no_harm(monkeypatch, tmp_path, state):
    build("o[i] = 0;")
    (tmp_path / "spoiled").write_text("nothing that g++ knows")
    monkeypatch.setattr(emulated, "_parsed_header", lambda *_: tmp_path / state)
    said = g_plus_plus_says(monkeypatch)
    assert (run(build(f"o[i] = 1; // {uuid4()}")) == 1).all()
    assert len(said) == 1 and not re.search("^! ", said[0], re.MULTILINE)


def test_a_missing_compiler_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(FlashgenError, match=r"no C\+\+ compiler was found.*apt install g\+\+"):
        SimDevice("gtx-1080", CARD).toolchain()


def test_a_source_that_does_not_compile_is_a_build_error():
    with pytest.raises(FlashgenError, match="no_such_name"):
        build("o[i] = no_such_name;")


# -- flashgen's own kernels -----------------------------------------------------------------------------


@cache
def legal(card: str, problem: Problem, count: int, seed: int, **held) -> list[Simt]:
    """A sample of the legal variants, of those with 128 threads unless held otherwise."""
    space = enumerate_space(Simt, problem, preset(card), {"threads_per_block": 128, **held})
    return random.Random(seed).sample(space.legal, min(count, len(space.legal)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("card", "head_dim"),
    sampled([("gtx-1080", 64), ("gtx-1080", 40), ("a100", 64), ("h200", 128), ("t4", 72)], 2),
)
def test_simt_kernels_are_right(card, head_dim):
    for causal in (False, True):
        problem = Problem(head_dim=head_dim, causal=causal)
        for variant in legal(card, problem, 3, seed=head_dim):
            kernel = render(variant, problem, preset(card))
            device = SimDevice(card, preset(card))
            error = validate(device.open(), device.toolchain().build(kernel), seed=1)
            assert 0 < error < 2e-6


@pytest.mark.thorough
def test_odd_head_dims_are_right():
    limits = preset("gtx-1080")
    for head_dim in (1, 3, 17, 49, 250):
        problem = Problem(head_dim=head_dim)
        for variant in legal("gtx-1080", problem, 1, seed=3):
            device = SimDevice("gtx-1080", limits)
            build = device.toolchain().build(render(variant, problem, limits))
            assert validate(device.open(), build, seed=2) < 2e-6


def test_a_kernel_is_right_in_any_order():
    problem, limits = Problem(causal=True), preset("a100")
    variant = legal("a100", problem, 1, seed=5, stages=2)[0]
    built = SimDevice("a100", limits).toolchain().build(render(variant, problem, limits))
    outputs = []
    for seed in SEEDS:
        q, k, v = reference.random_inputs(
            "normal", (1, 4, 150, 64), (1, 2, 177, 64), scale=0.125, rng=np.random.default_rng(1)
        )
        o, lse = SimRunner(limits, seed=seed).attend(built, q, k, v, scale=0.125, want_lse=True)
        outputs.append((o.tobytes(), lse.tobytes()))  # type: ignore[union-attr]
    assert len(set(outputs)) == 1


@pytest.mark.parametrize(
    ("card", "stages"), sampled([("gtx-1080", 1), ("gtx-1080", 2), ("a100", 1), ("a100", 2)], 1)
)
def test_every_synchronisation_of_a_kernel_is_needed(card, stages):
    """Each barrier, wait and warp barrier taken out of the source makes some result wrong."""
    problem, limits = Problem(head_dim=32), preset(card)
    variant = legal(card, problem, 1, seed=11, stages=stages)[0]
    kernel = render(variant, problem, limits)
    toolchain, runner = SimDevice(card, limits).toolchain(), SimRunner(limits)
    # Long enough for sums to be parked in o twice.
    run_tiles = re.search(r"kRunTiles = (\d+);", kernel.source)
    assert run_tiles is not None
    keys = 2 * int(run_tiles[1]) * variant.bc + 3

    def right(source: str) -> bool:
        built = toolchain.build(replace(kernel, source=source))
        q, k, v = reference.random_inputs(
            "rising", (1, 1, 99, 32), (1, 1, keys, 32), scale=0.2, rng=np.random.default_rng(0)
        )
        o, _ = runner.attend(built, q, k, v, scale=0.2)
        return bool(np.abs(o - reference.attention(q, k, v, scale=0.2).o).max() < 1e-4)

    assert right(kernel.source)
    calls = list(re.finditer(r"(__syncthreads|__syncwarp|__pipeline_wait_prior)\(\d*\);", kernel.source))
    assert len(calls) >= 3
    for call in calls:
        without = kernel.source[: call.start()] + kernel.source[call.end() :]
        line = kernel.source[: call.start()].count("\n") + 1
        assert not right(without), f"line {line}: {call[0]}"


def test_kernels_pass_the_sanitizer():
    for card, problem in (
        ("gtx-1080", Problem(head_dim=24)),
        ("a100", Problem(head_dim=24, causal=True)),
        ("a100", Problem(head_dim=7)),
    ):
        device = SimDevice(card, preset(card), sanitize=True)
        variant = legal(card, problem, 1, seed=4)[0]
        validate(device.open(), device.toolchain().build(render(variant, problem, device.limits)), seed=1)


def test_the_sanitizer_catches_an_unguarded_edge():
    """A kernel that forgets that the last tile is ragged."""
    problem, limits = Problem(head_dim=32), preset("a100")
    kernel = render(legal("a100", problem, 1, seed=4)[0], problem, limits)
    guard = "whole || first + row < end"
    assert guard in kernel.source
    device = SimDevice("a100", limits, sanitize=True)
    broken = device.toolchain().build(replace(kernel, source=kernel.source.replace(guard, "true")))
    # Named after the nearest array: far enough past the end of k that is v.
    stray = r"out of bounds: read of \d+ bytes at global memory, \d+ bytes (past the end of [kv]|before v)"
    with pytest.raises(LaunchError, match=stray):
        validate(device.open(), broken, seed=1)


def test_outputs_have_the_queries_layout():
    problem, limits = Problem(head_dim=64), preset("gtx-1080")
    built = SimDevice("gtx-1080", limits).toolchain().build(render(steps(64)["4.2.10"], problem, limits))
    packed = np.random.default_rng(0).standard_normal((2, 33, 3, 4, 64), dtype=np.float32)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    o, lse = SimRunner(limits).attend(built, q, k, v, scale=1 / 8)
    assert lse is None
    assert o.transpose(0, 2, 1, 3).flags.c_contiguous
    expected = reference.attention(q, k, v, scale=1 / 8).o
    assert np.abs(o - expected).max() < 1e-5


def test_times_are_predictions_and_repeat():
    problem, limits = Problem(), preset("gtx-1080")
    device = SimDevice("gtx-1080", limits)
    assert device.predicted
    assert device.spec == "sim:gtx-1080"
    builds = [device.toolchain().build(render(v, problem, limits)) for v in legal("gtx-1080", problem, 2, 7)]
    runner = device.open()
    timings = [runner.measure(build, problem) for build in builds]
    assert timings == runner.measure_interleaved(builds, problem, rounds=3)
    assert all(0 < t.times_us[0] < math.inf for t in timings)
    assert all(0 < runner.occupancy(build) <= 1 for build in builds)
