"""The simt sources: all of them render, and say what their variant says."""

import random
import re

import pytest
from flashgen.gen.emit.cuda import emit_cuda
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal

from tests.support.covering import draw
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy

SPACES = [
    ("gtx-1080", Problem()),
    ("gtx-1080", Problem(head_dim=40, causal=True)),
    ("t4", Problem(head_dim=128)),
    ("rtx-4090", Problem(head_dim=128)),
    ("h200", Problem()),
    ("h200", Problem(head_dim=256, causal=True)),
    ("gtx-1080", Problem(head_dim=64, head_dim_v=40)),
]
#: Of some thousands.
SAMPLED = 40


def of_spaces(spaces):
    return pytest.mark.parametrize(
        ("card", "problem"), spaces, ids=lambda value: value.name if isinstance(value, Problem) else value
    )


def assert_all_render_apart(variants, problem, limits):
    digests = set()
    for variant in variants:
        kernel = render(variant, problem, limits)
        assert_tidy(kernel.source, variant.name, longest=130)
        digests.add(kernel.digest)
    assert len(digests) == len(variants)


@of_spaces(SPACES)
def test_legal_variants_render(card, problem):
    # Nothing is asked of scores that would leave keys out.
    held = {"far_keys": "walked"}
    variants = draw(Simt, problem, PRESETS[card], SAMPLED, random.Random(1), held)
    assert 10 < len(variants) <= SAMPLED
    assert_all_render_apart(variants, problem, PRESETS[card])


@of_spaces(sampled(SPACES, 0, thorough=2))
def test_every_legal_variant_renders(card, problem):
    assert_all_render_apart(enumerate_space(Simt, problem, PRESETS[card]).legal, problem, PRESETS[card])


def test_rendering_is_deterministic():
    first = render(Simt(), Problem(), PRESETS["h200"])
    assert first == render(Simt(), Problem(), PRESETS["h200"])
    assert first.digest != render(Simt(bc=32), Problem(), PRESETS["h200"]).digest


def test_the_header_regenerates_the_variant():
    variant = Simt(br=96, bc=48, k_layout="padded", min_blocks=1)
    source = emit_cuda(render(variant, Problem(), PRESETS["h200"]), device="H200")
    settings = dict(s.split("=") for s in re.findall(r"--set (\w+=\w+)", source))
    assert Simt(**Simt.parse(settings)) == variant


def test_lines_stay_readable():
    source = render(
        Simt(br=32, bc=32, min_blocks=1), Problem(head_dim=40, causal=True), PRESETS["gtx-1080"]
    ).source
    assert max(map(len, source.splitlines())) <= 130


def test_illegal_variants_do_not_render():
    with pytest.raises(Illegal, match=r"shared memory: needs \d+ bytes, sm_61 allows 49152"):
        render(Simt(br=256, threads_per_block=256), Problem(), PRESETS["gtx-1080"])
    with pytest.raises(Illegal, match="vec=4 does not divide head dim 65"):
        render(Simt(), Problem(head_dim=65), PRESETS["h200"])


def test_the_scalar_width_serves_any_head_dim():
    for head_dim in range(1, 257):
        Simt(vec=1, br=32, bc=8, min_blocks=1).check(Problem(head_dim=head_dim), PRESETS["h200"])
