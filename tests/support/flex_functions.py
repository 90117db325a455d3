"""Well-known masks and changes of scores as users write them for FlexAttention, on numpy's arrays.

Each is a function of indices that computes on arrays of them as well: what is traced can be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

BATCH, HEADS, LENGTH = 2, 4, 48
_RNG = np.random.default_rng(17)
_DOCUMENTS = np.sort(_RNG.integers(0, 5, (BATCH, LENGTH))).astype(np.int32)
_STARTS = np.array([[np.argmax(row == each) for each in range(5)] for row in _DOCUMENTS], np.int64)
_GLOBALS = _RNG.random(LENGTH) < 0.2
_BIAS = _RNG.normal(size=(HEADS, 2 * LENGTH)).astype(np.float32)
_FULL_BIAS = _RNG.normal(size=(BATCH, HEADS, LENGTH, LENGTH)).astype(np.float16)
_PREFIX = np.array([5, 20], np.int32)
_TREE = np.tril(_RNG.random((16, 16)) < 0.4) | np.eye(16, dtype=bool)
_INTERVALS = np.sort(_RNG.integers(0, LENGTH, (LENGTH, 2))).astype(np.int32)
_DISTANCES = _RNG.integers(0, 6, (BATCH, LENGTH, LENGTH)).astype(np.uint8)
_TABLE = _RNG.normal(size=(HEADS, 6)).astype(np.float32)
_CAP = np.array(20.0, np.float32)

Function = Callable[..., Any]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def sliding_window(width: int) -> Function:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return causal(b, h, q_idx, kv_idx) & (q_idx - kv_idx <= width)

    return mask


def dilated_window(width: int, dilation: int) -> Function:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = np.abs(q_idx - kv_idx)
        return (distance <= width) & (distance % dilation == 0)

    return mask


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return _DOCUMENTS[b, q_idx] == _DOCUMENTS[b, kv_idx]


def within_documents(inner: Function) -> Function:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        logical_q = q_idx - _STARTS[b, _DOCUMENTS[b, q_idx]]
        logical_kv = kv_idx - _STARTS[b, _DOCUMENTS[b, kv_idx]]
        return document(b, h, q_idx, kv_idx) & inner(b, h, logical_q, logical_kv)

    return mask


def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < _PREFIX[b]) | (kv_idx <= q_idx)


def global_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (np.abs(q_idx - kv_idx) <= 4) | _GLOBALS[q_idx] | _GLOBALS[kv_idx]


def neighbourhood(width: int, kernel: int) -> Function:
    height = LENGTH // width

    def place(index: Any) -> tuple[Any, Any]:
        return index // width, index % width

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_row, q_column = place(q_idx)
        kv_row, kv_column = place(kv_idx)
        centre_row = np.clip(q_row, kernel // 2, height - 1 - kernel // 2)
        centre_column = np.clip(q_column, kernel // 2, width - 1 - kernel // 2)
        near_row = np.abs(centre_row - kv_row) <= kernel // 2
        return near_row & (np.abs(centre_column - kv_column) <= kernel // 2)

    return mask


def images_beside_text(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    same_image = (q_idx // 12 == kv_idx // 12) & (q_idx // 12 % 2 == 1)
    return np.logical_or(causal(b, h, q_idx, kv_idx), same_image)


def tree(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    committed = LENGTH - len(_TREE)
    drafted = _TREE[np.maximum(q_idx - committed, 0), np.maximum(kv_idx - committed, 0)]
    return (kv_idx < committed) & (kv_idx <= q_idx) | (kv_idx >= committed) & (q_idx >= committed) & drafted


def flamingo(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    image = kv_idx // 2
    return (_INTERVALS[image, 0] <= q_idx) & (q_idx < _INTERVALS[image, 1])


def block_diffusion(block: int) -> Function:
    half = LENGTH // 2

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        noisy_q, noisy_kv = q_idx < half, kv_idx < half
        block_q = np.where(noisy_q, q_idx, q_idx - half) // block
        block_kv = np.where(noisy_kv, kv_idx, kv_idx - half) // block
        itself = (block_q == block_kv) & (noisy_q == noisy_kv)
        before = noisy_q & ~noisy_kv & (block_q > block_kv)
        return itself | before | (~noisy_q & ~noisy_kv & (block_q >= block_kv))

    return mask


def tiles(tile: int, reach: int) -> Function:
    left, last = reach // 2, LENGTH // tile - 1

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        centre = np.clip(q_idx // tile, left, last - (left - 1 + reach % 2))
        return (centre - left <= kv_idx // tile) & (kv_idx // tile <= centre + left - 1 + reach % 2)

    return mask


MASKS: dict[str, Function] = {
    "causal": causal,
    "sliding window": sliding_window(7),
    "dilated window": dilated_window(12, 3),
    "documents": document,
    "causal in documents": within_documents(causal),
    "window in documents": within_documents(sliding_window(3)),
    "prefix": prefix_lm,
    "window and global tokens": global_window,
    "neighbourhood": neighbourhood(8, 3),
    "images beside text": images_beside_text,
    "tree": tree,
    "flamingo": flamingo,
    "block diffusion": block_diffusion(6),
    "sliding tiles": tiles(6, 3),
}


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (kv_idx - q_idx) * np.exp2(-((h + 1) * 8.0 / HEADS))


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return _CAP * np.tanh(score / _CAP)


def relative_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + _BIAS[h, kv_idx - q_idx + LENGTH]


def full_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + _FULL_BIAS[b, h, q_idx, kv_idx]


def sandwich(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    distance = np.abs(q_idx - kv_idx)
    waves = sum(np.cos(distance * 10000 ** (-2.0 * each / 16)) for each in range(8))
    return score + HEADS / (8 * (h + 1)) * waves


def graphormer(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + _TABLE[h, _DISTANCES[b, q_idx, kv_idx]]


def activation(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.log(np.maximum(score, 0) + LENGTH)


def hidden(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.where(causal(b, h, q_idx, kv_idx), score, -float("inf"))


SCORES: dict[str, Function] = {
    "alibi": alibi,
    "soft cap": soft_cap,
    "relative bias": relative_bias,
    "full bias": full_bias,
    "sandwich": sandwich,
    "graphormer": graphormer,
    "activation": activation,
    "hidden": hidden,
}


def places() -> SimpleNamespace:
    """All indices, as axes of one array, and scores."""
    sizes = (BATCH, HEADS, LENGTH, LENGTH)
    b, h, q, k = np.meshgrid(*map(np.arange, sizes), indexing="ij", sparse=True)
    return SimpleNamespace(b=b, h=h, q=q, k=k, score=np.random.default_rng(0).normal(size=sizes) * 8)
