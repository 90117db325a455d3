"""Values and outputs of another head dim than queries and keys: on emulated cards, beside float64."""

from __future__ import annotations

import random
import re

import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render

from tests.support.covering import Setting, draw
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, check, needs_compiler

#: Narrower and wider values; odd ones, whose accesses are narrow; some that fill the lanes and some that pad.
DIMS = ((64, 24), (24, 64), (40, 36), (36, 40), (33, 7), (7, 33), (128, 64), (192, 128), (16, 200))
#: Cards with and without asynchronous copies.
CARDS = ("gtx-1080", "h200")
#: Variants of each card, mask and pair of head dims.
DRAWN = 6


def settings() -> list[Setting]:
    """Some of every pair, so ordered that any share has of each."""
    rng, each = random.Random(7), []
    for d, dv in DIMS:
        for card in CARDS:
            for causal in (False, True):
                problem = Problem(head_dim=d, head_dim_v=dv, causal=causal)
                drawn = draw(Simt, problem, PRESETS[card], DRAWN, rng)
                each += [Setting(variant, problem, PRESETS[card]) for variant in drawn]
    rng.shuffle(each)
    return each


@needs_compiler
@pytest.mark.parametrize("setting", sampled(settings(), 6, thorough=20), ids=lambda setting: setting.name)
def test_outputs_are_right(setting):
    assert 0 < check(setting, seed=1) <= setting.problem.tolerance


def test_sources_render_and_are_tidy():
    for setting in settings():
        source = render(setting.variant, setting.problem, setting.limits).source
        assert_tidy(source, setting.name, longest=130)
        named = {int(width) for width in re.findall(r"constexpr int kDv? = (\d+)", source)}
        assert named <= {setting.problem.head_dim, setting.problem.head_dim_v}


def test_vectors_divide_both_head_dims():
    with pytest.raises(Exception, match="vec=4 does not divide head dim 30"):
        Simt(vec=4).check(Problem(head_dim=64, head_dim_v=30), PRESETS["gtx-1080"])
    advice = Simt(vec=1).advice(Problem(head_dim=64, head_dim_v=30), PRESETS["gtx-1080"])
    assert advice is not None and "vec=1, but 2 divides head dim 30 and 64 too" in advice


def test_tiles_are_as_wide_as_what_they_hold():
    problem = Problem(head_dim=64, head_dim_v=32)
    tiles = Simt().layouts(problem)
    assert (tiles["v"].stride, tiles["v"].floats) == (32, 32 * Simt().bc)
    wide, narrow = (Simt().smem_bytes(each, PRESETS["h200"]) for each in (Problem(), problem))
    assert wide - narrow == 4 * 32 * Simt().bc
