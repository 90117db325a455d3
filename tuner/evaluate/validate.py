"""Whether a kernel is right: against float64, on fresh random inputs, at the shapes where kernels go wrong.

It runs behind the `Runner` protocol, so that a CUDA card and an emulated one answer the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...gen.layout import DENSE
from ...gen.problem import Problem
from ..build.protocol import Build
from ..cards.device import Runner
from ..cards.key_scales import draw_scales, scaled_keys
from ..cards.pages import draw_table, told_of_pages
from . import reference
from .appending import attended_values, check_caches, rotated_queries, take_new_rows
from .asked_values import case_values
from .cases import Case, Depth, cases
from .comparison import compare
from .differentiated import check_gradients
from .error_bounds import moved_scores, tanh_error
from .inputs import lengths_of, make_inputs
from .packed import compare_sequences, draw_packed_sample, packed_sample_problem
from .paged import in_pages, out_of_pages, row_after_row
from .sampled_gradients import KEPT_SAMPLES, check_gradient_sample, check_packed_gradient_sample
from .sampled_problem import SAMPLE_SEEDS, draw_sample, sample_problem


def validate(
    runner: Runner,
    build: Build,
    *,
    seed: int,
    depth: Depth = "quick",
    problem: Problem | None = None,
    max_sample_flops: float = math.inf,
    tell: Callable[[str], None] = lambda step: None,
) -> float:
    """Returns the largest per-head error met on inputs whose scores are of ordinary size.

    Runs the suite of that depth on inputs drawn from ``seed``, then a sample of ``problem``, shrunk to
    ``max_sample_flops`` (an emulated card is slow) and to `SAMPLE_BYTES`. ``tell`` hears each step.

    Raises:
        WrongResult, CorruptedMemory, LaunchError: what is wrong with the kernel.
    """
    kernel = build.kernel
    worst = 0.0
    rng = np.random.default_rng([seed, int(kernel.digest, 16)])
    for number, case in enumerate(cases(kernel.variant, kernel.problem, depth, rng), 1):
        tell(f"case {number}, {case.name}")
        worst = max(worst, check_case(runner, build, case, rng))
    # Gradients of packed sequences are proved by the suite alone.
    if problem is not None and not (problem.backward and problem.layout is not DENSE):
        choose = sample_problem if problem.layout is DENSE else packed_sample_problem
        sample = choose(problem, depth, max_sample_flops)
        if sample is not None:
            tell(f"a sample of {problem.name} at its real lengths")
            worst = max(worst, _check_sample(runner, build, sample, seed % SAMPLE_SEEDS))
    return worst


def check_case(runner: Runner, build: Build, case: Case, rng: np.random.Generator) -> float:
    """Returns the largest per-head error that a kernel has on one problem, as `validate` does on all."""
    problem = build.kernel.problem
    variant = build.kernel.variant
    width = max(variant.access_width(problem), variant.key_access_width(problem))
    q, k, v, scale = make_inputs(case, problem, rng, access_width=width)
    values = {**case_values(case, problem, rng), **lengths_of(case)}
    if problem.backward:
        return check_gradients(runner, build, case, (q, k, v), scale, values, rng)
    new = apart = None
    if problem.append is not None:
        new = take_new_rows(problem, k, v, values, case.new, apart=case.apart)
        values = new.values
    values = {**values, **draw_scales(problem, case.batch, case.num_kv_heads, rng)}
    o, lse = runner.attend(build, q, k, v, scale=scale, want_lse=case.want_lse, values=values)
    if new is not None:
        check_caches(problem, new, k, v, case.name)
        (q, apart), values = rotated_queries(problem, new, q), attended_values(problem, new)
    if case.lengths is not None:
        lse = lse if case.want_lse else None
        if problem.layout.is_paged:
            q, k, v, values = out_of_pages(problem, q, k, v, values)
        if not problem.layout.is_packed:
            o, lse = row_after_row(o), None if lse is None else row_after_row(lse)
            apart = None if apart is None else row_after_row(apart)
        return compare_sequences(o, lse, q, k, v, scale, values, problem, case.name, apart)
    k, v = scaled_keys(problem, k, v, values)
    expected = reference.attention(
        q, k, v, scale=scale, scores=problem.scores, values=values, tanh_error=tanh_error(problem)
    )
    moved = 0.0 if apart is None else moved_scores(apart, k, scale)
    return compare(o, lse if case.want_lse else None, expected, v, problem, case.name, moved)


def _check_sample(runner: Runner, build: Build, problem: Problem, seed: int) -> float:
    if problem.backward and problem.layout is not DENSE:
        return check_packed_gradient_sample(runner, build, problem, seed)
    if problem.layout is not DENSE:
        return _check_packed_sample(runner, build, problem, seed)
    if problem.backward:
        return check_gradient_sample(runner, build, problem, seed % KEPT_SAMPLES)
    sample = draw_sample(problem, seed)
    k, v, values = sample.k, sample.v, sample.values
    if problem.append is not None:
        k, v = k.copy(), v.copy()
        counts = (min(problem.seqlen_new, problem.seqlen_k),) * problem.batch
        values = take_new_rows(problem, k, v, values, counts, turned=False).values
    o, _ = runner.attend(build, sample.q, k, v, scale=sample.scale, values=values)
    worst = 0.0
    for (b, h), expected in zip(sample.picks, sample.expected, strict=True):
        rows = o[b : b + 1, h : h + 1, sample.rows]
        name = f"{problem.name} at its real lengths, head {h} of batch {b}"
        worst = max(worst, compare(rows, None, expected, sample.v, problem, name))
    return worst


def _check_packed_sample(runner: Runner, build: Build, problem: Problem, seed: int) -> float:
    packed = draw_packed_sample(replace(problem, page_size=0, append=None), seed)
    layout, values = build.kernel.problem.layout, dict(packed.values)
    arrays = (packed.q, packed.k, packed.v)
    if layout.is_paged:
        keys = problem.lengths.k
        table = draw_table(keys, problem.page_size, hostile=True)
        arrays = in_pages(build.kernel.problem, arrays, problem.batch, keys, table)
        values |= told_of_pages(keys, table)
    if problem.append is not None:
        counts = tuple(map(min, problem.lengths.q, problem.lengths.k))
        if not layout.is_packed:
            counts = (min(counts),) * problem.batch
        apart = layout.is_packed
        values = dict(take_new_rows(problem, *arrays[1:], values, counts, apart=apart, turned=False).values)
    o, _ = runner.attend(build, *arrays, scale=packed.scale, values=values)
    return packed.compare(o if layout.is_packed else row_after_row(o), problem)
