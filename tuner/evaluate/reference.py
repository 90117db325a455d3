"""Attention in float64 by numpy: what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gen.scores import FULL, Scores
from ..cards.dtypes import numpy_dtype
from .asked_pairs import AskedPairs
from .score_rounding import UNIT

#: Bytes of scores held at a time.
MAX_SCORE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Reference:
    """``o`` (batch, num_q_heads, rows, head_dim_v) and ``lse`` (batch, num_q_heads, rows) in float64.

    A row that sees no key has o = 0, and lse = -inf or its head's sink. ``max_score`` is the largest
    |scale · q·k| met in a key that a row sees: float32 rounds a score of that size by up to 2⁻²⁴ of it, and
    exp turns the absolute error of a score into a relative error of its weight. Where scores are changed it
    is what rounding of that kind comes to behind the change, and ``change_error`` what the change's own
    operations round by, of the keys that have weight.
    """

    o: np.ndarray
    lse: np.ndarray
    max_score: float
    change_error: float = 0.0


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    scores: Scores = FULL,
    values: Mapping[str, Any] | None = None,
    first: tuple[int, int] = (0, 0),
    rows: np.ndarray | None = None,
    tanh_error: float = 0.0,
) -> Reference:
    """Computes softmax(scale · q kᵀ) v of arrays shaped (batch, heads, seqlen, head_dim), heads of k and v
    grouped.

    Any type of number serves; v may have more or fewer columns than q and k. ``scores`` says which keys each
    row sees and what becomes of its scores, by ``values``, the arrays and numbers that they read; the first
    batch and head of q are those numbered ``first`` there. Only ``rows`` are computed, an array of query rows
    in rising order; None: all. ``tanh_error`` is how far off hyperbolic tangents may be, of their size.
    """
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    num_kv_heads, seqlen_k = k.shape[1:3]
    heads = (num_kv_heads, num_q_heads // num_kv_heads)
    rows = np.arange(seqlen_q) if rows is None else np.asarray(rows)
    asked = AskedPairs(scores, values or {}, first, num_q_heads, seqlen_q, seqlen_k)
    sinks = asked.sinks()[:, None, None]
    o = np.zeros((batch, num_q_heads, len(rows), v.shape[-1]))
    lse = np.broadcast_to(sinks[..., 0], o.shape[:3]).copy()
    step = max(1, MAX_SCORE_BYTES // (8 * num_q_heads * seqlen_k))
    max_score = change_error = 0.0
    for b in range(batch):
        keys = np.asarray(k[b], np.float64)[:, None]
        all_weighed = np.asarray(v[b], np.float64)[:, None]
        begins, ends = asked.interval(b, rows)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            queries = np.asarray(q[b][:, rows[part]], np.float64) * scale
            # Keys that no row of the part sees are left out.
            seeing = start + np.flatnonzero(begins[part] < ends[part])
            if not seeing.size:
                continue
            seen = slice(int(begins[seeing].min()), int(ends[seeing].max()))
            positions = np.arange(seen.start, seen.stop)
            hidden = asked.hidden(b, rows[part], positions)
            weighed = all_weighed[:, :, seen]
            unseen = hidden.all(axis=(0, 1))
            if unseen.any():
                weighed = np.where(unseen[:, None], 0.0, weighed)
            with np.errstate(invalid="ignore"):
                products = queries.reshape(*heads, -1, head_dim) @ keys[:, :, seen].swapaxes(-1, -2)
            products = products.reshape(num_q_heads, -1, len(positions))
            np.copyto(products, 0.0, where=hidden)
            if scores.change is None:
                max_score = max(max_score, float(products.max()), -float(products.min()))
                errors = ()
            else:
                products, *errors = asked.changed(b, products, rows[part], positions, tanh_error)
            np.copyto(products, -np.inf, where=hidden)
            top = np.maximum(products.max(axis=-1, keepdims=True), sinks)
            top[np.isneginf(top)] = 0.0
            products -= top
            weights = np.exp(products, out=products)
            for_sinks = np.exp(sinks - top)
            total = weights.sum(axis=-1) + for_sinks[..., 0]
            visible = total > 0.0
            sums = (weights.reshape(*heads, -1, len(positions)) @ weighed).reshape(
                num_q_heads, -1, v.shape[-1]
            )
            o[b, :, part] = sums / np.where(visible, total, 1.0)[..., None]
            with np.errstate(divide="ignore"):
                lse[b, :, part] = np.log(total) + top[..., 0]
            if errors:
                inherited, own = (felt_errors(each, weights, hidden) for each in errors)
                max_score, change_error = max(max_score, inherited), max(change_error, own)
            felt = for_sinks[..., 0] > UNIT
            max_score = max(max_score, float(np.abs(np.where(felt, sinks[..., 0], 0.0)).max()))
    return Reference(o, lse, max_score, change_error)


def felt_errors(errors: np.ndarray, weights: np.ndarray, hidden: np.ndarray) -> float:
    """Returns the largest that errors of scores are in a row, as far as weights let them be felt: their mean
    by weight, or that of one heavy key, whichever is more."""
    errors = np.where(hidden, 0.0, np.nan_to_num(errors, nan=0.0, posinf=1e30))
    largest = weights.max(axis=-1, keepdims=True)
    shares = np.divide(weights, largest, out=np.zeros_like(weights), where=largest > 0)
    totals = np.maximum(shares.sum(axis=-1), 1.0)
    means = (errors * shares).sum(axis=-1) / totals
    return float(max(means.max(), (errors * np.sqrt(shares)).max()))


#: What inputs a kernel is tried on, by name.
LARGE_DISTRIBUTIONS = ("rising", "falling", "negative", "spiked")
DISTRIBUTIONS = ("uniform", "normal", *LARGE_DISTRIBUTIONS)
#: Fewer elements of a head's o than this are few.
FEW_AVERAGES = 256
#: exp of ±this overflows or underflows float32, so that only a running maximum gets it right.
LARGE_SCORE = 150.0


def random_inputs(
    distribution: str,
    q_shape: tuple[int, int, int, int],
    kv_shape: tuple[int, int, int, int],
    *,
    scale: float,
    rng: np.random.Generator,
    dtype: str = "f32",
    head_dim_v: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws q, k, v of the shapes (batch, heads, seqlen, head_dim), v with ``head_dim_v`` columns if it is
    given.

    They are drawn in float32 and rounded to ``dtype``.

    ``uniform`` in ±3 and standard ``normal`` are plain. The others add to every score a term of up to
    `LARGE_SCORE`: ``rising`` and ``falling`` along the keys (each tile moves the running maximum, or none
    but the first does), ``negative`` for all keys alike (a maximum that starts at 0 gets it wrong),
    ``spiked`` for a few keys only.
    """
    head_dim_v = q_shape[-1] if head_dim_v is None else head_dim_v
    shapes = (q_shape, kv_shape, (*kv_shape[:3], head_dim_v))
    if distribution == "uniform":
        q, k, v = (rng.random(s, dtype=np.float32) * np.float32(6) - np.float32(3) for s in shapes)
    else:
        q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in shapes)
    if distribution in LARGE_DISTRIBUTIONS or q_shape[2] * head_dim_v < FEW_AVERAGES:
        # Few values are averaged, or few averages taken. Were both signs among them they could cancel, and
        # the relative error of what is left would say nothing about the kernel.
        v = np.abs(v) * rng.choice(np.array([-1, 1], np.float32), head_dim_v)
    if distribution in LARGE_DISTRIBUTIONS:
        _enlarge_scores(distribution, q, k, scale, rng)
    target = numpy_dtype(dtype)
    return q.astype(target, copy=False), k.astype(target, copy=False), v.astype(target, copy=False)


