"""A stand-in for PyTorch by numpy: enough to time attention, on a clock that moves only when work is done.

``FAKE_TORCH`` holds JSON: ``ms`` by backend, and ``refuse``, ``die`` and ``hang``, lists of backends that
raise, kill the process and never return (``only``: at this head dim alone).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from types import SimpleNamespace

import numpy as np

__version__ = "9.9.0+fake"
version = SimpleNamespace(cuda="13.0")
float32, float16, bfloat16, int8, int32 = "float32", "float16", "bfloat16", "int8", "int32"
bool = "bool"
BEHAVIOUR = json.loads(os.environ.get("FAKE_TORCH", "{}"))
clock_ms = 0.0
launches: list[str] = []


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

    def __init__(self, array, dtype=float32):
        self.array, self.dtype = np.asarray(array), dtype

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
        return Tensor(self.array.swapaxes(a, b), self.dtype)

    def reshape(self, *shape):
        return Tensor(self.array.reshape(*shape), self.dtype)

    def to(self, dtype):
        if dtype == "cuda":
            return self
        if dtype in (int32, float32):
            return Tensor(self.array.astype(dtype), dtype)
        return Tensor(self.array.astype(np.float16).astype(np.float32), dtype)

    def double(self):
        return Tensor(self.array.astype(np.float64), "float64")

    def cpu(self):
        return self

    contiguous = cpu

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

    def synchronize(self):
        pass

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


no_grad = contextlib.nullcontext
cuda = SimpleNamespace(
    Event=Event,
    current_device=lambda: 0,
    current_stream=lambda device=None: SimpleNamespace(cuda_stream=0),
    device=lambda ordinal: contextlib.nullcontext(),
    empty_cache=_nothing,
    get_device_properties=lambda device: SimpleNamespace(L2_cache_size=64),
    mem_get_info=lambda: (BEHAVIOUR.get("free_bytes", 2**30), 2**31),
    synchronize=_nothing,
    _sleep=lambda cycles: launch("idle"),
)
backends = SimpleNamespace(
    cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False)),
    cudnn=SimpleNamespace(version=lambda: 91900),
)
_dynamo = SimpleNamespace(reset=_nothing)


def compile(function, *, dynamic, fullgraph):
    assert fullgraph and not dynamic
    return function


def packed_attention(name, q, k, v, starts_q, starts_k, is_causal=False, **options):
    """The same of sequences one behind the other, as one launch: (total, heads, head_dim)."""
    o = q[:] * 0
    ended = len(launches)
    for i in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        parts = [x[None, of].transpose(1, 2) for x, of in ((q, rows), (k, keys), (v, keys))]
        o[rows] = attention(name, *parts, is_causal, **options).transpose(1, 2)[0]
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
    scores = q.array @ keys.swapaxes(2, 3) / np.sqrt(q.shape[-1])
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
    return (o, Tensor((np.log(total) + most)[..., 0])) if return_lse else o
