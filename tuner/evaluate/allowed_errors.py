"""Attention in float64 with what each row may err by, whatever the inputs: infinite, huge, tiny.

A row's outputs are judged by what plain float32 arithmetic can do at best, not by a bound for all inputs: a
score of 1e6 has an ulp of 0.06 in float32, so that its weight is off by some percent whoever computes it.

Let s[j] be a row's scores, a[j] = scale · Σ_d |q[d] k[j,d]|, p[j] its weights and o = Σ_j p[j] v[j]. Each of
the d additions of a dot product rounds by at most u = 2⁻²⁴ (the class's `Promise.roundoff`) of a partial
sum, which never exceeds Σ|q k|. So a computed score is s[j] + δ[j] with |δ[j]| <= η[j] = c · u · a[j]; c = d
in the worst case, about √d where signs are mixed, here 3 + √d / 2, which counts the two roundings of
scale · log2 e and of the maximum. A weight is then p[j] e^δ[j], and

    ô - o = Σ_j p[j] (e^δ[j] - 1) (v[j] - o) / Σ_j p[j] e^δ[j],
    |ô - o| <= Σ_j p[j] (e^η[j] - 1) |v[j] - o| / Σ_j p[j] e^-η[j].

Where η is large that says nothing, but ô stays a mean of the values whose weight can matter, those with
s[j] + η[j] within 2^-149 of what the largest weight may have shrunk to: |ô - o| <= max over these |v[j] - o|.
The smaller of the two is taken. It is 0 where one key has all the weight, however large its score, and where
scores are equal by construction (`exact`): then δ is the same for all.

To this come the class's own bound times Σ_j p[j] |v[j]|, a row's measure that an outlier in another row or of
weight zero leaves alone; what numbers too small for the type, or for the class's arithmetic, leave behind
(`Promise.weight_floor`, half the output's smallest number, what builds flush of float32); and for
log-sum-exp the largest η that matters and the class's bound of its size.

Where scores are changed, η is what comes of it behind the change, and what the change's own operations round
by is added. A sink is a key of value 0 whose score is off by a few u of itself.

What is not finite. Each row is judged by itself. Where float64, by IEEE arithmetic over the keys that the row
sees, gives NaN, o is NaN and so is the log-sum-exp, if it was a score; where it gives ±inf, or more than the
output's type can hold, o is not finite; else it is finite and within the bound. Two things are left open: a
row whose Σ|q k|, scaled or not, is beyond float32, and an element whose Σ|v| is, may be not finite, since
plain float32 arithmetic overflows there. They may not be finite and wrong; but where something is asked of
masks and scores, a row that may overflow to -inf throughout is one that sees nothing, and o may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ...gen.promise import LEAST, Promise
from ..cards.dtypes import numpy_dtype, smallest
from .asked_pairs import LEAST_SCORE, AskedPairs
from .error_bounds import element_factor, lse_bound, tanh_error
from .score_rounding import UNIT

FLOAT_MAX = float(np.finfo(np.float32).max)
LOG2_E = math.log2(math.e)
#: exp(-this) is less than float32's smallest number.
NO_WEIGHT = 104.0
#: Of errors of scores beyond this, weights say nothing.
MANY_UNITS = 30.0
#: Results that may be flushed, and so off by `LEAST`: products, sums, rescaling, division.
FLUSHES = 4
#: Bytes of products held at a time.
MAX_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Allowed:
    """``o`` and ``lse`` in float64 by head and row, and the errors that are allowed.

    ``measure`` is Σ p |v|, ``slack`` what is allowed of an element beside the class's bound times the
    measure, ``lse_slack`` that of the log-sum-exp. ``open_rows`` and ``open`` mark what may be not finite.
    ``infinite_scores`` marks rows with a score of inf, whose log-sum-exp may be inf instead of NaN, and
    ``no_weight`` those that see keys but none with a score above -inf, where 0 is as good as NaN.
    """

    o: np.ndarray
    lse: np.ndarray
    measure: np.ndarray
    slack: np.ndarray
    lse_slack: np.ndarray
    open_rows: np.ndarray
    open: np.ndarray
    infinite_scores: np.ndarray
    no_weight: np.ndarray


def attend_exactly(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    problem: Problem,
    promise: Promise,
    exact: bool = False,
    values: Mapping[str, Any] | None = None,
) -> Allowed:
    """Computes attention of arrays shaped (batch, heads, seqlen, head_dim) and what each result may err by.

    ``problem`` gives type, masks and changes of scores, and ``values`` what those read. ``exact``: scores are
    equal or far apart by construction, so that rounding moves no weight.
    """
    batch, heads, rows, d = q.shape
    group, keys, columns = heads // k.shape[1], k.shape[2], v.shape[3]
    step = max(1, MAX_BYTES // (8 * keys * max(d, columns)))
    fields: dict[str, list[np.ndarray]] = {name: [] for name in Allowed.__dataclass_fields__}
    asked = AskedPairs(problem.scores, values or {}, (0, 0), heads, rows, keys)
    sinks = asked.sinks()
    with np.errstate(all="ignore"):
        for b in range(batch):
            for h in range(heads):
                one = [np.asarray(x, np.float64) for x in (q[b, h], k[b, h // group], v[b, h // group])]
                for first in range(0, rows, step):
                    part = np.arange(rows)[first : first + step]
                    pairs = _Pairs(asked, b, h, part, np.arange(keys))
                    head = _Rows(one[0][part], one[1], one[2], pairs, scale, float(sinks[h]))
                    for name, judged in head.judged(problem, promise, exact).items():
                        fields[name].append(judged)
    shapes = {name: (batch, heads, rows, *parts[0].shape[1:]) for name, parts in fields.items()}
    return Allowed(**{name: np.concatenate(fields[name]).reshape(shapes[name]) for name in fields})


@dataclass(frozen=True)
class _Pairs:
    """What is asked of some rows of a head beside all its keys."""

    asked: AskedPairs
    b: int
    h: int
    rows: np.ndarray
    keys: np.ndarray

    def seen(self) -> np.ndarray:
        return self.asked.visible(self.b, self.h, self.rows, self.keys)

    def changed(
        self, scores: np.ndarray, errors: np.ndarray, tanh_error: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """What becomes of scores and of their errors."""
        found = self.asked.change(self.b, self.h, scores, errors, self.rows, self.keys, tanh_error)
        scores = np.where(found.value < LEAST_SCORE, -np.inf, found.value)
        return scores, np.broadcast_to(np.add(found.inherited, 2 * found.own), scores.shape)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a head, in float64, beside all its keys, what is asked of the pairs, and the sink."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pairs: _Pairs
    scale: float
    sink: float

    @cached_property
    def seen(self) -> np.ndarray:
        """Which keys each row sees."""
        return self.pairs.seen()

    def judged(self, problem: Problem, promise: Promise, exact: bool) -> dict[str, np.ndarray]:
        """The fields of `Allowed`."""
        scores, sizes = self._scores(exact)
        eta = np.zeros_like(sizes) if exact else self._score_errors(sizes, promise)
        if problem.scores.change is not None:
            scores, eta = self.pairs.changed(scores, eta, tanh_error(problem))
            scores, eta = np.where(self.seen, scores, -np.inf), np.where(self.seen, eta, 0.0)
        top = np.maximum(scores.max(axis=-1, keepdims=True), self.sink)
        weightless = np.asarray(np.isneginf(top))
        shift = np.where(weightless, 0.0, top)
        weights, of_sink = np.exp(scores - shift), np.exp(self.sink - shift)
        total = weights.sum(axis=-1, keepdims=True) + of_sink
        divisor = np.where(weightless, 1.0, total)
        p = weights / divisor
        o = self._averages(p, self.v)
        visible_v = self.seen.astype(np.float64) @ np.abs(_finite(self.v))
        slack = self._moved_by_rounding(scores, p, (of_sink / divisor)[:, 0], eta, o)
        # A polynomial's least weight is also that of keys which a row does not see.
        reached_v = visible_v if promise.isolates_values else np.abs(_finite(self.v)).sum(axis=0)
        slack += max(promise.weight_floor, LEAST) * reached_v
        slack += promise.row_share * np.abs(_finite(o)).mean(axis=-1, keepdims=True)
        slack += FLUSHES * LEAST + smallest(problem.output_dtype) / 2
        lse = np.where(weightless, -np.inf, np.log(total) + top)[:, 0]
        lse_slack = np.where(self._mattering(scores, eta), eta, 0.0).max(axis=-1) + self._sink_error()
        lse_slack += lse_bound(problem, 0.0) * np.maximum(1.0, np.abs(lse))
        return {
            "o": np.where(self._overflows_in(problem.output_dtype, o), np.copysign(np.inf, o), o),
            "lse": lse,
            "measure": self._averages(p, np.abs(self.v)),
            "slack": slack,
            "lse_slack": lse_slack,
            "open_rows": np.asarray(self._overflows(np.nan_to_num(sizes, nan=np.inf)).any(axis=-1)),
            "open": np.logical_or(visible_v >= FLOAT_MAX * promise.headroom, self._spreading(promise)),
            "infinite_scores": np.asarray(np.isposinf(scores).any(axis=-1) & ~np.isnan(scores).any(axis=-1)),
            "no_weight": np.asarray(weightless[:, 0] & self.seen.any(axis=-1)),
        }

    def _scores(self, exact: bool) -> tuple[np.ndarray, np.ndarray]:
        """The scores, and Σ|q k| unscaled; ``exact``: equal keys have equal scores to the last bit, which
        BLAS does not say."""
        products = (self.q[:, None, :] * self.k).sum(axis=-1) if exact else self.q @ self.k.T
        scores = np.where(self.seen, products * self.scale, -np.inf)
        return scores, np.where(self.seen, np.abs(self.q) @ np.abs(self.k).T, 0.0)

    @staticmethod
    def _overflows_in(dtype: str, x: np.ndarray) -> np.ndarray:
        """Where numbers round to infinity in a type: beyond its largest one by half a unit of that."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.isinf(x.astype(numpy_dtype(dtype)))

    def _overflows(self, sizes: np.ndarray) -> np.ndarray:
        """Which scores float32 may not hold, scaled or not."""
        return np.asarray(sizes * max(1.0, abs(self.scale) * LOG2_E) >= FLOAT_MAX)

    def _score_errors(self, sizes: np.ndarray, promise: Promise) -> np.ndarray:
        """η by row and key, infinite where a sum may overflow to either side."""
        q_sums, k_sums = np.abs(self.q).sum(axis=-1)[:, None], np.abs(self.k).sum(axis=-1)
        eta = (3 + math.sqrt(self.q.shape[-1]) / 2) * promise.roundoff * sizes
        eta += FLUSHES * LEAST * (1 + q_sums + k_sums)
        eta *= abs(self.scale)
        if promise.scales_queries:  # once, whatever the scale: what is flushed is q's element times it
            eta += LEAST * k_sums
        return np.where(self.seen, np.where(self._overflows(sizes), np.inf, eta), 0.0)

    def _averages(self, p: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Σ p v over the keys that each row sees: what others hold, NaN say, is not looked at."""
        odd = ~np.isfinite(v).all(axis=-1)
        found = p[:, ~odd] @ v[~odd]
        for j in np.flatnonzero(odd):
            found += np.where(self.seen[:, j, None], p[:, j, None] * v[j], 0.0)
        return found

    def _spreading(self, promise: Promise) -> np.ndarray:
        """Columns that a value may make NaN in rows that do not see it: rounded, the largest are infinite."""
        odd = ~(np.abs(self.v) < FLOAT_MAX * promise.headroom).all(axis=0)
        return np.broadcast_to(odd & (not promise.isolates_values), (len(self.q), odd.size))

    def _mattering(self, scores: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """Which keys may have weight."""
        least = np.maximum((scores - eta).max(axis=-1, keepdims=True), self.sink)
        return np.logical_and(self.seen, scores + eta >= least - NO_WEIGHT)

    def _sink_mattering(self, scores: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """In which rows the sink may have weight: as much as a key of its score would."""
        return np.logical_and(self.sink > -np.inf, self.sink >= (scores - eta).max(axis=-1) - NO_WEIGHT)

    def _sink_error(self) -> float:
        """What the sink may be off by, twice rounded."""
        return 0.0 if math.isinf(self.sink) else 3 * UNIT * abs(self.sink)

    def _moved_by_rounding(
        self, scores: np.ndarray, p: np.ndarray, of_sink: np.ndarray, eta: np.ndarray, o: np.ndarray
    ) -> np.ndarray:
        """What errors of the scores up to ``eta`` do to the outputs at most; see the module's docstring."""
        moved = np.zeros_like(o)
        v = _finite(self.v)
        mattering, sink_mattering = self._mattering(scores, eta), self._sink_mattering(scores, eta)
        eta = np.where(mattering, eta, 0.0)
        most = np.maximum(eta.max(axis=-1), self._sink_error())
        shift = p * np.expm1(np.minimum(eta, MANY_UNITS))
        kept = (p * np.exp(-eta)).sum(axis=-1) + of_sink
        sink_shift = of_sink * math.expm1(self._sink_error())
        for i in np.flatnonzero((most > 0) & ~np.isnan(o).all(axis=-1)):
            distance, to_sink = np.abs(v - o[i]), np.abs(o[i])
            moved[i] = np.maximum(
                distance[mattering[i]].max(axis=0, initial=0.0), to_sink * sink_mattering[i]
            )
            if most[i] < MANY_UNITS:
                moved[i] = np.fmin(moved[i], (shift[i] @ distance + sink_shift[i] * to_sink) / kept[i])
        if not self.pairs.asked.scores.is_plain:
            # One of which all scores are -inf sees nothing.
            vanishing = (scores - eta).max(axis=-1, keepdims=True) < LEAST_SCORE
            moved = np.where(vanishing, np.maximum(moved, np.abs(o)), moved)
        return np.where(np.isnan(o), 0.0, moved)


def row_bounds(allowed: Allowed, promise: Promise) -> np.ndarray:
    """Returns the largest ‖o - ref‖ of each row."""
    return promise.tolerance * _norm(allowed.measure, -1) + _norm(allowed.slack, -1)


def element_bounds(allowed: Allowed, problem: Problem, promise: Promise) -> np.ndarray:
    """Returns the largest |o - ref| of each element."""
    return element_factor(problem) * promise.tolerance * allowed.measure + allowed.slack


def _finite(x: np.ndarray) -> np.ndarray:
    """The array with zeros for what is not finite."""
    return np.where(np.isfinite(x), x, 0.0)


def _norm(values: np.ndarray, axis: int) -> np.ndarray:
    return np.sqrt(np.square(values).sum(axis=axis))
