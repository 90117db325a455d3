"""What a module with kernels for gradients does when it is run: it checks and times them, too."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import _Buffer
from .driver import _check, _driver, _pop_context, _push_context
from .facts import Tuned
from .gradient_plans import _NOTHING_READ, _ReadByGradients
from .gradients import DifferentiableAttention, Gradients, _Settings
from .program import (
    _CHECKED,
    _check_and_time,
    _from_host,
    _self_check,
    _time_calls,
    _time_us,
    _to_host,
    _visible_share,
)

#: How many times an output's tolerance a gradient may be off by: it is a sum of differences of such.
_GRADIENT_SLACK = 4.0


def run_gradients_module(gradients: Gradients, doc: str | None) -> int:
    """Says what the module is, checks and times its kernels on device 0; the exit code."""
    check = functools.partial(_check_gradients, gradients)
    time_us = functools.partial(_time_gradients_us, gradients)
    return _check_and_time(gradients.kernels, gradients.use, check, time_us, _visible_share, doc)


def run_differentiable_module(attention: DifferentiableAttention, doc: str | None) -> int:
    """Says what the module is, checks and times its kernels on device 0, forwards and backwards; the exit
    code."""
    gradients = attention._gradients

    def check(tuned: Tuned) -> float:
        if tuned in gradients.kernels:
            return _check_gradients(gradients, tuned)
        return _self_check(attention, tuned)

    def time_us(tuned: Tuned) -> float:
        if tuned in gradients.kernels:
            return _time_gradients_us(gradients, tuned)
        return _time_us(attention, tuned)

    kernels = (*attention._table.kernels, *gradients.kernels)
    return _check_and_time(kernels, attention.use, check, time_us, _visible_share, doc)


class _Changed(NamedTuple):
    """What becomes of scores."""

    masked: NDArray[Any]
    """What they are then, -inf where nothing is seen."""
    slope: Any
    """By how much these rise with them."""
    sinks: Any
    """What stands beside a row's in the denominator."""


