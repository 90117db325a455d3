"""Gradients of the real problem, of which a few rows of a few heads are given some of their outputs.

What other rows are given is nothing, and so is what they add to the gradients of keys and values: all keys
can be compared, at any length, by a reference that looks at these rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ..build.protocol import Build
from ..cards.device import Runner
from ..cards.dtypes import numpy_dtype
from ..cards.sequences import sequence_slices
from .differentiated import compare_gradient, least_weight, weight_bound
from .error_bounds import tanh_error
from .gradients import Gradient, gradients
from .packed import draw_packed_sample
from .reference import Reference
from .sampled_problem import draw_sample

#: The log-sum-exp of rows that are given nothing: so large that none of their weights overflows.
FAR_ABOVE = 128.0
#: Samples that are kept: gradients of all heads and their spreads take room.
KEPT_SAMPLES = 2


@dataclass(frozen=True)
class GradientSample:
    """A kernel's inputs by name, its scale and what its scores read; the gradients that it should make; and
    of the rows that are given something what bounds errors."""

    arrays: Mapping[str, np.ndarray]
    scale: float
    values: Mapping[str, Any]
    expected: Mapping[str, Gradient]
    sizes: Reference


@lru_cache(maxsize=KEPT_SAMPLES)
def draw_gradient_sample(problem: Problem, seed: int) -> GradientSample:
    """Draws the inputs of `draw_sample` for a problem of gradients, and gradients of its rows."""
    sample = draw_sample(problem, seed)
    q, k, v = sample.q, sample.k, sample.v
    rng = np.random.default_rng([seed, 2])
    o, dout, lse = _nothing_given(problem, q, v)
    for (b, h), found in zip(sample.picks, sample.expected, strict=True):
        o[b, h, sample.rows] = found.o[0, 0].astype(o.dtype)
        lse[b, h, sample.rows] = found.lse[0, 0]
        drawn = rng.standard_normal(found.o.shape[2:], dtype=np.float32)
        dout[b, h, sample.rows] = drawn.astype(o.dtype)
    names = ("max_score", "change_error", "sink_score")
    most = {name: max(getattr(each, name) for each in sample.expected) for name in names}
    sizes = replace(sample.expected[0], **most)
    expected = gradients(
        *(q, k, v, dout),
        scale=sample.scale,
        scores=problem.scores,
        values=sample.values,
        unit=weight_bound(problem, sizes),
        tanh_error=tanh_error(problem),
    )
    arrays = {"q": q, "k": k, "v": v, "o": o, "dout": dout, "lse": lse}
    return GradientSample(arrays, sample.scale, sample.values, expected, sizes)


def check_gradient_sample(runner: Runner, build: Build, problem: Problem, seed: int) -> float:
    """Returns the largest per-head error over spread of a kernel's gradients on a sample of a problem.
    Raises `WrongResult`."""
    sample = draw_gradient_sample(problem, seed)
    found = runner.differentiate(build, sample.arrays, scale=sample.scale, values=sample.values)
    name = f"{problem.name} at its real lengths"
    least, worst = least_weight(build.kernel), 0.0
    for each, wanted in sample.expected.items():
        whole, told = wanted.summed_to(found[each].shape), f"{each}, {name}"
        worst = max(worst, compare_gradient(found[each], whole, sample.sizes, problem, told, least))
    return worst


def check_packed_gradient_sample(runner: Runner, build: Build, problem: Problem, seed: int) -> float:
    """Returns the same of packed sequences: of each some rows of one head are given something. Raises
    `WrongResult`."""
    sample = draw_packed_sample(problem, seed)
    q, k, v = sample.q, sample.k, sample.v
    rng = np.random.default_rng([seed, 3])
    o, dout, lse = _nothing_given(problem, q, v)
    for (head, rows), exact in zip(sample.picks, sample.expected, strict=True):
        o[0, head, rows], lse[0, head, rows] = exact.o[0, 0].astype(o.dtype), exact.lse[0, 0]
        dout[0, head, rows] = rng.standard_normal(exact.o.shape[2:], dtype=np.float32).astype(o.dtype)
    arrays = {"q": q, "k": k, "v": v, "o": o, "dout": dout, "lse": lse}
    found = runner.differentiate(build, arrays, scale=sample.scale, values=sample.values)
    name, least = f"{problem.name} at its real lengths", least_weight(build.kernel)
    worst, of_buffers = 0.0, dict[str, Gradient]()
    places = zip(*(sequence_slices(sample.values, each) for each in "qk"), strict=True)
    picked = iter(sample.expected)
    for number, (rows, keys) in enumerate(places):
        if rows.stop <= rows.start:
            continue
        sizes = next(picked)
        wanted = gradients(
            *(q[:, :, rows], k[:, :, keys], v[:, :, keys], dout[:, :, rows]),
            scale=sample.scale,
            scores=problem.scores,
            values=sample.values,
            first=(number, 0),
            unit=weight_bound(problem, sizes),
            tanh_error=tanh_error(problem),
        )
        for each, gradient in wanted.items():
            if each not in ("dq", "dk", "dv"):
                of_buffers[each] = gradient.plus(of_buffers.get(each))
                continue
            own = found[each][:, :, rows if each == "dq" else keys]
            told = f"{each}, {name}, sequence {number}"
            worst = max(worst, compare_gradient(own, gradient, sizes, problem, told, least))
    largest = max(sample.expected, key=lambda exact: weight_bound(problem, exact))
    for each, gradient in of_buffers.items():
        whole = gradient.summed_to(found[each].shape)
        worst = max(worst, compare_gradient(found[each], whole, largest, problem, f"{each}, {name}", least))
    return worst


def _nothing_given(
    problem: Problem, q: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, their gradients and log-sum-exps of rows that are given nothing."""
    o = np.zeros((*q.shape[:3], v.shape[3]), numpy_dtype(problem.output_dtype))
    return o, np.zeros_like(o), np.full(q.shape[:3], FAR_ABOVE, np.float32)
