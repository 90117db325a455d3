"""`flashgen.attention_with_cache`: attention beside a cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...templates.runtime.arrays import _torch_of
from ...templates.runtime.attention import _check_call
from ...templates.runtime.packed_values import SequencePlan, _shape
from ...templates.runtime.slots import _slots_as_pages
from .asked import Formula, named_apart
from .attend import serving
from .bound import bound_of
from .card import check_card
from .host_tensors import as_arrays, as_tensor
from .legal import check_kept, check_scales, check_told, flag, own_integer, scale_of
from .libraries import shape_of
from .new_rows import Cache, NewRows

#: The sizes of pages that caches of slots are taken as, where room is for whole ones.
_SLOT_PAGES = (128, 64, 32, 16)


def attention_with_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    seqused_k: Any = None,
    max_seqlen_k: int | None = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    seqused_q: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    mask: Formula | None = None,
    score: Formula | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    kv_layout: str = "NHD",
    k: Any = None,
    v: Any = None,
    cache_seqlens: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = True,
    rotary_by_place: bool | None = None,
    plan: SequencePlan | None = None,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    scales: tuple[float, float, float] | None = None,
    wait: bool = True,
    device: str | None = None,
    **values: Any,
) -> Any:
    """Computes attention of sequences whose keys and values lie in a cache, by the fastest kernel known.

    Caches are (pages, page_size, kv_heads, head_dim), with kv_layout="HND" (pages, kv_heads, page_size,
    head_dim), and page_table, int32 (batch, max_pages), lists the pages of each sequence. Without it they are
    (slots, room, kv_heads, head_dim), a slot for each sequence, or that which cache_batch_idx, integers
    (batch), names. seqused_k, an int or int32 (batch), counts the keys of each sequence, of which there are
    max_seqlen_k at most; without either all that there is room for. Masks are aligned to a sequence's last
    key.

    q is (batch, heads, seqlen_q, head_dim), with layout="bshd" (batch, seqlen_q, heads, head_dim), or with
    cu_seqlens_q, int32 (batch + 1), and max_seqlen_q packed, (total_q, heads, head_dim), and the result is
    alike. All else is as `flashgen.attention` has it, gradients apart: there are none.

    k and v, laid out as q is, (batch, kv_heads, rows, head_dim), are new keys and values: before it attends
    the call writes them into the caches, in place, behind the ``cache_seqlens`` keys, an int or int32
    (batch), that each sequence has there; they are seen then, and there must be room. Packed queries come
    without. rotary_cos and rotary_sin, (positions, columns / 2), rotate the first columns of k, by the place
    of each, and of q: pairs of neighbours, or with rotary_interleaved=False of columns half of them apart.
    Queries are rotated by their own places under a causal mask or a window, else all by the first one's, or
    as ``rotary_by_place`` says. The arrays' library does this; JAX's arrays cannot be written to.

    Raises TypeError, ValueError and RuntimeError as `flashgen.attention` does.
    """
    torch = None if device is None else _torch_of(q)
    if torch is not None:
        arrays = {"page_table": page_table, "cache_batch_idx": cache_batch_idx, "seqused_k": seqused_k}
        arrays |= {"cu_seqlens_q": cu_seqlens_q, "seqused_q": seqused_q, "sinks": sinks, "out": out}
        arrays |= {"k": k, "v": v, "cache_seqlens": cache_seqlens, "alibi_slopes": alibi_slopes}
        arrays |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, **values}
        found = attention_with_cache(
            *(as_arrays(torch, x) for x in (q, k_cache, v_cache)),
            **{name: as_arrays(torch, x) for name, x in arrays.items()},
            max_seqlen_k=max_seqlen_k,
            max_seqlen_q=max_seqlen_q,
            causal=causal,
            window=window,
            softcap=softcap,
            mask=mask,
            score=score,
            scale=scale,
            layout=layout,
            kv_layout=kv_layout,
            rotary_interleaved=rotary_interleaved,
            rotary_by_place=rotary_by_place,
            return_lse=return_lse,
            scales=scales,
            wait=wait,
            device=device,
        )
        return tuple(as_tensor(torch, x) for x in found) if return_lse else as_tensor(torch, found)
    causal, return_lse, scale = flag("causal", causal), flag("return_lse", return_lse), scale_of(scale)
    max_seqlen_q, max_seqlen_k = own_integer(max_seqlen_q), own_integer(max_seqlen_k)
    check_kept(None, plan)
    check_scales(q, scales)
    named = {"window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
    named, read, bias_name = named_apart(named, values)
    packed, scaled = cu_seqlens_q is not None, scales is not None
    _check_packing({"max_seqlen_q": max_seqlen_q, "seqused_q": seqused_q, "plan": plan}, packed=packed)
    page_size = _page_size(k_cache, page_table, kv_layout)
    bound = bound_of(device, wait=flag("wait", wait))
    check_card(bound.card, q)
    attention, asked = serving(
        *(bound, ("paged", page_size, packed, scaled)),
        lambda scoring: bound.paged(scoring, page_size=page_size, packed=packed, scaled=scaled),
        *(named, mask, score, read, bias_name),
    )
    if page_table is not None and cache_batch_idx is not None:
        raise ValueError(
            "cache_batch_idx is given beside page_table, which says where keys are: leave it out"
        )
    new = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    _check_new(new, cache_seqlens, seqused_k, packed=packed)
    lengths = {"page_table": page_table, "cache_batch_idx": cache_batch_idx, "seqused_k": seqused_k}
    lengths |= {"cache_seqlens": cache_seqlens, "cu_seqlens_q": cu_seqlens_q, "seqused_q": seqused_q}
    caches = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    check_told({**caches, **new, **lengths, **asked.told}, out)
    if cache_seqlens is not None:
        seqused_k = cache_seqlens
    rows = cache = None
    if k is not None:
        _check_call(layout)
        of_keys, of_values = (_rows_first(name, x, layout) for name, x in (("k", k), ("v", v)))
        rows = NewRows(of_keys, of_values, rotary_cos, rotary_sin, rotary_interleaved, layout)
        kept = [x.swapaxes(1, 2) if kv_layout == "HND" else x for x in (k_cache, v_cache)]
        cache = Cache(kept[0], kept[1], cache_seqlens, page_table, cache_batch_idx)
        if not _is_traced(q):
            rows.check(cache, _shape(q)[0])
        by_place = causal or any(side not in (None, -1) for side in window or ())
        turned = rows.rotated_queries(
            _rows_first("q", q, layout),
            cache_seqlens,
            by_their_places=by_place if rotary_by_place is None else rotary_by_place,
        )
        q = _rows_first("q", turned, layout)
        seqused_k = cache.used + int(of_keys.shape[1])
    if page_table is None:
        batch = _shape(cu_seqlens_q)[0] - 1 if packed else _shape(q)[0]
        (k_cache, v_cache), page_table = _slots_as_pages(
            attention.tuned, (k_cache, v_cache), cache_batch_idx, batch
        )
    if isinstance(seqused_k, int | np.integer):
        max_seqlen_k, seqused_k = int(seqused_k), None
    arrays = (q, k_cache, v_cache, page_table, seqused_k)
    told = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "seqused_q": seqused_q}
    told |= {"max_seqlen_k": max_seqlen_k, "causal": causal, "scale": scale, "layout": layout}
    told |= {"kv_layout": kv_layout, "plan": plan, "out": out, "return_lse": return_lse, "stream": stream}
    told |= {"scales": scales, **asked.told}
    if rows is not None and cache is not None:
        if not _is_traced(q):
            attention.check(*arrays, **told)  # nothing is written where the rest is refused
        rows.write(cache)
    return attention.attention_paged(*arrays, **told)


def _is_traced(q: Any) -> bool:
    """Whether torch.compile reads the call, which makes none of it yet."""
    torch = _torch_of(q)
    return torch is not None and torch.compiler.is_compiling()


def _check_packing(told: Mapping[str, Any], *, packed: bool) -> None:
    """Raises TypeError for what is told of packed queries where there are none, and of these without their
    longest."""
    if packed and told["max_seqlen_q"] is None:
        raise TypeError(
            "max_seqlen_q= is missing: cu_seqlens_q is given, and says nothing of the longest on the host"
        )
    given = next((name for name, value in told.items() if value is not None), None)
    if given is not None and not packed:
        raise TypeError(f"{given}= tells of packed queries: pass cu_seqlens_q as well, or leave it out")


def _check_new(new: Mapping[str, Any], cache_seqlens: Any, seqused_k: Any, *, packed: bool) -> None:
    """Raises ValueError for what does not go together of what is ``new``, which may be None."""
    has = {name: array is not None for name, array in new.items()}
    if has["k"] != has["v"]:
        given, missing = ("k", "v") if has["k"] else ("v", "k")
        raise ValueError(f"{given} is given without {missing}: both are written to the cache, or neither")
    if has["rotary_cos"] != has["rotary_sin"]:
        raise ValueError("rotary_cos and rotary_sin go together: pass both, or neither")
    if has["rotary_cos"] and not has["k"]:
        raise ValueError("rotary_cos is given without k: it is new keys that are rotated")
    if cache_seqlens is not None and seqused_k is not None:
        raise ValueError("cache_seqlens and seqused_k both count the keys of the cache: pass one of them")
    if has["k"] and cache_seqlens is None:
        raise ValueError("k is given without cache_seqlens, which says behind how many keys it is written")
    if has["k"] and packed:
        raise ValueError(
            "k is given beside cu_seqlens_q, and new rows are written for a batch alone: write them into the "
            "cache before the call"
        )


def _rows_first(name: str, x: Any, layout: str) -> Any:
    """New rows or queries with rows before heads, or such ones as the layout has them. Raises TypeError and
    ValueError for what is neither."""
    shape_of(name, x, "batch, heads, rows, head_dim" if layout == "bhsd" else "batch, rows, heads, head_dim")
    return x.swapaxes(1, 2) if layout == "bhsd" else x


def _page_size(k_cache: Any, page_table: Any, kv_layout: str) -> int:
    """The keys of a page; of caches of slots, of which each is some pages. Raises ValueError."""
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout is {kv_layout!r}; choose 'NHD' or 'HND'")
    shape = _shape(k_cache)
    if len(shape) != 4:
        raise ValueError(
            f"k_cache has {len(shape)} dimensions, {shape}; 4 are needed, (pages or slots, room, kv_heads, "
            "head_dim)"
        )
    if page_table is None and kv_layout != "NHD":
        raise ValueError("kv_layout is 'HND', and caches of slots have rows first: pass a page_table")
    room = int(shape[1 if kv_layout == "NHD" else 2])
    if page_table is not None:
        return max(1, room)
    return next((size for size in _SLOT_PAGES if room % size == 0), max(1, room))
