"""Hopper kernels on the emulated card, their sources, and the rules of what may run."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
from flashgen.gen.emit.cuda import emit_cuda
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.registers import needed_registers
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.scores import scores_of
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.evaluate import reference
from flashgen.tuner.predict.cost_model import predict

from tests.support.covering import (
    OF_16_BITS,
    WGMMA_HEAD_DIMS,
    WGMMA_LOOSE,
    WGMMA_NUMBERS,
    Setting,
    draw,
    each_value,
    traits,
    wgmma_settings,
)
from tests.support.depth import sampled
from tests.support.emulated import (
    assert_a_forgotten_mask_is_caught,
    assert_all_right,
    assert_tidy,
    attend,
    check,
    inputs,
    is_caught,
    needs_compiler,
)

H200 = preset("h200")
RELEASE_OF_Q = "barrier_arrive(&smem.q_empty[q_pipe.stage]);"
LAST_SCORES = f"if (leader && n == first_tile) {RELEASE_OF_Q}"
CONSUMER_MEETS = "named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);"
#: Tests that share the cover, and what of it has every value, so that several workers can.
SHARDS, SHARDS_OF_VALUES = 16, 4
HALF, BRAIN = Problem(dtype="f16"), Problem(dtype="bf16")


@cache
def settings() -> list[Setting]:
    return wgmma_settings([H200])


# -- numerics -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("shard", range(SHARDS_OF_VALUES))
def test_any_value_of_a_parameter_is_right(shard):
    assert_all_right(list(enumerate(each_value(settings(), 0)))[shard::SHARDS_OF_VALUES])


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("shard", range(SHARDS))
def test_any_two_values_together_are_right(shard):
    assert_all_right(list(enumerate(settings()))[shard::SHARDS])


@pytest.mark.thorough
def test_the_cover_leaves_nothing_out():
    singles = set().union(*map(traits, settings()))
    # Tangents and stages of biases are of changed scores; float32, eight bits and pages have covers and tests
    # of their own.
    others = (
        "tangent",
        "bias_stages",
        "bias_heads",
        "seen_bits",
        "far_keys",
        "values",
        "powers",
        "score_type",
        "promotion",
        "copiers",
        "last_turn",
    )
    chosen = [p for p in Wgmma.parameters() if p.name not in others]
    choices = {(p.name, choice) for p in chosen for choice in p.choices}
    left = {("split_by", "tiles"), ("split", "in_front"), ("weights", "e4m3")}
    assert singles >= choices - left - {("summed_columns", columns) for columns in (64, 128)}
    assert singles >= {("causal", False), ("causal", True)}
    pairs = {frozenset(pair) for s in settings() for pair in combinations(traits(s), 2)}
    for numbers in WGMMA_NUMBERS:
        for dims in WGMMA_HEAD_DIMS:
            assert frozenset([("numbers", numbers), ("dims", dims)]) in pairs
    rng = random.Random(5)
    for _ in range(40):
        dtype, precision = rng.choice(WGMMA_NUMBERS)
        d, dv = rng.choice(WGMMA_HEAD_DIMS)
        problem = Problem(
            dtype=dtype, precision=precision, head_dim=d, head_dim_v=dv, causal=rng.random() < 0.5
        )
        drawn_here = draw(Wgmma, problem, H200, 8, rng, OF_16_BITS)
        assert drawn_here
        for variant in drawn_here:
            drawn = Setting(variant, problem, H200)
            found = [each for each in traits(drawn) if each[0] not in WGMMA_LOOSE]
            missing = [pair for pair in combinations(found, 2) if frozenset(pair) not in pairs]
            assert not missing, drawn.name


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (replace(BRAIN, head_dim=64, head_dim_v=64, causal=True), Wgmma(br=128, bc=32, q_stages=2)),
        (
            replace(HALF, head_dim=40, head_dim_v=72),
            Wgmma(br=64, bc=16, persistent=False, schedule="chained", min_blocks=2),
        ),
    ],
    ids=["bf16", "f16"],
)
def test_the_full_suite(problem, variant):
    assert 0 < check(Setting(variant, problem, H200), seed=3, depth="full") <= problem.tolerance


#: As models have it whose keys carry positions in columns of their own.
NARROW_VALUES = replace(BRAIN, head_dim=192, head_dim_v=128, causal=True)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("varlen", ["", "uniform:1-4096"])
def test_values_may_be_narrower_than_keys(dtype, varlen):
    problem = replace(NARROW_VALUES, dtype=dtype, varlen=varlen)
    variant = Wgmma(br=128, bc=96, q_in_registers=True, o_apart=True)
    assert 0 < check(Setting(variant, problem, H200), seed=3) <= problem.tolerance


def test_narrow_values_leave_room_for_tiles_of_many_keys():
    for variant in (Wgmma(br=128, bc=128), Wgmma(br=192, bc=80, schedule="chained", o_apart=True)):
        variant.check(NARROW_VALUES, H200)
        assert variant.advice(NARROW_VALUES, H200) is None
        with pytest.raises(Illegal):
            variant.check(replace(NARROW_VALUES, head_dim_v=192), H200)


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (replace(BRAIN, head_dim=24, head_dim_v=24, causal=True), Wgmma(br=128, bc=16)),
        (
            replace(HALF, head_dim=72, head_dim_v=8),
            Wgmma(br=64, bc=32, schedule="chained", k_stages=1, v_stages=1),
        ),
        (replace(BRAIN, head_dim=16, head_dim_v=24, causal=True), Wgmma(br=64, bc=32, cluster=2)),
    ],
    ids=["bf16", "f16", "cluster"],
)
def test_kernels_pass_the_sanitizer(problem, variant):
    check(Setting(variant, problem, H200), seed=1, sanitize=True)


@needs_compiler
def test_a_kernel_is_right_in_any_order():
    problem = replace(BRAIN, head_dim=16, head_dim_v=16, causal=True)
    variant = Wgmma(br=128, bc=16, order_of_groups="products")
    built = SimDevice("h200", H200).toolchain().build(render(variant, problem, H200))
    q, k, v = inputs(problem, 170, 177, 0.25)
    outputs = set()
    for seed in range(8):
        o, lse = SimRunner(H200, seed=seed).attend(built, q, k, v, scale=0.25, want_lse=True)
        assert lse is not None
        outputs.add((o.tobytes(), lse.tobytes()))
    assert len(outputs) == 1


@needs_compiler
def test_tiles_are_found_however_many_heads():
    """Of blocks that stay: places are found by multiplying with inverses, exact or not."""
    problem = replace(BRAIN, head_dim=8, head_dim_v=8)
    limits = replace(H200, num_sms=3)
    built = SimDevice("h200", limits).toolchain().build(render(Wgmma(br=64, bc=16), problem, limits))
    for batch, heads, rows in ((1, 1, 1), (7, 1, 65), (1, 7, 130), (5, 3, 64), (3, 11, 129)):
        case = inputs(problem, rows, 9, 0.2, batch=batch, heads=heads, kv_heads=1)
        found = attend(built, case, 0.2, limits, 1)
        assert found is not None, (batch, heads, rows)
        expected = reference.attention(*case, scale=0.2).o
        np.testing.assert_allclose(found[0].astype(np.float64), expected, atol=2e-2)


@needs_compiler
@pytest.mark.parametrize(
    ("schedule", "cluster"), sampled(product(("overlapped", "chained"), (1, 2)), 1, thorough=1)
)
def test_every_synchronisation_of_a_kernel_is_needed(schedule, cluster):
    """Each barrier, wait and fence taken out of the source makes some result wrong or the launch fail, with
    some number of stages."""
    problem = replace(HALF, head_dim=16, head_dim_v=16, causal=True)
    # One block or cluster alone, so that it has several tiles; of the second, the last warpgroup sees
    # nothing; of the first, the first sees fewer keys, be it after another such tile. Keys are several tiles,
    # or one, which lets copies run ahead from one tile of queries to the next.
    limits = replace(H200, num_sms=1)
    variant = Wgmma(br=128, bc=16, schedule=schedule, cluster=cluster)
    kernels = [
        render(replace(variant, k_stages=k, v_stages=v, q_stages=q), problem, limits)
        for k, v, q in ((2, 2, 1), (1, 3, 2), (3, 2, 2))
    ]
    toolchain = SimDevice("h200", limits).toolchain()
    # A negative scale turns the sign of Q in shared memory.
    cases = [
        (inputs(problem, rows, keys, 0.2, "rising"), scale)
        for rows, keys, scale in ((150, 115, 0.2), (150, 13, 0.2), (150, 115, -0.2), (128, 115, 0.2))
    ]
    expected = [
        reference.attention(*case, scale=scale, scores=scores_of(causal=True)).o for case, scale in cases
    ]

    def right(kernel: Kernel) -> bool:
        built = toolchain.build(kernel)
        for (case, scale), o_expected in zip(cases, expected, strict=True):
            for seed in range(4):
                found = attend(built, case, scale, limits, seed)
                if not found or not np.abs(found[0].astype(np.float64) - o_expected).max() < 1e-2:
                    return False
        return True

    assert all(map(right, kernels))
    pattern = re.compile(
        r"(if \([^()]*\) )?(barrier_(wait|arrive|arrive_at|expect)|wgmma_(wait<\d>|fence|commit)"
        r"|fence_(proxy_async|barrier_init)|tma_(wait_read<0>|commit|multicast)|named_barrier_sync"
        r"|__syncthreads|cluster_sync)\([^;{]*\);"
    )

    def calls(source: str) -> list[re.Match[str]]:
        return list(pattern.finditer(source, source.index("// Starts s = q k^T")))

    source = kernels[0].source
    assert len(calls(source)) >= 30
    for index in range(len(calls(source))):
        for kernel in kernels:
            call = calls(kernel.source)[index]
            without = kernel.source[: call.start()] + kernel.source[call.end() :]
            if not right(replace(kernel, source=without)):
                break
        else:
            line = source[: call.start()].count("\n") + 1
            pytest.fail(f"line {line}: {call[0]}")


#: Of clusters: blocks that stay and those with one tile, by every order of tiles.
CLUSTERS = [
    Wgmma(br=64, bc=16, cluster=2),
    Wgmma(br=128, bc=32, q_stages=2, k_stages=1, v_stages=3, schedule="chained", cluster=2),
    Wgmma(br=64, bc=16, persistent=False, cluster=2),
    Wgmma(br=64, bc=48, persistent=False, section=0, q_in_registers=True, cluster=2),
    Wgmma(br=128, bc=16, persistent=False, section=2, order_of_groups="products", cluster=2),
    Wgmma(br=64, bc=32, cluster=4),
]

#: Of clusters over heads, the same, and with what else changes a block's walk.
OVER_HEADS = [
    Wgmma(br=64, bc=32, o_apart=True, cluster_over="heads", cluster=4),
    Wgmma(br=128, bc=16, q_stages=2, schedule="chained", cluster_over="heads", cluster=2),
    Wgmma(br=64, bc=32, persistent=False, section=0, cluster_over="heads", cluster=4, tail=16),
    Wgmma(br=64, bc=16, persistent=False, section=4, q_in_registers=True, cluster_over="heads", cluster=2),
]


#: With narrow last tiles: both schedules, all orders, Q in registers, a cluster.
TAILS = [
    Wgmma(br=128, bc=64, q_stages=2, schedule="chained", order_of_groups="products", tail=16),
    Wgmma(br=64, bc=48, k_stages=1, v_stages=2, rescale="always", schedule="chained", tail=16),
    Wgmma(br=128, bc=32, order_of_groups="exponentials", q_in_registers=True, tail=16),
    Wgmma(br=64, bc=48, rescale="always", o_apart=True, tail=16),
    Wgmma(br=64, bc=32, persistent=False, cluster=2, tail=16),
]


@needs_compiler
@pytest.mark.parametrize("causal", sampled([False, True], 1))
@pytest.mark.parametrize("variant", sampled(TAILS, 3), ids=lambda variant: variant.name)
def test_narrow_last_tiles_are_right(variant, causal):
    """Alone, after whole tiles, full, by one key too long; seen by all rows or by few; warps without rows."""
    problem = replace(BRAIN, head_dim=24, head_dim_v=16, causal=causal)
    limits = replace(H200, num_sms=2)
    built = SimDevice("h200", limits).toolchain().build(render(variant, problem, limits))
    bc, tail = variant.bc, variant.tail
    for rows, keys in ((5, 1), (70, tail), (150, bc + 5), (33, 3 * bc + tail), (40, bc + tail + 1)):
        case = inputs(problem, rows, keys, 0.2)
        expected = reference.attention(*case, scale=0.2, scores=scores_of(causal=causal))
        found = attend(built, case, 0.2, limits, keys)
        assert found is not None and found[1] is not None, (rows, keys)
        np.testing.assert_allclose(found[0].astype(np.float64), expected.o, atol=2e-2)
        np.testing.assert_allclose(found[1], expected.lse, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("causal", sampled([False, True], 1))
@pytest.mark.parametrize("variant", sampled(CLUSTERS, 3), ids=lambda variant: variant.name)
def test_blocks_of_a_cluster_are_right(variant, causal):
    """With a tile of queries, an even and an odd number of them, rows without keys, keys of less than a tile
    and of several; heads that share keys; one cluster that takes all turns, and more of them."""
    problem = replace(BRAIN, head_dim=24, head_dim_v=16, causal=causal)
    for num_sms in (1, 5):
        limits = replace(H200, num_sms=num_sms)
        kernel = render(variant, problem, limits)
        built = SimDevice("h200", limits).toolchain().build(kernel)
        for rows, keys in ((50, 70), (2 * variant.br, 115), (2 * variant.br + 1, 300), (230, 45)):
            case = inputs(problem, rows, keys, 0.2)
            expected = reference.attention(*case, scale=0.2, scores=scores_of(causal=causal))
            for seed in range(2):
                found = attend(built, case, 0.2, limits, seed)
                assert found is not None and found[1] is not None, (rows, keys)
                np.testing.assert_allclose(found[0].astype(np.float64), expected.o, atol=2e-2)
                np.testing.assert_allclose(found[1], expected.lse, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("  cluster_sync();\n\n  Pipeline", "  __syncthreads();\n\n  Pipeline"),
        (
            "barrier_init(&smem.k_empty[i], kCluster * kConsumers)",
            "barrier_init(&smem.k_empty[i], kConsumers)",
        ),
        (
            "barrier_init(&smem.v_empty[i], kCluster * kConsumers)",
            "barrier_init(&smem.v_empty[i], kConsumers)",
        ),
        (
            "barrier_arrive_at(&smem.k_empty[k_pipe.stage], thread)",
            "barrier_arrive(&smem.k_empty[k_pipe.stage])",
        ),
        (
            "barrier_arrive_at(&smem.v_empty[v_pipe.stage], thread)",
            "barrier_arrive(&smem.v_empty[v_pipe.stage])",
        ),
        ("if (thread < kCluster)", "if (thread < 1)"),
        ("kEveryBlock = (1 << kCluster) - 1", "kEveryBlock = 1"),
        ("share(blockIdx.x % kCluster * kShare)", "share(0)"),
        ("k[i] + source.share * kChunk", "k[i]"),
        ("first_key + source.share, source", "first_key, source"),
        ("(q_tile + 1) * kClusterRows", "first_row + kBr"),
        ("+ blockIdx.x % kCluster * kBr", ""),
        ("item = blockIdx.x / kCluster", "item = blockIdx.x"),
        ("item += gridDim.x / kCluster", "item += gridDim.x"),
    ],
)
def test_mistakes_between_the_blocks_of_a_cluster_are_caught(right, wrong):
    problem = replace(BRAIN, head_dim=16, head_dim_v=16, causal=True)
    limits = replace(H200, num_sms=4)
    kernel = render(Wgmma(br=64, bc=16, cluster=2), problem, limits)
    assert is_caught(kernel, right, wrong, limits, ((150, 170, 0.2),))


@needs_compiler
@pytest.mark.parametrize("causal", sampled([False, True], 1))
@pytest.mark.parametrize("variant", sampled(OVER_HEADS, 2), ids=lambda variant: variant.name)
def test_heads_of_a_cluster_are_right(variant, causal):
    """The same to the bit as blocks alone: groups of heads that fill clusters, that do not, of one; one tile
    of queries and several; clusters that take one turn and all."""
    problem = replace(BRAIN, head_dim=24, head_dim_v=16, causal=causal)
    limits = replace(H200, num_sms=5)
    toolchain = SimDevice("h200", limits).toolchain()
    alone = replace(variant, cluster=1, cluster_over="rows", section=min(variant.section, 1))
    built, built_alone = (toolchain.build(render(each, problem, limits)) for each in (variant, alone))
    for heads, kv_heads, rows, keys in (
        (3, 1, 70, 45),
        (2, 2, 5, 70),
        (4, 2, 2 * variant.br + 1, 115),
        (8, 2, variant.br, 300),
        (6, 2, 2 * variant.br, 33),
    ):
        case = inputs(problem, rows, keys, 0.2, batch=2, heads=heads, kv_heads=kv_heads)
        expected = reference.attention(*case, scale=0.2, scores=scores_of(causal=causal))
        found, found_alone = (attend(each, case, 0.2, limits, heads) for each in (built, built_alone))
        assert found is not None and found[1] is not None, (heads, kv_heads, rows, keys)
        assert found_alone is not None and found_alone[1] is not None
        np.testing.assert_allclose(found[0].astype(np.float64), expected.o, atol=2e-2)
        np.testing.assert_allclose(found[1], expected.lse, atol=1e-3)
        assert found[0].tobytes() == found_alone[0].tobytes()
        assert found[1].tobytes() == found_alone[1].tobytes()


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cluster % clusters * kCluster + blockIdx.x % kCluster", "cluster % clusters * kCluster"),
        ("cluster % clusters * kCluster + blockIdx.x % kCluster", "blockIdx.x % kCluster"),
        ("min(in_group, group - 1)", "in_group"),
        ("cluster / clusters * group", "cluster / clusters"),
        ("const int batch = heads.divide(", "const int batch = 0 * heads.divide("),
        ("(q_tile + 1) * kBr", "first_row + kBr"),
        ("+ kCluster - 1) / kCluster;", ") / kCluster;"),
        ("args.num_kv_heads * clusters_of_group(args)", "args.num_kv_heads"),
        ("+ kCluster - 1) / kCluster *", ") / kCluster *"),  # the launcher's
    ],
)
def test_mistakes_with_the_heads_of_a_cluster_are_caught(right, wrong):
    problem = replace(BRAIN, head_dim=16, head_dim_v=16, causal=True)
    limits = replace(H200, num_sms=4)
    # Of blocks that do not stay, all that the launcher counts are needed.
    stays = not right.endswith("*")
    kernel = render(Wgmma(br=64, bc=16, persistent=stays, cluster_over="heads", cluster=2), problem, limits)
    shape = {"batch": 2, "heads": 6, "kv_heads": 2}
    assert is_caught(kernel, right, wrong, limits, ((100, 170, 0.2),), **shape)


@needs_compiler
@pytest.mark.parametrize(
    ("q_in_registers", "right", "wrong", "nth"),
    [
        (False, LAST_SCORES, "", 0),
        (False, LAST_SCORES, "", 1),
        (
            False,
            LAST_SCORES,
            LAST_SCORES.replace("first_tile", "first_tile + 1"),
            1,
        ),
        (False, f"if (last_tile == first_tile) {RELEASE_OF_Q}", "", 0),
        (False, "if (leader) tma_wait_read<0>();", "", 0),
        (False, f"if (leader) tma_wait_read<0>();\n  {CONSUMER_MEETS}", "if (leader) tma_wait_read<0>();", 0),
        (False, "    tma_wait_read<0>();", "", 0),
        (True, f"{CONSUMER_MEETS}\n  if (leader) {RELEASE_OF_Q}", f"if (leader) {RELEASE_OF_Q}", 0),
        (True, f"if (leader) {RELEASE_OF_Q}", "", 0),
    ],
)
def test_mistakes_with_outputs_apart_are_caught(q_in_registers, right, wrong, nth):
    problem = replace(HALF, head_dim=16, head_dim_v=16)
    # Of the second tile, the last warpgroup sees nothing.
    limits = replace(H200, num_sms=1)
    kernel = render(Wgmma(br=128, bc=16, o_apart=True, q_in_registers=q_in_registers), problem, limits)
    assert is_caught(kernel, right, wrong, limits, ((150, 13, 0.2), (150, 50, 0.2)), nth)


STORE = "store_weights(smem.p[consumer], s, warp, consumer);"


@needs_compiler
@pytest.mark.parametrize(
    ("schedule", "right", "wrong"),
    [
        ("overlapped", "  fence_proxy_async();", ""),
        ("chained", CONSUMER_MEETS, ""),
        # Before the outputs have been multiplied.
        ("overlapped", "wgmma_wait<1>();", f"wgmma_wait<1>(); {STORE}"),
        ("chained", "wgmma_wait<1>();", f"{STORE} wgmma_wait<1>();"),
        # Chunks as wide as there are keys, or that are not swizzled.
        ("overlapped", "step_of_columns<PChunk>(p", "step_of_columns<VChunk>(p"),
        ("overlapped", "const int piece = (step % 4 * 2 + lane / 16) ^ row % 8;", "const int piece = 0;"),
    ],
)
def test_mistakes_with_weights_in_shared_memory_are_caught(schedule, right, wrong):
    problem = replace(HALF, head_dim=16, head_dim_v=16)
    kernel = render(Wgmma(br=64, bc=80, p_in_shared=True, schedule=schedule), problem, H200)
    assert is_caught(kernel, right, wrong, H200, ((64, 165, 0.2),))


@needs_compiler
def test_a_mask_that_forgets_the_last_keys_is_caught():
    problem = replace(HALF, head_dim=16, head_dim_v=16)
    kernel = render(Wgmma(br=64, bc=32), problem, H200)
    assert_a_forgotten_mask_is_caught(kernel, H200)


# -- sources --------------------------------------------------------------------------------------------


def test_limits_of_rows_counted_by_their_own_place_name_no_diagonal():
    """The last of 64 rows, too, whose limit shares a sum with the first one's."""
    scores = replace(HALF, causal=True).scores
    assert scores.limits_beside("aligned", diagonal=0) == [("kCausal", "aligned + 1")]
    assert scores.limits_beside(scores.before("aligned") + 64, diagonal=0) == [("kCausal", "aligned + 64")]


