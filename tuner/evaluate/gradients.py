"""The gradients of attention in float64 by numpy: what every kernel of the backward pass is compared with.

Beside each gradient stands its spread: how far it would be off, as far as errors of its terms are
independent, if each of them were off by its own size. A gradient is a sum of terms of both signs, and of
differences: of a row that sees one key alone, what is left of the weight's gradient above the row's mean is
nothing, but both are rounded. So an error is held against the spread, not against the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...gen.expression import Load
from ...gen.formula.derivative import derivative
from ...gen.scoring.buffer_gradients import buffer_gradients
from ...gen.scoring.scores import FULL, SCORE, Scores
from .asked_pairs import AskedPairs
from .score_rounding import UNIT

#: Bytes of scores held at a time.
MAX_SCORE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Gradient:
    """A gradient and its spread, in float64 and of its array's shape."""

    value: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray) -> Gradient:
        return cls(np.zeros(array.shape), np.zeros(array.shape))

    def plus(self, other: Gradient | None) -> Gradient:
        """Returns the sum of two, whose errors are independent."""
        if other is None:
            return self
        spread = np.hypot(self.spread, other.spread)
        return Gradient(self.value + other.value, spread)

    def summed_to(self, shape: tuple[int, ...]) -> Gradient:
        """Returns the gradient of an array of that shape, which this one's was made of: repeated where it has
        length 1, and then cut."""
        value, squares = self.value, np.square(self.spread)
        for axis, length in enumerate(shape):
            if length == 1 < value.shape[axis]:
                value, squares = (x.sum(axis, keepdims=True) for x in (value, squares))
        cut = tuple(slice(0, length) for length in shape)
        return Gradient(value[cut], np.sqrt(squares + np.square(value) * (value.size < self.value.size))[cut])


