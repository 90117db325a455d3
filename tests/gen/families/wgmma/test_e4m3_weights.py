"""Kernels of e4m3 whose weights are e4m3, too: products of eight bits, values transposed on their way."""

from __future__ import annotations

import random
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.arguments import describe_maps, make_arguments
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma.registers import consumer_registers, needed_registers
from flashgen.gen.limits import preset
from flashgen.gen.problem import EIGHT, Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate.validate import validate

from tests.support.covering import draw
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

H200 = preset("h200")
SMALL = Wgmma(br=64, bc=32, weights="e4m3")
ASKED = Problem(dtype="e4m3", precision=EIGHT, head_dim=64)
#: Less than a chunk, more than one, columns that three warps share evenly and not; the widest that registers
#: hold; rows of several heads on the same keys.
PROBLEMS = (
    replace(ASKED, head_dim=16, head_dim_v=16),
    replace(ASKED, head_dim=48, head_dim_v=80, causal=True),
    replace(ASKED, num_q_heads=6, num_kv_heads=2),
    replace(ASKED, head_dim=128, head_dim_v=128, causal=True),
    replace(ASKED, head_dim=192, head_dim_v=128),
    replace(ASKED, head_dim=256, head_dim_v=32),
    replace(ASKED, varlen="uniform:20-130", causal=True),
    replace(ASKED, page_size=16),
    replace(ASKED, page_size=32, varlen="uniform:20-130"),
    replace(ASKED, causal=True, scoring=Scoring(window=(40, 0), softcap=20.0, sinks=True)),
    replace(ASKED, scoring=Scoring(mask="(q + k) % 3 > 0", bias="f16")),
    replace(ASKED, causal=True, scoring=Scoring(alibi=True)),
)

#: Of parameters that are not made for eight bits, or for other scores.
HELD = {
    "weights": "e4m3",
    "values": "in_place",
    "powers": "rounded",
    "score_type": "f32",
    "promotion": "tiles",
    "copiers": 1,
    "last_turn": "whole",
    **dict.fromkeys(("pack_heads", "p_in_shared"), False),
    **dict.fromkeys(("splits", "workspace_splits", "cluster"), 1),
    "cluster_over": "rows",
    "split_by": "rows",
    "tail": 0,
    "tangent": "polynomial",
}


def built(variant: Wgmma, problem: Problem, *, sanitize: bool = False):
    device = SimDevice("h200", H200, sanitize)
    return device.open(), device.toolchain().build(render(variant, problem, H200))


# -- numerics -------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("place", sampled(range(len(PROBLEMS)), 6))
def test_variants_by_chance_are_right(place):
    problem = PROBLEMS[place]
    (variant,) = draw(Wgmma, problem, H200, 1, random.Random(place), HELD)
    runner, build = built(variant, problem)
    assert 0 < validate(runner, build, seed=place) <= problem.tolerance, variant.name


@needs_compiler
@pytest.mark.parametrize("problem", [replace(ASKED, head_dim=48, head_dim_v=16, causal=True)])
def test_kernels_pass_the_sanitizer(problem):
    runner, build = built(SMALL, problem, sanitize=True)
    validate(runner, build, seed=2)


@pytest.mark.parametrize("problem", [ASKED, PROBLEMS[1]], ids=lambda each: each.stem)
def test_sources_are_tidy(problem):
    for variant in draw(Wgmma, problem, H200, 4, random.Random(5), HELD):
        assert_tidy(render(variant, problem, H200).source, variant.name)


def of_ones(keys: int, value: float):
    """q, k, v of which all weights are alike, and all values."""
    shape, numbers = (1, 1, keys, 16), ml_dtypes.float8_e4m3fn
    return np.zeros((1, 1, 64, 16), numbers), np.zeros(shape, numbers), np.full(shape, value, numbers)


#: Of what a tile's outputs are made apart from the others', and of one sum of all tiles.
APART = (
    ("float tile_o[kDv / 2];", "float tile_o[kDv / 2] = {};"),
    ("step_of_columns<VChunk>(v, step), step > 0);", "step_of_columns<VChunk>(v, step), true);"),
    ("o[i] += tile_o[i];", "o[i] = tile_o[i];"),
)


@needs_compiler
def test_sums_over_many_keys_keep_what_tensor_cores_cut_off():
    kernel = render(
        replace(SMALL, bc=128, rescale="always"), replace(ASKED, head_dim=16, head_dim_v=16), H200
    )
    source = kernel.source
    for apart, together in APART:
        assert source.count(apart) == 1
        source = source.replace(apart, together)
    source = source.replace("    rescale_output(o, rescale);\n", "").replace(
        "      rescale_output(o, rescale);\n", ""
    )
    errors = []
    for each in (kernel, replace(kernel, source=source)):
        device = SimDevice("h200", H200)
        o, _ = device.open().attend(device.toolchain().build(each), *of_ones(8192, 1.875), scale=1.0)
        errors.append(float(np.abs(o.astype(np.float64) / 1.875 - 1).max()))
    assert errors[0] == 0 and errors[1] > 0.05


@needs_compiler
def test_a_key_that_has_all_the_weight_loses_nothing():
    rng, numbers = np.random.default_rng(3), ml_dtypes.float8_e4m3fn
    q, k = (np.zeros((1, 1, n, 64), np.float32) for n in (64, 200))
    q[..., 0], k[..., :, 0] = 3.0, rng.uniform(-1, 1, 200)
    k[0, 0, 77, 0] = 16.0
    v = rng.standard_normal((1, 1, 200, 64)).astype(numbers)
    runner, build = built(SMALL, ASKED)
    o, _ = runner.attend(build, q.astype(numbers), k.astype(numbers), v, scale=1.0)
    rows = np.broadcast_to(v[0, 0, 77].astype(np.float32), (64, 64))
    np.testing.assert_allclose(o[0, 0].astype(np.float32), rows, rtol=2**-8)


