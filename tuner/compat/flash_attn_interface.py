"""FlashAttention-3's functions by flashgen's kernels, as ``flashgen.compat.flash_attn_interface``.

Signatures, defaults and return values are those of hopper/flash_attn_interface.py, on every card that
flashgen has kernels for. Left out are qv, scales of eight bits and new rows of packed queries, all refused.
"""

from __future__ import annotations

from typing import Any

from .caches import Cache
from .flash_calls import cached, dense, packed, packed_beside_cache
from .flash_words import FlashWords, check_deterministic

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Computes attention of q, k and v, each (batch, seqlen, heads, head_dim); heads of k and v may be fewer.

    Masks are aligned to the last key: row i sees keys up to i + seqlen_k - seqlen_q, and with
    ``attention_chunk`` those of its own chunk alone. Returns o, or with ``return_attn_probs`` (o,
    log-sum-exp), the log-sum-exp as (batch, heads, seqlen_q) with -inf for rows that see no key.
    ``num_splits``, ``pack_gqa`` and ``sm_margin`` are the kernel's own choice. Raises ValueError for qv and
    descales, otherwise as `flashgen.attention` does.
    """
    _check_unserved(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_deterministic(deterministic, q, k, v)
    words = FlashWords(
        softmax_scale, causal, window_size, softcap, attention_chunk=attention_chunk, version=3
    )
    return dense(q, k, v, words, return_attn_probs)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Computes attention of packed sequences, (total, heads, head_dim), each by itself.

    Sequence i has the rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1], int32 (batch + 1), of which the first
    seqused_q[i] count, and so its keys. Returns o, or with ``return_attn_probs`` (o, log-sum-exp), the
    log-sum-exp as (heads, total_q). The rest is as `flash_attn_func` has it.
    """
    _check_unserved(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_deterministic(deterministic, q, k, v)
    words = FlashWords(
        softmax_scale, causal, window_size, softcap, attention_chunk=attention_chunk, version=3
    )
    return packed(
        *(q, k, v, words, return_attn_probs),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Computes attention of q, (batch, seqlen, heads, head_dim), beside a cache, to which k and v are written
    first.

    Caches are (batch, room, heads, head_dim), or with ``cache_batch_idx`` (slots, room, heads, head_dim), or
    with a ``page_table`` (pages, page_size, heads, head_dim). ``cache_seqlens``, an int or int32 (batch),
    counts the keys there were. With ``cu_seqlens_q`` and ``max_seqlen_q`` q is packed, (total, heads,
    head_dim), and nothing new is written. Returns o, or with ``return_softmax_lse`` (o, log-sum-exp, None,
    None): what blocks leave each other is no result here.

    ``scheduler_metadata``, ``num_splits``, ``pack_gqa`` and ``sm_margin`` are the kernel's own choice. Raises
    ValueError for qv, descales, ``cache_leftpad`` and ``rotary_seqlens``, otherwise as
    `flashgen.attention_with_cache` does.
    """
    _check_unserved(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, rotary_seqlens=rotary_seqlens
    )
    words = FlashWords(
        softmax_scale, causal, window_size, softcap, attention_chunk=attention_chunk, version=3
    )
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    if cu_seqlens_q is not None:
        _check_unserved(**{"k beside cu_seqlens_q": k})
        made = packed_beside_cache(
            q, cache, words, return_softmax_lse, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q
        )
    else:
        made = cached(
            *(q, cache, words, return_softmax_lse),
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
        )
    return (*made, None, None) if return_softmax_lse else made


def _check_unserved(**given: Any) -> None:
    """Raises ValueError for the first that is given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is given, and no kernel of flashgen.attention reads it: leave it out")
