"""A stand-in for PyTorch by numpy: enough to time attention, on a clock that moves only when work is done.

``FAKE_TORCH`` holds JSON: ``ms`` by backend, and ``refuse``, ``die`` and ``hang``, lists of backends that
raise, kill the process and never return (``only``: at this head dim alone); ``restless`` are those whose
gradients are others in every call.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np

__version__ = "9.9.0+fake"
version = SimpleNamespace(cuda="13.0")
float32, float16, bfloat16, int8, int32 = "float32", "float16", "bfloat16", "int8", "int32"
float8_e4m3fn = "float8_e4m3fn"
bool = "bool"
BEHAVIOUR = json.loads(os.environ.get("FAKE_TORCH", "{}"))
clock_ms = 0.0
launches: list[str] = []
idled: list[int] = []


def launch(name: str, head_dim: int = 0) -> None:
    """Work of that name on the card."""
    global clock_ms
    if BEHAVIOUR.get("only", head_dim) == head_dim:
        if name in BEHAVIOUR.get("die", ()):
            os.abort()
        if name in BEHAVIOUR.get("hang", ()):
            time.sleep(600)
        if name in BEHAVIOUR.get("refuse", ()):
            raise RuntimeError(f"{name} is not for you\nand a trace")
    launches.append(name)
    clock_ms += BEHAVIOUR.get("ms", {}).get(name, 1.0)


class Tensor(np.lib.mixins.NDArrayOperatorsMixin):
    requires_grad = False

    def __init__(self, array, dtype=float32, requires_grad=False):
        self.array, self.dtype, self.requires_grad = np.asarray(array), dtype, requires_grad
        self.made_by = None

    def requires_grad_(self):
        self.requires_grad = True
        return self

    def clone(self):
        return Tensor(self.array.copy(), self.dtype)

    def float(self):
        return Tensor(self.array.astype(np.float32))

    @property
    def shape(self):
        return self.array.shape

    def __array_ufunc__(self, ufunc, method, *inputs, **_):
        arrays = [each.array if isinstance(each, Tensor) else each for each in inputs]
        with np.errstate(all="ignore"):
            return Tensor(getattr(ufunc, method)(*arrays), self.dtype)

    def __getitem__(self, key):
        if isinstance(key, tuple):
            key = tuple(getattr(each, "array", each) for each in key)
        key = getattr(key, "array", key)
        return Tensor(self.array[key], self.dtype)

    def __setitem__(self, key, value):
        self.array[key] = getattr(value, "array", value)

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def expand(self, *shape):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return Tensor(np.broadcast_to(self.array, shape), self.dtype)

    def masked_fill_(self, where, value):
        self.array[np.broadcast_to(where.array, self.shape)] = value

    def view(self, dtype):
        assert dtype == bool and self.array.dtype == np.uint8
        return Tensor(self.array.view(np.bool_), dtype)

    def transpose(self, a, b):
        found = Tensor(self.array.swapaxes(a, b), self.dtype, self.requires_grad)
        found.made_by = self.made_by
        return found

    def reshape(self, *shape):
        found = Tensor(self.array.reshape(*shape), self.dtype, self.requires_grad)
        found.made_by = self.made_by
        return found

    def to(self, dtype):
        if dtype == "cuda":
            return self
        if dtype in (int32, float32):
            return Tensor(self.array.astype(dtype), dtype)
        if dtype == float8_e4m3fn:
            return Tensor(self.array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), dtype)
        return Tensor(self.array.astype(np.float16).astype(np.float32), dtype)

    def max(self):
        return self.array.max()

    def clamp(self, least, most):
        return Tensor(self.array.clip(least, most))

    def double(self):
        return Tensor(self.array.astype(np.float64), "float64")

    def cpu(self):
        return self

    contiguous = detach = cpu

    def numpy(self):
        return self.array

    def zero_(self):
        launch("flush")

    def copy_(self, other):
        launch("copy")

    def data_ptr(self):
        return 4096

    def __matmul__(self, other):
        launch("gemm")
        return self


def _rng_array(draw, shape):
    # Large tensors are only ever timed.
    return draw(shape).astype(np.float32) if np.prod(shape) < 2**20 else np.zeros((1, 1), np.float32)


def equal(a, b):
    return np.array_equal(a.array, b.array)


_rng = np.random.default_rng(0)


def manual_seed(seed):
    global _rng
    _rng = np.random.default_rng(seed)


def randn(*shape, device):
    return Tensor(_rng_array(_rng.standard_normal, shape))


def rand(*shape, device):
    return Tensor(_rng_array(_rng.random, shape))


def full(shape, value, *, dtype, device):
    return Tensor(np.full(shape, value, np.float32), dtype)


def matmul(x, y):
    return Tensor(x.array @ y.array)


def logsumexp(x, axis):
    most = x.array.max(axis=axis, keepdims=True)
    return Tensor((np.log(np.exp(x.array - most).sum(axis=axis, keepdims=True)) + most).squeeze(axis))


def softmax(x, axis):
    weights = np.exp(x.array - x.array.max(axis=axis, keepdims=True))
    return Tensor(weights / weights.sum(axis=axis, keepdims=True))


def zeros(*shape, device):
    return Tensor(np.zeros(shape, np.float32))


def empty(*shape, dtype, device):
    return Tensor(np.zeros(shape if len(shape) == 4 else 1), dtype)


def arange(length, device):
    return Tensor(np.arange(length))


def from_numpy(array):
    return Tensor(array, str(array.dtype))


def _of_arrays(function):
    def call(*operands):
        return Tensor(function(*(getattr(each, "array", each) for each in operands)))

    return call


where, tanh, exp = _of_arrays(np.where), _of_arrays(np.tanh), _of_arrays(np.exp)


def sigmoid(x):
    return Tensor(1 / (1 + np.exp(-x.array)))


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = clock_ms
        self.awaited = False

    def synchronize(self):
        self.awaited = True

    def elapsed_time(self, end):
        return end.at - self.at


class _Nested:
    """Sequences of their own lengths: (batch, rows, heads, columns), or heads before rows."""

    def __init__(self, array, starts):
        self.array, self.starts = array, starts

    def transpose(self, a, b):
        assert (a, b) == (1, 2)
        return self

    def values(self):
        return self.array


def nested_tensor_from_jagged(values, offsets, min_seqlen, max_seqlen):
    lengths = np.diff(offsets.array)
    assert (min_seqlen, max_seqlen) == (lengths.min(), lengths.max())
    return _Nested(values, offsets.array)


nested = SimpleNamespace(nested_tensor_from_jagged=nested_tensor_from_jagged)


def _nothing(*_):
    return None


def gradients(name, q, k, v, given, seen, added=0.0):
    """Right gradients, or as wrong as ``noise`` says, of heads before rows; scores are changed by what is
    added alone."""
    launch(f"{name} backward", q.shape[-1])
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.where(seen, scale * q @ keys.swapaxes(2, 3) + added, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    of_weights = given @ values.swapaxes(2, 3)
    of_scores = scale * weights * (of_weights - (weights * of_weights).sum(axis=3, keepdims=True))
    dk, dv = of_scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ given
    dk, dv = (x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    if name in BEHAVIOUR.get("restless", ()):
        dk = dk * (1 + 1e-6 * len(launches))
    return (1 + BEHAVIOUR.get("noise", {}).get(f"{name} backward", 0.0)) * of_scores @ keys, dk, dv


def _grad(o, leaves, given, retain_graph):
    assert retain_graph
    name, arrays, added = o.made_by
    assert name != "flex" or not _functorch.config.donated_buffer, "a graph is kept"
    given = given.array
    if len(given) != len(arrays[0]):
        given = _behind_another(given.swapaxes(1, 2))
    found = gradients(name, *arrays, given, added > -np.inf, np.maximum(added, -1e30))
    # Leaves may lie with rows before heads, and their batches one behind the other.
    return tuple(
        Tensor(x if x.shape == leaf.shape else x.swapaxes(1, 2).reshape(leaf.shape), leaf.dtype)
        for x, leaf in zip(found, leaves, strict=True)
    )


def _behind_another(array):
    """Sequences of rows before heads as one of heads before rows, in a batch."""
    return array.reshape(1, -1, *array.shape[-2:]).swapaxes(1, 2)


autograd = SimpleNamespace(grad=_grad)
no_grad = enable_grad = contextlib.nullcontext
cuda = SimpleNamespace(
    Event=Event,
    current_device=lambda: 0,
    current_stream=lambda device=None: SimpleNamespace(cuda_stream=0),
    device=lambda ordinal: contextlib.nullcontext(),
    empty_cache=_nothing,
    get_device_properties=lambda device: SimpleNamespace(L2_cache_size=64),
    mem_get_info=lambda: (BEHAVIOUR.get("free_bytes", 2**30), 2**31),
    synchronize=_nothing,
    _sleep=lambda cycles: (launch("idle"), idled.append(cycles)),
)
backends = SimpleNamespace(
    cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False)),
    cudnn=SimpleNamespace(version=lambda: 91900),
)
_dynamo = SimpleNamespace(reset=_nothing)
_functorch = SimpleNamespace(config=SimpleNamespace(donated_buffer=True))


def compile(function, *, dynamic, fullgraph):
    assert fullgraph and not dynamic
    return function


def packed_attention(name, q, k, v, starts_q, starts_k, is_causal=False, **options):
    """The same of sequences one behind the other, as one launch: (total, heads, head_dim)."""
    o = q[:] * 0
    o.requires_grad = q.requires_grad
    ended = len(launches)
    added = np.full((1, q.shape[1], len(q.array), len(k.array)), -np.inf)
    for i in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        parts = [x[None, of].transpose(1, 2) for x, of in ((q, rows), (k, keys), (v, keys))]
        part = attention(name, *parts, is_causal, **options)
        o[rows] = part.transpose(1, 2)[0]
        added[:, :, rows, keys] = part.made_by[2]
    o.made_by = (name, [_behind_another(x.array) for x in (q, k, v)], added)
    global clock_ms
    clock_ms -= BEHAVIOUR.get("ms", {}).get(name, 1.0) * (len(launches) - ended - 1)
    del launches[ended + 1 :]
    return o


def from_pages(cache, table, lengths):
    """Keys of pages (pages, page_size, heads, columns) one behind the other, and where sequences begin."""
    parts = [
        cache.array[row[: -(-length // cache.shape[1])]].reshape(-1, *cache.shape[2:])[:length]
        for row, length in zip(table.array, lengths.array, strict=True)
    ]
    return Tensor(np.concatenate(parts), cache.dtype), np.cumsum([0, *lengths.array])


def attention(
    name, q, k, v, is_causal=False, *, window=(-1, -1), softcap=0.0, sinks=None, mask=None, change=None,
    return_lse=False,
):  # fmt: skip
    """Right attention, or as wrong as ``noise`` says."""
    launch(name, q.shape[-1])
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x.array, group, axis=1) for x in (k, v))
    products = scores = q.array @ keys.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if change is not None:
        scores = change(scores)
    place = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - np.arange(k.shape[2])
    left, right = (2**30 if side is None or side < 0 else side for side in window)
    seen = (place <= left) & (place >= -(0 if is_causal else right))
    scores = np.where(seen & (True if mask is None else mask), scores, -np.inf)
    logits = np.full((1, 1, 1, 1), -np.inf) if sinks is None else sinks.array[None, :, None, None]
    most = np.maximum(scores.max(axis=3, keepdims=True), logits)
    weights = np.exp(scores - most)
    total = weights.sum(axis=3, keepdims=True) + np.exp(logits - most)
    o = Tensor((1 + BEHAVIOUR.get("noise", {}).get(name, 0.0)) * (weights / total @ values), q.dtype)
    o.requires_grad = q.requires_grad
    o.made_by = (name, (q.array, k.array, v.array), scores - products)  # a mask may be a sum of scores
    return (o, Tensor((np.log(total) + most)[..., 0])) if return_lse else o
