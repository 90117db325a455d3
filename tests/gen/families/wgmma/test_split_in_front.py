"""Hopper kernels of float32 that launches in front split: on the emulated card, rules, what is counted."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.append import Append
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.registers import consumer_registers, needed_registers, producer_registers
from flashgen.gen.handover.split_tiles import UNIT_WORDS
from flashgen.gen.launch import MAIN_ROLE, QUERY_TILES_ROLE, WALKED_TILES_ROLE
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.scores import scores_of
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import compare
from flashgen.tuner.predict.cost_model import predict
from flashgen.tuner.prove.sanitizers import for_sanitizer

from tests.support.covering import IN_FRONT_HEAD_DIMS, Setting, draw
from tests.support.depth import sampled
from tests.support.emulated import COURSES, assert_tidy, check, inputs, is_caught, needs_compiler

H200 = preset("h200")
PARTED = Problem(precision="3xf16", head_dim=16, head_dim_v=16, num_q_heads=4, num_kv_heads=2)
FRONT = Wgmma(split="in_front", br=128, bc=32)
#: What no legal kernel of this kind has otherwise.
HELD = ("split", "split_by", "pack_heads", "splits", "workspace_splits", "o_apart", "p_in_shared", "weights")
HELD += ("bias_stages", "bias_heads", "seen_bits", "q_in_registers", "poly_exp", "cluster_over", "cluster")
HELD += ("tail", "tangent", "values", "promotion", "copiers", "far_keys")
#: Blocks that stay and that do not, both schedules, tiles of keys of which 64 are not a multiple, and outputs
#: summed at once, some columns at a time, and what is left of them.
WAYS: dict[str, tuple[Wgmma, dict[str, int]]] = {
    "overlapped": (replace(FRONT, bc=80), {"head_dim": 40, "head_dim_v": 40}),
    "chained": (
        replace(FRONT, br=192, bc=48, schedule="chained", order_of_groups="exponentials", persistent=False),
        {"head_dim": 64, "head_dim_v": 64},
    ),
    "three consumers": (
        replace(FRONT, br=192, bc=64, order_of_groups="products", k_stages=3, v_stages=2),
        {"head_dim": 64, "head_dim_v": 64},
    ),
    "one consumer": (
        replace(FRONT, br=64, bc=16, k_stages=3, v_stages=3, rescale="always"),
        {"head_dim": 36, "head_dim_v": 24},
    ),
    "columns apart": (
        replace(FRONT, bc=32, summed_columns=64, order_of_groups="products"),
        {"head_dim": 128, "head_dim_v": 128},
    ),
    "fewer columns at last": (
        replace(FRONT, bc=32, summed_columns=64, schedule="chained", q_stages=2),
        {"head_dim": 64, "head_dim_v": 160},
    ),
    "two chunks at once": (
        replace(FRONT, bc=32, summed_columns=128, persistent=False, v_stages=1),
        {"head_dim": 160, "head_dim_v": 160},
    ),
    "wide": (
        replace(FRONT, bc=32, summed_columns=64, v_stages=1, persistent=False),
        {"head_dim": 256, "head_dim_v": 256},
    ),
    "wide, chained": (
        replace(FRONT, br=64, bc=32, summed_columns=64, persistent=False, schedule="chained"),
        {"head_dim": 256, "head_dim_v": 256},
    ),
}


def setting_of(way: str, *, causal: bool = False) -> Setting:
    variant, dims = WAYS[way]
    return Setting(variant, replace(PARTED, causal=causal, **dims), H200)  # type: ignore[arg-type]


# -- numerics -------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("way", "causal"), sampled([(way, causal) for way in WAYS for causal in (False, True)], 4, thorough=16)
)
def test_outputs_are_those_of_float64(way, causal):
    setting = setting_of(way, causal=causal)
    assert 0 < check(setting, seed=5) <= setting.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(WAYS, 1, thorough=4))
def test_outputs_are_right_at_all_lengths(way):
    setting = setting_of(way, causal=True)
    assert 0 < check(setting, seed=3, depth="full") <= setting.problem.tolerance


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("dims", IN_FRONT_HEAD_DIMS)
def test_legal_variants_are_right(dims):
    rng, held = random.Random(sum(dims)), {name: getattr(FRONT, name) for name in HELD}
    for causal in (False, True):
        problem = replace(PARTED, head_dim=dims[0], head_dim_v=dims[1], causal=causal)
        for variant in draw(Wgmma, problem, H200, 2, rng, held):
            setting = Setting(variant, problem, H200)
            assert 0 < check(setting, seed=3) <= problem.tolerance, setting.name


@needs_compiler
@pytest.mark.parametrize("way", sampled(["overlapped", "one consumer", "fewer columns at last"], 1))
def test_nothing_is_read_or_written_out_of_bounds(way):
    check(setting_of(way, causal=True), seed=1, sanitize=True)


@needs_compiler
def test_a_kernel_is_right_in_any_order():
    """To the bit; blocks that stay for several tiles and warpgroups that see no key; rows that see none, a
    negative scale, and none."""
    problem, limits = replace(PARTED, causal=True), replace(H200, num_sms=2)
    variant = replace(FRONT, schedule="chained", order_of_groups="products", q_stages=2)
    built = SimDevice("h200", limits).toolchain().build(render(variant, problem, limits))
    for rows, keys, scale in ((170, 177, 0.25), (150, 45, -0.3), (33, 50, 0.0)):
        q, k, v = inputs(problem, rows, keys, scale, "rising")
        results = [
            SimRunner(limits, seed=seed).attend(built, q, k, v, scale=scale, want_lse=True)
            for seed in range(8)
        ]
        assert len({(o.tobytes(), lse.tobytes()) for o, lse in results if lse is not None}) == 1
        o, lse = results[0]
        expected = reference.attention(q, k, v, scale=scale, scores=scores_of(causal=True))
        compare(o, lse, expected, v, problem, f"{rows} rows, {keys} keys")


@needs_compiler
@pytest.mark.parametrize("bc", sampled([16, 48, 96], 1))
def test_rows_of_any_size_may_be_of_one_tile(bc):
    """Of each array in turn, sixteen rows of each size, and every eighth row larger or smaller than the
    others by far: one unit for a tile loses no more than the guard allows, whose rows are computed again."""
    built = SimDevice("h200", H200).toolchain().build(render(replace(FRONT, br=64, bc=bc), PARTED, H200))
    runner, rng = SimRunner(H200), np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, n, 16)) for n in (80, 80, 80))
    courses = {name: np.repeat(sizes, 16) for name, sizes in COURSES.items()}
    courses["large among small"] = np.where(np.arange(80) % 8 == 3, 1e4, 1e-4)
    courses["small among large"] = np.where(np.arange(80) % 8 == 3, 1e-6, 1e3)
    for course, sizes in courses.items():
        factors = sizes[:, None]
        most = factors.max() or 1.0
        for arrays in ((q, k, v * factors), (q / most, k * factors, v), (q * factors, k / most, v)):
            floats = [array.astype(np.float32) for array in arrays]
            o, _ = runner.attend(built, *floats, scale=0.25)
            expected = reference.attention(*floats, scale=0.25).o
            distance = np.linalg.norm(o - expected)
            assert distance <= PARTED.tolerance * np.linalg.norm(expected), course


@needs_compiler
@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
def test_tiny_queries_of_huge_keys_are_right(scale):
    """And a scale of zero, which makes all keys alike, however large."""
    built = SimDevice("h200", H200).toolchain().build(render(replace(FRONT, br=64), PARTED, H200))
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 1, n, 16)).astype(np.float32) for n in (48, 80, 80))
    arrays = q * np.float32(1e-28), k * np.float32(1e28), v
    o, _ = SimRunner(H200).attend(built, *arrays, scale=scale)
    expected = reference.attention(*arrays, scale=scale).o
    assert np.linalg.norm(o - expected) <= PARTED.tolerance * np.linalg.norm(expected)


@needs_compiler
def test_racecheck_gets_the_same_kernel_with_more_arrivals():
    kernel = render(FRONT, PARTED, H200)
    q, k, v = inputs(PARTED, 150, 165, 0.25, "rising")
    results = []
    for tool in ("memcheck", "racecheck"):
        built = SimDevice("h200", H200).toolchain().build(for_sanitizer(kernel, tool))
        o, lse = SimRunner(H200).attend(built, q, k, v, scale=0.25, want_lse=True)
        assert lse is not None
        results.append((o.tobytes(), lse.tobytes()))
    assert results[0] == results[1]


# -- mistakes -------------------------------------------------------------------------------------------

MISTAKES = {
    "tiles in one place": ("+ nth * kQueryWords", ""),
    "keys of another tile": (
        "static_cast<long long>(nth) * kKeyWords",
        "static_cast<long long>(0) * kKeyWords",
    ),
    "values of another head": (
        "values = values_of_head(args, tile.batch, kv_head)",
        "values = values_of_head(args, tile.batch, 0)",
    ),
    "no unit of keys": ("fmaxf(scale[0] * unit, 1e-37f)", "scale[0]"),
    "no unit of values": ("o[i] = fmaf(tile_o[i], unit, o[i])", "o[i] = tile_o[i] + o[i]"),
    "not swizzled": ("(piece ^ row % 8) * 16", "piece * 16"),
    "rows behind the last": ("row < count && ", ""),
    "units of no warp": ("warp < kSplitThreads / 32; ++warp) largest", "warp < 0; ++warp) largest"),
    "another array's units": ("  __syncthreads();  // nobody reads", "  // nobody reads"),
    "values not waited for": ("barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);\n    split", "split"),
    "left by one warp": (
        "barrier_init(&smem.k_empty[i], kArrivals * 4 *",
        "barrier_init(&smem.k_empty[i], kArrivals *",
    ),
    "fewer bytes awaited": ("constexpr unsigned kKBytes = kBc", "constexpr unsigned kKBytes = 16 + kBc"),
    "sign forgotten": ("args.scale < 0.0f ? -1.0f :", "args.scale < 0.0f ? 1.0f :"),
}


@needs_compiler
@pytest.mark.parametrize("mistake", sampled(MISTAKES, 4, thorough=13))
def test_mistakes_are_caught(mistake):
    limits = replace(H200, num_sms=1)
    kernel = render(FRONT, PARTED, limits)
    right, wrong = MISTAKES[mistake]
    assert is_caught(kernel, right, wrong, limits, ((150, 165, 0.2), (150, 13, -0.2)))


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("v + (kFirst / kChunk * sizeof(VChunk) >> 4)", "v"),
        ("accumulate<kFirst>(o, last_o, unit);", ""),
        (
            "      add_other_columns(o, tile_o, p, v_desc",
            "      if (n > 0) add_other_columns(o, tile_o, p, v_desc",
        ),
    ],
    ids=["first columns again", "last columns forgotten", "columns of a tile forgotten"],
)
def test_mistakes_with_columns_apart_are_caught(right, wrong):
    limits, problem = replace(H200, num_sms=1), replace(PARTED, head_dim_v=160)
    kernel = render(replace(FRONT, summed_columns=64), problem, limits)
    assert is_caught(kernel, right, wrong, limits, ((70, 165, 0.2),))


# -- what is launched, and what is counted --------------------------------------------------------------


def test_launches_in_front_leave_tiles_in_the_workspace():
    problem = replace(PARTED, batch=3, head_dim=72, head_dim_v=40, seqlen_q=70, seqlen_k=100)
    kernel = render(replace(FRONT, bc=48), problem, H200)
    assert [each.role for each in kernel.launches] == [QUERY_TILES_ROLE, WALKED_TILES_ROLE, MAIN_ROLE]
    assert [each.grid(problem) for each in kernel.launches] == [3 * 4 * 2, 3 * 2 * 3, 3 * 4]
    assert not any(each.tensor_maps for each in kernel.launches)
    queries = 3 * 4 * 2 * (64 * 128 + UNIT_WORDS)
    keys, values = (3 * 2 * 3 * (48 * columns + UNIT_WORDS) for columns in (128, 64))
    sizes = {name: getattr(problem, name) for name in ("batch", "num_q_heads", "num_kv_heads")}
    sizes |= {"seqlen_q": 70, "seqlen_k": 100}
    assert kernel.workspace is not None and all(each % 64 == 0 for each in (queries, keys, values))
    assert kernel.workspace_bytes(sizes) == 4 * (queries + keys + values)
    assert "TensorMaps" not in kernel.source and "maps" not in kernel.source
    # No keys: nothing is split of them.
    assert kernel.launches[1].grid_of({**sizes, "seqlen_k": 0}) == 0


def test_blocks_split_nothing_and_consumers_have_what_that_took():
    problem = replace(PARTED, head_dim=64, head_dim_v=64)
    front, place = (replace(FRONT, br=192, bc=48, split=split) for split in ("in_front", "in_place"))
    assert producer_registers(front, problem, H200) == 32 < producer_registers(place, problem, H200) == 72
    assert consumer_registers(front, problem, H200) == 160 > consumer_registers(place, problem, H200) == 144
    apart = replace(FRONT, summed_columns=64)
    wide = replace(PARTED, head_dim=128, head_dim_v=128)
    assert needed_registers(FRONT, wide) - needed_registers(apart, wide) == 32
    assert "split_rows" not in render(front, problem, H200).source


def test_work_is_that_of_copies_and_of_launches_in_front():
    problem = replace(PARTED, head_dim=64, head_dim_v=64, num_q_heads=4, num_kv_heads=2)
    front, place = (
        replace(FRONT, br=192, bc=48, split=split).work(problem, H200) for split in ("in_front", "in_place")
    )
    assert (front.score_cycles, front.output_cycles) == (place.score_cycles, place.output_cycles)
    assert front.split_rounds == front.splitter_slots == 0 < front.split_slots < place.split_slots
    # They arrive, and are neither read nor written where they lie.
    assert place.wavefronts - front.wavefronts == pytest.approx(2 * 48 * 128 * 4 / 128 / 3)
    assert (front.launches_in_front, place.launches_in_front) == (2, 0)
    elements = problem.batch * 64 * (4 * problem.seqlen_q + 2 * 2 * problem.seqlen_k)
    assert front.bytes_in_front == 2 * 4 * elements  # read, and written as many
    apart = replace(FRONT, summed_columns=64).work(replace(problem, head_dim_v=128), H200)
    assert (apart.late_outputs, front.late_outputs) == (0.5, 0.0)


def test_predictions_prefer_it_where_there_is_much_to_split():
    problem = Problem(precision="3xf16", head_dim=128, head_dim_v=128)
    front, place = (Wgmma(br=128, bc=48, split=split) for split in ("in_front", "in_place"))
    found = predict(front, problem, H200)
    assert found.median_us < 0.85 * predict(place, problem, H200).median_us
    assert 0 < found.parts_us["launches in front"] < 0.1 * found.median_us
    few = replace(problem, seqlen_q=64, seqlen_k=64)
    small, in_place = (replace(each, br=64, bc=32) for each in (front, place))
    assert predict(small, few, H200).median_us > predict(in_place, few, H200).median_us


# -- sources and rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_sources_are_tidy(way):
    setting = setting_of(way, causal=True)
    kernel = render(setting.variant, setting.problem, H200)
    assert kernel.sm == "sm_90a" and kernel.is_deterministic
    assert_tidy(kernel.source, setting.name, longest=180)


@pytest.mark.parametrize(
    ("changes", "variant", "message"),
    [
        ({"dtype": "bf16", "precision": "auto"}, FRONT, "combination: split=in_front: bf16 is not split"),
        (
            {"varlen": "uniform:8-64"},
            FRONT,
            "combination: split=in_front: made for queries and keys that lie",
        ),
        ({"page_size": 16}, FRONT, "combination: split=in_front: made for queries and keys that lie"),
        ({"append": Append()}, FRONT, "combination: split=in_front: made for queries and keys that lie"),
        ({}, replace(FRONT, split_by="tiles"), "combination: split_by=tiles: no block splits anything"),
        (
            {},
            replace(FRONT, cluster=2),
            "combination: cluster=2: each block copies tiles in parts for itself",
        ),
        (
            {},
            replace(FRONT, summed_columns=64),
            "combination: summed_columns=64: 16 columns of values are no",
        ),
        ({}, Wgmma(bc=48, summed_columns=64), "combination: summed_columns=64: not made for split=in_place"),
        (
            {"head_dim": 256, "head_dim_v": 256},
            replace(FRONT, summed_columns=64, v_stages=1),
            "registers: about 256 per computing thread, 232 allowed",
        ),
        (
            {"head_dim": 256, "head_dim_v": 256},
            replace(FRONT, summed_columns=64, persistent=False),
            "shared memory: needs 263168 bytes, sm_90 allows 232448",
        ),
    ],
)
def test_rules(changes, variant, message):
    with pytest.raises(Illegal, match=message):
        render(variant, replace(PARTED, **changes), H200)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_some_variant_serves_every_multiple_of_eight(head_dim):
    problem = Problem(precision="3xf16", head_dim=head_dim, head_dim_v=head_dim)
    columns = 64 if head_dim > 64 else 0
    variant = replace(FRONT, v_stages=1, summed_columns=columns, persistent=False)
    variant.check(problem, H200)


@pytest.mark.nvcc
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_spilled(way):
    try:
        toolchain = cuda_toolchain(90)
    except FlashgenError as error:
        pytest.skip(str(error))
    for causal in (False, True):
        setting = setting_of(way, causal=causal)
        build = toolchain.build(render(setting.variant, setting.problem, H200))
        assert build.spill_bytes == 0, setting.name
