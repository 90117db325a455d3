"""Gradients of packed sequences by Hopper's warpgroups on an emulated card, beside float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from flashgen.gen.arguments import MAP_ROWS_END, describe_maps, make_arguments
from flashgen.gen.families import FAMILIES
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.handover.plan import ITEM_INTS
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import PLAN_ROLE
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.predict.cost_model import predict

from tests.gen.families.test_packed import SCORINGS
from tests.gen.families.test_packed_gradients import K_LENGTHS, Q_LENGTHS, differentiate
from tests.gen.families.test_wgmma_backward import FULL, H200, PROBLEM, SMALL, check
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

PACKED = replace(
    PROBLEM, varlen="uniform:5-50", batch=8, seqlen_q=50, seqlen_k=50, head_dim=32, head_dim_v=32
)
SUMS = WgmmaBackward(bc=64, br=64, dq_path="bulk")
WAYS: dict[str, tuple[WgmmaBackward, Problem]] = {
    "launch": (SMALL, replace(PACKED, dtype="f16")),
    "launch, scores ahead": (
        WgmmaBackward(br=48, keys=48, schedule="ahead", order="heaviest_first"),
        replace(PACKED, head_dim=64, head_dim_v=40),
    ),
    "launch, apart": (replace(SMALL, br=48, apart=True, order="by_section"), PACKED),
    "launch, apart, a tile ahead": (replace(SMALL, apart=True, schedule="ahead"), PACKED),
    "bulk": (SUMS, PACKED),
    "bulk, apart, in passes": (
        replace(SUMS, apart=True, dout_stages=1, order="heaviest_first"),
        replace(PACKED, head_dim=256, head_dim_v=200),
    ),
    "bulk, in parts": (
        WgmmaBackward(
            br=128, schedule="ahead", parts=2, kept="registers", dq_path="bulk", order="by_section"
        ),
        replace(PACKED, head_dim=64, head_dim_v=40),
    ),
    "bulk, in parts, late, rows of keys": (
        WgmmaBackward(
            br=128,
            schedule="ahead",
            parts=2,
            dq_path="bulk",
            meeting="late",
            ranges="of_keys",
        ),
        replace(PACKED, head_dim=64, head_dim_v=40),
    ),
    "bulk, two blocks on an SM": (replace(SUMS, min_blocks=2), PACKED),
    "bulk, across": (
        WgmmaBackward(br=48, dq_path="bulk", ranges="of_keys"),
        replace(PACKED, head_dim=104, head_dim_v=128),
    ),
    "atomics": (replace(SUMS, dq_path="atomics", schedule="weights_first"), replace(PACKED, dtype="f16")),
    "atomics, by columns": (
        WgmmaBackward(dq_path="atomics", schedule="ahead", ds_stages=1),
        replace(PACKED, head_dim=104, head_dim_v=72),
    ),
}
BRIEF = ("launch", "bulk", "atomics")
SCORED = [(way, name) for name in SCORINGS if name != "plain" for way in BRIEF]


def kernel_of(way: str, **asked: object) -> Kernel:
    variant, problem = WAYS[way]
    return render(variant, replace(problem, **asked), H200)  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.parametrize(("way", "causal"), sampled(list(product(WAYS, (True, False))), 2, thorough=3))
def test_sequences_have_gradients_of_their_own(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal)
    assert 0.0 < check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 0, thorough=1))
def test_gradients_of_ragged_problems_are_right(way: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert check(kernel, depth="full") < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(("way", "name"), sampled(SCORED, 0, thorough=1))
def test_masks_and_scores_are_of_each_sequence(way: str, name: str) -> None:
    kernel = kernel_of(way, causal=name != "score", scoring=SCORINGS[name])
    assert check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(BRIEF, 0, thorough=1))
def test_nothing_is_read_or_written_out_of_bounds(way: str) -> None:
    check(kernel_of(way, causal=True), sanitize=True)


def assert_close(found, wanted, bound: float = 1e-2) -> None:
    for name, exact in wanted.items():
        assert np.linalg.norm(found[name] - exact) <= bound * np.linalg.norm(exact), name


#: Lengths at which something ends: a sequence, a step, a tile.
CORNERS = (0, 0, 1, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)


@needs_compiler
@pytest.mark.parametrize(
    ("way", "seed"), sampled([(way, seed) for seed in range(3) for way in WAYS], 1, thorough=4)
)
def test_sequences_of_any_lengths_are_differentiated(way: str, seed: int, monkeypatch) -> None:
    """Of none, of one row, and of what lies about the ends of tiles; rows and keys each of lengths of their
    own."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    q_lengths, k_lengths = (tuple(int(n) for n in rng.choice(CORNERS, count)) for _ in "qk")
    q_lengths, k_lengths = (*q_lengths, 1), (*k_lengths, 17)  # some rows and keys that see each other
    kernel = kernel_of(way, causal=seed % 2 == 0)
    found, wanted, _ = differentiate(kernel, q_lengths, k_lengths, monkeypatch, limits=H200)
    assert_close(found, wanted)


