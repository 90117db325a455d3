"""`flashgen.attention` and its companions in numpy, as docs say they are: what others' names end in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flashgen.tuner.compat import calls
from flashgen.tuner.compat.block_mask import evaluated_mask
from numpy.typing import NDArray
from pytest import MonkeyPatch

Array = NDArray[Any]


@dataclass
class StandIn:
    """Computes what is asked, and remembers what that was."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    def put_in(self, monkeypatch: MonkeyPatch) -> StandIn:
        monkeypatch.setattr(calls, "_front", lambda name: getattr(self, name))
        return self

    @property
    def last(self) -> dict[str, Any]:
        return self.asked[-1]

    def attention(self, q: Any, k: Any, v: Any, **asked: Any) -> Any:
        self.asked.append(dict(asked))
        back = _giving_back(q)
        q, k, v = map(_as_kernels_take_it, (q, k, v))
        layout, with_lse = asked.pop("layout", "bhsd"), asked.pop("return_lse", False)
        if layout == "bshd":
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        assert q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3], "as kernels take them"
        o, lse = attended(q, k, v, **asked)
        o = back(o.swapaxes(1, 2) if layout == "bshd" else o)
        return (o, back(lse, np.float32)) if with_lse else o

    def attention_varlen(
        self, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **asked: Any
    ) -> Any:
        self.asked.append(dict(asked))
        back = _giving_back(q)
        q, k, v = map(_as_kernels_take_it, (q, k, v))
        starts_q, starts_k = map(_host, (cu_seqlens_q, cu_seqlens_k))
        slopes = asked.pop("alibi_slopes", None)
        used_q = _host(asked.pop("seqused_q", np.diff(starts_q)))
        used_k = _host(asked.pop("seqused_k", np.diff(starts_k)))
        assert asked.pop("max_seqlen_q") >= used_q.max() and asked.pop("max_seqlen_k") >= used_k.max()
        with_lse = asked.pop("return_lse", False)
        o = np.zeros((*q.shape[:2], v.shape[2]))
        lse = np.full(q.shape[1::-1], -np.inf)
        for i, (at_q, at_k, rows, keys) in enumerate(zip(starts_q, starts_k, used_q, used_k, strict=False)):
            if slopes is not None:
                asked["alibi_slopes"] = slopes if len(slopes.shape) == 1 else slopes[i]
            rows, keys = slice(at_q, at_q + rows), slice(at_k, at_k + keys)
            one = (x[part].swapaxes(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys)))
            made, of_rows = attended(*one, **asked)
            o[rows], lse[:, rows] = made[0].swapaxes(0, 1), of_rows[0]
        return (back(o), back(lse, np.float32)) if with_lse else back(o)

    def attention_with_cache(self, q: Any, k_cache: Any, v_cache: Any, **asked: Any) -> Any:
        self.asked.append(dict(asked))
        raise NotImplementedError("tests look at what is asked")


def attended(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    chunk: int | None = None,
    attn_mask: Any = None,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    fallback: Any = None,
) -> tuple[Array, Array]:
    """o and the log-sum-exp of (batch, heads, seqlen, head_dim), masks aligned to the last key."""
    (batch, heads, rows, head_dim), keys = q.shape, k.shape[2]
    k, v = (np.repeat(x, heads // x.shape[1], axis=1).astype(np.float64) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) * (head_dim**-0.5 if scale is None else scale)
    place, key = (np.arange(rows) + keys - rows)[:, None], np.arange(keys)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - _host(alibi_slopes)[..., None, None] * np.abs(place - key)
    if score is not None:
        b, h, i, j = np.ogrid[:batch, :heads, :rows, :keys]
        scores = np.broadcast_to(score(scores, b, h, i, j), scores.shape)
    seen = np.ones(scores.shape, bool)
    if causal:
        seen &= key <= place
    left, right = (-1, -1) if window is None else window
    seen &= (key >= place - left) if left >= 0 else True
    seen &= (key <= place + right) if right >= 0 else True
    if chunk is not None:
        seen &= key // chunk == place // chunk
    if mask is not None:
        seen &= evaluated_mask(mask, scores.shape)
    if attn_mask is not None and _host(attn_mask).dtype == bool:
        seen &= _host(attn_mask)
    elif attn_mask is not None:
        scores = scores + _host(attn_mask).astype(np.float64)
    scores = np.where(seen, scores, -np.inf)
    logits = np.full((batch, heads, rows, 1), -np.inf)
    if sinks is not None:
        logits = np.broadcast_to(_host(sinks)[None, :, None, None], logits.shape)
    highest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), logits)
    base = np.where(np.isinf(highest), 0.0, highest)
    weights = np.exp(scores - base)
    total = weights.sum(-1, keepdims=True) + np.exp(logits - base)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + base, -np.inf)[..., 0]
    return weights @ v / np.where(total > 0, total, 1.0), lse


def _as_kernels_take_it(array: Any) -> Array:
    array = _host(array)
    assert array.size == 0 or array.shape[-1] == 1 or array.strides[-1] == array.itemsize, "as kernels read"
    return array


def _host(array: Any) -> Array:
    if not hasattr(array, "detach"):
        return np.asarray(array)
    array = array.detach()
    return (array.float() if array.is_floating_point() else array).numpy()


def _giving_back(q: Any) -> Any:
    """What makes arrays of q's library and type."""
    if not hasattr(q, "detach"):
        return lambda made, dtype=None: made.astype(dtype or q.dtype)
    torch = __import__("torch")
    return lambda made, dtype=None: torch.from_numpy(np.ascontiguousarray(made)).to(
        torch.float32 if dtype else q.dtype
    )