@pytest.mark.parametrize(
    ("problem", "unique"),
    [
        (HALF, "unsigned p[kKeySteps][4];"),
        (Problem(), "split_tiles("),
        (Problem(dtype="e4m3"), "convert_values("),
    ],
)
def test_each_type_has_an_algorithm_of_its_own(problem, unique):
    source = render(Wgmma(br=64, bc=32), problem, H200).source
    assert unique in source
    assert ("split_tiles(" in source) == (problem.dtype == "f32")
    assert ("convert_values(" in source) == (problem.dtype == "e4m3")


SAMPLED = 60


@pytest.mark.parametrize(
    "problem",
    sampled(
        [
            HALF,
            replace(BRAIN, head_dim=40, head_dim_v=72, causal=True),
            replace(BRAIN, head_dim=256, head_dim_v=256),
        ],
        1,
    ),
    ids=lambda problem: problem.name,
)
def test_legal_variants_render(problem):
    variants = draw(Wgmma, problem, H200, SAMPLED, random.Random(2), OF_16_BITS)
    assert variants
    for variant in variants:
        kernel = render(variant, problem, H200)
        assert kernel.sm == "sm_90a"
        assert_tidy(kernel.source, variant.name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "problem",
    sampled(
        [
            replace(BRAIN, head_dim=128, head_dim_v=128),
            replace(HALF, causal=True, seqlen_q=512, seqlen_k=512),
        ],
        1,
    ),
    ids=lambda problem: problem.name,
)
def test_what_a_search_proposes_renders_apart(problem):
    space = enumerate_space(Wgmma, problem, H200)
    assert 20 < len(space) < 40_000
    sample = random.Random(2).sample(space.legal, 300)
    assert len({render(variant, problem, H200).digest for variant in sample}) == len(sample)