def gradients(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    *,
    scale: float,
    dlse: np.ndarray | None = None,
    scores: Scores = FULL,
    values: Mapping[str, Any] | None = None,
    first: tuple[int, int] = (0, 0),
    unit: float = UNIT,
    tanh_error: float = 0.0,
) -> dict[str, Gradient]:
    """Computes the gradients ``dq``, ``dk`` and ``dv`` of a sum over softmax(scale · q kᵀ) v times ``dout``,
    and over its log-sum-exp times ``dlse`` where that is given; and those of the arrays of floats among
    ``values`` on which scores depend, of their shapes but of length 1 along what they are repeated along, by
    the names of `gen.operation.gradient_name`.

    Arrays are (batch, heads, seqlen, head_dim), heads of k and v grouped; ``scores`` and ``values`` are as in
    `flashgen.tuner.evaluate.reference.attention`, as are ``tanh_error`` and ``first``, the batch and the head
    there that the first of q are. ``unit`` is the relative error of a term that spreads are of: where a
    change of scores flattens, how fast it rises is known less well, and counts more. Rows whose ``dout`` and
    ``dlse`` are nothing add nothing, and take no time.
    """
    batch, num_q_heads, seqlen_q, _ = q.shape
    num_kv_heads, seqlen_k = k.shape[1:3]
    asked = AskedPairs(scores, values or {}, (0, 0), first[1] + num_q_heads, seqlen_q, seqlen_k)
    rates = None
    if scores.change is not None:
        rates = replace(scores, change=derivative(scores.change, SCORE.name))
    found = {"dq": Gradient.of(q), "dk": Gradient.of(k), "dv": Gradient.of(v)}
    of_buffers = buffer_gradients(scores)
    found |= {
        each.name: Gradient.of(_once(np.asarray(asked.values[each.buffer.name]))) for each in of_buffers
    }
    step = max(1, MAX_SCORE_BYTES // (8 * max(1, seqlen_k)))
    given = np.any(dout, axis=-1) if dlse is None else np.any(dout, axis=-1) | (dlse != 0)
    for b, h, turn in np.ndindex(batch, num_q_heads, -(-seqlen_q // step)):
        part = np.flatnonzero(given[b, h])[turn * step : (turn + 1) * step]
        if not part.size:
            continue
        at, kv_head = (first[0] + b, first[1] + h, part), h // (num_q_heads // num_kv_heads)
        terms = _Terms.of(
            asked, rates, at, scale, q[b, h, part], k[b, kv_head], v[b, kv_head], dout[b, h, part],
            0.0 if dlse is None else np.asarray(dlse, np.float64)[b, h, part, None], unit, tanh_error,
        )  # fmt: skip
        terms.add_queries(found["dq"], (b, h, part))
        terms.add_keys(found["dk"], (b, kv_head))
        terms.add_values(found["dv"], (b, kv_head))
        for each in of_buffers:
            if each.is_of_sinks:
                terms.add_sink(found[each.name], first[1] + h)
            for load, rate in each.rates:
                terms.add_elements(
                    found[each.name], replace(asked, scores=replace(scores, change=rate)), load
                )
    for each in found.values():
        np.sqrt(each.spread, out=each.spread)
    return found


def _once(array: np.ndarray) -> np.ndarray:
    """The array without what is repeated along an axis, the last aside."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides[:-1])]


@dataclass(frozen=True)
class _Terms:
    """What gradients are sums over, of some rows ``at`` a batch and a head: (rows, keys). ``of_changed`` are
    the gradients of what became of scores, ``changed_errors`` what each may be off by, and ``row_errors``
    what all of a row may be, of their weights; ``of_scores``, ``errors`` and ``shared`` the same of products
    of queries and keys. ``sink_weights`` are what a sink weighs in rows, and ``deltas`` what gradients of
    weights are less by."""

    at: tuple[int, int, np.ndarray]
    products: np.ndarray
    query: np.ndarray
    key: np.ndarray
    given: np.ndarray
    weights: np.ndarray
    of_scores: np.ndarray
    errors: np.ndarray
    shared: np.ndarray
    of_changed: np.ndarray
    changed_errors: np.ndarray
    row_errors: np.ndarray
    sink_weights: np.ndarray
    deltas: np.ndarray
    unit: float
    tanh_error: float

    @classmethod
    def of(
        cls,
        asked: AskedPairs,
        rates: Scores | None,
        at: tuple[int, int, np.ndarray],
        scale: float,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        dout: np.ndarray,
        dlse: np.ndarray | float,
        unit: float,
        tanh_error: float,
    ) -> _Terms:
        query, key, value, given = (np.asarray(x, np.float64) for x in (q, k, v, dout))
        b, h, rows = at
        hidden = ~asked.visible(b, h, rows, np.arange(asked.seqlen_k))
        # What nobody sees may be no number.
        unseen = np.all(hidden, axis=0, keepdims=True).T
        key, value = (np.where(unseen, 0.0, x) for x in (key, value))
        products = scale * query @ key.T
        place = (b, h, rows, np.arange(asked.seqlen_k), asked.seqlen_q, asked.seqlen_k)
        changed = asked.scores.changed(asked.values, products, *place)
        slopes, doubts = np.ones_like(products), np.zeros_like(products)
        if rates is not None:
            keys = np.arange(asked.seqlen_k)
            found = replace(asked, scores=rates).change(
                b, h, products, UNIT * np.abs(products), rows, keys, tanh_error
            )
            slopes, doubts = found.value, (found.inherited + found.own) / unit
        masked, sink = np.where(hidden, -np.inf, changed), asked.sinks()[h]
        top = np.maximum(masked.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        top[np.isneginf(top)] = 0.0
        weights = np.exp(masked - top)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        weights /= np.where(total > 0.0, total, 1.0)
        of_weights = given @ value.T
        delta = (weights * of_weights).sum(axis=-1, keepdims=True) - dlse
        slopes, doubts = (np.where(weights > 0.0, x, 0.0) for x in (slopes, doubts))
        of_changed = weights * (of_weights - delta)
        rounded = np.sqrt(np.square(given) @ np.square(value).T)
        changed_errors = weights * (np.abs(of_weights - delta) + rounded)
        shared = np.sqrt(np.square(given * (weights @ value)).sum(axis=-1, keepdims=True)) + np.abs(dlse)
        errors = changed_errors * (np.abs(slopes) + doubts)
        of_scores, scaled_errors, scaled_shared = (
            scale * x for x in (of_changed * slopes, errors, shared * weights * slopes)
        )
        return cls(
            at=at,
            products=products,
            query=query,
            key=key,
            given=given,
            weights=weights,
            of_scores=of_scores,
            errors=scaled_errors,
            shared=scaled_shared,
            of_changed=of_changed,
            changed_errors=changed_errors,
            row_errors=shared,
            sink_weights=np.exp(sink - top) / np.where(total > 0.0, total, 1.0),
            deltas=delta,
            unit=unit,
            tanh_error=tanh_error,
        )

    def add_queries(self, gradient: Gradient, where: tuple[Any, ...]) -> None:
        """Adds what keys make of the rows' gradients."""
        value = self.of_scores @ self.key
        gradient.value[where] += value
        gradient.spread[where] += (
            np.square(self.errors) @ np.square(self.key)
            + np.square(self.shared @ self.key)
            + np.square(value)
        )

    def add_keys(self, gradient: Gradient, where: tuple[Any, ...]) -> None:
        """Adds what the rows make of keys' gradients."""
        gradient.value[where] += self.of_scores.T @ self.query
        squares = np.square(self.errors) + np.square(self.shared)
        gradient.spread[where] += squares.T @ np.square(self.query)

    def add_values(self, gradient: Gradient, where: tuple[Any, ...]) -> None:
        """Adds what the rows make of values' gradients."""
        gradient.value[where] += self.weights.T @ self.given
        gradient.spread[where] += np.square(self.weights).T @ np.square(self.given)

    def add_sink(self, gradient: Gradient, head: int) -> None:
        """Adds what the rows make of their head's sink."""
        terms = -self.sink_weights * self.deltas
        errors = self.sink_weights * (np.abs(self.deltas) + self.row_errors)
        gradient.value[head] += terms.sum()
        gradient.spread[head] += np.square(errors).sum() + terms.sum() ** 2

    def add_elements(self, gradient: Gradient, rates: AskedPairs, load: Load) -> None:
        """Adds what the pairs make of elements of an array, ``rates`` being how fast scores rise with
        them."""
        b, h, rows = self.at
        keys = np.arange(rates.seqlen_k)
        errors = UNIT * np.abs(self.products)
        found = rates.change(b, h, self.products, errors, rows, keys, self.tanh_error)
        rate, doubt = (
            np.where(self.weights > 0.0, x, 0.0)
            for x in (found.value, (found.inherited + found.own) / self.unit)
        )
        place = rates.index_of(load, gradient.value.shape, b, h, rows, keys)
        elements, which = np.unique(place, return_inverse=True)
        which = which.reshape(place.shape)

        def added(terms: np.ndarray) -> np.ndarray:
            return np.bincount(which.reshape(-1), terms.reshape(-1))

        value, spread = gradient.value.reshape(-1), gradient.spread.reshape(-1)
        terms = added(self.of_changed * rate)
        value[elements] += terms
        squares = np.square(self.changed_errors * (np.abs(rate) + doubt))
        spread[elements] += added(squares) + np.square(terms)
        # What all pairs of a row are off by together.
        groups, of_group = np.unique(np.arange(len(rows))[:, None] * value.size + place, return_inverse=True)
        together = np.bincount(of_group.reshape(-1), (self.row_errors * self.weights * rate).reshape(-1))
        np.add.at(spread, groups % value.size, np.square(together))
