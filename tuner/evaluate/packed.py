"""Packed sequences beside float64: each by itself, of a case whole, of the real problem some rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...gen.lengths import listed_lengths
from ...gen.problem import Problem
from ...gen.scoring.values import typical_values
from ..cards.key_scales import draw_scales, scaled_keys
from ..cards.score_values import values_as_read
from ..cards.sequences import lengths_as_values, sequence_slices
from . import reference
from .cases import Depth
from .comparison import compare
from .error_bounds import moved_scores, tanh_error
from .reference import Reference
from .sampled_problem import SAMPLE_BYTES, SAMPLE_SEEDS, SAMPLED_ROWS


def compare_sequences(
    o: np.ndarray,
    lse: np.ndarray | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    values: Mapping[str, Any],
    problem: Problem,
    name: str,
    apart: np.ndarray | None = None,
) -> float:
    """Returns the largest per-head error of a sequence, the arrays being (1, heads, all rows, columns) and
    ``values`` what tells of their lengths and what scores read; a kernel's queries may be ``apart`` from
    ``q`` by so much. Raises `WrongResult`."""
    worst = 0.0
    places = zip(sequence_slices(values, "q"), sequence_slices(values, "k"), strict=True)
    for number, (rows, keys) in enumerate(places):
        if rows.stop <= rows.start:
            continue
        own_k, of_keys = scaled_keys(problem, k[:, :, keys], v[:, :, keys], values, (number, 0))
        expected = reference.attention(
            q[:, :, rows],
            own_k,
            of_keys,
            scale=scale,
            scores=problem.scores,
            values=values,
            first=(number, 0),
            tanh_error=tanh_error(problem),
        )
        told = f"{name}, sequence {number} of {rows.stop - rows.start} queries and {of_keys.shape[2]} keys"
        found = None if lse is None else lse[:, :, rows]
        moved = 0.0 if apart is None else moved_scores(apart[:, :, rows], own_k, scale)
        worst = max(worst, compare(o[:, :, rows], found, expected, of_keys, problem, told, moved))
    return worst


def packed_sample_problem(problem: Problem, depth: Depth, max_flops: float = math.inf) -> Problem | None:
    """Returns ``problem`` with as few sequences and heads as the check of it needs: the longest, the shortest
    and one between, in full depth as many as fit. None where they have more than ``max_flops``."""
    pairs = sorted(problem.lengths.pairs, key=lambda pair: pair[0] * pair[1])
    group = problem.num_q_heads // problem.num_kv_heads
    few = list(dict.fromkeys([pairs[-1], pairs[0], pairs[len(pairs) // 2]]))
    small = replace(problem, num_q_heads=min(group, 2), num_kv_heads=1)
    sample = _of_sequences(small, few)
    if depth == "full" and problem.min_bytes <= SAMPLE_BYTES and problem.flops <= max_flops:
        sample = problem
    if sample.flops > max_flops:
        sample = _of_sequences(small, pairs[len(pairs) // 2 : len(pairs) // 2 + 1])
    return sample if sample.flops <= max_flops else None


def _of_sequences(problem: Problem, pairs: list[tuple[int, int]]) -> Problem:
    q, k = (tuple(each) for each in zip(*pairs, strict=True))
    return replace(problem, batch=len(pairs), varlen=listed_lengths(q, k))


@dataclass(frozen=True)
class PackedSample:
    """Inputs of real lengths, and the reference of some rows of one head of each sequence: of head ``picks``,
    rows of all that there are."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    values: Mapping[str, Any]
    picks: tuple[tuple[int, np.ndarray], ...]
    expected: tuple[Reference, ...]

    def compare(self, o: np.ndarray, problem: Problem) -> float:
        """Returns the largest error of an output of the sample. Raises `WrongResult`."""
        worst = 0.0
        for (head, rows), expected in zip(self.picks, self.expected, strict=True):
            name = f"{problem.name} at its real lengths, head {head}, rows from {rows[0]} on"
            found = o[:, head : head + 1, rows]
            worst = max(worst, compare(found, None, expected, self.v, problem, name))
        return worst


@lru_cache(maxsize=SAMPLE_SEEDS)
def draw_packed_sample(problem: Problem, seed: int) -> PackedSample:
    """Returns a sample of a problem, the same for the same seed."""
    rng = np.random.default_rng([seed, 2])
    scale = float(np.float32(1 / math.sqrt(problem.head_dim)))
    q, k, v = (
        np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        for x in reference.random_inputs(
            "normal",
            (1, problem.num_q_heads, problem.total_q, problem.head_dim),
            (1, problem.num_kv_heads, problem.total_k, problem.head_dim),
            scale=scale,
            rng=rng,
            dtype=problem.dtype,
            head_dim_v=problem.head_dim_v,
            latent=problem.latent,
            one_sign=True,
            key_dtype=problem.key_dtype,
        )
    )
    lengths = problem.lengths
    values = {} if problem.scores.is_plain else values_as_read(problem, typical_values(problem))
    values = {**values, **lengths_as_values(lengths.q, lengths.k)}
    values |= draw_scales(problem, problem.batch, problem.num_kv_heads, rng)
    group = problem.num_q_heads // problem.num_kv_heads
    picks, expected = [], []
    places = zip(sequence_slices(values, "q"), sequence_slices(values, "k"), strict=True)
    for number, (rows, keys) in enumerate(places):
        if (count := rows.stop - rows.start) < 1:
            continue
        head = int(rng.integers(problem.num_q_heads))
        some = np.unique(np.concatenate([[0, count - 1], rng.integers(count, size=SAMPLED_ROWS)]))
        picks.append((head, rows.start + some))
        of_head = slice(head // group, head // group + 1)
        expected.append(
            reference.attention(
                q[:, head : head + 1, rows],
                *scaled_keys(
                    problem, k[:, of_head, keys], v[:, of_head, keys], values, (number, head // group)
                ),
                scale=scale,
                scores=problem.scores,
                values=values,
                first=(number, head),
                rows=some,
                tanh_error=tanh_error(problem),
            )
        )
    return PackedSample(q, k, v, scale, values, tuple(picks), tuple(expected))
