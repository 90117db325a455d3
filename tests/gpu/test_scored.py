"""Kernels of masks and changes of scores on a real card: right, as promised, and clean when sanitized."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from flashgen.gen.families import family_named
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.cuda import CudaDevice, CudaRunner
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.adversarial import prove_promise
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.prove.sanitizers import find_compute_sanitizer, sanitize_on_card

from tests.support.covering import draw

ASKED = {
    "window": Scoring(window=(127, 0)),
    "window beside first keys": Scoring(window=(127, 3), always=4, sinks=True),
    "chunk": Scoring(chunk=64),
    "prefix": Scoring(prefix=100),
    "lengths": Scoring(lengths=True, softcap=30.0),
    "documents": Scoring(documents=4, alibi=True),
    "dilation": Scoring(dilation=2),
    "bias": Scoring(bias="f32", sinks=True),
    "boolean": Scoring(bias="u8"),
    "expressions": Scoring(
        mask="doc[b, q] == doc[b, k]", score="score + table[h, k - q]", buffers=(("doc", "i16"),)
    ),
    "all": Scoring(window=(100, 3), softcap=20.0, alibi=True, sinks=True, lengths=True, bias="f16"),
}
FAMILIES = (("simt", "f32"), ("mma", "f32"), ("mma", "f16"), ("wgmma", "f32"), ("wgmma", "bf16"))
#: Kernels that compute-sanitizer sees: one of each family.
SANITIZED = (("simt", "f32", "all"), ("mma", "f16", "expressions"), ("wgmma", "bf16", "window"))


@pytest.fixture(scope="module")
def runner(device: CudaDevice) -> Iterator[CudaRunner]:
    runner = device.open()
    yield runner
    runner.close()


def problem_of(dtype: str, name: str) -> Problem:
    return Problem(
        batch=2,
        num_q_heads=4,
        num_kv_heads=2,
        seqlen_q=1000,
        seqlen_k=1100,
        dtype=dtype,
        head_dim=64,
        causal=name in ("prefix", "window"),
        scoring=ASKED[name],
    )


def kernel_of(device: CudaDevice, family: str, dtype: str, name: str):
    """A kernel by chance; skips where the card has none of the family."""
    problem = problem_of(dtype, name)
    found = draw(family_named(family), problem, device.limits, 1, random.Random(f"{family} {dtype} {name}"))
    if not found:
        pytest.skip(f"no kernel of {family} runs {problem.name} on {device.limits.name}")
    return render(found[0], problem, device.limits)


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
@pytest.mark.parametrize("name", ASKED)
def test_kernels_are_right_and_keep_their_promise(device, runner, family, dtype, name):
    kernel = kernel_of(device, family, dtype, name)
    build = device.toolchain().build(kernel)
    error = validate(runner, build, seed=1, depth="full", problem=kernel.problem)
    assert 0 < error < kernel.problem.tolerance
    prove_promise(runner, build, "few")
    assert min(runner.measure(build, kernel.problem, budget_ms=20.0).times_us) > 0


@pytest.mark.parametrize(("family", "dtype", "name"), SANITIZED)
def test_compute_sanitizer_is_clean(device, family, dtype, name):
    try:
        find_compute_sanitizer()
    except FlashgenError as error:
        pytest.skip(str(error))
    sanitize_on_card(kernel_of(device, family, dtype, name), device, 0)
