"""Whether something orders what threads do in shared memory, in kernels of all families."""

from __future__ import annotations

import json

import pytest
from flashgen.gen.families import family_named
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.prove.sanitizers import for_sanitizer

from tests.support import ROOT
from tests.support.depth import sampled
from tests.support.emulated import needs_compiler

CASES = json.loads((ROOT / "tests" / "gen" / "golden" / "cases.json").read_text())
#: Where one lane tells for its warp that units of float32's parts are read, which products of the warp that
#: need what was read, but no __syncwarp, precede. As racecheck has them, all lanes tell.
ONE_LANE_TELLS = {"wgmma_h200_f32_3xf16_d128"}


@needs_compiler
@pytest.mark.parametrize("name", sampled(CASES, 2, thorough=30))
def test_a_kernel_has_no_races(name: str) -> None:
    case = CASES[name]
    limits = PRESETS[case["card"]]
    variant = family_named(case["family"])(**case["variant"])
    kernel = render(variant, Problem.from_dict(case["problem"]), limits)
    if name in ONE_LANE_TELLS:
        kernel = for_sanitizer(kernel, "racecheck")
    device = SimDevice("emulated", limits, races=True)
    assert 0 < validate(device.open(), device.toolchain().build(kernel), seed=1) <= kernel.problem.tolerance
