"""Adversarial inputs reach kernels whatever the layout of keys: packed, in pages, appended, of eight bits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from flashgen.gen.append import Append
from flashgen.gen.families import family_named
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import LaunchError
from flashgen.tuner.evaluate.adversarial import BrokenPromise, prove_promise
from flashgen.tuner.evaluate.adversarial_inputs import cases_for

from tests.support.covering import draw
from tests.support.depth import sampled

PROBLEM = Problem(
    dtype="f16", batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=16, seqlen_k=300, head_dim=32, head_dim_v=32
)
RAGGED = "uniform:1-16/uniform:16-300"
ROTARY = Append(rotary="halves", rotary_dim=32)
#: What is asked for, and the family that is tried.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "pages": ("mma", {"page_size": 16}),
    "appended to pages": ("mma", {"page_size": 16, "append": Append()}),
    "odd pages, causal": ("simt", {"page_size": 7, "causal": True, "dtype": "f32"}),
    "packed, pages": ("mma", {"page_size": 16, "varlen": RAGGED}),
    "packed": ("mma", {"varlen": RAGGED, "scoring": Scoring(softcap=20.0)}),
    "appended and rotated": ("mma", {"append": ROTARY}),
    "packed, appended and rotated": ("mma", {"page_size": 16, "varlen": RAGGED, "append": ROTARY}),
    "pages of e4m3": ("mma", {"page_size": 16, "dtype": "bf16", "kv_dtype": "e4m3"}),
    "window, pages": ("mma", {"page_size": 16, "causal": True, "scoring": Scoring(window=(20, 0))}),
    "latent pages": (
        "simt",
        {"page_size": 16, "latent": True, "head_dim": 48, "num_kv_heads": 1, "dtype": "f32"},
    ),
    "pages by the copy engine": ("wgmma", {"page_size": 64, "head_dim": 64, "head_dim_v": 64}),
}


#: What no kernel of 16 bits and a plain mask has otherwise.
HELD: dict[str, dict[str, Any]] = {
    "wgmma": {
        "bias_stages": 0,
        "bias_heads": 1,
        "seen_bits": False,
        "split": "in_place",
        "summed_columns": 0,
        "weights": "f16",
        "split_by": "rows",
    }
}


def kernel_of(name: str):
    family, asked = ASKED[name]
    problem, limits = replace(PROBLEM, **asked), preset("h200")
    (variant,) = draw(family_named(family), problem, limits, 1, random.Random(name), HELD.get(family))
    return render(variant, problem, limits)


@pytest.mark.parametrize("name", sampled(ASKED, 2, thorough=5))
def test_kernels_of_every_layout_keep_their_promise(name):
    kernel = kernel_of(name)
    device = SimDevice("h200", preset("h200"))
    tried = prove_promise(device.open(), device.toolchain().build(kernel), "few")
    assert tried == len(cases_for(kernel.problem, "few")) > 50


def test_a_wrong_page_is_seen():
    kernel = kernel_of("odd pages, causal")
    right = "(key - nth * rows.page_size)"
    assert right in kernel.source
    wrong = replace(kernel, source=kernel.source.replace(right, "(key - nth)"))
    device = SimDevice("h200", preset("h200"))
    with pytest.raises((BrokenPromise, LaunchError)):
        prove_promise(device.open(), device.toolchain().build(wrong), "few")
