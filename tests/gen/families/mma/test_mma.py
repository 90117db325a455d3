"""Tensor-core kernels on emulated cards, their sources, and the rules of what may run."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.cuda import emit_cuda
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.scores import scores_of
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import CorruptedMemory, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import compare
from flashgen.tuner.predict.cost_model import predict

from tests.support.covering import (
    HEAD_DIMS,
    LOOSE,
    NUMBERS,
    TURING_NUMBERS,
    Setting,
    draw,
    each_value,
    held_by,
    mma_settings,
    parts_of,
    serves,
    traits,
)
from tests.support.depth import sampled
from tests.support.emulated import (
    COURSES,
    assert_a_forgotten_mask_is_caught,
    assert_all_right,
    assert_tidy,
    check,
    needs_compiler,
    trusting,
)

#: One card per way of multiplying and copying: sm_75, sm_80, sm_86, sm_90.
CARDS = ("t4", "a100", "rtx-3090", "h200")
#: Tests that share the cover, and what of it has every value, so that several workers can.
SHARDS, SHARDS_OF_VALUES = 24, 4
HALF, BRAIN = Problem(dtype="f16"), Problem(dtype="bf16")
ROUNDED, PARTED = Problem(precision="tf32"), Problem(precision="3xf16")
DECODING = Problem(
    dtype="bf16", batch=1, num_q_heads=32, num_kv_heads=8, seqlen_q=1, seqlen_k=8192, head_dim=128
)


@cache
def settings() -> list[Setting]:
    return mma_settings([preset(card) for card in CARDS])


# -- numerics -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("shard", range(SHARDS_OF_VALUES))
def test_any_value_of_a_parameter_is_right(shard):
    assert_all_right(list(enumerate(each_value(settings(), 0), 1))[shard::SHARDS_OF_VALUES])


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("shard", range(SHARDS))
def test_any_two_values_together_are_right(shard):
    assert_all_right(list(enumerate(settings(), 1))[shard::SHARDS])


@pytest.mark.thorough
def test_the_cover_leaves_nothing_out():
    """Every value of everything, and no pair of values that chance finds legal but the cover lacks."""
    singles = set().union(*map(traits, settings()))
    choices = {(p.name, choice) for p in Mma.parameters() for choice in p.choices}
    assert singles >= choices - {("far_keys", "left_out")}  # of changed scores
    assert singles >= {("causal", False), ("causal", True)}
    assert singles >= {("limits", preset(card).name) for card in CARDS}
    pairs = {frozenset(pair) for s in settings() for pair in combinations(traits(s), 2)}
    for numbers in NUMBERS:
        for dims in HEAD_DIMS:
            together = frozenset([("numbers", numbers), ("dims", dims)]) in pairs
            assert together == serves(numbers[1], *dims)
    rng = random.Random(5)
    for _ in range(15):
        for card in CARDS:
            dtype, precision = rng.choice(NUMBERS) if card != "t4" else ("f16", "auto")
            d, dv = rng.choice([dims for dims in HEAD_DIMS if serves(precision, *dims)])
            problem = Problem(
                dtype=dtype, precision=precision, head_dim=d, head_dim_v=dv, causal=rng.random() < 0.5
            )
            for variant in draw(Mma, problem, preset(card), 8, rng, held_by(dtype, precision)):
                drawn = Setting(variant, problem, preset(card))
                found = [each for each in traits(drawn) if each[0] not in LOOSE]
                missing = [pair for pair in combinations(found, 2) if frozenset(pair) not in pairs]
                assert not missing, drawn.name


@needs_compiler
@pytest.mark.parametrize(
    ("card", "problem", "variant"),
    sampled(
        [
            (
                "h200",
                replace(HALF, head_dim=40, head_dim_v=24, causal=True),
                Mma(br=32, bc=40, stages=4, rescale="lazy", poly_exp=2),
            ),
            (
                "a100",
                replace(BRAIN, head_dim=64, head_dim_v=64),
                Mma(br=32, bc=32, stages=3, layout="swizzled", q_in_registers=False),
            ),
            ("t4", replace(HALF, head_dim=33, head_dim_v=33, causal=True), Mma(br=32, bc=16, stages=1)),
            (
                "a100",
                Problem(head_dim=36, causal=True),
                Mma(br=64, rows_per_warp=32, bc=16, q_in_registers=False),
            ),
            (
                "rtx-3090",
                replace(ROUNDED, head_dim=16, head_dim_v=48),
                Mma(br=16, bc=32, stages=3, rescale="lazy"),
            ),
            (
                "h200",
                replace(PARTED, head_dim=40, head_dim_v=24, causal=True),
                Mma(parts="f16", br=64, rows_per_warp=32, bc=40, stages=1, q_in_registers=False),
            ),
        ],
        3,
    ),
    ids=["f16", "bf16", "f16-sm_75", "3xtf32", "tf32", "3xf16"],
)
def test_the_full_suite_on_one_kernel_of_each_kind(card, problem, variant):
    assert 0 < check(Setting(variant, problem, preset(card)), seed=3, depth="full") <= problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "variant"),
    sampled(
        [
            (replace(HALF, head_dim=24, head_dim_v=24), Mma(br=16, bc=16, rescale="lazy", poly_exp=2)),
            (replace(BRAIN, head_dim=7, head_dim_v=5), Mma(br=16, bc=16, q_in_registers=False, stages=3)),
            (Problem(head_dim=12, causal=True), Mma(br=16, bc=16, q_in_registers=False)),
            (replace(ROUNDED, head_dim=16, head_dim_v=16), Mma(br=32, bc=16, stages=1, layout="swizzled")),
            (
                replace(PARTED, head_dim=24, head_dim_v=8),
                Mma(parts="f16", br=32, bc=16, q_in_registers=False),
            ),
        ],
        2,
    ),
    ids=["f16", "bf16", "3xtf32", "tf32", "3xf16"],
)
def test_kernels_pass_the_sanitizer(problem, variant):
    check(Setting(variant, problem, preset("a100")), seed=1, sanitize=True)


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "parts"),
    [(HALF, "tf32"), (Problem(), "tf32"), (PARTED, "f16")],
    ids=["f16", "3xtf32", "3xf16"],
)
def test_a_kernel_is_right_in_any_order(problem, parts):
    problem, limits = replace(problem, head_dim=16, head_dim_v=16, causal=True), preset("a100")
    variant = Mma(parts=parts, br=64, bc=16, q_in_registers=False)
    built = SimDevice("a100", limits).toolchain().build(render(variant, problem, limits))
    q, k, v = reference.random_inputs(
        "normal",
        (1, 4, 70, 16),
        (1, 2, 77, 16),
        scale=0.25,
        rng=np.random.default_rng(1),
        dtype=problem.dtype,
        head_dim_v=16,
    )
    outputs = set()
    for seed in range(8):
        o, lse = SimRunner(limits, seed=seed).attend(built, q, k, v, scale=0.25, want_lse=True)
        assert lse is not None
        outputs.add((o.tobytes(), lse.tobytes()))
    assert len(outputs) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("card", "changes"),
    sampled(
        [
            ("a100", {"parts": "f16", "stages": 1}),
            ("a100", {"parts": "f16", "stages": 2, "q_in_registers": False}),
            ("a100", {"parts": "f16", "br": 16, "key_warps": 2, "q_in_registers": False}),
            ("t4", {"stages": 1, "q_in_registers": False}),
            ("a100", {"stages": 1}),
            ("a100", {"stages": 2, "q_in_registers": False}),
            ("a100", {"stages": 3}),
            ("a100", {"stages": 1, "q_in_registers": False}),
            ("a100", {"stages": 3, "q_in_registers": False}),
            ("h200", {"br": 16, "key_warps": 2, "splits": 2, "q_in_registers": False}),
            ("h200", {"br": 16, "key_warps": 2, "splits": 2, "merge": "at_once"}),
        ],
        3,
    ),
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_every_synchronisation_of_a_kernel_is_needed(card, changes):
    """Each barrier of the block and each wait taken out of the source makes some result wrong."""
    limits = preset(card)
    problem = replace(PARTED if "parts" in changes else HALF, head_dim=16, head_dim_v=16)
    kernel = render(Mma(**{"br": 64, "bc": 16, **changes}), problem, limits)
    toolchain, runner = SimDevice(card, limits).toolchain(), SimRunner(limits)
    allowed = 1e-3 if problem.dtype == "f32" else 1e-2

    def right(source: str) -> bool:
        built = toolchain.build(replace(kernel, source=source))
        # A negative scale turns the sign of Q in shared memory, which has a barrier of its own.
        for scale in (0.2, -0.2):
            q, k, v = reference.random_inputs(
                "rising",
                (1, 1, 99, 16),
                (1, 1, 115, 16),
                scale=0.2,
                rng=np.random.default_rng(0),
                dtype=problem.dtype,
                head_dim_v=16,
            )
            if problem.dtype == "f32":
                q[..., ::8, 0] *= 1e3  # who does not see them takes too small a unit
            try:
                o, _ = runner.attend(built, q, k, v, scale=scale)
            except (CorruptedMemory, LaunchError):
                return False
            expected = reference.attention(q, k, v, scale=scale).o
            if not np.abs(o.astype(np.float64) - expected).max() < allowed:
                return False
        return True

    source = trusting(kernel.source)
    assert source != kernel.source and right(source)
    calls = list(re.finditer(r"(__syncthreads|__pipeline_wait_prior|cluster_sync)\([^()]*\);", source))
    assert len(calls) >= 2
    for call in calls:
        without = source[: call.start()] + source[call.end() :]
        line = source[: call.start()].count("\n") + 1
        assert not right(without), f"line {line}: {call[0]}"


@needs_compiler
@pytest.mark.parametrize("q_in_registers", [True, False])
def test_packed_heads_are_right_in_any_group(q_in_registers):
    """Groups that tiles cut through, one head alone, all heads on one; fewer keys than rows, under a mask."""
    problem, limits = replace(HALF, head_dim=16, head_dim_v=24, causal=True), preset("a100")
    variant = Mma(pack_heads=True, br=32, bc=16, q_in_registers=q_in_registers, stages=3)
    built = SimDevice("a100", limits).toolchain().build(render(variant, problem, limits))
    runner, rng = SimRunner(limits), np.random.default_rng(1)
    shapes = ((6, 2, 7, 45), (3, 3, 33, 40), (5, 1, 1, 70), (40, 1, 2, 33), (6, 3, 21, 9))
    for heads, kv_heads, rows, keys in shapes:
        q, k, v = reference.random_inputs(
            "normal",
            (2, heads, rows, 16),
            (2, kv_heads, keys, 16),
            scale=0.25,
            rng=rng,
            dtype="f16",
            head_dim_v=24,
        )
        o, lse = runner.attend(built, q, k, v, scale=0.25, want_lse=True)
        expected = reference.attention(q, k, v, scale=0.25, scores=scores_of(causal=True))
        assert compare(o, lse, expected, v, problem, f"{heads}/{kv_heads} heads") > 0


#: Keys shared by warps, by blocks, by both; Q kept in registers and not, tiles fetched ahead and in turns.
SHARING: tuple[tuple[Problem, dict[str, Any]], ...] = (
    (HALF, {"key_warps": 2, "stages": 1, "q_in_registers": False}),
    (HALF, {"splits": 4, "br": 32}),
    (HALF, {"splits": 16, "q_in_registers": False, "pack_heads": True}),
    (HALF, {"splits": 2, "key_warps": 8, "stages": 3, "pack_heads": True}),
    (HALF, {"splits": 4, "br": 32, "merge": "at_once"}),
    (HALF, {"splits": 8, "key_warps": 4, "stages": 3, "pack_heads": True, "merge": "at_once"}),
    (HALF, {"workspace_splits": 8, "key_warps": 4, "stages": 1, "pack_heads": True, "merge": "at_once"}),
    (Problem(), {"splits": 16, "stages": 1, "q_in_registers": False, "merge": "at_once"}),
    (Problem(), {"key_warps": 2, "q_in_registers": False}),
    (Problem(), {"splits": 16, "stages": 1, "pack_heads": True}),
    (PARTED, {"parts": "f16", "key_warps": 4, "splits": 2, "pack_heads": True, "q_in_registers": False}),
)


@needs_compiler
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("course", COURSES)
def test_units_follow_the_largest_element(course, stages):
    """Of V, and of K with a Q that keeps scores of ordinary size."""
    problem, limits = replace(PARTED, head_dim=16, head_dim_v=16), preset("h200")
    variant = Mma(parts="f16", br=32, bc=16, stages=stages, q_in_registers=stages == 3)
    built = SimDevice("h200", limits).toolchain().build(render(variant, problem, limits))
    runner, rng = SimRunner(limits), np.random.default_rng(2)
    factors = np.repeat(COURSES[course], 16)[:, None]
    q, k, v = (rng.standard_normal((1, 1, n, 16)) for n in (48, 80, 80))
    for arrays in ((q, k, v * factors), (q / (factors.max() or 1.0), k * factors, v)):
        q, k, v = (array.astype(np.float32) for array in arrays)
        o, _ = runner.attend(built, q, k, v, scale=0.25)
        expected = reference.attention(q, k, v, scale=0.25).o
        assert np.linalg.norm(o - expected) <= problem.tolerance * np.linalg.norm(expected)


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "changes"),
    SHARING,
    ids=lambda value: value.dtype if isinstance(value, Problem) else str(value),
)
def test_shared_keys_are_right_in_any_order(problem, changes):
    """To the bit; with more tiles than shares, and with shares that have no key."""
    problem, limits = replace(problem, head_dim=16, head_dim_v=16, causal=True), preset("h200")
    variant = Mma(**{"br": 16, "bc": 16, **changes})
    built = SimDevice("h200", limits).toolchain().build(render(variant, problem, limits))
    for rows, keys in ((1, 16 * (2 * variant.key_shares() + 1) + 3), (19, 40), (9, 2)):
        q, k, v = reference.random_inputs(
            "rising",
            (1, 4, rows, 16),
            (1, 2, keys, 16),
            scale=0.25,
            rng=np.random.default_rng(keys),
            dtype=problem.dtype,
            head_dim_v=16,
        )
        outputs = set()
        for seed in range(3):
            o, lse = SimRunner(limits, seed=seed).attend(built, q, k, v, scale=0.25, want_lse=True)
            assert lse is not None
            outputs.add((o.tobytes(), lse.tobytes()))
        expected = reference.attention(q, k, v, scale=0.25, scores=scores_of(causal=True))
        compare(o, lse, expected, v, problem, f"{rows} rows, {keys} keys")
        assert len(outputs) == 1


@pytest.mark.parametrize("evict_first", [False, True])
def test_copies_are_hinted_where_asked(evict_first):
    variant = Mma(pack_heads=True, br=16, bc=32, evict_first=evict_first)
    source = render(variant, DECODING, preset("h200")).source
    hint = "cp.async.cg.shared.global.L2::cache_hint" if evict_first else "cp.async.cg.shared.global ["
    assert source.count("cp.async.cg") == source.count(hint) == 1
    assert ("evict_first" in source) == evict_first
    assert ("ptxas 13.0 garbles" in source) == evict_first


@needs_compiler
def test_a_mask_that_forgets_the_last_keys_is_caught():
    problem = replace(HALF, head_dim=16, head_dim_v=16)
    kernel = render(Mma(br=16, bc=32), problem, preset("a100"))
    assert_a_forgotten_mask_is_caught(kernel, preset("a100"))


# -- sources --------------------------------------------------------------------------------------------

#: Of some 10^5 variants that run on a card, most of which a search leaves out.
SAMPLED = 80


@pytest.mark.parametrize(
    ("card", "problem"),
    sampled(
        [
            ("t4", replace(HALF, head_dim=33, head_dim_v=8)),
            ("a100", replace(ROUNDED, head_dim=72, head_dim_v=72)),
            ("rtx-3090", replace(BRAIN, head_dim=40, head_dim_v=40, causal=True)),
            ("h200", HALF),
            ("h200", replace(HALF, head_dim=7, head_dim_v=7, causal=True)),
            ("h200", Problem(head_dim=36, causal=True)),
            ("h200", replace(PARTED, head_dim=72, head_dim_v=40)),
            ("b200", replace(BRAIN, head_dim=192, head_dim_v=128)),
            ("rtx-5090", Problem(head_dim=1)),
        ],
        4,
    ),
    ids=lambda value: value.name if isinstance(value, Problem) else value,
)
def test_legal_variants_render(card, problem):
    limits = preset(card)
    for variant in draw(Mma, problem, limits, SAMPLED, random.Random(1)):
        kernel = render(variant, problem, limits)
        assert_tidy(kernel.source, variant.name, longest=150)


@pytest.mark.parametrize(
    ("card", "problem"),
    sampled(
        [
            ("h200", Problem(precision="3xtf32", head_dim=128)),
            ("t4", Problem(head_dim=64)),
            ("t4", replace(HALF, head_dim=192, head_dim_v=192, causal=True)),
            ("h200", replace(HALF, seqlen_q=1, seqlen_k=1)),
        ],
        1,
    ),
    ids=lambda value: value.name if isinstance(value, Problem) else value,
)
def test_all_that_a_search_proposes_renders(card, problem):
    space = enumerate_space(Mma, problem, preset(card))
    assert 20 < len(space) < 2000
    digests = set()
    for variant in space.legal:
        kernel = render(variant, problem, preset(card))
        assert_tidy(kernel.source, variant.name)
        digests.add(kernel.digest)
    assert len(digests) == len(space)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_few_rows_share_keys(batch):
    """Of what a search proposes, what the cost model likes best reads keys once and fills the card."""
    problem, limits = replace(DECODING, batch=batch), preset("h200")
    space = enumerate_space(Mma, problem, limits)
    assert 10 < len(space) < 1000 and not space.waived
    assert all(variant.pack_heads and variant.br == 16 for variant in space.legal)
    best = min(space.legal, key=lambda variant: predict(variant, problem, limits).median_us)
    assert isinstance(best, Mma)
    assert best.launch(problem, limits).grid(problem) * best.key_warps * best.min_blocks > limits.num_sms
    assert (best.splits > 1) == (batch < 64)
    reading_us = problem.min_bytes / (1e3 * limits.dram_gbps)
    assert reading_us < predict(best, problem, limits).median_us < 2 * reading_us + 15


@pytest.mark.parametrize("card", ["a100", "h200"])
def test_many_rows_share_no_keys(card):
    grouped = replace(BRAIN, batch=2, num_q_heads=32, num_kv_heads=8, seqlen_q=8192, seqlen_k=8192)
    for problem in (HALF, grouped, Problem(dtype="f16", batch=4096, seqlen_q=49, seqlen_k=49, head_dim=32)):
        # What is held has no part in it, and takes most of the time.
        held = {"rows_per_warp": 16, "layout": "padded", "q_in_registers": True, "stages": 2, "poly_exp": 0}
        space = enumerate_space(Mma, problem, preset(card), held | {"bc": 64, "d_steps": "exact"})
        assert len(space)
        for variant in space.legal:
            assert not variant.pack_heads and variant.key_shares() == 1, variant.name


def test_rendering_is_deterministic():
    first = render(Mma(), HALF, preset("h200"))
    assert first == render(Mma(), HALF, preset("h200"))
    assert first.digest != render(Mma(bc=32), HALF, preset("h200")).digest


def test_the_header_regenerates_the_variant():
    variant = Mma(br=96, bc=40, q_in_registers=False, rescale="lazy", block_order="heaviest_first")
    source = emit_cuda(render(variant, HALF, preset("h200")), device="H200")
    parsed = dict(s.split("=") for s in re.findall(r"--set (\w+=\w+)", source))
    assert Mma(**Mma.parse(parsed)) == variant
    assert "--device h200 --dtype f16 --d 64 --family mma" in source


# -- rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "problem", "variant", "message"),
    [
        ("v100", HALF, Mma(), "arithmetic: tensor cores multiply f16 from sm_75 on, this is sm_70"),
        ("t4", BRAIN, Mma(), "arithmetic: tensor cores multiply bf16 from sm_80 on, this is sm_75"),
        ("t4", Problem(), Mma(), "arithmetic: tensor cores multiply tf32 from sm_80 on, this is sm_75"),
        ("gtx-1080", PARTED, Mma(parts="f16"), "arithmetic: tensor cores multiply f16 from sm_75 on"),
        ("h200", Problem(precision="ieee"), Mma(), "arithmetic: .* precision ieee is asked for"),
        ("h200", PARTED, Mma(), "arithmetic: parts=tf32: precision 3xf16 is asked for"),
        ("h200", ROUNDED, Mma(parts="f16"), "arithmetic: parts=f16: precision tf32 is asked for"),
        ("h200", HALF, Mma(parts="f16"), "arithmetic: parts=f16: f16 is multiplied whole"),
        (
            "h200",
            Problem(head_dim=64, head_dim_v=41),
            Mma(parts="f16"),
            "arithmetic: parts=f16: tiles are split by 8 columns, no divisor of head dim 41",
        ),
        (
            "h200",
            HALF,
            Mma(br=48, rows_per_warp=32),
            "divisibility: br=48 rows do not split into warps of 32",
        ),
        (
            "h200",
            replace(HALF, head_dim=40),
            Mma(layout="swizzled"),
            "layout: layout=swizzled: a row of 40 elements is not made of four 16-byte chunks each",
        ),
        ("t4", HALF, Mma(stages=2), "copies: stages=2: sm_75 has no asynchronous copies"),
        (
            "t4",
            HALF,
            Mma(stages=1, evict_first=True),
            "copies: evict_first=True: sm_75 has no asynchronous copies to hint",
        ),
        (
            "h200",
            replace(HALF, head_dim=36, head_dim_v=36),
            Mma(evict_first=True),
            "copies: evict_first=True: copies of 8 bytes take no hint, those of 16 do",
        ),
        (
            "rtx-3090",
            replace(HALF, head_dim=256, head_dim_v=256),
            Mma(stages=4, bc=32),
            "shared memory: needs 135168 bytes, sm_86 allows 101376",
        ),
        (
            "h200",
            Problem(),
            Mma(br=32, bc=16, poly_exp=4),
            "combination: poly_exp=4 is good to 1e-4",
        ),
        (
            "h200",
            HALF,
            Mma(heads=4, stages=1, q_in_registers=False),
            "combination: heads=4: the next head arrives in a second stage",
        ),
        (
            "h200",
            HALF,
            Mma(heads=2, q_in_registers=False, block_order="heaviest_first"),
            "combination: heads=2 .* block_order=heaviest_first",
        ),
        (
            "h200",
            HALF,
            Mma(br=64, key_warps=2),
            "divisibility: key_warps=2: br=64 rows are more than the 16 of a warp",
        ),
        ("a100", HALF, Mma(splits=2), "clusters: splits=2: sm_80 forms clusters of 1 blocks at most"),
        ("rtx-5090", HALF, Mma(splits=16), "clusters: splits=16: sm_120 forms clusters of 8 blocks at most"),
        (
            "h200",
            HALF,
            Mma(heads=2, q_in_registers=False, splits=2),
            r"combination: heads=2: keys that others have too \(key_warps=1 splits=2\) are those of one head",
        ),
        (
            "h200",
            HALF,
            Mma(pack_heads=True, heads=2, q_in_registers=False),
            "combination: heads=2: a block with heads side by side takes none in turn",
        ),
        (
            "h200",
            HALF,
            Mma(min_blocks=8),
            r"registers: about \d+ per thread, 32 allowed with 8 blocks of 256 threads per SM",
        ),
        (
            "h200",
            replace(HALF, head_dim=128, head_dim_v=128),
            Mma(br=16, bc=32, stages=4, min_blocks=4),
            r"occupancy: min_blocks=4, but 69632 bytes of shared memory leave room for 3",
        ),
    ],
)
def test_every_rule_names_both_numbers(card, problem, variant, message):
    with pytest.raises(Illegal, match=message):
        render(variant, problem, preset(card))


@pytest.mark.parametrize(
    ("problem", "variant", "message"),
    [
        (Problem(), Mma(bc=32), "parts: parts=tf32: tensor cores multiply f16 twice as fast"),
        (replace(HALF, seqlen_q=20), Mma(br=64, min_blocks=3), "short sequence: br=64"),
        (replace(HALF, seqlen_k=20), Mma(min_blocks=2), "short sequence: bc=64"),
        (
            HALF,
            Mma(bc=40, min_blocks=2),
            "short sequence: bc=40 fits odd lengths up to 320, this one is 4096",
        ),
        (HALF, Mma(d_steps="whole", min_blocks=2), "last step: d_steps=whole: a head dim of 64"),
        (replace(HALF, seqlen_k=128), Mma(stages=4), "stages: stages=4, but 128 keys are 2 tiles of 64"),
        (
            HALF,
            Mma(evict_first=True),
            "copies: evict_first=True: 4096 query rows take longer than their keys to be read",
        ),
        (
            replace(DECODING, num_kv_heads=32, seqlen_q=40),
            Mma(br=16, bc=32, layout="swizzled", evict_first=True),
            "copies: evict_first=True: 3 tiles of query rows read the same keys, all but one from L2",
        ),
        (HALF, Mma(rescale="always"), "rescaling: rescale=always: "),
        (replace(HALF, head_dim=128, head_dim_v=128), Mma(poly_exp=2), "exponentials: poly_exp=2"),
        (HALF, Mma(heads=2, q_in_registers=False), "short sequence: heads=2: 4096 keys"),
        (HALF, Mma(br=16, key_warps=2), "shares of keys: key_warps=2: 4096 query rows for 4096 keys suffice"),
        (HALF, Mma(splits=2), "shares of keys: splits=2: 2048 blocks occupy 132 multiprocessors without"),
        (
            replace(HALF, batch=1, num_q_heads=3, num_kv_heads=3),
            Mma(splits=2),
            "shares of keys: splits=2: makes 192 blocks of 96, 132 are enough",
        ),
        (
            replace(DECODING, batch=64),
            Mma(pack_heads=True, br=16, splits=4, bc=32),
            "shares of keys: splits=4: makes 2048 blocks of 512, 1056 are enough",
        ),
        (
            replace(DECODING, seqlen_k=500),
            Mma(pack_heads=True, br=16, splits=8, key_warps=2, bc=32),
            "shares of keys: bc=32: 500 keys are no tile for each of 16 shares",
        ),
        (
            DECODING,
            Mma(pack_heads=True, br=16, splits=8, bc=16, min_blocks=8, layout="swizzled"),
            r"occupancy: 3971 bytes per SM under way, 36363 wanted for the bandwidth",
        ),
        (
            DECODING,
            Mma(pack_heads=True, br=16, stages=1, layout="swizzled"),
            "stages: stages=1: nothing is under way",
        ),
        (
            replace(DECODING, batch=1),
            Mma(pack_heads=True, br=16, key_warps=4, splits=16, bc=32),
            "decoding: splits=16: never within 4 % of the best where 8 make 64 blocks on 132 SMs",
        ),
        (DECODING, Mma(pack_heads=True, br=16, bc=80), "decoding: bc=80: most of more than 64 keys spill"),
        (DECODING, Mma(pack_heads=True, br=16, bc=32), "decoding: layout=padded: 4 to 16 % slower"),
        (
            replace(DECODING, head_dim=64, head_dim_v=64),
            Mma(pack_heads=True, br=16, poly_exp=4, layout="swizzled"),
            "exponentials: poly_exp=4: 1 query rows wait for memory",
        ),
        (HALF, Mma(pack_heads=True), "packing: pack_heads=True: 16 query heads have as many of keys"),
        (
            replace(HALF, num_kv_heads=4),
            Mma(pack_heads=True),
            "packing: pack_heads=True: 4096 query rows fill tiles by themselves",
        ),
        (
            replace(HALF, num_kv_heads=4, seqlen_q=2),
            Mma(br=16),
            "packing: pack_heads=False: 4 heads of 2 query rows fit one tile",
        ),
        (
            replace(HALF, num_kv_heads=4, seqlen_q=8),
            Mma(pack_heads=True),
            "short sequence: br=128 covers 128",
        ),
        (HALF, Mma(br=32, min_blocks=1), r"occupancy: min_blocks=1, but \d blocks fit"),
        (HALF, Mma(min_blocks=2, block_order="heaviest_first"), "block order: block_order=heaviest_first"),
    ],
)
def test_advice_names_what_is_never_best(problem, variant, message):
    variant.check(problem, preset("h200"))
    said = variant.advice(problem, preset("h200"))
    assert said is not None and re.match(message, said), said


def test_advice_lets_a_good_variant_through():
    assert Mma(min_blocks=2).advice(HALF, preset("h200")) is None


def test_settings_are_typed():
    text = {"bc": "40", "q_in_registers": "False", "layout": "swizzled", "poly_exp": "0"}
    assert Mma.parse(text) == {"bc": 40, "q_in_registers": False, "layout": "swizzled", "poly_exp": 0}
    with pytest.raises(ValueError, match="bc=24 is not a choice; choose from 64, 16, 32, 40"):
        Mma.parse({"bc": "24"})
    with pytest.raises(ValueError, match="did you mean 'rescale'"):
        Mma.parse({"rescal": "lazy"})


@pytest.mark.parametrize("card", [*CARDS, "b200"])
@pytest.mark.parametrize("head_dim", range(1, 257, 15))
def test_some_variant_serves_every_head_dim(card, head_dim):
    for dtype, precision in NUMBERS if card != "t4" else TURING_NUMBERS:
        if not serves(precision, head_dim, head_dim):
            continue
        problem = Problem(dtype=dtype, precision=precision, head_dim=head_dim)
        small = Mma(parts=parts_of(precision), br=16, bc=16, stages=1, q_in_registers=False)
        small.check(problem, preset(card))