@pytest.mark.parametrize(("cluster", "over"), [(1, "rows"), (2, "rows"), (2, "heads")])
def test_the_header_regenerates_the_variant(cluster, over):
    base = Wgmma(br=192, bc=80, schedule="chained", persistent=False, section=4)
    variant = replace(base, cluster=cluster, cluster_over=over)
    source = emit_cuda(render(variant, HALF, H200), device="H200")
    parsed = dict(s.split("=") for s in re.findall(r"--set (\w+=\w+)", source))
    assert Wgmma(**Wgmma.parse(parsed)) == variant
    # What is implied is not said.
    assert ("cluster = 2" in source) == ("cluster" in parsed) == (cluster > 1)
    assert ("cluster_over = heads" in source) == ("cluster_over" in parsed) == (over == "heads")
    # -arch=sm_90a would build, and refuse, PTX for all of sm_90 too.
    assert "-gencode arch=compute_90a,code=sm_90a -c" in source


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("cluster", [1, 2])
def test_grids_are_of_whole_clusters(persistent, cluster):
    limits, heads = replace(H200, num_sms=7), 6
    variant = Wgmma(br=64, bc=16, persistent=persistent, min_blocks=3, cluster=cluster)
    launch = render(variant, HALF, limits).launch
    assert launch.max_blocks == ((21 - 21 % cluster) if persistent else None)
    for rows, tiles in ((1, 1), (64, 1), (65, 2), (500, 8), (513, 9)):
        problem = replace(HALF, batch=2, num_q_heads=3, num_kv_heads=3, seqlen_q=rows)
        blocks = heads * (tiles + tiles % cluster)
        assert launch.grid(problem) == min(blocks, launch.max_blocks or blocks)
    alone = render(replace(variant, min_blocks=1), HALF, replace(limits, num_sms=1)).launch
    assert alone.grid(HALF) % cluster == 0