#: Where the text stands, and a mistake in its place.
MISTAKES = {
    "no fence": ("    fence_proxy_async();\n    __syncwarp();\n", "    __syncwarp();\n"),
    "full stages": ("barrier_wait(&smem.v_empty[v_pipe.stage], v_pipe.phase ^ 1);\n#pragma", "\n#pragma"),
    "empty stages": ("barrier_wait(&smem.v_raw_full[raw_pipe.stage], raw_pipe.phase);", ""),
    "kept for ever": ("barrier_arrive(&smem.v_raw_empty[raw_pipe.stage]);", ""),
    "come unswizzled": ("(c ^ lane) % 8 * 16", "c % 8 * 16"),
    "read unswizzled": (" ^ column % 8;", ";"),
    "keys in their own order": ("m[0], m[1], one_column", "m[1], m[0], one_column"),
    "columns exchanged": ("(lane / 4 ^ lane / 8) % 2", "lane / 4 % 2"),
    "a half of the keys": ("step * 32 * kQkChunk", "step * 16 * kQkChunk"),
    "weights in another order": ("four[0], four[1], four[4]", "four[0], four[4], four[1]"),
    "weights of other rows": ("i / 2 * 8 + i % 2 * 2", "i / 2 * 8 + (1 - i % 2) * 2"),
    "a tile's outputs forgotten": ("    accumulate(o, tile_o);\n", ""),
    "log-sum-exps too large": (" - kWeightExponent) * kLn2", ") * kLn2"),
    "maxima that lag behind": ("-softmax.max[h]) > 0.0f", "-softmax.max[h]) > 4.0f"),
}


@needs_compiler
@pytest.mark.parametrize("mistake", sampled(MISTAKES, 7))
def test_mistakes_are_caught(mistake):
    right, wrong = MISTAKES[mistake]
    kernel = render(replace(SMALL, bc=64), replace(ASKED, causal=True), H200)
    assert right in kernel.source
    broken = replace(kernel, source=kernel.source.replace(right, wrong))
    device = SimDevice("h200", H200)
    build = device.toolchain().build(broken)
    with pytest.raises(Exception, match=r"wrong |launch|nobody|fence|deadlock|wait"):
        for seed in range(4):
            validate(device.open(), build, seed=seed)


# -- what may run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "problem", "message"),
    [
        (SMALL, replace(ASKED, precision="auto"), "precision auto promises, precision eight takes them"),
        (SMALL, Problem(dtype="bf16"), "weights=e4m3: not made for bf16"),
        (replace(SMALL, bc=80), ASKED, "bc=80: products of weights=e4m3 take 32 keys at a time"),
        (replace(SMALL, cluster=2), ASKED, "cluster=2: each block"),
        (SMALL, replace(ASKED, scoring=Scoring(lengths=True)), "weights=e4m3: values behind the end"),
        (SMALL, replace(ASKED, head_dim=256, head_dim_v=256), "registers: about 300 per computing thread"),
    ],
)
def test_rules(variant, problem, message):
    with pytest.raises(Illegal, match=message):
        render(variant, problem, H200)


def test_weights_of_eight_bits_are_asked_for_not_chosen():
    assert Wgmma().weights == "f16" and render(Wgmma(), ASKED, H200).source != ""
    eight = Problem(dtype="e4m3", precision=EIGHT)
    assert (eight.stem, eight.tolerance) == ("e4m3_eight_d64", 9e-2)


def test_shared_memory_holds_values_as_they_come_and_transposed():
    half = replace(SMALL, bc=96, weights="f16").smem_bytes(ASKED, H200)
    eight = replace(SMALL, bc=96).smem_bytes(ASKED, H200)
    # Two tiles each: of 96 keys, of 64 columns in rows of 64 and 128 bytes; and of 96 rows or 64 columns.
    assert eight - half == 2 * (96 * 64 - (96 - 64) * 128)


def test_registers_hold_a_tiles_outputs_beside_the_others():
    problem, half = replace(ASKED, head_dim=128, head_dim_v=128), Wgmma()
    eight = replace(half, weights="e4m3")
    assert needed_registers(eight, problem) == needed_registers(half, problem) + 64 - 16 - 4
    assert needed_registers(eight, problem) == consumer_registers(eight, problem, H200) == 232


def test_both_products_take_half_the_time():
    problem = replace(ASKED, head_dim=128, head_dim_v=128)
    half, eight = (Wgmma(weights=weights).work(problem, H200) for weights in ("f16", "e4m3"))
    assert eight.score_cycles == half.score_cycles and eight.output_cycles == half.output_cycles / 2
    # Products read a byte less of each value; of three bytes that came and went two are left.
    assert half.wavefronts - eight.wavefronts == (128 * 128 + 128 * 128 / 2) / 128
    assert eight.split_slots == 64 and eight.splitter_slots > 0


def test_values_come_swizzled():
    kernel = render(SMALL, replace(ASKED, head_dim_v=144), H200)
    addresses = {"q": 16, "k": 32, "v": 48, "o": 64}
    arguments = make_arguments(ASKED, addresses, dict.fromkeys("qkvo", (10**6, 10**4, 256)), scale=1.0)
    found = {each.array: each for each in describe_maps(kernel.launch, kernel.problem, arguments)}
    assert [found[name].columns for name in "qkvo"] == [128, 128, 128, 64]
    assert [found[name].swizzle for name in "qkvo"] == [128] * 4
