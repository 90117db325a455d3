"""Kernels with masks and changes of scores on emulated cards, beside float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.variant import Illegal, Variant
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.evaluate import reference

from tests.support.emulated import inputs
from tests.support.scorings import OF_STEPS, STEPS, drawn_values

SCALE = 0.3
#: What says that a row of the tensor cores is right as it is.
TRUSTED = "return fabsf(row_max) <= 1048576.0f && row_sum < 1e30f;"


@cache
def built(
    variant: Variant,
    problem: Problem,
    card: str = "h200",
    *,
    sanitize: bool = False,
    distrusting: bool = False,
) -> Build:
    """A variant's kernel; a ``distrusting`` one computes every row again."""
    kernel = render(variant, problem, preset(card))
    if distrusting:
        assert TRUSTED in kernel.source
        kernel = replace(kernel, source=kernel.source.replace(TRUSTED, "return false;"))
    return SimDevice(card, preset(card), sanitize).toolchain().build(kernel)


def attend(
    build: Build,
    rows: int,
    keys: int,
    values: Mapping[str, Any],
    case=None,
    *,
    sanitize: bool = False,
    scale: float = SCALE,
):
    """What the kernel makes of random inputs, and the reference of them."""
    problem = build.kernel.problem
    heads = {"heads": problem.num_q_heads, "kv_heads": problem.num_kv_heads}
    case = case or inputs(problem, rows, keys, scale, batch=problem.batch, **heads)
    runner = SimRunner(preset("h200"), seed=rows + keys, sanitize=sanitize)
    found = runner.attend(build, *case, scale=scale, want_lse=True, values=values)
    return found, reference.attention(*case, scale=scale, scores=problem.scores, values=values)


def cases_by_steps(
    walks: Mapping[str, Variant], problem_of: Callable[..., Problem]
) -> list[tuple[str, str, bool]]:
    """Every other one of the masks of every so many keys, the walks and causal or not, where it is legal."""
    return [
        (name, walk, causal)
        for i, (name, scoring) in enumerate(OF_STEPS.items())
        for j, walk in enumerate(walks)
        for causal in (False, True)
        if (i + j + causal) % 2 == 0 and is_legal(walks[walk], problem_of(scoring, causal=causal))
    ]


def attended_by_steps(build: Build) -> Iterator[Any]:
    """The same for each dilation, which no kernel is built for; also where rows' places are before all
    keys."""
    problem = build.kernel.problem
    for steps in STEPS if problem.scoring.dilation else STEPS[:1]:
        for rows, keys in ((150, 170), (230, 75)):
            values = {**drawn_values(problem, rows, keys), "dilation": steps}
            yield attend(build, rows, keys, values)


def hiding_biases(heads: int, rows: int, keys: int) -> Iterator[np.ndarray]:
    """Biases (1, heads, rows, keys) that hide keys before or behind others by a large number, beside which
    nothing is left of a score."""
    for size, hidden in product((1e9, 3e9, 1e12), (slice(0, 100), slice(50, 150))):
        bias = np.zeros((1, heads, rows, keys), np.float32)
        bias[..., hidden] = -size
        yield bias


def assert_close(found, expected: reference.Reference, tolerance: float) -> None:
    """Rows that see nothing are zeros, with a log-sum-exp of -inf, and the others as near as that."""
    o, lse = found
    seen = ~np.isneginf(expected.lse)
    assert np.abs(o.astype(np.float64) - expected.o).max() <= tolerance
    assert (np.isneginf(lse) == ~seen).all()
    assert (o[~seen] == 0).all()
    assert np.abs(lse[seen] - expected.lse[seen]).max(initial=0.0) <= tolerance


def is_legal(variant: Variant, problem: Problem, card: str = "h200") -> bool:
    """Whether a variant can run a problem on a card."""
    try:
        variant.check(problem, preset(card))
    except Illegal:
        return False
    return True
