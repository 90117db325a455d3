"""What a module of packed sequences with a kernel for gradients does when it is run: it checks that, too."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import _Buffer
from .driver import _check, _driver, _pop_context, _push_context
from .facts import Tuned
from .gradient_program import _GRADIENT_SLACK, _Passed
from .gradient_tensors import _Settings
from .packed_gradients import DifferentiablePackedAttention, PackedGradients, _PackedGradientsRead
from .packed_program import (
    _CHECKED_HEADS,
    _CHECKED_KEYS,
    _CHECKED_ROWS,
    _packed_check,
    _packed_shapes,
    _packed_time_us,
    _parts,
    _sequences,
)
from .packed_values import SequencePlan
from .program import _check_and_time, _from_host, _time_calls, _to_host
from .scored_gradient_program import _changing, _share_of_pairs
from .table import _SIZES


def run_packed_gradients_module(gradients: PackedGradients, doc: str | None) -> int:
    """Says what the module is, checks its kernel on device 0 and times it on sequences that are as long as
    the longest it was tuned for; the exit code."""

    def check(tuned: Tuned) -> float:
        return _check_packed_gradients(gradients)

    def time_us(tuned: Tuned) -> float:
        return _time_packed_gradients_us(gradients)

    return _check_and_time(gradients.kernels, gradients.use, check, time_us, _share_of_pairs, doc)


def run_differentiable_packed_module(attention: DifferentiablePackedAttention, doc: str | None) -> int:
    """Says what the module is, checks and times its kernels on device 0, forwards and backwards; the exit
    code."""
    gradients = attention._gradients

    def check(tuned: Tuned) -> float:
        if tuned is gradients.tuned:
            return _check_packed_gradients(gradients)
        return _packed_check(attention, tuned)

    def time_us(tuned: Tuned) -> float:
        if tuned is gradients.tuned:
            return _time_packed_gradients_us(gradients)
        return _packed_time_us(attention, tuned)

    kernels = (*attention.kernels, *gradients.kernels)
    return _check_and_time(kernels, attention.use, check, time_us, _share_of_pairs, doc)


def _check_packed_gradients(gradients: PackedGradients) -> float:
    """The largest error of a head of a sequence over both masks, in shares of `_GRADIENT_SLACK`."""
    tuned, random = gradients.tuned, np.random.default_rng(0)
    (heads, kv_heads), rows, keys = _CHECKED_HEADS, _CHECKED_ROWS, _CHECKED_KEYS
    shapes = _packed_shapes(tuned, sum(rows), sum(keys), heads, kv_heads)
    hosts = [_to_host(random.standard_normal(shape).astype(np.float32), tuned.dtype) for shape in shapes]
    q, k, v, dout = (_from_host(x, tuned.dtype).astype(np.float64) for x in hosts)
    sizes: dict[str, Any] = dict(zip(_SIZES, (len(rows), heads, kv_heads, max(rows), max(keys)), strict=True))
    told = _sequences(tuned, sizes, rows, keys)
    worst = 0.0
    for causal in (False, True):
        o, lse = np.zeros(shapes[3]), np.full((heads, sum(rows)), -np.inf, np.float32)
        wanted: list[NDArray[Any]] = [np.zeros(shape) for shape in shapes[:3]]
        parts = list(zip(_parts(rows), _parts(keys), strict=True))
        for number, (part, keys_of) in enumerate(parts):
            if part.start == part.stop or keys_of.start == keys_of.stop:
                continue
            changed = None if told.scoring is None else _changing(told.scoring, number)
            views = _of_one(q[part]), _of_one(k[keys_of]), _of_one(v[keys_of])
            passed = _Passed(*views, causal, changed)
            o[part], lse[:, part] = passed.o[0].swapaxes(0, 1), passed.lse[0]
            found = passed.gradients(_of_one(dout[part]))
            for each, grad, at in zip(wanted, found, (part, keys_of, keys_of), strict=True):
                each[at] = grad[0].swapaxes(0, 1)
        settings = _Settings(causal, None, None, told.layout, None, _PackedGradientsRead(told))
        arrays = (*hosts[:3], _to_host(o.astype(np.float32), tuned.dtype), hosts[3])
        made = gradients._group._through_buffers(arrays, lse, None, settings, tuned.dtype)
        for host, exact, of_keys in zip(made, wanted, (False, True, True), strict=True):
            apart = _from_host(host, tuned.dtype) - exact
            for pair in parts:
                at = pair[of_keys]
                error, norm = (np.linalg.norm(x[at], axis=(0, 2)) for x in (apart, exact))
                share = np.where(error == 0, 0.0, error / np.maximum(norm, 1e-30))
                # NaN is an error too, which max() would pass over.
                worst = float(np.maximum(worst, share.max()))
    return worst / _GRADIENT_SLACK


def _of_one(x: NDArray[Any]) -> NDArray[Any]:
    """(rows, heads, head_dim) as (1, heads, rows, head_dim)."""
    return x.swapaxes(0, 1)[None]


def _time_packed_gradients_us(gradients: PackedGradients, repeats: int = 20) -> float:
    """The median time of a call whose plan is made, by CUDA events, with a warm cache."""
    driver, tuned = _driver(), gradients.tuned
    problem, random = tuned.problem, np.random.default_rng(0)
    rows, keys = ((problem[each],) * problem["batch"] for each in ("seqlen_q", "seqlen_k"))
    heads, kv_heads = problem["num_q_heads"], problem["num_kv_heads"]
    shapes = _packed_shapes(tuned, sum(rows), sum(keys), heads, kv_heads)
    pushed = _push_context(driver, 0, 0)
    buffers: list[_Buffer] = []

    def put(host: NDArray[Any], dtype: str | None = None) -> _Buffer:
        buffers.append(_Buffer(host.shape, host.dtype, dtype or host.dtype.name))
        buffers[-1].write(host, 0)
        _check(driver.cuStreamSynchronize(None), "copying to the GPU")
        return buffers[-1]

    try:
        drawn = [random.standard_normal(shape, np.float32) for shape in (*shapes, shapes[3])]
        q, k, v, o, dout = (put(_to_host(x, tuned.dtype), tuned.dtype) for x in drawn)
        # Of the size that it has: larger ones let weights vanish, smaller ones overflow.
        lse = put(np.full((heads, sum(rows)), np.log(max(1, keys[0])) + 0.5, np.float32), "float32")
        told = _sequences(tuned, problem, rows, keys).on_device(put)
        told.plan = SequencePlan()
        read = _PackedGradientsRead(told)
        settings = _Settings(problem["causal"], None, None, told.layout, None, read)

        def call() -> None:
            made, workspace = gradients._group._of_others((q, k, v, o, dout), lse, None, settings)
            buffers.extend((*made, workspace))

        return _time_calls(call, repeats)
    finally:
        for buffer in buffers:
            buffer.free()
        if pushed:
            _pop_context()