@pytest.mark.parametrize(
    ("group", "cluster", "blocks"), [(1, 2, 2), (2, 2, 2), (3, 2, 4), (4, 4, 4), (5, 4, 8)]
)
def test_clusters_over_heads_hold_those_that_share_keys(group, cluster, blocks):
    variant = Wgmma(br=64, bc=32, persistent=False, cluster_over="heads", cluster=cluster)
    problem = replace(HALF, batch=2, num_q_heads=3 * group, num_kv_heads=3, seqlen_q=130)
    kernel = render(variant, problem, H200)
    assert kernel.launch.blocks_per_cluster == cluster
    assert kernel.launch.grid(problem) == 2 * 3 * blocks * 3  # batches, heads of keys, blocks, tiles
    # Larger clusters do not find all of a card's room.
    stays = replace(variant, persistent=True).launch(problem, H200)
    assert stays.max_blocks == {2: 132, 4: 120}[cluster]


def test_outputs_apart_take_room_and_let_queries_come_early():
    problem = replace(HALF, head_dim=128, head_dim_v=64)
    over, apart = (Wgmma(o_apart=o_apart) for o_apart in (False, True))
    assert apart.smem_bytes(problem, H200) - over.smem_bytes(problem, H200) == 128 * 64 * 2
    none, later, early = (v.work(problem, H200) for v in (over, apart, replace(over, q_stages=2)))
    assert [each.early_q for each in (none, later, early)] == [False, False, True]
    assert [each.outputs_apart for each in (none, later, early)] == [False, True, False]
    times = [predict(v, problem, H200).median_us for v in (over, apart, replace(over, q_stages=2))]
    assert times[0] > times[1] > times[2]