@needs_compiler
@pytest.mark.parametrize("way", sampled(["bulk", "launch"], 1))
def test_rows_and_keys_that_do_not_count_are_left_alone(way: str, monkeypatch) -> None:
    used = {"seqused_q": np.array([30, 0, 5, 1, 17]), "seqused_k": np.array([1, 50, 0, 69, 40])}
    used = {name: each.astype(np.int32) for name, each in used.items()}
    found, wanted, _ = differentiate(kernel_of(way), Q_LENGTHS, K_LENGTHS, monkeypatch, limits=H200, **used)
    for name, exact in wanted.items():
        there = np.any(exact != 0.0, axis=(0, 1, 3))
        assert there.any()
        assert_close({name: found[name][:, :, there]}, {name: exact[:, :, there]})


@needs_compiler
@pytest.mark.parametrize("way", sampled(["bulk", "launch"], 1))
def test_plans_list_those_sequences_first_that_take_longest(way: str, monkeypatch) -> None:
    """In memory that has served other lengths; where blocks of keys make all there is, these are all that is
    listed."""
    other = {"cu_seqlens_q": [0, 1, 100, 100, 110, 119], "cu_seqlens_k": [0, 180, 180, 181, 182, 200]}
    kernel = kernel_of(way)
    found, wanted, plan = differentiate(
        kernel, Q_LENGTHS, K_LENGTHS, monkeypatch, before=[other], limits=H200
    )
    assert_close(found, wanted)
    keys = kernel.launch.rows_per_block
    of_keys = [(3, -(-70 // keys)), (0, -(-40 // keys)), (4, -(-40 // keys)), (1, -(-50 // keys))]
    if way == "launch":
        (rows,) = (each.rows_per_block for each in kernel.launches if each.role == "queries")
        assert rows
        of_rows = [(3, -(-64 // rows)), (0, -(-33 // rows)), (4, -(-17 // rows)), (2, -(-5 // rows))]
        behind = sum(Q_LENGTHS) // rows + 5 + 1
        lists = [(plan[:behind], of_rows), (plan[behind:], of_keys)]
    else:
        assert len(plan) == sum(K_LENGTHS) // keys + 5 + 1
        lists = [(plan, of_keys)]
    for listed, wanted_items in lists:
        sequences = [number for number, count in wanted_items for _ in range(count)]
        assert listed[0, 0] == len(sequences)
        assert listed[1 : 1 + len(sequences), 0].tolist() == sequences
        assert not listed[1 + len(sequences) :].any()


@needs_compiler
def test_every_run_of_launches_that_keep_rows_has_the_same_bits(monkeypatch) -> None:
    kernel = kernel_of("launch", causal=True)
    assert kernel.is_deterministic and not kernel_of("bulk").is_deterministic
    first, second = (
        differentiate(kernel, Q_LENGTHS, K_LENGTHS, monkeypatch, limits=H200)[0] for _ in range(2)
    )
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@needs_compiler
@pytest.mark.parametrize("way", sampled(BRIEF, 1, thorough=1))
def test_offsets_that_fall_or_go_beyond_the_arrays_touch_nothing_else(way: str, monkeypatch) -> None:
    kernel = kernel_of(way)
    for offsets in ([0, 30, 10, 40], [0, 40, 0, 40, 0, 40], [0, 20, 99]):
        cut = np.array(offsets, np.int32)
        told = {"cu_seqlens_q": cut, "cu_seqlens_k": cut}
        *_, plan = differentiate(kernel, (40,), (40,), monkeypatch, limits=H200, **told)
        assert plan[0, 0] <= len(plan) - 1


@needs_compiler
@pytest.mark.parametrize(
    ("way", "right", "wrong"),
    sampled(
        [
            ("launch", "own.before + first + row", "own.before + first"),
            ("bulk", "(item.first_row / 64 + item.sequence) * 64", "item.first_row / 64 * 64"),
            ("launch", "first_of(middle) > place", "first_of(middle) >= place"),
            ("bulk", "i < num_query_sums(args)", "i < num_query_sums(args) / 4"),
            ("bulk", "int(threadIdx.x) / 32;\n  if (first_row < 0 || ", "0;\n  if (first_row < 0 || "),
            ("launch", "if (item.num_keys == 0) return;", "if (item.num_rows == 0) return;"),
            ("bulk", "args.dk += item.first_key", "args.dk += 0 * item.first_key"),
            ("atomics", "filled_row(item) * 32LL", "0"),
        ],
        1,
        thorough=2,
    ),
)
def test_mistakes_are_found(way: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert right in kernel.source
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        check(replace(kernel, source=kernel.source.replace(right, wrong)))


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_reads_well(way: str) -> None:
    scoring = Scoring(window=(9, 0), bias="f32", sinks=True)
    schedule = "together" if WAYS[way][0].schedule == "weights_first" else WAYS[way][0].schedule
    kernel = render(
        replace(WAYS[way][0], schedule=schedule), replace(WAYS[way][1], causal=True, scoring=scoring), H200
    )
    assert_tidy(kernel.source, way, longest=160)
    assert "stride_batch" not in kernel.source
    roles = [each.role for each in kernel.launches]
    sums = way.startswith(("bulk", "atomics"))
    by = ["kernel", "postprocess"] if sums else ["queries", "kernel"]
    assert roles == [PLAN_ROLE, "statistics", *by, "gradient_of_bias", "gradient_of_sinks"]


def test_the_workspace_has_room_for_whole_tiles_of_each_sequence() -> None:
    sizes = {"batch": 5, "total_q": 100, "total_k": 170, "num_q_heads": 4, "num_kv_heads": 2}
    of_rows, of_keys = kernel_of("launch"), kernel_of("bulk")
    # Two numbers of each row of four heads: 100 rows are three tiles of 32, and five more that may be begun.
    assert of_rows.workspace_bytes(sizes) == 2 * 4 * 4 * 8 * 32
    # The same of tiles of 64, and sums of 32 columns.
    assert of_keys.workspace_bytes(sizes) == (2 + 32) * 4 * 4 * 6 * 64
    assert of_rows.num_plan_ints(sizes) == (100 // 64 + 5 + 1 + 170 // 64 + 5 + 1) * ITEM_INTS
    assert of_keys.num_plan_ints(sizes) == (170 // 64 + 5 + 1) * ITEM_INTS
    (last,) = (each for each in of_keys.launches if each.role == "postprocess")
    assert last.grid_of(sizes) == (100 // 64 + 5) * 4 and last.threads == 128


def test_maps_are_of_rows_that_end_where_told() -> None:
    kernel = kernel_of("launch")
    strides = {each.name: (0, 32, 128) for each in kernel.problem.operation.strided}
    told = dict.fromkeys(strides, 1 << 20)
    sizes = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 50, "seqlen_k": 50}
    arguments = make_arguments(
        kernel.problem, told, strides, scale=1.0, sizes={**sizes, "total_q": 70, "total_k": 90}
    )
    q, _, k, _ = describe_maps(kernel.launch, kernel.problem, arguments)
    assert q.sizes == (32, MAP_ROWS_END, 4, 71, MAP_ROWS_END + 1)
    assert k.sizes == (32, MAP_ROWS_END, 2, 91, MAP_ROWS_END + 1)


LONG = replace(PROBLEM, varlen="uniform:512-4096", batch=8, seqlen_q=4096, seqlen_k=4096, causal=True)


@pytest.mark.parametrize("d", sampled([256, 128, 64], 1, thorough=0))
def test_legal_variants_render(d: int) -> None:
    problem = replace(LONG, head_dim=d, head_dim_v=d)
    legal = enumerate_space(WgmmaBackward, problem, H200).legal
    assert {each.dq_path for each in legal} >= {"launch", "bulk"}
    for variant in legal[:: len(legal) // 10]:
        assert_tidy(render(variant, problem, H200).source, variant.name, longest=160)


@pytest.mark.parametrize(("d", "variant"), [(64, replace(SUMS, bc=128, br=128)), (128, WgmmaBackward())])
def test_long_sequences_are_predicted_to_be_faster_than_by_warps(d: int, variant: WgmmaBackward) -> None:
    problem = replace(LONG, head_dim=d, head_dim_v=d, num_q_heads=16, num_kv_heads=16)
    other = FAMILIES["mma-backward"]()
    assert predict(variant, problem, H200).median_us < 0.7 * predict(other, problem, H200).median_us


#: Those that serve packed sequences: a plan's blocks have one turn each.
FULL_OF_PACKED = [tiles for tiles, (variant, *_) in FULL.items() if not variant.takes_turns]


@pytest.mark.nvcc
@pytest.mark.parametrize("tiles", sampled(FULL_OF_PACKED, 0, thorough=2))
def test_tiles_that_fill_registers_do_not_spill(
    tiles: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    try:
        toolchain = cuda_toolchain(90)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    variant, d, dv = FULL[tiles]
    build = toolchain.build(render(variant, replace(LONG, head_dim=d, head_dim_v=dv), H200))
    assert build.spill_bytes == 0
