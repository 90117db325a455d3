"""What a module with masks and changes of scores does when it is run: it checks and times its kernels."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .attention import Attention
from .facts import Tuned
from .program import _CHECKED, _check_and_time, _self_check, _time_us, _to_host, _visible_share
from .scored_attention import ScoredAttention
from .scored_kinds import _Operands
from .scored_values import _BUFFER_DTYPES, Buffer, Scored, _Asked, _document_bounds, _needed
from .table import _SIZES

#: Of boolean masks, the share of pairs that they show; of rows, how many are looked at for how many they see.
_SHOWN, _SAMPLED_ROWS = 0.9, 64
#: The rows by which kernels of trees are checked, which take no more than a word has bits.
_CHECKED_TREE = 61


def run_scored_module(attention: ScoredAttention, doc: str | None) -> int:
    """Says what the module is, checks and times its kernels on device 0, with masks and changes that are
    drawn; the exit code."""

    def check(tuned: Tuned) -> float:
        return _check_scored(attention, tuned)

    def time_us(tuned: Tuned) -> float:
        return _time_scored_us(attention, tuned)

    def visible_share(tuned: Tuned) -> float:
        if not isinstance(tuned, Scored):
            return _visible_share(tuned)
        return _Drawn(tuned, tuned.problem).visible_share(bool(tuned.problem["causal"]))

    return _check_and_time(attention.kernels, attention.use, check, time_us, visible_share, doc)


def _check_scored(attention: ScoredAttention, tuned: Tuned) -> float:
    """The largest per-head error over both masks."""
    serving: Attention = attention._groups_of(tuned.name)[0]
    if not isinstance(tuned, Scored):
        return _self_check(serving, tuned)
    sizes = _checked_sizes(tuned)
    drawn = _Drawn(tuned, sizes)
    return _self_check(serving, tuned, drawn, drawn.reference, sizes)


def _time_scored_us(attention: ScoredAttention, tuned: Tuned) -> float:
    """The median time of a call on the tuned problem's shape."""
    drawn = _Drawn(tuned, tuned.problem) if isinstance(tuned, Scored) else None
    return _time_us(attention._groups_of(tuned.name)[0], tuned, drawn)


def _checked_sizes(tuned: Scored) -> dict[str, int]:
    """The sizes of arrays by which a kernel is checked."""
    return _CHECKED | ({"seqlen_q": _CHECKED_TREE} if "tree" in tuned.named else {})