def test_weights_in_shared_memory_take_room_and_passes_and_no_registers():
    problem = replace(HALF, head_dim=128, head_dim_v=128)
    kept, passed = (Wgmma(bc=144, p_in_shared=p_in_shared) for p_in_shared in (False, True))
    assert passed.smem_bytes(problem, H200) - kept.smem_bytes(problem, H200) == 128 * 3 * 64 * 2
    assert needed_registers(kept, problem) - needed_registers(passed, problem) == 144 // 4 - 4
    # Written once and read once.
    work, more = (variant.work(problem, H200) for variant in (kept, passed))
    assert more.wavefronts - work.wavefronts == 2 * 64 * 144 * 2 / 128
    assert replace(more, wavefronts=work.wavefronts) == work


def test_a_cluster_asks_l2_for_half():
    alone, shared = (Wgmma(cluster=cluster).work(HALF, H200) for cluster in (1, 2))
    assert alone.tile_bytes == 128 * (64 + 64) * 2 == 2 * shared.tile_bytes
    assert replace(shared, tile_bytes=alone.tile_bytes, cluster=1, tiles_together=1) == alone
    # Neighbours walk as far as the one that sees more.
    causal = replace(HALF, causal=True, seqlen_q=300, seqlen_k=300)
    walks = [Wgmma(bc=64, cluster=cluster).work(causal, H200).walks for cluster in (1, 2)]
    assert walks == [(5, 4, 2), (5, 5, 4, 4)]


