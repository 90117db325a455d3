"""Emitted sources build for every architecture, without spills and without warnings."""

from dataclasses import replace

import pytest
from flashgen.gen.families.ladder import steps
from flashgen.gen.families.simt import Simt
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.space import enumerate_space
from flashgen.tuner.compile import cuda_toolchain
from flashgen.tuner.device import BuildError, FlashgenError

pytestmark = pytest.mark.nvcc

CARDS = ["gtx-1080", "v100", "t4", "a100", "rtx-3090", "rtx-4090", "h200", "b200", "rtx-5090"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))


def build(variant, problem, card):
    limits = PRESETS[card]
    try:
        toolchain = cuda_toolchain(limits.arch)
    except FlashgenError as missing:
        pytest.skip(str(missing))
    return toolchain.build(render(variant, problem, limits))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("head_dim", [64, 40, 65])
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


@pytest.mark.parametrize("card", ["gtx-1080", "t4", "h200"])
@pytest.mark.parametrize("step", steps(64))
def test_every_step_of_the_ladder_builds_without_spills(card, step):
    assert build(steps(64)[step], Problem(), card).spill_bytes == 0
