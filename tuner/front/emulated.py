"""Calls on an emulated card: what the runtime makes of numpy arrays, without a card's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...templates.runtime.arrays import _View
from ...templates.runtime.attention import Attention
from ...templates.runtime.gradient_tensors import _check_order, _Settings
from ...templates.runtime.gradients import Gradients
from ...templates.runtime.plans import _Beside
from ...templates.runtime.scored_gradients import _WantedGradients
from ...templates.runtime.scored_values import _Asked, _broadcast, _needed
from .card import SimCard
from .table import MadeTable

#: What kernels call the logits beside a row's scores.
_SINKS = "sinks"


class EmulatedAttention(Attention):
    """Attention of numpy arrays on an emulated card."""

    card: SimCard

    def _through_buffers(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        causal: bool | None,
        scale: float | None,
        out: np.ndarray,
        handle: int,
        return_lse: bool,
        layout: str,
        dtype: str,
        beside: _Beside,
    ) -> Any:
        masked = self._tensors.is_masked(causal)
        query, key, value = _views(self._table, (q, k, v), layout)
        values = _values(beside, self._table.sizes(query, key, layout))
        if 0 in (out.size, *key.shape):
            out[...] = 0
            return (out, lse_of_nothing(query.shape, values)) if return_lse else out
        tuned = self._table.choose(query, key, value, (0,) * 12, masked).tuned
        scale = 1 / math.sqrt(query.head_dim) if scale is None else scale
        heads_first = [dense(_heads_first(x, layout)) for x in (q, k, v)]
        runner = self.card.device.open()
        o, lse = runner.attend(
            self.card.builds[tuned, masked], *heads_first, scale=scale, want_lse=return_lse, values=values
        )
        if self._table.has_scales:
            o = (o.astype(np.float32) * _value_scale(beside)).astype(o.dtype)
        out[...] = _heads_first(o, layout)
        return (out, lse) if return_lse else out


class EmulatedGradients(Gradients):
    """Gradients of numpy arrays on an emulated card."""

    card: SimCard

    def _through_buffers(
        self,
        arrays: Sequence[np.ndarray],
        lse: np.ndarray,
        dlse: np.ndarray | None,
        settings: _Settings,
        dtype: str,
    ) -> list[np.ndarray]:
        tensors, layout = self._tensors, settings.layout
        masked = tensors.is_masked(settings.causal)
        query, key, value = _views(tensors.table, arrays[:3], layout)
        tensors.table.check_shapes(query, key, value)
        scoring = settings.read.scoring if isinstance(settings.read, _WantedGradients) else None
        values = {} if scoring is None else as_read(scoring, tensors.table.sizes(query, key, layout))
        if 0 in (*query.shape, *key.shape):
            zeros = [np.zeros(x.shape, x.dtype) for x in arrays[:3]]
            return [*zeros, *of_what_is_read(settings, gradients_of_nothing(settings, dlse, values))]
        table = tensors.repeating if settings.deterministic else tensors.table
        tuned = table.choose(query, key, value, (0,) * 24, masked).tuned
        scale = 1 / math.sqrt(query.head_dim) if settings.scale is None else settings.scale
        named = zip(("q", "k", "v", "o", "dout"), arrays, strict=True)
        given = {name: dense(_heads_first(x, layout)) for name, x in named} | {"lse": dense(lse)}
        given |= {} if dlse is None else {"dlse": dense(dlse)}
        build = self.card.builds[tuned, masked]
        found = self.card.device.open().differentiate(build, given, scale=scale, values=values)
        grads = [_heads_first(found[name], layout) for name in ("dq", "dk", "dv")]
        return [*grads, *of_what_is_read(settings, found)]


def dense(x: np.ndarray) -> np.ndarray:
    """Returns an array as it would lie on a card, where numpy's are copied: without gaps, in the order of its
    axes, those of one entry among them, whose strides numpy lets be anything."""
    return x.copy(order="C")


def lse_of_nothing(rows: Sequence[int], values: Mapping[str, Any]) -> np.ndarray:
    """Returns the log-sum-exp of (batch, heads, rows) that see no key, where kernels read these values: minus
    infinity, or the sinks."""
    lse = np.full(tuple(rows), -np.inf, np.float32)
    if _SINKS in values:
        lse[...] = values[_SINKS][:, None]
    return lse


def gradients_of_nothing(
    settings: _Settings, dlse: np.ndarray | None, values: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the gradients that a call wants of what scores read, where no row sees a key; ``dlse`` is that
    of log-sum-exps, (batch, heads, rows), which are the sinks then."""
    read = settings.read
    names = read.wanted if isinstance(read, _WantedGradients) else ()
    found = {f"d{name}": np.zeros(values[name].shape, np.float32) for name in names}
    if _SINKS in names and dlse is not None:
        found[f"d{_SINKS}"] += dlse.sum((0, 2))
    return found


def _views(table: Any, arrays: Sequence[np.ndarray], layout: str) -> list[_View]:
    assert isinstance(table, MadeTable)
    return [
        table.inspect(name, (x.dtype.name, x.shape, None, None), layout, None)
        for name, x in zip("qkv", arrays, strict=True)
    ]


def _heads_first(x: np.ndarray, layout: str) -> np.ndarray:
    """An array with heads before rows, or one such as the layout has it."""
    return x.swapaxes(1, 2) if layout == "bshd" else x


def _values(beside: _Beside, sizes: dict[str, int]) -> dict[str, Any]:
    """What masks and changes of scores read, by the kernel's own names, repeated to the sizes of a call."""
    return as_read(beside, sizes) if isinstance(beside, _Asked) else {}


def as_read(asked: _Asked, sizes: dict[str, int]) -> dict[str, Any]:
    """Returns what a call says of masks and changes of scores by the kernel's own names, arrays of numpy
    repeated to the sizes of the call."""
    asked.sizes = sizes
    found: dict[str, Any] = dict(asked.scalars)
    for name, array in asked.buffers().items():
        buffer, exact = asked.tuned.buffers[name], name in asked.tuned.exact
        called = asked.called.get(name, name)
        whole, _ = _broadcast(called, array.shape, array.strides, buffer, exact, sizes)
        lengths = zip(whole, _needed(buffer, sizes), strict=True)
        found[name] = np.broadcast_to(array.reshape(whole), [max(each) for each in lengths])
    return found


def of_what_is_read(settings: _Settings, found: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the gradients that a call wants of what masks and changes of scores read, of the shapes of what
    they are of, and zero where kernels read nothing; ``found`` are those that a kernel made. Raises
    RuntimeError where the same bits are asked for of what is added up in no order."""
    read = settings.read
    if settings.deterministic:
        _check_order(read, False)
    made: list[np.ndarray] = []
    if not isinstance(read, _WantedGradients) or read.scoring is None:
        return made
    for name in read.wanted:
        grad, shape = found[f"d{name}"], read.scoring.array(name).shape
        whole = (1,) * (grad.ndim - len(shape)) + shape
        if whole[-1] == 1 < grad.shape[-1]:  # a kernel repeats no last axis
            grad = grad.sum(-1, keepdims=True)
        made.append(np.zeros(whole, np.float32))
        made[-1][tuple(map(slice, grad.shape))] = grad
        made[-1] = made[-1].reshape(shape)
    return made


def _value_scale(beside: _Beside) -> float:
    """What o is multiplied by where arrays come with scales."""
    return float(beside.scalars["value_scale"] if isinstance(beside, _Asked) else beside.told[0])