def test_a_cluster_over_heads_asks_l2_for_its_share_and_walks_no_further():
    problem = replace(BRAIN, causal=True, num_q_heads=8, num_kv_heads=2, seqlen_q=300, seqlen_k=300)
    alone = Wgmma(bc=64).work(problem, H200)
    shared = Wgmma(bc=64, cluster_over="heads", cluster=4).work(problem, H200)
    assert alone.tile_bytes == 4 * shared.tile_bytes
    assert replace(shared, tile_bytes=alone.tile_bytes, cluster=1, tiles_together=1) == alone
    # Blocks without a head take room all the same.
    odd = replace(problem, num_q_heads=6)
    assert Wgmma(bc=64, cluster_over="heads", cluster=2).work(odd, H200).heads == odd.batch * 2 * 4
    # Keys that L2 does not hold come from device memory once for all heads of a cluster; those of others that
    # run at once find most of them in L2, too.
    long = replace(problem, head_dim=256, head_dim_v=256, seqlen_q=1024, seqlen_k=262144)
    variants = [Wgmma(br=128, bc=64), Wgmma(br=128, bc=64, cluster_over="heads", cluster=2)]
    moved = [predict(variant, long, H200).parts_us["device memory"] for variant in variants]
    assert moved[1] < 0.9 * moved[0]


