"""`flashgen.attention_varlen`: attention of packed sequences by the best kernel known for a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...templates.runtime.arrays import _torch_of
from ...templates.runtime.packed_values import SequencePlan
from ...templates.runtime.scored_values import TileLists
from .asked import Asked, Formula, named_apart
from .attend import check_underived, serving
from .bound import Bound, bound_of
from .card import check_card
from .host_gradients import attend_differentiably, derived_of
from .host_tensors import as_arrays, as_tensor
from .legal import check_kept, check_scales, check_told, flag, own_integer, scale_of


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    mask: Formula | None = None,
    score: Formula | None = None,
    scale: float | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    plan: SequencePlan | None = None,
    lists: TileLists | None = None,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    scales: tuple[float, float, float] | None = None,
    wait: bool = True,
    device: str | None = None,
    **values: Any,
) -> Any:
    """Computes attention of packed sequences, each by itself, by the fastest kernel known for the card.

    q is (total_q, heads, head_dim), k (total_k, kv_heads, head_dim) and v (total_k, kv_heads, head_dim_v);
    sequence i has the rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] and the keys cu_seqlens_k[i] ..
    cu_seqlens_k[i + 1], int32 arrays of batch + 1 entries on the arrays' card, and at most ``max_seqlen_q``
    rows and ``max_seqlen_k`` keys. seqused_q and seqused_k, int32 (batch), say how many of them count. The
    result is (total_q, heads, head_dim_v), the log-sum-exp (heads, total_q). ``plan`` is a `SequencePlan` of
    the runtime, for calls that share lengths. All else is as `flashgen.attention` has it: torch tensors have
    gradients, those that masks and scores read, too, but there is no ``fallback``.

    Raises TypeError, ValueError and RuntimeError as `flashgen.attention` does.
    """
    told = {"window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
    causal, return_lse, scale = flag("causal", causal), flag("return_lse", return_lse), scale_of(scale)
    max_seqlen_q, max_seqlen_k = own_integer(max_seqlen_q), own_integer(max_seqlen_k)
    check_kept(lists, plan)
    check_scales(q, scales)
    named, read, bias_name = named_apart(told, values)
    bound = bound_of(device, wait=flag("wait", wait))
    check_card(bound.card, q)
    scaled = scales is not None
    attention, asked = serving(
        *(bound, ("packed", scaled), lambda scoring: bound.packed(scoring, scaled=scaled)),
        *(named, mask, score, read, bias_name),
    )
    torch = _torch_of(q)
    if torch is not None and attention._group._tensors.gradients is None:
        check_underived(torch, (q, k, v))
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    settings = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "causal": causal, "scale": scale}
    if device is not None and torch is not None:
        call = _HostCall((q, k, v), lengths, settings, asked, out, return_lse, scales)
        return _on_host(torch, bound, call)
    check_told({"q": q, "k": k, "v": v, **lengths, **asked.told}, out)
    return attention.attention_varlen(
        *(q, k, v),
        **lengths,
        **settings,
        plan=plan,
        out=out,
        return_lse=return_lse,
        stream=stream,
        scales=scales,
        lists=lists,
        **asked.told,
    )


class _HostCall(NamedTuple):
    """A call of tensors on the host: ``lengths`` say where sequences are, ``settings`` are all else that
    gradients are told, too."""

    tensors: tuple[Any, Any, Any]
    lengths: Mapping[str, Any]
    settings: Mapping[str, Any]
    asked: Asked
    out: Any
    return_lse: bool
    scales: tuple[float, float, float] | None


def _on_host(torch: Any, bound: Bound, call: _HostCall) -> Any:
    """Computes a call on an emulated card."""
    scoring, told = call.asked
    arrays = {name: as_arrays(torch, x) for name, x in {**call.lengths, **told, **call.settings}.items()}

    def attended(*tensors: Any, out: Any = None) -> tuple[Any, Any]:
        attention = bound.packed(scoring, scaled=call.scales is not None)
        check_told({}, as_arrays(torch, out))
        o, lse = attention.attention_varlen(
            *(as_arrays(torch, x) for x in tensors),
            **arrays,
            out=as_arrays(torch, out),
            return_lse=True,
            scales=call.scales,
        )
        return as_tensor(torch, o) if out is None else out, as_tensor(torch, lse)

    more = derived_of(torch, call.tensors, told)
    if more is None:
        o, lse = attended(*call.tensors, out=call.out)
        return (o, lse) if call.return_lse else o
    if call.out is not None:
        raise RuntimeError("no gradient is taken through out: leave it out, or call under torch.no_grad()")

    def differentiated(*given: Any) -> tuple[Any, ...]:
        names = ("q", "k", "v", "o", "lse", "dout", "dlse")
        found = bound.packed_gradients(scoring).gradients_varlen(
            **{name: as_arrays(torch, x) for name, x in zip(names, given, strict=True)},
            **arrays,
            deterministic=bool(torch.are_deterministic_algorithms_enabled()),
            wanted=tuple(more),
        )
        return tuple(as_tensor(torch, x) for x in found)

    o, lse = attend_differentiably(torch, call.tensors, tuple(more.values()), attended, differentiated)
    return (o, lse) if call.return_lse else o
