"""Packed sequences on emulated cards: beside float64, with gaps that nobody may touch, by plans that hold."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from flashgen.gen.arguments import (
    MAP_ROUND_BYTES,
    MAP_ROWS_END,
    MAP_STRIDE_UNIT,
    describe_maps,
    make_arguments,
)
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.handover.plan import ITEM_INTS
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import PLAN_ROLE
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scored_tiles.arrays import tile_arrays
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.cards.sequences import lengths_as_values, sequence_slices
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.validate import validate

from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

H200 = PRESETS["h200"]
#: Cards by name; with so few SMs, blocks that stay take many tiles.
CARDS = {**PRESETS, "h200 of two": replace(PRESETS["h200"], num_sms=2)}
PACKED = Problem(
    batch=8,
    num_q_heads=4,
    num_kv_heads=2,
    seqlen_q=50,
    seqlen_k=50,
    head_dim=24,
    varlen="uniform:5-50",
)
SIMT = Simt(br=32, bc=16, threads_per_block=64, min_blocks=1)
FEW = Mma(br=16, bc=32, rows_per_warp=16, pack_heads=True)
GROUPS = Wgmma(br=64, bc=32)
IN_TURNS = replace(GROUPS, br=192, schedule="chained", order_of_groups="products", rescale="always")
APART = replace(GROUPS, o_apart=True, p_in_shared=True, k_stages=3, v_stages=3)
#: Of each way that differs in how rows become addresses: variant, dtype, card.
WAYS = {
    "simt": (SIMT, "f32", "h200"),
    "simt, two stages": (replace(SIMT, stages=2, block_order="heaviest_first"), "f32", "gtx-1080"),
    "simt, q in registers": (replace(SIMT, q_in_registers=True, br=16, lanes=8), "f32", "gtx-1080"),
    "mma": (Mma(br=32, bc=32), "bf16", "h200"),
    "mma, one stage": (Mma(br=32, bc=32, stages=1, block_order="heaviest_first"), "f16", "a100"),
    "mma, shared q": (Mma(br=32, bc=32, stages=3, q_in_registers=False), "bf16", "h200"),
    "mma, heads packed": (Mma(br=32, bc=32, pack_heads=True), "f16", "h200"),
    "mma, keys over warps": (replace(FEW, key_warps=2), "bf16", "h200"),
    "mma, keys over blocks": (replace(FEW, splits=2, key_warps=2), "f16", "h200"),
    "mma, blocks alone": (replace(FEW, splits=4, pack_heads=False), "bf16", "h200"),
    "simt, keys by memory": (replace(SIMT, br=16, workspace_splits=8), "f32", "gtx-1080"),
    "mma, keys by memory": (replace(FEW, bc=16, workspace_splits=4), "bf16", "a100"),
    "3xtf32": (Mma(br=32, bc=32), "f32", "h200"),
    "3xf16": (Mma(br=32, bc=32, parts="f16"), "f32", "a100"),
    "wgmma": (GROUPS, "bf16", "h200 of two"),
    "wgmma, one tile a block": (replace(GROUPS, br=128, persistent=False, schedule="chained"), "f16", "h200"),
    "wgmma, by length": (replace(GROUPS, persistent=False, section=0), "bf16", "h200"),
    "wgmma, in turns": (IN_TURNS, "bf16", "h200 of two"),
    "wgmma, outputs apart": (APART, "bf16", "h200 of two"),
    "wgmma, q in registers": (replace(GROUPS, br=128, q_in_registers=True, q_stages=2), "f16", "h200 of two"),
    "wgmma, tail": (replace(GROUPS, bc=48, tail=16, poly_exp=4), "f16", "h200 of two"),
    "wgmma, heads packed": (replace(GROUPS, pack_heads=True), "bf16", "h200 of two"),
    "wgmma, keys over blocks": (replace(GROUPS, splits=2, persistent=False), "f16", "h200"),
    "wgmma, few rows": (replace(GROUPS, pack_heads=True, splits=3, persistent=False), "bf16", "h200"),
    "wgmma, f32": (replace(GROUPS, br=128), "f32", "h200 of two"),
    "wgmma, f32 by tiles": (replace(GROUPS, split_by="tiles", persistent=False), "f32", "h200"),
    "wgmma, e4m3": (replace(GROUPS, br=128, schedule="chained"), "e4m3", "h200 of two"),
}
SCORINGS = {
    "plain": Scoring(),
    "window": Scoring(window=(20, 0)),
    "window to both sides": Scoring(window=(9, 5)),
    "window and first keys": Scoring(window=(9, 5), always=2),
    "mask": Scoring(mask="(q * 7 + k) % 5 > 1"),
    "mask by head": Scoring(mask="(q + h * 16) // 32 == k // 32 or k < 3"),
    "mask by batch": Scoring(mask="doc[b, q] == doc[b, k]", lengths=True),
    "dilation": Scoring(dilation=3),
    "tree": Scoring(tree=True),
    "sinks, soft cap": Scoring(sinks=True, softcap=20.0),
    "alibi, lengths": Scoring(alibi=True, lengths=True),
    "documents": Scoring(documents=3),
    "bias": Scoring(bias="f16"),
    "chunk": Scoring(chunk=16),
    "score": Scoring(score="score + table[h, q - k] * b"),
}


def is_asked(way: str, name: str) -> bool:
    """Whether a family has such masks or changes; a narrow last tile is not made for lists of tiles."""
    scores = replace(PACKED, scoring=SCORINGS[name]).scores
    has_lists = scores.needs_lists
    if way in ("wgmma, heads packed", "wgmma, few rows") and (has_lists or tile_arrays(scores)):
        return False
    return name != "plain" and not (has_lists and "tail" in way)


def kernel_of(way: str, *, causal: bool = False, scoring: Scoring = SCORINGS["plain"]) -> Kernel:
    variant, dtype, card = WAYS[way]
    # Rows of whole 16 bytes.
    problem = replace(PACKED, head_dim=32, head_dim_v=32) if dtype == "e4m3" else PACKED
    return render(variant, replace(problem, dtype=dtype, causal=causal, scoring=scoring), CARDS[card])


def check(kernel: Kernel, way: str, *, depth="quick", sanitize: bool = False, seed: int = 1) -> float:
    device = SimDevice("emulated", CARDS[WAYS[way][2]], sanitize)
    build = device.toolchain().build(kernel)
    return validate(device.open(), build, seed=seed, depth=depth, problem=kernel.problem)


#: Kernels that most tests of every run share, for what takes their time is to compile.
USUAL = [("simt", False), ("mma, keys over blocks", False), ("wgmma", False)]


@needs_compiler
@pytest.mark.parametrize(
    ("way", "causal"),
    [*USUAL, *sampled([each for each in product(WAYS, (False, True)) if each not in USUAL], 1, thorough=24)],
)
def test_sequences_are_right_each_by_itself(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal)
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 0, thorough=6))
def test_ragged_problems_of_all_kinds_are_right(way: str) -> None:
    for seed in range(8):
        kernel = kernel_of(way, causal=seed % 2 == 1)
        assert check(kernel, way, depth="full", seed=seed) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "name"),
    sampled([(way, name) for name in SCORINGS for way in WAYS if is_asked(way, name)], 3, thorough=40),
)
def test_masks_and_scores_are_of_each_sequence(way: str, name: str) -> None:
    kernel = kernel_of(way, causal=name != "score", scoring=SCORINGS[name])
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled([way for way in WAYS if "," not in way], 1))
def test_nothing_is_read_or_written_out_of_bounds(way: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert check(kernel, way, sanitize=True) < kernel.problem.tolerance


@pytest.mark.parametrize("way", sampled(WAYS, 6))
def test_a_kernel_reads_well(way: str) -> None:
    source = kernel_of(way, causal=True, scoring=Scoring(window=(9, 0))).source
    assert_tidy(source, way, longest=150 if "f32" in way else 130)
    assert "stride_batch" not in source


def attend(kernel: Kernel, q_lengths, k_lengths, *, heads=(4, 2), **changed):
    """What a kernel makes of sequences, and its plan."""
    device = SimDevice("emulated", H200)
    runner, build = device.open(), device.toolchain().build(kernel)
    problem, values = kernel.problem, {**lengths_as_values(q_lengths, k_lengths), **changed}
    rng = np.random.default_rng(0)
    rows, keys = sum(q_lengths), sum(k_lengths)
    arrays = reference.random_inputs(
        "normal", (1, heads[0], rows, 24), (1, heads[1], keys, 24), scale=0.2, rng=rng, dtype=problem.dtype
    )
    plans = []
    launch = runner._launch

    def keep(build, arrays, buffers, arguments):
        launch(build, arrays, buffers, arguments)
        plans.append(buffers["plan"].view.reshape(-1, ITEM_INTS).copy())

    runner._launch = keep  # type: ignore[method-assign]
    o, lse = runner.attend(build, *arrays, scale=0.2, want_lse=True, values=values)
    return o, lse, plans[0]


def launched_twice(kernel: Kernel, monkeypatch, first: dict, second: dict) -> float:
    """The largest error of a kernel launched twice on the same memory, with other contents and arguments."""
    q_lengths, k_lengths = (33, 0, 5, 64, 17), (40, 50, 10, 70, 40)
    launch = SimRunner._launch

    def twice(runner, build, arrays, buffers, arguments):
        for changed in (first, second):
            kept = {name: buffers[name].view.copy() for name in changed if name in buffers}
            numbers = {name: value for name, value in changed.items() if name not in buffers}
            for name in kept:
                buffers[name].view[...] = changed[name]
            values = {**arguments.values, **numbers}
            launch(runner, build, arrays, buffers, replace(arguments, values=values))
            for name, content in kept.items():
                buffers[name].view[...] = content

    monkeypatch.setattr(SimRunner, "_launch", twice)
    o, _, _ = attend(kernel, q_lengths, k_lengths)
    values = lengths_as_values(q_lengths, k_lengths)
    rng = np.random.default_rng(0)
    shapes = ((1, 4, sum(q_lengths), 24), (1, 2, sum(k_lengths), 24))
    q, k, v = reference.random_inputs("normal", *shapes, scale=0.2, rng=rng, dtype=kernel.problem.dtype)
    worst = 0.0
    for rows, keys in zip(sequence_slices(values, "q"), sequence_slices(values, "k"), strict=True):
        exact = reference.attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], scale=0.2).o
        worst = max(worst, float(np.abs(np.asarray(o[:, :, rows], np.float64) - exact).max(initial=0)))
    return worst


@needs_compiler
@pytest.mark.parametrize("way", sampled(["mma, keys over blocks", "simt", "wgmma"], 1))
def test_the_same_memory_serves_other_lengths(way: str, monkeypatch) -> None:
    """As when a graph is replayed: what the plan held before is of no account."""
    other = {"cu_seqlens_q": [0, 1, 100, 100, 110, 119], "cu_seqlens_k": [0, 200, 200, 201, 202, 210]}
    assert launched_twice(kernel_of(way), monkeypatch, other, {}) < 1e-2


@needs_compiler
@pytest.mark.parametrize("way", sampled(["mma, keys over blocks", "simt", "wgmma"], 1))
def test_a_plan_that_is_made_is_taken(way: str, monkeypatch) -> None:
    """As all layers of a model do: lengths are read no more."""
    nonsense = {name: [0] * 6 for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert launched_twice(kernel_of(way), monkeypatch, {}, {**nonsense, "plan_made": 1}) < 1e-2
    with pytest.raises(AssertionError):
        # What is compared is the second launch's.
        spoilt = {**nonsense, "plan_made": 1, "scale": 0.0}
        assert launched_twice(kernel_of(way), monkeypatch, {}, spoilt) < 1e-2


@needs_compiler
@pytest.mark.parametrize("way", sampled(["wgmma", "mma, heads packed", "simt"], 1))
def test_the_longest_sequences_come_first(way: str) -> None:
    q_lengths = (33, 0, 5, 64, 17, *([3] * 200))
    k_lengths = (10, 50, 40, 0, 40, *range(200))
    kernel = kernel_of(way)
    *_, plan = attend(kernel, q_lengths, k_lengths)
    group = 2 if kernel.launch.pack_heads else 1
    br = kernel.launch.rows_per_block
    starts, starts_k = np.cumsum([0, *q_lengths]), np.cumsum([0, *k_lengths])
    expected, ranks = [], []
    for rank, s in enumerate(sorted(range(len(q_lengths)), key=lambda s: (-k_lengths[s], s))):
        tiles = -(-q_lengths[s] * group // br)
        first = len(expected)
        expected += [(s, first, starts[s], q_lengths[s], starts_k[s], k_lengths[s])] * tiles
        ranks += [rank if kernel.launch.max_blocks else 0] * tiles
    assert plan[0, 0] == len(expected) <= len(plan) - 1
    assert [tuple(item[:6]) for item in plan[1 : 1 + len(expected)]] == expected
    assert plan[1 : 1 + len(expected), 6].tolist() == ranks
    assert not plan[1 + len(expected) :].any()  # which ends the blocks that meet it


@needs_compiler
def test_tiles_are_found_however_many_heads() -> None:
    """Of blocks that stay: places are found by multiplying with an inverse."""
    kernel, other = kernel_of("wgmma"), kernel_of("mma")
    lengths = (1, 65, 200, 0, 64, 9), (3, 7, 2, 5, 0, 9)
    for heads in ((1, 1), (7, 7), (6, 3), (11, 1), (12, 4)):
        o, lse, plan = attend(kernel, *lengths, heads=heads)
        expected, expected_lse, _ = attend(other, *lengths, heads=heads)
        assert plan[0, 0] == 9
        np.testing.assert_allclose(o.astype(np.float32), expected.astype(np.float32), atol=0.03)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-3)


@needs_compiler
def test_offsets_that_fall_or_go_beyond_the_arrays_touch_nothing_else() -> None:
    kernel = kernel_of("mma")
    for offsets in ([0, 30, 10, 40], [0, 40, 0, 40, 0, 40], [0, 20, 99]):
        cut = np.array(offsets, np.int32)
        o, lse, plan = attend(kernel, (40,), (40,), cu_seqlens_q=cut, cu_seqlens_k=cut)
        assert np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
        assert plan[0, 0] <= len(plan) - 1
        assert (plan[1 : 1 + plan[0, 0], 2] + plan[1 : 1 + plan[0, 0], 3] <= 40).all()


@needs_compiler
def test_results_are_the_same_bits_whatever_the_order_of_sequences() -> None:
    kernel = kernel_of("mma, keys over blocks")
    q_lengths, k_lengths = (3, 20, 1), (70, 33, 150)
    o, lse, _ = attend(kernel, q_lengths, k_lengths)
    again, lse_again, _ = attend(kernel, q_lengths, k_lengths)
    assert (o.view(np.uint16) == again.view(np.uint16)).all() and (lse == lse_again).all()


@needs_compiler
@pytest.mark.parametrize(
    ("way", "right", "wrong"),
    sampled(
        [
            ("simt", "item.num_rows;", "item.num_rows + 1;"),  # into the next sequence
            ("simt", "args.seqlen_k = item.num_keys;", "args.seqlen_k = item.num_keys + 1;"),
            ("simt", "args.lse += item.first_row", "args.lse += 0"),
            ("simt", "if (args.seqused_k != nullptr)", "if (false)"),
            ("simt", "if (args.seqused_q != nullptr)", "if (false)"),
            ("wgmma", "item.first_row, item.num_rows)", "item.first_row, item.num_rows + 1)"),
            ("wgmma", "item.first_key, item.num_keys)", "item.first_key, item.num_keys + 1)"),
            ("wgmma", "place = takers - 1 - place", "place = takers - place"),
        ],
        2,
    ),
)
def test_the_suite_finds_mistakes(way: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way)
    assert right in kernel.source
    kernel = replace(kernel, source=kernel.source.replace(right, wrong))
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        check(kernel, way)


def test_maps_name_rows_by_where_their_sequence_ends() -> None:
    kernel, lengths = kernel_of("wgmma"), (5, 0, 17, 20)
    sizes = {"batch": 4, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 20, "seqlen_k": 20}
    sizes |= {"total_q": sum(lengths), "total_k": 0}
    arrays = "qkvo"
    arguments = make_arguments(
        kernel.problem,
        dict.fromkeys(arrays, 1 << 20),
        dict.fromkeys(arrays, (0, 24, 96)),
        scale=1.0,
        sizes=sizes,
    )
    found = {each.array: each for each in describe_maps(kernel.launch, kernel.problem, arguments)}
    total, row_bytes = sum(lengths), 2 * 96
    for name in "qo":
        described = found[name]
        assert described.sizes == (24, MAP_ROWS_END, 4, total + 1, MAP_ROWS_END + 1)
        assert described.strides == (row_bytes, 2 * 24, row_bytes, MAP_ROUND_BYTES - row_bytes)
        assert described.address == 1 << 20  # which is memory, whatever is before
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            before, end = MAP_ROWS_END - length, int(start) + length
            steps = zip((before, 0, end, MAP_ROWS_END), described.strides, strict=True)
            address = described.address + sum(step * stride for step, stride in steps)
            assert 0 <= end < described.sizes[3] and address % 2**64 == (1 << 20) + start * row_bytes
            assert before + length == described.sizes[1]  # its first row that is not there is outside
    # Of no keys nothing is read.
    assert found["k"].sizes == (24, 1, 1, 1, 1) and found["k"].address == 1 << 20
    assert found["k"].strides == (MAP_STRIDE_UNIT,) * 4


def test_maps_begin_with_memory() -> None:
    kernel = kernel_of("wgmma")
    right = "&maps.q, args->q,"
    assert right in kernel.source
    kernel = replace(kernel, source=kernel.source.replace(right, "&maps.q, args->q - 4096,"))
    with pytest.raises(LaunchError, match=r"tma_load_until in line .* that begins with what is no memory"):
        check(kernel, "wgmma")


@pytest.mark.parametrize("way", sampled(["mma", "simt", "3xtf32"], 0))
def test_what_is_made_for_a_sequence_takes_no_memory(way: str, tmp_path, monkeypatch) -> None:
    """Arguments of a sequence are a copy of all, of which compilers keep what is used."""
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    try:
        toolchain = cuda_toolchain(H200.arch)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    build = toolchain.build(kernel_of(way, causal=True))
    assert build.spill_bytes == 0 < build.registers <= 255


def test_a_plan_is_a_launch_of_its_own_which_calls_may_share() -> None:
    kernel = kernel_of("mma, keys over blocks")
    assert [each.role for each in kernel.launches] == [PLAN_ROLE, "kernel"]
    sizes = {"batch": 5, "total_q": 100, "num_q_heads": 8, "num_kv_heads": 2}
    assert kernel.num_plan_ints(sizes) == (100 * 4 // 16 + 5 + 1) * ITEM_INTS
    assert kernel.launch.grid_of(sizes) == (100 * 4 // 16 + 5) * 2 * 2
    assert re.search(r"if \(!args->plan_made\) \{\s+if \(const int status = launch_plan", kernel.source)
    assert f"long long {kernel.entry}_plan_ints(" in kernel.source


def test_what_packed_sequences_do_not_have_is_told() -> None:
    with pytest.raises(Illegal, match="no tiles in common"):
        render(Mma(heads=2, q_in_registers=False), replace(PACKED, dtype="bf16"), H200)
    for variant, told in (
        (Wgmma(cluster=2), "plans of packed sequences list blocks one by one"),
        (Wgmma(persistent=False, section=4), "by those that share keys, or all"),
    ):
        with pytest.raises(Illegal, match=told):
            render(variant, replace(PACKED, dtype="bf16", seqlen_q=500), H200)
