"""Gradients of packed sequences on emulated cards, each by itself, by plans; and the cost of windows."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from flashgen.gen.handover.plan import ITEM_INTS
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import PLAN_ROLE
from flashgen.gen.limits import DeviceLimits
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.cards.emulated import SimDevice, SimRunner, _load
from flashgen.tuner.cards.sequences import lengths_as_values, sequence_slices
from flashgen.tuner.errors import CorruptedMemory, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.gradients import gradients

from tests.gen.families.test_gradients import GTX_1080, check, kernel_of
from tests.gen.families.test_packed import SCORINGS
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

PACKED = {"varlen": "uniform:5-50", "batch": 8, "seqlen_q": 50, "seqlen_k": 50}
WAYS = ("simt", "mma")
SCORED = [(way, name) for name in SCORINGS if name != "plain" for way in WAYS]


@needs_compiler
@pytest.mark.parametrize(("way", "causal"), sampled(list(product(WAYS, (True, False))), 2))
def test_sequences_have_gradients_of_their_own(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal, **PACKED)
    assert 0.0 < check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 0, thorough=1))
def test_gradients_of_ragged_problems_are_right(way: str) -> None:
    for seed in range(2):
        kernel = kernel_of(way, causal=seed == 1, **PACKED)
        assert check(kernel, depth="full", seed=seed) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(("way", "name"), sampled(SCORED, 0, thorough=4))
def test_masks_and_scores_are_of_each_sequence(way: str, name: str) -> None:
    kernel = kernel_of(way, causal=name != "score", scoring=SCORINGS[name], **PACKED)
    assert check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 0, thorough=1))
def test_nothing_is_read_or_written_out_of_bounds(way: str) -> None:
    check(kernel_of(way, causal=True, **PACKED), sanitize=True)


def differentiate(
    kernel: Kernel,
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    monkeypatch,
    before=(),
    limits: DeviceLimits = GTX_1080,
    **given: np.ndarray,
):
    """What a kernel makes of sequences, what it should, and its plan; the memory of the plan has served
    ``before`` then. ``given`` are other lengths than those, of arrays that have room for them."""
    problem, values = kernel.problem, {**lengths_as_values(q_lengths, k_lengths), **given}
    rng, scale, heads = np.random.default_rng(0), 0.3, (4, 2)
    d, dv = problem.head_dim, problem.head_dim_v
    shapes = ((1, heads[0], sum(q_lengths), d), (1, heads[1], sum(k_lengths), d))
    q, k, v = reference.random_inputs(
        "normal", *shapes, scale=scale, rng=rng, dtype=problem.dtype, head_dim_v=dv
    )
    dout = rng.standard_normal((*q.shape[:3], dv), dtype=np.float32).astype(q.dtype)
    o, lse = np.zeros_like(dout), np.zeros(q.shape[:3], np.float32)
    wanted = {name: np.zeros(x.shape) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for rows, keys in zip(sequence_slices(values, "q"), sequence_slices(values, "k"), strict=True):
        own = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        exact = reference.attention(*own, scale=scale, scores=problem.scores)
        o[:, :, rows], lse[:, :, rows] = exact.o, exact.lse
        found = gradients(*own, dout[:, :, rows], scale=scale, scores=problem.scores)
        for name, each in found.items():
            wanted[name][:, :, rows if name == "dq" else keys] = each.value
    plans, launch = [], SimRunner._launch

    def keep(runner, build, arrays, buffers, arguments):
        for starts in before:
            kept = {name: buffers[name].view.copy() for name in starts}
            for name, numbers in starts.items():
                buffers[name].view[...] = numbers
            launch(runner, build, arrays, buffers, arguments)
            for name, numbers in kept.items():
                buffers[name].view[...] = numbers
        launch(runner, build, arrays, buffers, arguments)
        plans.append(buffers["plan"].view.reshape(-1, ITEM_INTS).copy())

    monkeypatch.setattr(SimRunner, "_launch", keep)
    device = SimDevice("emulated", limits)
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "o": o, "lse": lse}
    build = device.toolchain().build(kernel)
    return device.open().differentiate(build, arrays, scale=scale, values=values), wanted, plans[0]


Q_LENGTHS, K_LENGTHS = (33, 0, 5, 64, 17), (40, 50, 0, 70, 40)


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
def test_plans_list_rows_and_keys_those_first_that_take_longest(way: str, monkeypatch) -> None:
    """In memory that has served other lengths, as when a graph is replayed; some sequences are empty."""
    other = {"cu_seqlens_q": [0, 1, 100, 100, 110, 119], "cu_seqlens_k": [0, 180, 180, 181, 182, 200]}
    kernel = kernel_of(way, **PACKED)
    found, wanted, plan = differentiate(kernel, Q_LENGTHS, K_LENGTHS, monkeypatch, before=[other])
    for name, exact in wanted.items():
        assert np.linalg.norm(found[name] - exact) <= 1e-2 * np.linalg.norm(exact)
    rows, keys = (each.rows_per_block for each in kernel.launches if each.role in ("queries", "kernel"))
    assert rows and keys
    of_rows = [(3, -(-64 // rows)), (0, -(-33 // rows)), (4, -(-17 // rows)), (2, -(-5 // rows))]
    of_keys = [(3, -(-70 // keys)), (0, -(-40 // keys)), (4, -(-40 // keys)), (1, -(-50 // keys))]
    behind = sum(Q_LENGTHS) // rows + 5 + 1
    for listed, wanted_items in ((plan[:behind], of_rows), (plan[behind:], of_keys)):
        sequences = [number for number, count in wanted_items for _ in range(count)]
        assert listed[0, 0] == len(sequences)
        assert listed[1 : 1 + len(sequences), 0].tolist() == sequences
        assert not listed[1 + len(sequences) :].any()


@needs_compiler
def test_every_run_has_the_same_bits(monkeypatch) -> None:
    kernel = kernel_of("simt", causal=True, **PACKED)
    first, second = (differentiate(kernel, Q_LENGTHS, K_LENGTHS, monkeypatch)[0] for _ in range(2))
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    sampled(
        [
            ("args.workspace += item.first_row;", ""),
            ("if (item.num_keys == 0) return;", "if (item.num_keys == 0 || item.num_rows == 0) return;"),
            ("kv_head = nth_block / tiles;", "kv_head = nth_block / tiles % 1;"),
            ("args.dk += item.first_key", "args.dk += 0 * item.first_key"),
        ],
        1,
    ),
)
def test_mistakes_are_found(right: str, wrong: str) -> None:
    kernel = kernel_of("simt", causal=True, **PACKED)
    assert right in kernel.source
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        check(replace(kernel, source=kernel.source.replace(right, wrong)))


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_reads_well(way: str) -> None:
    kernel = kernel_of(way, causal=True, scoring=Scoring(window=(9, 0), bias="f32", sinks=True), **PACKED)
    assert_tidy(kernel.source, way, longest=160)
    assert "stride_batch" not in kernel.source
    roles = [each.role for each in kernel.launches]
    assert roles[:4] == [PLAN_ROLE, "statistics", "queries", "kernel"]
    assert roles[4:] == ["gradient_of_bias", "gradient_of_sinks"]
    sizes = {"batch": 5, "total_q": 100, "total_k": 170, "num_q_heads": 4, "num_kv_heads": 2}
    rows, keys = (each.rows_per_block for each in kernel.launches[2:4])
    assert rows and keys
    assert kernel.num_plan_ints(sizes) == (100 // rows + 5 + 1 + 170 // keys + 5 + 1) * ITEM_INTS
    assert kernel.workspace_bytes(sizes) == 2 * 4 * 448  # 4 heads of 100 rows, rounded up to 256 bytes


#: What tells that a tile passes by, in the launch that makes gradients of keys and in that of queries.
PASSING = {
    "simt": ("load_tile<kBr, kD, kStride>(smem.q, q,", "load_tile<kBc, kD, kStride>(smem.k, k,"),
    "mma": ("copy_tile<OfKeys, kPassingRows,", "copy_tile<OfKeys, kPassingKeys,"),
}


@needs_compiler
@pytest.mark.parametrize(("way", "layout"), sampled(list(product(WAYS, ({}, PACKED))), 1))
def test_a_window_costs_what_it_sees(way: str, layout: dict[str, object]) -> None:
    """By how many tiles pass by: those that some row of a block sees, or that see some key, no others."""
    length, left, right = 400, 20, 3
    kernel = kernel_of(way, scoring=Scoring(window=(left, right)), **layout)
    source = kernel.source
    for number, passing in enumerate(PASSING[way]):
        assert source.count(passing) == 1
        count = f"if (threadIdx.x == 0) __atomic_fetch_add(&tiles_{number}, 1, 0);"
        source = source.replace(passing, f"{count}\n      {passing}")
    counters = 'extern "C" long long tiles_0 = 0, tiles_1 = 0;\n'
    kernel = replace(kernel, source=counters + source)
    device = SimDevice("emulated", GTX_1080)
    build, problem = device.toolchain().build(kernel), kernel.problem
    rng = np.random.default_rng(0)
    shapes, dtype = ((1, heads, length, 32) for heads in (4, 2, 2)), numpy_dtype(problem.dtype)
    q, k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)
    given = {"q": q, "k": k, "v": v, "dout": q, "o": q, "lse": np.zeros((1, 4, length), np.float32)}
    values = {"window_left": left, "window_right": right}
    values |= lengths_as_values((length,), (length,)) if problem.varlen else {}
    device.open().differentiate(build, given, scale=0.1, values=values)
    rows, keys = (each.rows_per_block for each in kernel.launches if each.role in ("queries", "kernel"))
    assert rows and keys
    begin, end = problem.scores.interval(np.arange(length), length, length, values)
    seen = (np.arange(length) >= begin[:, None]) & (np.arange(length) < end[:, None])
    variant: Any = kernel.variant
    passing_rows, passing_keys = variant.br, variant.bc if way == "simt" else variant.keys
    of_keys = sum(_tiles(seen[:, i : i + keys].any(axis=1), passing_rows) for i in range(0, length, keys))
    of_rows = sum(_tiles(seen[i : i + rows].any(axis=0), passing_keys) for i in range(0, length, rows))
    library = _load(build.artifact)
    counted = [ctypes.c_longlong.in_dll(library, f"tiles_{number}").value for number in (0, 1)]
    assert counted == [4 * of_keys, 4 * of_rows]
    # A fraction of all tiles.
    assert counted[0] < 0.3 * 4 * -(-length // keys) * -(-length // passing_rows)


def _tiles(seen: np.ndarray, size: int) -> int:
    """How many tiles of neighbours have some that are seen."""
    return len({int(place) // size for place in np.flatnonzero(seen)})