class _Passed:
    """A pass of float64 attention both ways: (batch, heads, seqlen, head_dim) arrays."""

    def __init__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        causal: bool,
        changed: "Callable[[NDArray[Any], bool], _Changed] | None" = None,
    ) -> None:
        """`changed` tells what becomes of scores; None: they stay."""
        self.q, self.groups = q.astype(np.float64), q.shape[1] // k.shape[1]
        self.k, self.v = (np.repeat(x.astype(np.float64), self.groups, axis=1) for x in (k, v))
        self.scale = 1 / math.sqrt(q.shape[3])
        scores = self.scale * self.q @ self.k.swapaxes(2, 3)
        visible = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        masked, self.slope, sinks = np.where(visible, scores, -np.inf) if causal else scores, 1.0, -np.inf
        if changed is not None:
            masked, self.slope, sinks = changed(scores, causal)
        top = np.maximum(masked.max(axis=3, keepdims=True), sinks)
        top = np.where(np.isneginf(top), 0.0, top)
        weights = np.exp(masked - top)
        total = weights.sum(axis=3, keepdims=True) + np.exp(sinks - top)
        with np.errstate(divide="ignore"):
            self.lse = (np.log(total) + top)[..., 0]
        self.weights = weights / np.where(total == 0, 1.0, total)
        self.o = self.weights @ self.v

    def gradients(self, dout: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """dq, dk and dv."""
        of_weights = dout @ self.v.swapaxes(2, 3)
        delta = (dout * self.o).sum(axis=3, keepdims=True)
        of_scores = self.scale * self.slope * self.weights * (of_weights - delta)
        dk, dv = of_scores.swapaxes(2, 3) @ self.q, self.weights.swapaxes(2, 3) @ dout
        return of_scores @ self.k, self._shared(dk), self._shared(dv)

    def _shared(self, x: NDArray[Any]) -> NDArray[Any]:
        batch, heads, rows, columns = x.shape
        summed: NDArray[Any] = x.reshape(batch, heads // self.groups, self.groups, rows, columns).sum(axis=2)
        return summed


def _check_gradients(
    gradients: Gradients,
    tuned: Tuned,
    read: _ReadByGradients = _NOTHING_READ,
    changed: "Callable[[NDArray[Any], bool], _Changed] | None" = None,
    sizes: "dict[str, int] | None" = None,
) -> float:
    """The largest per-head error over both masks, in shares of `_GRADIENT_SLACK`, of arrays of some sizes."""
    random = np.random.default_rng(0)
    shapes = _shapes_of(tuned, dict(sizes or _CHECKED))
    hosts = [_to_host(random.standard_normal(shape).astype(np.float32), tuned.dtype) for shape in shapes]
    worst = 0.0
    for causal in (False, True):
        q, k, v, dout = (_from_host(x, tuned.dtype) for x in hosts)
        passed = _Passed(q, k, v, causal, changed)
        o = _to_host(passed.o.astype(np.float32), tuned.dtype)
        lse = passed.lse.astype(np.float32)
        settings = _Settings(causal, None, None, "bhsd", None, read)
        arrays = (*hosts[:3], o, hosts[3])
        found = gradients._through_buffers(arrays, lse, None, settings, tuned.dtype)
        for host, wanted in zip(found, passed.gradients(dout.astype(np.float64)), strict=True):
            difference = np.linalg.norm(_from_host(host, tuned.dtype) - wanted, axis=(2, 3))
            # NaN is an error too, which max() would pass over.
            worst = float(np.maximum(worst, (difference / np.linalg.norm(wanted, axis=(2, 3))).max()))
    return worst / _GRADIENT_SLACK


def _shapes_of(tuned: Tuned, sizes: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """The shapes of q, k, v and dout."""
    of_rows = sizes["batch"], sizes["num_q_heads"], sizes["seqlen_q"]
    of_keys = sizes["batch"], sizes["num_kv_heads"], sizes["seqlen_k"]
    return (
        (*of_rows, tuned.head_dim),
        (*of_keys, tuned.head_dim),
        (*of_keys, tuned.head_dim_v),
        (*of_rows, tuned.head_dim_v),
    )


def _time_gradients_us(
    gradients: Gradients, tuned: Tuned, read: _ReadByGradients = _NOTHING_READ, repeats: int = 20
) -> float:
    """The median time of a call on the tuned problem's shape, by CUDA events, with a warm cache."""
    driver, problem = _driver(), tuned.problem
    random = np.random.default_rng(0)
    pushed = _push_context(driver, 0, 0)
    buffers: list[_Buffer] = []

    def put(host: NDArray[Any], dtype: str | None = None) -> _Buffer:
        buffers.append(_Buffer(host.shape, host.dtype, dtype or host.dtype.name))
        buffers[-1].write(host, 0)
        _check(driver.cuStreamSynchronize(None), "copying to the GPU")
        return buffers[-1]

    try:
        drawn = [random.standard_normal(shape, np.float32) for shape in _shapes_of(tuned, problem)]
        q, k, v, dout = (put(_to_host(x, tuned.dtype), tuned.dtype) for x in drawn)
        o = put(_to_host(drawn[3], tuned.dtype), tuned.dtype)
        # Of the size that it has: larger ones let weights vanish, smaller ones overflow.
        rows = np.full(drawn[3].shape[:3], math.log(max(1, problem["seqlen_k"])) + 0.5, np.float32)
        lse = put(rows, "float32")

        placed = read.on_device(put)
        settings = _Settings(problem["causal"], None, None, "bhsd", None, placed)

        def call() -> None:
            made, workspace = gradients._of_others((q, k, v, o, dout), lse, None, settings)
            buffers.extend((*made, workspace))

        return _time_calls(call, repeats)
    finally:
        for buffer in buffers:
            buffer.free()
        if pushed:
            _pop_context()