# -- rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "problem", "variant", "message"),
    [
        ("a100", HALF, Wgmma(), "arithmetic: warpgroups multiply on sm_90 alone, this is sm_80"),
        ("b200", HALF, Wgmma(), "arithmetic: warpgroups multiply on sm_90 alone, this is sm_100"),
        (
            "h200",
            Problem(precision="3xtf32"),
            Wgmma(),
            "arithmetic: family wgmma multiplies float32 in parts of f16, precision 3xtf32 is asked for",
        ),
        (
            "h200",
            replace(HALF, head_dim=60),
            Wgmma(),
            "alignment: rows of 60 elements are not",
        ),
        (
            "h200",
            replace(HALF, head_dim=256, head_dim_v=256),
            Wgmma(bc=96),
            "shared memory: needs 263168 bytes, sm_90 allows 232448",
        ),
        (
            "h200",
            HALF,
            Wgmma(br=64, order_of_groups="products"),
            "combination: order_of_groups=products",
        ),
        (
            "h200",
            HALF,
            Wgmma(persistent=False, q_stages=2),
            "combination: q_stages=2: a block",
        ),
        (
            "h200",
            HALF,
            Wgmma(persistent=False, o_apart=True),
            "combination: o_apart=True: a block that does not stay has no next tile",
        ),
        ("h200", HALF, Wgmma(section=2), "combination: section=2: blocks that stay"),
        ("h200", HALF, Wgmma(bc=256), "registers: about 252 per computing thread, 240 allowed with 1 blocks"),
        (
            "h200",
            replace(HALF, head_dim=256, head_dim_v=256),
            Wgmma(br=64, bc=128, v_stages=1),
            "registers: about 252 per computing thread, 248 allowed with 1 blocks",
        ),
        (
            "h200",
            HALF,
            Wgmma(br=64, bc=208, min_blocks=2),
            "registers: 134 for one product of 208 columns, a launch of 2 blocks of 256 threads per SM",
        ),
        (
            "h200",
            HALF,
            Wgmma(br=64, bc=96, k_stages=4, v_stages=4, min_blocks=3),
            "occupancy: min_blocks=3, but 107520 bytes of shared memory leave room for 2",
        ),
        (
            "h200",
            replace(HALF, seqlen_q=128),
            Wgmma(cluster=2),
            "clusters: cluster=2: 128 query rows are one tile of 128, a cluster takes 2 of one head",
        ),
        (
            "h200",
            HALF,
            Wgmma(cluster_over="heads"),
            "combination: cluster_over=heads: a cluster of one block shares keys with no other",
        ),
        (
            "h200",
            HALF,
            Wgmma(bc=80, cluster=4),
            "combination: cluster=4: bc=80 keys are not as many shares of whole groups of 8",
        ),
        (
            "h200",
            HALF,
            Wgmma(persistent=False, section=4, cluster_over="heads", cluster=4),
            "combination: section=4: a cluster takes 4 heads, which is section=1 too",
        ),
    ],
)
def test_every_rule_names_both_numbers(card, problem, variant, message):
    with pytest.raises(Illegal, match=message):
        render(variant, problem, preset(card))


