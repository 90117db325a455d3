"""Keys and values of e4m3 beside float32 queries, on CUDA cores: held to float64 of the very numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate.validate import validate

from tests.support.covering import draw
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

CACHED = Problem(
    kv_dtype="e4m3", batch=3, num_q_heads=4, num_kv_heads=2, seqlen_q=4, seqlen_k=90, head_dim=24, causal=True
)
SIMT = Simt(br=32, bc=16, threads_per_block=64, min_blocks=1)
WAYS = {
    "one stage": (SIMT, "h200"),
    "two stages": (replace(SIMT, stages=2, vec=2, k_layout="row"), "gtx-1080"),
    "q in registers": (replace(SIMT, q_in_registers=True, br=16, vec=1), "p100"),
}
ASKED = {
    "dense": {},
    "pages": {"page_size": 16},
    "packed": {"varlen": "uniform:1-4/uniform:3-90"},
    "window, soft cap": {"scoring": Scoring(window=(20, 0), softcap=20.0)},
}


@needs_compiler
@pytest.mark.parametrize(("way", "asked"), sampled([(way, asked) for asked in ASKED for way in WAYS], 1))
def test_keys_of_eight_bits_are_right(way: str, asked: str) -> None:
    variant, card = WAYS[way]
    kernel = render(variant, replace(CACHED, **ASKED[asked]), PRESETS[card])
    device = SimDevice("emulated", PRESETS[card])
    error = validate(device.open(), device.toolchain().build(kernel), seed=1, problem=kernel.problem)
    assert error < kernel.problem.tolerance


@needs_compiler
def test_every_number_is_what_it_was() -> None:
    """The values of a single key come back, all 256 codes of them, and what is no number as none."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(1, 4, 1, 64)
    problem = replace(CACHED, head_dim=64, head_dim_v=64, num_kv_heads=4, causal=False)
    kernel = render(SIMT, problem, PRESETS["gtx-1080"])
    device = SimDevice("emulated", PRESETS["gtx-1080"])
    q, k = np.ones((1, 4, 2, 64), np.float32), np.zeros_like(codes)
    o, _ = device.open().attend(device.toolchain().build(kernel), q, k, codes, scale=1.0)
    expected = np.broadcast_to(codes.astype(np.float32), o.shape)
    assert ((o == expected) | np.isnan(expected)).all() and (np.isnan(o) == np.isnan(expected)).all()


@pytest.mark.parametrize("card", sampled(["gtx-1080", "v100", "h200"], 1))
def test_legal_variants_render(card: str) -> None:
    for asked in ({}, {"page_size": 16}):
        problem = replace(CACHED, head_dim=40, head_dim_v=40, **asked)
        for variant in draw(Simt, problem, PRESETS[card], 6, random.Random(1)):
            assert_tidy(render(variant, problem, PRESETS[card]).source, variant.name, longest=130)
