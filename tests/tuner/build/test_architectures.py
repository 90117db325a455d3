"""Emitted sources build for every architecture, without spills and without warnings."""

import random
from dataclasses import replace
from itertools import cycle

import pytest
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.space import enumerate_space
from flashgen.tuner.build.compile import CompilePool, cuda_toolchain
from flashgen.tuner.errors import BuildError, FlashgenError
from flashgen.tuner.shelf import library

from tests.support.covering import NUMBERS, TURING_NUMBERS, draw, held_by, parts_of, serves
from tests.support.depth import sampled

pytestmark = pytest.mark.nvcc

CARDS = ["gtx-1080", "v100", "t4", "a100", "rtx-3090", "rtx-4090", "h200", "b200", "rtx-5090"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))


def toolchain_for(card):
    try:
        return cuda_toolchain(PRESETS[card].arch)
    except FlashgenError as missing:
        pytest.skip(str(missing))


def build(variant, problem, card):
    return toolchain_for(card).build(render(variant, problem, PRESETS[card]))


def build_all(pairs, card):
    with CompilePool(toolchain_for(card)) as pool:
        futures = [pool.submit(render(variant, problem, PRESETS[card])) for variant, problem in pairs]
        return [future.result() for future in futures]


@pytest.mark.parametrize(("card", "head_dim"), sampled(zip(CARDS, cycle([64, 40, 65]), strict=False), 3))
def test_a_sample_of_the_space_builds(card, head_dim):
    problem = Problem(head_dim=head_dim, causal=head_dim == 40)
    legal = enumerate_space(Simt, problem, PRESETS[card]).legal
    for variant in legal[len(legal) // 3 :: len(legal) // 2]:
        built = build(variant, problem, card)
        assert 0 < built.registers <= 255


@pytest.mark.parametrize("off", [-16, 16])
def test_the_kernel_asks_for_just_the_shared_memory_that_was_counted(off):
    kernel = render(Simt(), Problem(), PRESETS["h200"])
    counted = kernel.launch.smem_bytes
    wrong = replace(kernel, source=kernel.source.replace(f"== {counted},", f"== {counted + off},"))
    with pytest.raises(BuildError, match="the size that pruning counted on"):
        cuda_toolchain(90).build(wrong)


@pytest.mark.parametrize("card", sampled(["gtx-1080", "t4", "h200"], 1))
@pytest.mark.parametrize("step", steps(64))
def test_every_step_of_the_ladder_builds_without_spills(card, step):
    assert build(steps(64)[step], Problem(), card).spill_bytes == 0


# -- tensor cores ---------------------------------------------------------------------------------------

MMA_CARDS = [card for card in CARDS if PRESETS[card].arch >= 75]
#: Of queries and keys, of values, and whether under a causal mask.
HEAD_DIMS = [(64, 64, True), (40, 40, False), (7, 5, False), (33, 8, True), (160, 24, False)]


def served(card):
    """The number formats that the card's tensor cores multiply."""
    return NUMBERS if PRESETS[card].arch >= 80 else TURING_NUMBERS


@pytest.mark.parametrize("card", sampled(MMA_CARDS, 2))
def test_tensor_core_kernels_build_without_warnings(card, monkeypatch):
    # nvcc reads it; a function that only the emulated card has, or a constant that is never used, fails.
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Werror all-warnings")
    rng = random.Random(PRESETS[card].arch)
    pairs = []
    for dtype, precision in served(card):
        for d, dv, causal in rng.sample([dims for dims in HEAD_DIMS if serves(precision, *dims[:2])], 2):
            problem = Problem(dtype=dtype, precision=precision, head_dim=d, head_dim_v=dv, causal=causal)
            drawn = draw(Mma, problem, PRESETS[card], 1, rng, held_by(dtype, precision))
            pairs += [(variant, problem) for variant in drawn]
    assert len(pairs) == 2 * len(served(card))
    for (variant, problem), built in zip(pairs, build_all(pairs, card), strict=True):
        assert not isinstance(built, BuildError), f"{problem.stem} {variant.name}: {built}"
        assert 0 < built.registers <= 255


#: By bytes of an element and head dim: what a search would start from.
PLAIN = {
    (2, 64): [Mma(bc=64), Mma(br=128, rows_per_warp=32, bc=64)],
    (2, 128): [Mma(bc=64), Mma(br=64, bc=32)],
    (2, 256): [Mma(br=64, bc=16, q_in_registers=False)],
    (4, 64): [Mma(br=64, bc=32)],
    (4, 128): [Mma(br=64, bc=16, q_in_registers=False)],
}


@pytest.mark.parametrize("card", sampled(MMA_CARDS, 1))
def test_plain_tensor_core_kernels_build_without_spills(card):
    limits = PRESETS[card]
    pairs = [
        (replace(variant, parts=parts_of(precision), stages=2 if limits.has_async_copy else 1), problem)
        for dtype, precision in served(card)
        for (size, d), variants in PLAIN.items()
        if size == (4 if dtype == "f32" else 2)
        for problem in [Problem(dtype=dtype, precision=precision, head_dim=d, causal=True)]
        for variant in variants
    ]
    for (variant, problem), built in zip(pairs, build_all(pairs, card), strict=True):
        assert not isinstance(built, BuildError), f"{problem.stem} {variant.name}: {built}"
        assert built.spill_bytes == 0, f"{problem.stem} {variant.name}"


# -- warpgroups -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", sampled([False, True], 1))
def test_warpgroup_kernels_build_without_warnings_and_spills(causal, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Werror all-warnings")
    rng = random.Random(causal)
    pairs = []
    for dtype in ("f16", "bf16"):
        for d, dv in ((40, 40), (64, 64), (128, 128), (192, 128), (256, 256)):
            problem = Problem(dtype=dtype, head_dim=d, head_dim_v=dv, causal=causal)
            legal = enumerate_space(Wgmma, problem, PRESETS["h200"]).legal
            pairs.append((rng.choice(legal), problem))
    for (variant, problem), built in zip(pairs, build_all(pairs, "h200"), strict=True):
        assert not isinstance(built, BuildError), f"{problem.stem} {variant.name}: {built}"
        assert built.spill_bytes == 0, f"{problem.stem} {variant.name}"


#: float32 in parts, and gradients beside those of what scores read.
TUNED = [
    "f32_d64_causal",
    "f32_d128",
    "f32_d32",
    "f32_d64_softcap30_causal",
    "bf16_d64_backward_alibi_causal_b2_h32_n8192",
]


@pytest.mark.parametrize("name", TUNED)
def test_tuned_warpgroup_kernels_build_without_warnings_and_spills(name, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Werror all-warnings")
    tuned = library.read(library.shipped_folder() / "nvidia_h200" / f"{name}.json").kernel
    assert isinstance(tuned.variant, (Wgmma, WgmmaBackward))
    assert build(tuned.variant, tuned.problem, "h200").spill_bytes == 0
