"""The real problem, of which a few rows of a few heads are compared: a full reference would take too long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ...gen.scoring.values import typical_values
from ..cards.key_scales import draw_scales, scaled_keys
from ..cards.score_values import values_as_read
from . import reference
from .cases import Depth
from .error_bounds import tanh_error
from .reference import Reference

#: Rows of each head of the real problem that are compared.
SAMPLED_ROWS = 64
#: Most bytes of q, k, v and o that the check of the real problem may take.
SAMPLE_BYTES = 2**27
#: Inputs of the real problem are shared by this many seeds: drawing them again for each candidate, and their
#: reference, would cost more than the check.
SAMPLE_SEEDS = 4


def sample_problem(problem: Problem, depth: Depth, max_flops: float = math.inf) -> Problem | None:
    """Returns ``problem`` with as few batches and heads as the check needs: all that fit in `SAMPLE_BYTES` in
    full depth, one or two that share a K and V in quick depth. None when they have more than
    ``max_flops``."""
    group = problem.num_q_heads // problem.num_kv_heads
    one = replace(problem, batch=1, num_q_heads=min(group, 2), num_kv_heads=1)
    sample = one
    if depth == "full":
        per_batch = replace(problem, batch=1)
        largest = SAMPLE_BYTES // per_batch.min_bytes
        if largest >= 1:
            sample = replace(problem, batch=min(problem.batch, largest))
        else:
            whole_group = replace(one, num_q_heads=group)
            groups = max(1, SAMPLE_BYTES // whole_group.min_bytes)
            sample = replace(one, num_q_heads=groups * group, num_kv_heads=groups)
    if sample.flops > max_flops:
        sample = one
    return sample if sample.flops <= max_flops else None


@dataclass(frozen=True)
class Sample:
    """Inputs of the real problem's shape, and the reference of some rows of some heads."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    picks: tuple[tuple[int, int], ...]
    rows: np.ndarray
    expected: tuple[Reference, ...]
    values: Mapping[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=SAMPLE_SEEDS)
def draw_sample(problem: Problem, seed: int) -> Sample:
    rng = np.random.default_rng([seed, 1])
    q_shape = (problem.batch, problem.num_q_heads, problem.seqlen_q, problem.head_dim)
    kv_shape = (problem.batch, problem.num_kv_heads, problem.seqlen_k, problem.head_dim)
    scale = float(np.float32(1 / math.sqrt(problem.head_dim)))
    q, k, v = reference.random_inputs(
        "normal",
        q_shape,
        kv_shape,
        scale=scale,
        rng=rng,
        dtype=problem.dtype,
        head_dim_v=problem.head_dim_v,
        latent=problem.latent,
        key_dtype=problem.key_dtype,
    )
    # The first and the last head find wrong strides and 32-bit offsets, the first and last rows wrong edges.
    last = (problem.batch - 1, problem.num_q_heads - 1)
    drawn = (int(rng.integers(problem.batch)), int(rng.integers(problem.num_q_heads)))
    picks = tuple(dict.fromkeys(((0, 0), drawn, last)))
    rows = np.unique(
        np.concatenate([[0, problem.seqlen_q - 1], rng.integers(problem.seqlen_q, size=SAMPLED_ROWS)])
    )
    values = {} if problem.scores.is_plain else values_as_read(problem, typical_values(problem))
    values = {**values, **draw_scales(problem, problem.batch, problem.num_kv_heads, rng)}
    group = problem.num_q_heads // problem.num_kv_heads

    def keys_of(b: int, kv_head: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(b, b + 1), slice(kv_head, kv_head + 1)
        return scaled_keys(problem, k[part], v[part], values, (b, kv_head))

    expected = tuple(
        reference.attention(
            q[b : b + 1, h : h + 1],
            *keys_of(b, h // group),
            scale=scale,
            scores=problem.scores,
            values=values,
            first=(b, h),
            rows=rows,
            tanh_error=tanh_error(problem),
        )
        for b, h in picks
    )
    return Sample(q, k, v, scale, picks, rows, expected, values)