@pytest.mark.parametrize(
    ("problem", "variant", "message"),
    [
        (replace(HALF, seqlen_q=20), Wgmma(), "short sequence: br=128"),
        (replace(HALF, seqlen_k=20), Wgmma(), "short sequence: bc=128"),
        (HALF, Wgmma(bc=32), "short sequence: bc=32 is for short sequences, not for 4096 keys"),
        (HALF, Wgmma(bc=64, q_stages=2), "Q stages: q_stages=2: Q comes once for 64 tiles of keys"),
        (
            replace(HALF, seqlen_k=1024),
            Wgmma(bc=64, q_stages=2, o_apart=True),
            "Q stages: o_apart=True: with q_stages=2 the next Q comes early already",
        ),
        (replace(HALF, seqlen_k=256), Wgmma(k_stages=3), "stages: k_stages=3 v_stages=2, but 256 keys are 2"),
        (HALF, Wgmma(k_stages=1, v_stages=1), "stages: k_stages=1 v_stages=1: the next of 32 tiles"),
        (HALF, Wgmma(v_stages=3), "stages: k_stages=2 v_stages=3: V keeps its room"),
        (
            HALF,
            Wgmma(p_in_shared=True),
            "weights: p_in_shared=True: registers hold the weights as well, about 156 of 240",
        ),
        (HALF, Wgmma(rescale="always"), "rescaling: rescale=always: "),
        (replace(HALF, head_dim=128, head_dim_v=128), Wgmma(poly_exp=4), "exponentials: poly_exp=4"),
        (HALF, Wgmma(persistent=False, section=2), "tile order: section=2: without a causal mask"),
        (
            replace(HALF, seqlen_q=600),
            Wgmma(cluster=2),
            "clusters: cluster=2: 600 query rows are 5 tiles of 128, beside the last a block has none",
        ),
        (
            replace(HALF, causal=True, seqlen_q=512, seqlen_k=512),
            Wgmma(cluster=2),
            "clusters: cluster=2: neighbours see 128 keys apart, rows 256 on average",
        ),
        (HALF, Wgmma(cluster=4), "clusters: cluster=4: 2 neighbouring tiles gain 2 % at most"),
        (
            HALF,
            Wgmma(cluster_over="heads", cluster=2),
            "clusters: cluster_over=heads: 16 query heads have as many of keys",
        ),
        (
            replace(HALF, num_q_heads=12, num_kv_heads=4),
            Wgmma(cluster_over="heads", cluster=2),
            "clusters: cluster=2: 3 query heads share keys, 1 of 4 blocks have none",
        ),
        (
            replace(HALF, causal=True, seqlen_k=16384),
            Wgmma(persistent=False, section=0),
            "tile order: section=0: 268435456 bytes of K and V, L2 holds 62914560",
        ),
    ],
)
def test_advice_names_what_is_never_best(problem, variant, message):
    variant.check(problem, H200)
    said = variant.advice(problem, H200)
    assert said is not None and re.match(message, said), said


def test_sections_are_as_large_as_there_are_and_l2_holds():
    """Also where L2 holds more heads than any section takes: short sequences, heads that share keys."""
    long = replace(HALF, causal=True, num_q_heads=32, num_kv_heads=32)
    for problem, most in (
        (replace(long, seqlen_k=16384), 8),
        (long, 16),
        (replace(long, seqlen_k=512), 16),
        (replace(long, seqlen_k=16384, num_kv_heads=8), 16),
    ):
        sections = [Wgmma(persistent=False, section=section) for section in (2, 4, 8, 16)]
        assert [each.section for each in sections if each.advice(problem, H200) is None] == [most]


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_some_variant_serves_every_multiple_of_eight(head_dim):
    for dtype, _ in WGMMA_NUMBERS:
        problem = Problem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
        Wgmma(br=128, bc=64).check(problem, H200)
