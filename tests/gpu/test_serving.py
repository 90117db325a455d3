"""Kernels of packed sequences, of caches in pages, of few queries and of gradients on a real card."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from flashgen.gen.append import Append
from flashgen.gen.families import family_named
from flashgen.gen.families.mma_backward.family import MmaBackward
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Variant
from flashgen.tuner.cards.cuda import CudaDevice, CudaRunner
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.prove.sanitizers import find_compute_sanitizer, sanitize_on_card

from tests.support.covering import draw

PROBLEM = Problem(
    batch=4, num_q_heads=8, num_kv_heads=2, seqlen_q=300, seqlen_k=900, head_dim=64, causal=True
)
RAGGED = "uniform:0-300/uniform:0-900"
FEW: dict[str, Any] = {"seqlen_q": 16, "seqlen_k": 3000}
ROTARY = Append(rotary="halves", rotary_dim=64)
#: What is served, by name.
ASKED: dict[str, dict[str, Any]] = {
    "packed": {"varlen": RAGGED},
    "packed, window and soft cap": {"varlen": RAGGED, "scoring": Scoring(window=(99, 0), softcap=20.0)},
    "packed, documents by expression": {"varlen": RAGGED, "scoring": Scoring(mask="(q + h) % 5 != k % 7")},
    "pages of 16": {"page_size": 16},
    "pages of 64, packed": {"page_size": 64, "varlen": RAGGED},
    "pages of 128, few queries": {"page_size": 128, **FEW},
    "trees": {"scoring": Scoring(tree=True), **FEW},
    "trees in pages": {"scoring": Scoring(tree=True), "page_size": 16, **FEW},
    "appended": {"append": Append(), "page_size": 16, **FEW},
    "appended and rotated": {"append": ROTARY, "page_size": 16, "varlen": "uniform:1-16/uniform:16-900"},
    "few queries": FEW,
}
FAMILIES = (("simt", "f32"), ("mma", "f16"), ("mma", "bf16"), ("wgmma", "bf16"), ("wgmma", "f16"))
#: What only some families have, or what is asked for by a parameter.
SPECIAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "e4m3 keys": ("mma", {"dtype": "bf16", "kv_dtype": "e4m3", **FEW}, {}),
    "e4m3 keys in pages": ("mma", {"dtype": "f16", "kv_dtype": "e4m3", "page_size": 16, **FEW}, {}),
    "heads packed": ("wgmma", {"dtype": "bf16", **FEW}, {"pack_heads": True, "splits": 1}),
    "keys over a cluster": ("wgmma", {"dtype": "bf16", **FEW}, {"pack_heads": True, "splits": 4}),
    "keys of pages over a cluster": (
        "wgmma",
        {"dtype": "bf16", "page_size": 16, **FEW},
        {"pack_heads": True, "splits": 8},
    ),
    **{
        f"soft cap, {tangent}": (
            "wgmma",
            {"dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "scoring": Scoring(softcap=30.0)},
            {"tangent": tangent},
        )
        for tangent in ("polynomial", "unit", "mixed", "cubic", "quintic")
    },
    **{
        f"soft cap in float32, {tangent}, {split}": (
            "wgmma",
            {"head_dim": 64, "head_dim_v": 64, "scoring": Scoring(softcap=30.0)},
            {"tangent": tangent, "split": split, "bc": 64},
        )
        for tangent in ("polynomial", "quintic", "septic", "nonic")
        for split in ("in_place", "in_front")
    },
    "latent": ("latent", {"dtype": "bf16", "latent": True, **FEW}, {}),
    "latent in pages": ("latent", {"dtype": "f16", "latent": True, "page_size": 64, **FEW}, {}),
    "latent in float32": ("simt", {"latent": True, **FEW}, {}),
}
#: Kernels of gradients.
GRADIENTS: dict[str, tuple[Variant, dict[str, Any]]] = {
    "f32": (SimtBackward(br=32, bc=32, threads_per_block=128), {}),
    "f32, window": (SimtBackward(br=32, bc=32, threads_per_block=128), {"scoring": Scoring(window=(50, 0))}),
    "bf16": (MmaBackward(), {"dtype": "bf16"}),
    "bf16, 128 columns": (MmaBackward(br=32), {"dtype": "bf16", "head_dim": 128, "head_dim_v": 128}),
    "f16, soft cap": (MmaBackward(layout="swizzled"), {"dtype": "f16", "scoring": Scoring(softcap=20.0)}),
}
SANITIZED = ("e4m3 keys in pages", "keys of pages over a cluster", "latent in pages")


@pytest.fixture(scope="module")
def runner(device: CudaDevice) -> Iterator[CudaRunner]:
    runner = device.open()
    yield runner
    runner.close()


def problem_of(asked: dict[str, Any]) -> Problem:
    if asked.get("latent"):
        asked = {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, **asked}
    return replace(PROBLEM, **asked)


def kernel_of(
    limits: DeviceLimits, family: str, problem: Problem, held: dict[str, Any] | None = None
) -> Kernel:
    """A kernel by chance; skips where the card has none of the family."""
    chance = random.Random(f"{family} {problem.name}")
    found = draw(family_named(family), problem, limits, 1, chance, held)
    if not found:
        pytest.skip(f"no kernel of {family} runs {problem.name} on {limits.name}")
    return render(found[0], problem, limits)


def check(device: CudaDevice, runner: CudaRunner, kernel: Kernel) -> None:
    build = device.toolchain().build(kernel)
    error = validate(runner, build, seed=1, depth="full", problem=kernel.problem)
    assert 0 < error < kernel.problem.tolerance
    assert min(runner.measure(build, kernel.problem, budget_ms=20.0).times_us) > 0


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
@pytest.mark.parametrize("name", ASKED)
def test_what_is_served_is_right(device, runner, family, dtype, name):
    problem = problem_of({**ASKED[name], "dtype": dtype})
    check(device, runner, kernel_of(device.limits, family, problem))


@pytest.mark.parametrize("name", SPECIAL)
def test_what_some_families_have_is_right(device, runner, name):
    family, asked, held = SPECIAL[name]
    check(device, runner, kernel_of(device.limits, family, problem_of(asked), held))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_right(device, runner, name):
    variant, asked = GRADIENTS[name]
    problem = replace(PROBLEM, backward=True, **asked)
    build = device.toolchain().build(render(variant, problem, device.limits))
    assert 0 < validate(runner, build, seed=1, depth="full") < problem.tolerance
    assert min(runner.measure(build, problem, budget_ms=20.0).times_us) > 0


@pytest.mark.parametrize("name", SANITIZED)
def test_compute_sanitizer_is_clean(device, name):
    try:
        find_compute_sanitizer()
    except FlashgenError as error:
        pytest.skip(str(error))
    family, asked, held = SPECIAL[name]
    sanitize_on_card(kernel_of(device.limits, family, problem_of(asked), held), device, 0)
