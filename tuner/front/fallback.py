"""Calls that no kernel serves, by PyTorch, where the caller asked for that."""

from __future__ import annotations

import math
from typing import Any

from ...templates.runtime.arrays import _torch_of
from .attend import Call
from .libraries import pytorchs_attention
from .notice import say_once

#: What PyTorch's attention knows of masks and changes of scores; what it does not is computed by its tensors.
_SERVED = ("window", "softcap", "sinks", "bias", "alibi_slopes", "chunk", "dilation", "lengths", "prefix")


def check_fallback(fallback: str) -> None:
    """Raises ValueError for what is no fallback."""
    if fallback != "torch":
        raise ValueError(f"fallback is {fallback!r}; choose 'torch', or None to have it refused")


def by_torch(call: Call, error: Exception) -> Any:
    """Computes a call by PyTorch, and says so once; raises the error where that cannot be."""
    torch = _torch_of(call.q)
    unserved = [name for name in call.named if name not in _SERVED]
    if torch is None or unserved or call.mask is not None or call.score is not None or call.scales:
        raise error
    say_once(f"PyTorch computes what no kernel serves: {error}")
    q, k, v = (x.transpose(1, 2) if call.layout == "bshd" else x for x in (call.q, call.k, call.v))
    plain = not call.named and not call.return_lse and (not call.causal or q.shape[2] == k.shape[2])
    if plain:
        gqa = q.shape[1] != k.shape[1]
        attention = pytorchs_attention(torch.nn.functional)
        o = attention(q, k, v, is_causal=call.causal, scale=call.scale, enable_gqa=gqa)
        lse = None
    else:
        o, lse = _by_tensors(torch, q, k, v, call)
    o = o.transpose(1, 2) if call.layout == "bshd" else o
    if call.out is not None:
        o = call.out.copy_(o)
    return (o, lse) if call.return_lse else o


def _by_tensors(torch: Any, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """o and the log-sum-exp, in float32."""
    rows, keys = q.shape[2], k.shape[2]
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).float() for x in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if call.scale is None else call.scale
    scores = scale * (q.float() @ k.transpose(2, 3))
    place = torch.arange(rows, device=q.device)[:, None] + keys - rows
    key = torch.arange(keys, device=q.device)[None]
    asked = call.named
    if "softcap" in asked:
        scores = asked["softcap"] * torch.tanh(scores / asked["softcap"])
    if "alibi_slopes" in asked:
        slopes = asked["alibi_slopes"]
        scores = scores - slopes.reshape(-1, slopes.shape[-1], 1, 1) * (place - key).abs()
    seen = _seen(torch, place, key, call)
    bias = asked.get("bias")
    if bias is not None and bias.dtype is torch.bool:
        seen = seen & bias
    elif bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -math.inf)
    if "sinks" in asked:
        sinks = asked["sinks"].float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        lse = torch.cat([scores, sinks], 3).logsumexp(3)
    else:
        lse = scores.logsumexp(3)
    weights = torch.exp(scores - lse[..., None]).masked_fill(~seen, 0.0)
    return (weights @ v).to(q.dtype), lse


def _seen(torch: Any, place: Any, key: Any, call: Call) -> Any:
    """Which keys rows see, of four axes."""
    asked = call.named
    seen = torch.ones_like(place >= key)[None, None]
    if call.causal:
        below = (key <= place)[None, None]
        prefix = asked.get("prefix")
        seen = seen & (below if prefix is None else below | (key < prefix.reshape(-1, 1, 1, 1)))
    left, right = asked.get("window", (-1, -1))
    if left is not None and left >= 0:
        seen = seen & (key >= place - left)
    if right is not None and right >= 0:
        seen = seen & (key <= place + right)
    if "chunk" in asked:
        size = asked["chunk"]
        floor = torch.div(place, size, rounding_mode="floor")
        seen = seen & (torch.div(key, size, rounding_mode="floor") == floor)
    if "dilation" in asked:
        seen = seen & ((place - key) % asked["dilation"] == 0)
    if "lengths" in asked:
        seen = seen & (key < asked["lengths"].reshape(-1, 1, 1, 1))
    return seen
