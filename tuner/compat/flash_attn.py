"""flash-attn 2's functions by flashgen's kernels, as ``flashgen.compat.flash_attn``.

Signatures, defaults and return values are those of flash-attn 2.8. Beyond the original, arrays of CuPy, JAX
and numpy are taken, float32, and any head dim up to 256. Dropout and a left padding of caches are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..front.libraries import empty_like
from .caches import Cache
from .flash_calls import cached, dense, packed
from .flash_words import FlashWords, check_deterministic, check_dropout, shift_in_batch, shift_in_sequences

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes attention of q, k and v, each (batch, seqlen, heads, head_dim); heads of k and v may be fewer.

    The causal mask and windows are aligned to the last key: row i sees keys up to i + seqlen_k - seqlen_q.
    Returns o, or with ``return_attn_probs`` (o, log-sum-exp, an empty array), the log-sum-exp as (batch,
    heads, seqlen_q) with +inf for rows that see no key. With ``deterministic`` gradients have the same bits
    in every run.

    Raises ValueError for dropout, otherwise as `flashgen.attention` does.
    """
    check_dropout(dropout_p)
    check_deterministic(deterministic, q, k, v)
    words = FlashWords(softmax_scale, causal, window_size, softcap, alibi_slopes)
    made, keys = dense(q, k, v, words, return_attn_probs), int(k.shape[1])
    return _returned(made, q, words, keys, lambda slopes: shift_in_batch(slopes, q, int(q.shape[1]), keys))


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_func` of keys and values in one array, (batch, seqlen, 2, heads, head_dim)."""
    _check_parts("kv", kv, 2, 5)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *tail, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_func` of all three in one array, (batch, seqlen, 3, heads, head_dim)."""
    _check_parts("qkv", qkv, 3, 5)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *tail, return_attn_probs)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Computes attention of packed sequences, (total, heads, head_dim), each by itself.

    Sequence i has the rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1], int32 (batch + 1), and so its keys. With a
    ``block_table``, int32 (batch, most pages), k and v are pages, (pages, page_size, heads, head_dim).
    Returns o, or with ``return_attn_probs`` (o, log-sum-exp, an empty array), the log-sum-exp as (heads,
    total_q). The rest is as `flash_attn_func` has it.
    """
    check_dropout(dropout_p)
    check_deterministic(deterministic, q, k, v)
    words = FlashWords(softmax_scale, causal, window_size, softcap, alibi_slopes)
    made = packed(
        *(q, k, v, words, return_attn_probs),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_table=block_table,
    )
    return _returned(
        *(made, q, words, int(max_seqlen_k)),
        lambda slopes: shift_in_sequences(
            slopes, int(q.shape[0]), cu_seqlens_q, cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        ),
    )


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_varlen_func` of keys and values in one array, (total, 2, heads, head_dim)."""
    _check_parts("kv", kv, 2, 4)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *lengths, *tail, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_varlen_func` of all three in one array, (total, 3, heads, head_dim)."""
    _check_parts("qkv", qkv, 3, 4)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *lengths, *tail, return_attn_probs)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Computes attention of q, (batch, seqlen, heads, head_dim), beside a cache, to which k and v are written
    first.

    Caches are (batch, room, heads, head_dim), or with ``cache_batch_idx`` (slots, room, heads, head_dim), or
    with a ``block_table`` (pages, page_size, heads, head_dim), pages of any size. ``cache_seqlens``, an int
    or int32 (batch), counts the keys there were; k and v stand behind these in the caches afterwards. Returns
    o, or with ``return_softmax_lse`` (o, log-sum-exp).

    Raises ValueError for ``cache_leftpad``, and as `flashgen.attention_with_cache` does. How many blocks
    share a sequence's keys is the kernel's choice, whatever ``num_splits``.
    """
    words = FlashWords(softmax_scale, causal, window_size, softcap, alibi_slopes)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    made = cached(
        *(q, cache, words, return_softmax_lse),
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
    )
    if not return_softmax_lse:
        return made
    o, lse = made
    return o, words.lse_of_flash2(
        lse, cache.room, lambda slopes: shift_in_batch(slopes, q, int(q.shape[1]), cache.keys(k))
    )


def _returned(made: Any, q: Any, words: FlashWords, keys: int, shift: Callable[[Any], Any]) -> Any:
    """Returns o, or the three that flash-attn returns of o and the log-sum-exp."""
    if not isinstance(made, tuple):
        return made
    o, lse = made
    return o, words.lse_of_flash2(lse, keys, shift), empty_like(q)


def _check_parts(name: str, array: Any, parts: int, rank: int) -> None:
    shape = tuple(array.shape)
    if len(shape) != rank or shape[-3] != parts:
        leading = "batch, seqlen" if rank == 5 else "total"
        raise ValueError(f"{name} has the shape {shape}; it must be ({leading}, {parts}, heads, head_dim)")
