"""Kernels of latent attention on the emulated card, their sources, and the rules of what may run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families.latent.family import Latent
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import LaunchError
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.predict.cost_model import predict
from flashgen.tuner.prove.sanitizers import for_sanitizer

from tests.support.covering import Setting
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, check, inputs, is_caught, needs_compiler

H200 = preset("h200")
#: As models have it, and as small as it may be: with columns that are no values, few, and none.
WHOLE = Problem(
    dtype="bf16", num_q_heads=128, num_kv_heads=1, seqlen_q=1, head_dim=576, head_dim_v=512, latent=True
)
SMALL = replace(WHOLE, num_q_heads=16, seqlen_q=2, head_dim=136, head_dim_v=128)
DIMS = ((136, 128), (128, 128), (192, 128), (320, 256))
#: Of each way in which blocks and chunks go together.
WAYS = {
    "alone": Latent(),
    "chunks by three": Latent(boxes=3),
    "all at once": Latent(boxes=9, splits=2),
    "three blocks": Latent(splits=3),
    "four blocks": Latent(splits=4),
    "sixteen blocks": Latent(splits=16),
    "by the workspace": Latent(workspace_splits=3),
    "by the workspace, many": Latent(workspace_splits=6, boxes=3),
    "by way of L2": Latent(workspace_splits=2, l2_ahead=2),
}


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", sampled(WAYS, 1))
def test_values_are_columns_of_keys(way: str, causal: bool) -> None:
    problem = replace(SMALL, causal=causal)
    assert 0 < check(Setting(WAYS[way], problem, H200), seed=2) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "dims", "splits"),
    sampled(
        [(dtype, dims, splits) for splits in (1, 4) for dims in DIMS for dtype in ("bf16", "f16")],
        0,
        thorough=3,
    ),
)
def test_problems_of_all_kinds_are_right(dtype: str, dims: tuple[int, int], splits: int) -> None:
    problem = replace(SMALL, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], causal=dtype == "f16")
    setting = Setting(Latent(splits=splits), problem, H200)
    assert 0 < check(setting, seed=splits, depth="full") <= problem.tolerance


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["alone", "chunks by three", "three blocks"])
def test_all_columns_of_models_are_right(way: str, causal: bool) -> None:
    problem = replace(WHOLE, causal=causal)
    assert 0 < check(Setting(WAYS[way], problem, H200), seed=4) <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize(("page_size", "splits"), sampled([(64, 1), (16, 3), (128, 2), (8, 1), (24, 4)], 1))
def test_caches_may_lie_in_pages(page_size: int, splits: int) -> None:
    problem = replace(SMALL, page_size=page_size, causal=splits > 1)
    variant = Latent(workspace_splits=splits) if page_size % 24 == 0 else Latent(splits=splits)
    variant = replace(variant, l2_ahead=(page_size // 8 + 1) % 3)
    assert 0 < check(Setting(variant, problem, H200), seed=5) <= problem.tolerance


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("page_size", [8, 64, 256])
def test_ragged_caches_of_all_kinds_are_right(page_size: int) -> None:
    problem = replace(SMALL, dtype="f16", page_size=page_size)
    setting = Setting(Latent(splits=1 + page_size // 64), problem, H200)
    assert 0 < check(setting, seed=page_size, depth="full") <= problem.tolerance


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("variant", [Latent(), Latent(splits=2), Latent(workspace_splits=4)])
def test_kernels_pass_the_sanitizer(variant: Latent) -> None:
    check(Setting(variant, replace(SMALL, causal=True), H200), seed=1, sanitize=True)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("variant", [Latent(splits=4), Latent(workspace_splits=5)])
def test_a_kernel_makes_the_same_bits_in_any_order(variant: Latent) -> None:
    problem = replace(SMALL, causal=True)
    build = SimDevice("h200", H200).toolchain().build(render(variant, problem, H200))
    q, k, _ = inputs(problem, 3, 777, 0.1, heads=32, kv_heads=1)
    v = k[..., : problem.head_dim_v]
    found = [SimRunner(H200, seed=seed).attend(build, q, k, v, scale=0.1)[0] for seed in range(6)]
    assert all(np.array_equal(found[0].view(np.uint16), each.view(np.uint16)) for each in found)


@needs_compiler
def test_accesses_to_shared_memory_are_ordered() -> None:
    kernel = render(Latent(boxes=3), replace(SMALL, dtype="f16", page_size=64, causal=True), H200)
    device = SimDevice("emulated", H200, races=True)
    assert 0 < validate(device.open(), device.toolchain().build(kernel), seed=1) <= kernel.problem.tolerance
    # Without it lanes overwrite maxima that others have read: a vote in between orders no memory.
    fence = "__syncwarp();  // all lanes have read the maxima"
    assert fence in kernel.source
    without = device.toolchain().build(replace(kernel, source=kernel.source.replace(fence, "//")))
    with pytest.raises(LaunchError, match=r"race: .* writes byte \d+ .*, which thread \d+, .* has read"):
        validate(device.open(), without, seed=1)


@needs_compiler
def test_what_racecheck_sees_is_right_as_well() -> None:
    kernel = for_sanitizer(render(Latent(), replace(SMALL, dtype="f16", causal=True), H200), "racecheck")
    device = SimDevice("emulated", H200)
    assert 0 < validate(device.open(), device.toolchain().build(kernel), seed=6) <= kernel.problem.tolerance


#: Passages of a kernel, by how many blocks share keys, and what breaks it.
MISTAKES = [
    (1, "if (n >= first_partial) mask(s, ends, n * kBc);", ""),
    (1, "if (grown) rescale_output(o, rescale);", ""),
    (1, "if (follow_maximum(smem.row_max, row, softmax, rescale)) rescale_output(o, rescale);", ""),
    (1, "named_barrier_sync(kWeightsBarrier + 1, kConsumerThreads);", ""),
    (1, "if (place == kRestChunks) barrier_wait(&smem.half_empty[stage][0], before);", ""),
    (1, "if (place == 0) barrier_wait(&smem.rest_empty[stage], before);", ""),
    (
        1,
        "named_barrier_sync(kConsumersBarrier, kConsumerThreads);\n  const float row_sum",
        "  const float row_sum",
    ),
    (1, "consumer * kHalf + group * 32);", "group * 32);"),
    (2, "named_barrier_sync(kConsumersBarrier, kConsumerThreads);  // no product", "//"),
    (2, "cluster_sync();\n  put_together", "put_together"),
    (2, "cluster_sync();  // a block's shared memory", "//"),
    (2, "transpose_quad(pieces);", ""),
    (2, "weights[i][h] = exp2f(weights[i][h] - base);", "weights[i][h] = 1.0f;"),
    (2, "consumer, group * 4 + t, thread", "consumer, t, thread"),
]


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(("splits", "right", "wrong"), MISTAKES)
def test_a_mistake_is_caught(splits: int, right: str, wrong: str) -> None:
    kernel = render(Latent(splits=splits), replace(SMALL, dtype="f16", causal=True), H200)
    shapes = [(3, 470, 0.3), (5, 700, 0.3)]
    assert is_caught(kernel, right, wrong, H200, shapes, heads=32, kv_heads=1)


@pytest.mark.parametrize("way", WAYS)
def test_sources_are_tidy(way: str) -> None:
    for causal in (False, True):
        for page_size in (0, 16):
            problem = replace(WHOLE, causal=causal, page_size=page_size)
            kernel = render(WAYS[way], problem, H200)
            # Names are long, and lines that have them.
            assert_tidy(kernel.source.replace(kernel.entry, "attention"), way, longest=121)


@pytest.mark.parametrize("page_size", [0, 16])
def test_tiles_come_to_l2_before_there_is_room(page_size: int) -> None:
    problem = replace(WHOLE, page_size=page_size)
    source = render(Latent(l2_ahead=2), problem, H200).source
    passage = source[source.index("void produce_keys(") : source.index("void walk_of_first(")]
    assert 0 < passage.index("tma_prefetch") < passage.index("barrier_wait(&smem.rest_empty")
    assert "first_key - kL2Ahead * kBc" in passage
    assert "prefetch.tensor." not in render(Latent(), problem, H200).source


@pytest.mark.parametrize(("page_size", "by_lanes"), [(8, True), (32, True), (64, False), (192, False)])
def test_one_thread_copies_tiles_that_are_of_one_page(page_size: int, by_lanes: bool) -> None:
    source = render(Latent(l2_ahead=1), replace(WHOLE, page_size=page_size), H200).source
    assert ("kPieces" in source, "if (warp == 0 && elect_one())" in source) == (by_lanes, not by_lanes)


def test_a_second_tile_is_asked_for_once_queries_are_there() -> None:
    source = render(Latent(), WHOLE, H200).source
    begun = source.index("load_queries(args, smem.q, tile, thread);")
    assert "if (i == 1) barrier_wait(&smem.queries, 0);" in source
    assert (
        begun
        < source.index("barrier_arrive(&smem.queries)")
        < source.index("walk_of_first(args, smem", begun)
    )


def test_no_array_of_values_is_asked_for() -> None:
    source = render(Latent(), WHOLE, H200).source
    assert "args.v" not in source and "args->v" not in source
    assert "CUtensorMap k;" in source


@pytest.mark.parametrize(
    ("problem", "card", "why"),
    [
        (replace(WHOLE, latent=False, head_dim=192, head_dim_v=128), "h200", "computes latent attention"),
        (WHOLE, "a100", "sm_90 alone"),
        (replace(WHOLE, head_dim_v=64), "h200", "64 columns of values are not multiples of 128"),
        (replace(WHOLE, head_dim=516), "h200", "516 elements are not multiples of 16 bytes"),
        (replace(WHOLE, scoring=Scoring(softcap=30.0)), "h200", "knows the causal mask alone"),
        (replace(WHOLE, varlen="same"), "h200", "takes dense, paged arrays"),
        (replace(WHOLE, page_size=20), "h200", "pages of 20 keys are no whole groups of 8 rows"),
    ],
)
def test_what_it_does_not_serve_is_told(problem: Problem, card: str, why: str) -> None:
    with pytest.raises(Illegal, match=why):
        Latent().check(problem, preset(card))


@pytest.mark.parametrize("family", [Wgmma, Mma])
def test_families_that_read_values_refuse_it(family: type) -> None:
    with pytest.raises(Illegal, match="this problem is latent attention"):
        family().check(WHOLE, H200)


#: By multiply-adds, for any card: dims, card and what else is asked.
PLAIN_WAYS = {
    "dense": (40, 24, "gtx-1080", {"causal": True}),
    "pages": (36, 20, "h200", {"page_size": 16}),
    "packed": (40, 32, "a100", {"varlen": "uniform:5-50", "seqlen_q": 50, "seqlen_k": 50, "batch": 8}),
    "scores": (40, 24, "h200", {"scoring": Scoring(window=(20, 0), softcap=20.0)}),
}


@needs_compiler
@pytest.mark.parametrize("way", sampled(PLAIN_WAYS, 1))
def test_float32_is_multiplied_by_any_card(way: str) -> None:
    d, dv, card, asked = PLAIN_WAYS[way]
    problem = Problem(num_q_heads=4, num_kv_heads=1, head_dim=d, head_dim_v=dv, latent=True, **asked)
    variant = Simt(br=32, bc=16, threads_per_block=64, min_blocks=1)
    assert 0 < check(Setting(variant, problem, preset(card)), seed=3) <= problem.tolerance
    kernel = render(variant, problem, preset(card))
    assert_tidy(kernel.source.replace(kernel.entry, "attention"), way, longest=126)


def test_all_columns_of_models_have_room_on_cards_with_large_shared_memories() -> None:
    space = enumerate_space(Simt, replace(WHOLE, dtype="f32"), preset("a100"))
    assert len(space.legal) > 0


def test_keys_are_split_where_rows_are_few() -> None:
    few = replace(WHOLE, batch=32, num_q_heads=64, seqlen_k=8192)
    times = {splits: predict(Latent(splits=splits), few, H200).median_us for splits in (1, 2)}
    assert times[2] < times[1]
    assert Latent(splits=16).advice(few, H200) is not None
