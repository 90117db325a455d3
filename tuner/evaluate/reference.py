"""Attention in float64 by numpy: what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gen.scoring.scores import FULL, Scores
from ..cards.dtypes import numpy_dtype
from .asked_pairs import LEAST_SCORE, AskedPairs
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
    operations round by, of the keys that have weight. Where sinks take weight from all keys, ``reach`` is
    Σ|v| of the keys that a row sees over the sum of its weights, the largest being 1: times the least weight
    that arithmetic has, it bounds what is lost. ``sink_score`` is the largest mean |score| of a row, by
    weight, times the sink's share of the row: what rounding does to all scores alike cancels between keys,
    but not against a sink.
    """

    o: np.ndarray
    lse: np.ndarray
    max_score: float
    change_error: float = 0.0
    reach: np.ndarray | None = None
    sink_score: float = 0.0


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
    batch, num_q_heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    rows = np.arange(seqlen_q) if rows is None else np.asarray(rows)
    asked = AskedPairs(scores, values or {}, first, num_q_heads, seqlen_q, seqlen_k)
    o = np.zeros((batch, num_q_heads, len(rows), v.shape[-1]))
    lse = np.broadcast_to(asked.sinks()[:, None], o.shape[:3]).copy()
    step = max(1, MAX_SCORE_BYTES // (8 * num_q_heads * max(1, seqlen_k)))
    reach = np.zeros_like(o) if scores.sinks else None
    max_score = change_error = sink_score = 0.0
    for b in range(batch):
        begins, ends = asked.interval(b, rows)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            # Keys that no row of the part sees are left out.
            seeing = start + np.flatnonzero(begins[part] < ends[part])
            if not seeing.size:
                continue
            seen = slice(int(begins[seeing].min()), int(ends[seeing].max()))
            tile = _Tile(asked, b, rows[part], np.arange(seen.start, seen.stop), scale)
            found = tile.attend(q[b][:, rows[part]], k[b][:, seen], v[b][:, seen], tanh_error)
            o[b, :, part], lse[b, :, part] = found.o, found.lse
            max_score, change_error = max(max_score, found.max_score), max(change_error, found.change_error)
            sink_score = max(sink_score, found.sink_score)
            if reach is not None:
                reach[b, :, part] = found.reach
    return Reference(o, lse, max_score, change_error, reach, sink_score)


@dataclass(frozen=True)
class _Tile:
    """Some rows of one batch beside some of its keys, of all heads."""

    asked: AskedPairs
    b: int
    rows: np.ndarray
    keys: np.ndarray
    scale: float

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, tanh_error: float) -> Reference:
        """The outputs of the rows, (num_q_heads, rows, head_dim_v) and (num_q_heads, rows), of q, k and v
        without a batch."""
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        has_sinks = self.asked.scores.sinks
        num_q_heads, heads = len(q), (len(k), len(q) // len(k))
        hidden = self.asked.hidden(self.b, self.rows, self.keys)
        with np.errstate(invalid="ignore"):  # of keys that no row sees
            products = (q * self.scale).reshape(*heads, *q.shape[1:]) @ k[:, None].swapaxes(-1, -2)
        products = products.reshape(num_q_heads, *products.shape[2:])
        np.copyto(products, 0.0, where=hidden)
        if self.asked.scores.change is None:
            max_score = max(float(products.max()), -float(products.min()))
            errors = ()
        else:
            max_score = 0.0
            products, *errors = self.asked.changed(self.b, products, self.rows, self.keys, tanh_error)
            hidden = hidden | (products < LEAST_SCORE)
        np.copyto(products, -np.inf, where=hidden)
        sinks = self.asked.sinks()[:, None, None]
        sizes = np.abs(np.where(hidden, 0.0, errors[0] if errors else products)) if has_sinks else None
        top = np.maximum(products.max(axis=-1, keepdims=True), sinks)
        top[np.isneginf(top)] = 0.0
        products -= top
        weights = np.exp(products, out=products)
        of_sinks = np.exp(sinks - top)[..., 0]
        total = weights.sum(axis=-1) + of_sinks
        unseen = np.asarray(hidden.all(axis=(0, 1)))
        values = np.where(unseen[:, None], 0.0, v) if unseen.any() else v
        divisor = np.where(total > 0.0, total, 1.0)[..., None]
        o = self._weighed(weights, values) / divisor
        reach, sink_score = None, 0.0
        if sizes is not None:
            sink_score = float((_means(sizes, weights) * of_sinks / divisor[..., 0]).max())
            seen = np.broadcast_to(~hidden, weights.shape).astype(np.float64)
            reach = self._weighed(seen, np.abs(values)) / divisor
        with np.errstate(divide="ignore"):
            lse = np.log(total) + top[..., 0]
        felt_sinks = np.where(of_sinks > UNIT, np.abs(sinks[..., 0]), 0.0)
        felt = [felt_errors(each, weights, hidden) for each in errors] or [0.0, 0.0]
        return Reference(o, lse, max(max_score, felt[0], float(felt_sinks.max())), felt[1], reach, sink_score)

    def _weighed(self, weights: np.ndarray, v: np.ndarray) -> np.ndarray:
        """The sums of values by weights, (num_q_heads, rows, head_dim_v)."""
        sums = weights.reshape(len(v), -1, *weights.shape[1:]) @ v[:, None]
        return sums.reshape(*weights.shape[:2], -1)


def _means(sizes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The mean size of each row's scores, by their weights."""
    totals = weights.sum(axis=-1)
    return np.divide((sizes * weights).sum(axis=-1), totals, out=np.zeros_like(totals), where=totals > 0.0)


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
    one_sign: bool = False,
    latent: bool = False,
    key_dtype: str = "",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws q, k, v of the shapes (batch, heads, seqlen, head_dim), v with ``head_dim_v`` columns if it is
    given.

    They are drawn in float32 and rounded to ``dtype``, k and v to ``key_dtype`` if it is given. ``one_sign``:
    those of a column of v have one sign, for rows that are compared few at a time. ``latent``: v is a view of
    the first columns of k.

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
    if latent:
        v = k[..., :head_dim_v]
    if one_sign or distribution in LARGE_DISTRIBUTIONS or q_shape[2] * head_dim_v < FEW_AVERAGES:
        # Few values are averaged, or few averages taken. Were both signs among them they could cancel, and
        # the relative error of what is left would say nothing about the kernel.
        v[...] = np.abs(v) * rng.choice(np.array([-1, 1], np.float32), head_dim_v)
    if distribution in LARGE_DISTRIBUTIONS:
        _enlarge_scores(distribution, q, k, scale, rng)
    q = q.astype(numpy_dtype(dtype), copy=False)
    k, v = (x.astype(numpy_dtype(key_dtype or dtype), copy=False) for x in (k, v))
    return q, k, k[..., :head_dim_v] if latent else v


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
