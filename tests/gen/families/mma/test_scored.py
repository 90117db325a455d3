"""Masks and changes of scores in tensor-core kernels: on emulated cards, beside numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring import Scoring
from flashgen.gen.scoring_values import draw_values
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.cards.score_values import score_values
from flashgen.tuner.evaluate import reference

from tests.support.depth import sampled
from tests.support.emulated import inputs, needs_compiler

#: Each mask and change by itself, and several together. Small numbers, so that a few tiles of 16 keys have
#: whole ones, partial ones and such as nobody sees.
SCORINGS = {
    "window": Scoring(window=(20, 0)),
    "two sides": Scoring(window=(5, 40)),
    "left side": Scoring(window=(17, -1)),
    "always": Scoring(window=(20, 0), always=3),
    "chunk": Scoring(chunk=24),
    "prefix": Scoring(prefix=30),
    "lengths": Scoring(lengths=True),
    "documents": Scoring(documents=4),
    "dilation": Scoring(dilation=3),
    "soft cap": Scoring(softcap=2.5),
    "alibi": Scoring(alibi=True),
    "bias f32": Scoring(bias="f32"),
    "bias f16": Scoring(bias="f16"),
    "bias bf16": Scoring(bias="bf16"),
    "hidden": Scoring(bias="u8"),
    "sinks": Scoring(sinks=True),
    "much": Scoring(
        window=(33, 0), lengths=True, softcap=3.0, alibi=True, bias="f32", sinks=True, dilation=2
    ),
    "mask": Scoring(mask="doc[b, q] == doc[b, k] or k % 7 == h"),
    "bounds": Scoring(mask="k >= start[b, q] and k <= q + n", scalars=(("n", 20),), documents=3),
    "score": Scoring(score="score * gain[h] + table[b, q - k] - 0.01 * abs(q - k)", sinks=True),
}
#: Rows and keys: ragged; more rows than keys, of which the first see none under a causal mask; more keys.
SHAPES = ((37, 53), (70, 45), (20, 100))
#: How numbers are multiplied, and the largest error.
NUMBERS = {
    "f16": (Problem(dtype="f16"), 2e-3),
    "bf16": (Problem(dtype="bf16"), 1.5e-2),
    "3xf16": (Problem(precision="3xf16"), 2e-5),
    "3xtf32": (Problem(precision="3xtf32"), 2e-5),
    "tf32": (Problem(precision="tf32"), 4e-3),
}
MAIN = Mma(br=32, bc=16, rows_per_warp=16, q_in_registers=False)
#: One of each way along the keys.
WALKS = {
    "main": MAIN,
    "wide": replace(MAIN, rows_per_warp=32, bc=32, q_in_registers=True, stages=3, layout="swizzled"),
    "one stage": replace(MAIN, stages=1, rescale="always"),
    "in turn": replace(MAIN, heads=4),
    "packed": replace(MAIN, pack_heads=True, br=48),
    "key warps": replace(MAIN, br=16, key_warps=4, pack_heads=True),
    "splits": replace(MAIN, br=16, splits=2, stages=1),
    "shared": replace(MAIN, br=32, rows_per_warp=32, splits=4, key_warps=2, q_in_registers=True),
}


def variant_of(walk: str, numbers: str) -> Mma:
    return replace(WALKS[walk], parts="f16" if numbers == "3xf16" else "tf32")


def problem_of(name: str, numbers: str, head_dim: int, *, causal: bool) -> Problem:
    sizes = asdict(Lengths(64, 64))
    return replace(NUMBERS[numbers][0], **sizes, head_dim=head_dim, causal=causal, scoring=SCORINGS[name])


@cache
def built(variant: Mma, problem: Problem, card: str):
    limits = preset(card)
    return SimDevice(card, limits).toolchain().build(render(variant, problem, limits))


@dataclass(frozen=True)
class Lengths:
    """The sizes of a launch."""

    seqlen_q: int
    seqlen_k: int
    batch: int = 2
    num_q_heads: int = 4
    num_kv_heads: int = 2


def values_of(problem: Problem, lengths: Lengths, seed: int = 5) -> dict[str, Any]:
    """What masks and changes read on arrays of those lengths, as the kernel has it."""
    drawn = draw_values(problem.scoring, problem.scores, lengths, np.random.default_rng(seed))
    return score_values(problem.scores, drawn, asdict(lengths)).named


def assert_right(
    problem: Problem,
    variant: Mma,
    lengths: Lengths,
    tolerance: float,
    *,
    card: str = "h200",
    scale: float = 0.3,
    values: Mapping[str, Any] | None = None,
) -> None:
    q, k, v = inputs(
        problem,
        lengths.seqlen_q,
        lengths.seqlen_k,
        scale,
        batch=lengths.batch,
        heads=lengths.num_q_heads,
        kv_heads=lengths.num_kv_heads,
    )
    values = values_of(problem, lengths) if values is None else values
    right = reference.attention(q, k, v, scale=scale, scores=problem.scores, values=values)
    runner = SimRunner(preset(card), seed=3)
    o, lse = runner.attend(built(variant, problem, card), q, k, v, scale=scale, want_lse=True, values=values)
    assert lse is not None
    seen = ~np.isneginf(right.lse)
    assert (np.isneginf(lse) == ~seen).all()
    assert np.abs(o.astype(np.float64) - right.o).max() <= tolerance
    assert np.abs(lse[seen] - right.lse[seen]).max(initial=0.0) <= tolerance
    assert (o[~seen] == 0).all()


def cases():
    for name in SCORINGS:
        for i, walk in enumerate(WALKS):
            for numbers in NUMBERS:
                for shape in SHAPES:
                    causal = name == "prefix" or (i + len(name)) % 2 == 0
                    yield name, walk, numbers, shape, causal


@needs_compiler
@pytest.mark.parametrize(("name", "walk", "numbers", "shape", "causal"), sampled(cases(), 12))
def test_masks_and_changes_are_right(name, walk, numbers, shape, causal):
    problem = problem_of(name, numbers, 32, causal=causal)
    variant = variant_of(walk, numbers)
    if walk == "in turn" and problem.scores.vary_by_batch:
        pytest.skip("heads in turn may be of several batches")
    assert_right(problem, variant, Lengths(*shape), NUMBERS[numbers][1])