class _Drawn(_Asked):
    """What a kernel reads for its masks and changes, drawn for arrays of some sizes."""

    def __init__(self, tuned: Scored, sizes: Mapping[str, Any]) -> None:
        sizes = {name: int(sizes[name]) for name in _SIZES}
        random = np.random.default_rng(1)
        arrays = {name: _draw(name, buffer, tuned, sizes, random) for name, buffer in tuned.buffers.items()}
        if "documents" in tuned.named:
            ids = np.sort(random.integers(0, 5, (sizes["batch"], sizes["seqlen_k"])))
            begins, ends = _document_bounds(ids, sizes["seqlen_q"], sizes["seqlen_k"])
            arrays |= {"document_begin": begins, "document_end": ends}
        beside = {"value_scale": 1.0} if "value_scale" in tuned.reads else {}
        super().__init__(tuned, {**tuned.scalars, **beside}, arrays, sizes)
        # As the kernel reads them.
        read = {name: _Clamped(array) for name, array in arrays.items()}
        self.at = SimpleNamespace(**tuned.scalars, **read)

    def array(self, name: str) -> Any:
        return self.arrays[name]

    def on_device(self, put: Callable[..., Any]) -> _Asked:
        placed = {}
        for name, array in self.arrays.items():
            dtype = _BUFFER_DTYPES[self.tuned.buffers[name].dtype][0]
            host = _to_host(array, dtype) if dtype in ("bfloat16", "float16") else array
            placed[name] = put(np.ascontiguousarray(host), dtype)
        return _Operands(self.tuned, self.scalars, placed, {}, put=put)

    def seen(self, causal: bool, *indices: NDArray[Any]) -> NDArray[Any]:
        """Which keys rows see, of batches, query heads, rows and keys."""
        lengths = self.sizes["seqlen_q"], self.sizes["seqlen_k"]
        with np.errstate(all="ignore"):
            return np.asarray(self.tuned.sees(self.at, causal, *indices, *lengths), bool)

    def visible_share(self, causal: bool) -> float:
        """Which share of the pairs of a row and a key there is, of a sample of rows."""
        rows, keys = self.sizes["seqlen_q"], self.sizes["seqlen_k"]
        sampled = np.arange(0, rows, max(1, rows // _SAMPLED_ROWS))
        batches, heads = np.arange(self.sizes["batch"]), np.arange(1)
        seen = self.seen(causal, *np.ix_(batches, heads, sampled, np.arange(keys)))
        return float(np.broadcast_to(seen, (len(batches), 1, len(sampled), keys)).mean())

    def scaled(self, name: str, x: NDArray[Any], first: int) -> NDArray[Any]:
        """Keys or values times the scales of that name, if the kernel reads them."""
        if name not in self.tuned.buffers or not self.tuned.buffers[name].any_step:
            return x
        return np.asarray(x * self.arrays[name][first : first + len(x), :, None, None])

    def reference(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], causal: bool, first: int = 0
    ) -> NDArray[Any]:
        """float64 attention of (batch, heads, seqlen, head_dim) arrays, whose first batch has that number."""
        k, v = (self.scaled(f"{name}_scale", x, first) for name, x in (("k", k), ("v", v)))
        groups = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x.astype(np.float64), groups, axis=1) for x in (k, v))
        scores = q.astype(np.float64) @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
        batches, *others = (np.arange(n) for n in scores.shape)
        indices = np.ix_(first + batches, *others)
        with np.errstate(all="ignore"):
            scores = self.tuned.change(self.at, scores, *indices, *scores.shape[2:])
            seen = np.asarray(self.tuned.sees(self.at, causal, *indices, *scores.shape[2:]), bool)
            scores = np.where(seen, scores, -np.inf)
            top = scores.max(axis=3, keepdims=True)
            sinks = self.at.sinks[indices[1]] if "sinks" in self.tuned.named else np.full_like(top, -np.inf)
            top = np.maximum(top, sinks)
            top = np.where(np.isneginf(top), 0.0, top)
            weights = np.exp(scores - top)
            total = weights.sum(axis=3, keepdims=True) + np.exp(sinks - top)
        result: NDArray[Any] = weights / np.where(total == 0, 1.0, total) @ v
        return result


class _Clamped:
    """An array as a kernel indexes it: from the end where an index is negative, and never beyond."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __getitem__(self, indices: Any) -> NDArray[Any]:
        places = []
        for index, length in zip(
            indices if isinstance(indices, tuple) else (indices,), self.array.shape, strict=True
        ):
            place = np.asarray(index)
            places.append(np.clip(np.where(place < 0, place + length, place), 0, length - 1))
        found: NDArray[Any] = self.array[tuple(places)]
        return found


def _draw(
    name: str, buffer: Buffer, tuned: Scored, sizes: Mapping[str, int], random: np.random.Generator
) -> NDArray[Any]:
    """An array in its type, or in float32 where that has 16 bits."""
    rows, keys = sizes["seqlen_q"], sizes["seqlen_k"]
    shape = tuple(
        least if names else rows + keys
        for least, names in zip(_needed(buffer, sizes), buffer.axes, strict=True)
    )
    named = {part for parts in tuned.named.values() for part in parts}
    if name in named and name in ("prefix", "lengths"):
        drawn: NDArray[Any] = random.integers(0 if name == "prefix" else keys // 2, keys + 1, shape)
        return drawn.astype(np.int32)
    if name in named and name == "tree":
        return random.integers(0, 2**63, shape) * 2 + 1
    if name in named and name == "slopes":
        heads = np.arange(1, shape[-1] + 1) / shape[-1]
        return np.broadcast_to(2.0 ** (-8.0 * heads), shape).astype(np.float32)
    if name in named and name == "bias":
        shape = (1, 1, *shape[2:])
    if buffer.dtype == "u8":
        return random.random(shape) < _SHOWN
    if buffer.dtype in ("f32", "f16", "bf16"):
        drawn = random.standard_normal(shape, np.float32)
        if buffer.dtype == "f32":
            return drawn
        # With few bits, so that it is the same in either type.
        return np.asarray(np.round(drawn * 16) / 16, np.float32)
    drawn = np.sort(random.integers(0, 16, shape), axis=-1)
    return drawn.astype(_BUFFER_DTYPES[buffer.dtype][0])
