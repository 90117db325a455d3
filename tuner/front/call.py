"""`flashgen.attention`: attention by the best kernel known for a call, made when it is first asked for."""

from __future__ import annotations

import sys
from typing import Any

from ...templates.runtime.attention import _check_call
from ...templates.runtime.plans import _NOTHING_BESIDE
from ...templates.runtime.scored_kinds import _either
from ...templates.runtime.scored_values import TileLists
from .alike import made_again
from .asked import Formula
from .attend import Call, attend
from .bound import Bound, bound_of
from .fallback import by_torch, check_fallback
from .legal import check_kept, check_precision, check_scales, flag, numbers_of, scale_of
from .table import NotMade
from .whole_columns import WHOLE, filled_up, first_columns

_ON_CARDS = bound_of(None)
_PLAIN = _ON_CARDS.attending()


@made_again(_ON_CARDS)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    bias: Any = None,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    documents: Any = None,
    prefix: Any = None,
    chunk: int | None = None,
    lengths: Any = None,
    dilation: int | None = None,
    always: int | None = None,
    tree: Any = None,
    mask: Formula | None = None,
    score: Formula | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    scales: tuple[float, float, float] | None = None,
    precision: str = "auto",
    lists: TileLists | None = None,
    wait: bool = True,
    fallback: str | None = None,
    device: str | None = None,
    **buffers: Any,
) -> Any:
    """Computes softmax(scale * q k^T) v by the fastest kernel known for the card and for this very shape.

    q is (batch, heads, seqlen_q, head_dim), k is (batch, kv_heads, seqlen_k, head_dim) and v (batch,
    kv_heads, seqlen_k, head_dim_v), of head dims up to 256, where kv_heads divides heads; the result is
    (batch, heads, seqlen_q, head_dim_v). With layout="bshd", heads and seqlen are swapped in all of them.
    They are torch, CuPy, JAX or numpy arrays, or others on a card; float32, float16, bfloat16, or
    float8_e4m3fn with ``scales``. Torch tensors have gradients, those that masks and scores read, too.

    The kernel is the one tuned for this call, or else what should be fastest of all known kernels and of
    untuned ones, by the cost model and what is known of its errors. The first call of its kind builds it and
    proves it on a small case, in seconds, which is said on stderr; the binary is kept for all processes.

    causal: row i sees keys 0 .. i + seqlen_k - seqlen_q.
    window: (left, right), so many keys before and behind a row's place, inclusive; -1 or None: all.
    softcap: scores s become softcap * tanh(s / softcap).
    sinks, alibi_slopes: float32 (heads), of slopes also (batch, heads).
    bias, attn_mask: added to scores, or a boolean mask; broadcast to (batch, heads, seqlen_q, seqlen_k).
    documents: sorted ids of the keys, (batch, seqlen_k); rows see keys of their own document.
    prefix, lengths: int32 (batch): first keys that all rows see whatever the causal mask says; keys of each.
    chunk, dilation, always, tree, lists: as modules that `flashgen emit` writes take them.
    mask, score: functions as FlexAttention takes them, ``mask(b, h, q, k)`` and ``score(score, b, h, q, k)``,
        or their text, which reads ``buffers`` by name.
    scale: None for 1 / sqrt(head_dim).
    return_lse: also return the natural log-sum-exp, float32 (batch, heads, seqlen_q).
    out, stream: where the result goes, and on which stream; None: a new array, the one in use.
    scales: of float8_e4m3fn, what q, k and v are multiplied by to be what was meant.
    precision: "eight" lets their weights be of eight bits as well, within 9e-2, which is faster.
    wait: False lets a call run on a kernel that is ready, if there is one, while a better one is built.
    fallback: "torch" has PyTorch compute what no kernel serves, and says so once; None refuses it.
    device: "sim:a100" runs numpy arrays and torch's of the host on that card, emulated.

    Raises TypeError and ValueError that name the argument, what it is and what is served; RuntimeError where
    no compiler is found, nothing that is built is right, or the card fails.
    """
    torch = sys.modules.get("torch")
    if isinstance(scale, bool) or not isinstance(scale, float | int | None):  # may be an array of one number
        scale = scale_of(scale)
    causal = causal if type(causal) is bool else flag("causal", causal)
    return_lse = return_lse if type(return_lse) is bool else flag("return_lse", return_lse)
    wait = wait if type(wait) is bool else flag("wait", wait)
    check_kept(lists)
    check_scales(q, scales)
    check_precision(precision, scales)
    named: dict[str, Any] = {}
    for name, value in (
        ("window", window),
        ("softcap", softcap),
        ("sinks", sinks),
        ("bias", _either(bias, attn_mask)),
        ("alibi_slopes", alibi_slopes),
        ("documents", documents),
        ("prefix", prefix),
        ("chunk", chunk),
        ("lengths", lengths),
        ("dilation", dilation),
        ("always", always),
        ("tree", tree),
    ):
        if value is not None:
            named[name] = value
    if named or buffers:
        named, buffers = numbers_of(named, buffers)
    settings = (causal, scale, layout, return_lse, out, stream, scales, precision, lists)
    bias_name = "bias" if attn_mask is None else "attn_mask"
    call = Call(q, k, v, named, mask, score, buffers, *settings, bias_name)
    return _found_out(torch, call, device, wait, fallback)


def _found_out(torch: Any, call: Call, device: str | None, wait: bool, fallback: str | None) -> Any:
    """Computes a call of which nothing is known."""
    of_tensors = torch is not None and isinstance(call.q, torch.Tensor)
    if of_tensors and device is None and wait and fallback is None and _is_plain(call):
        # Which torch.compile may trace before there was one.
        _check_call(call.layout, call.scale)
        return _PLAIN._attend_tensors(
            *(torch, call.q, call.k, call.v, call.causal, call.scale, call.out, call.stream),
            *(call.return_lse, call.layout, False, _NOTHING_BESIDE),
        )
    bound = bound_of(device, wait=wait)
    if fallback is None:
        return _attend(bound, call)
    check_fallback(fallback)
    try:
        return _attend(bound, call)
    except (TypeError, ValueError, NotMade) as error:
        return by_torch(call, error)


def _is_plain(call: Call) -> bool:
    """Tells whether a call asks for no more than a causal mask, of head dims that are whole."""
    whole = call.q.shape[-1] % WHOLE == 0 == call.v.shape[-1] % WHOLE
    return whole and call.scales is None and not call.asks_more


def _attend(bound: Bound, call: Call) -> Any:
    """Computes what a call asks, of tensors that are filled up where that pays."""
    torch = sys.modules.get("torch")
    if bound.card is None and torch is not None and isinstance(call.q, torch.Tensor):
        wide = filled_up(torch, call)
        if wide is not None:
            return first_columns(attend(bound, wide), call.v.shape[-1], call.return_lse)
    return attend(bound, call)