def _enlarge_scores(
    distribution: str, q: np.ndarray, k: np.ndarray, scale: float, rng: np.random.Generator
) -> None:
    """Adds to q and k, in place, what makes the distribution's term of every score."""
    head_dim, seqlen_k = q.shape[-1], k.shape[2]
    if distribution == "negative":
        term = np.full(seqlen_k, -LARGE_SCORE)
    elif distribution == "spiked":
        term = np.where(rng.random(seqlen_k) < 4.0 / seqlen_k, LARGE_SCORE / 2, 0.0)
        term[rng.integers(seqlen_k)] = LARGE_SCORE / 2
    else:
        term = np.linspace(-LARGE_SCORE, LARGE_SCORE, seqlen_k)
        term = term if distribution == "rising" else term[::-1]
    # q's share along one direction is the same for all rows, k's varies: their product is the term.
    direction = rng.standard_normal(head_dim)
    direction /= np.linalg.norm(direction)
    share = np.sqrt(LARGE_SCORE / max(abs(scale), 1e-3))
    if head_dim == 1:
        # No room beside the direction: noise in q would scale the whole term.
        q *= 0.01
    else:
        for x in (q, k):
            x -= ((x @ direction)[..., None] * direction).astype(np.float32)
    q += (share * direction).astype(np.float32)
    along = np.sign(scale) * term / LARGE_SCORE * share
    k += (along[:, None] * direction).astype(np.float32)
