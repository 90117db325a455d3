"""Dense, packed and cached attention as every version of flash-attn lays its arrays out."""

from __future__ import annotations

from typing import Any

from ..front.libraries import shape_of
from . import calls
from .caches import Cache
from .flash_words import FlashWords

DENSE, PACKED = "batch, seqlen, heads, head_dim", "total, heads, head_dim"


def dense(q: Any, k: Any, v: Any, words: FlashWords, return_lse: bool) -> Any:
    """Computes attention of (batch, seqlen, heads, head_dim); the log-sum-exp is (batch, heads, seqlen)."""
    rows, keys = shape_of("q", q, DENSE)[1], shape_of("k", k, DENSE)[1]
    return calls.attention(q, k, v, layout="bshd", return_lse=return_lse, **words.asked(rows, keys))


def packed(
    q: Any,
    k: Any,
    v: Any,
    words: FlashWords,
    return_lse: bool,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
) -> Any:
    """Computes attention of packed sequences, (total, heads, head_dim), of which ``seqused_q`` rows and
    ``seqused_k`` keys count; the log-sum-exp is (heads, total). With a ``block_table`` keys and values are
    pages."""
    shape_of("q", q, PACKED)
    longest = {"max_seqlen_q": int(max_seqlen_q), "max_seqlen_k": int(max_seqlen_k)}
    asked = words.asked(*longest.values()) | longest | {"return_lse": return_lse}
    if seqused_q is not None:
        asked["seqused_q"] = seqused_q
    if block_table is not None:
        used = cu_seqlens_k[1:] - cu_seqlens_k[:-1] if seqused_k is None else seqused_k
        told = {"page_table": block_table, "seqused_k": used, "cu_seqlens_q": cu_seqlens_q}
        return calls.attention_with_cache(q, k, v, **told, **asked)
    shape_of("k", k, PACKED)
    if seqused_k is not None:
        asked["seqused_k"] = seqused_k
    return calls.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **asked)


def cached(
    q: Any,
    cache: Cache,
    words: FlashWords,
    return_lse: bool,
    *,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = True,
) -> Any:
    """Computes attention of (batch, seqlen, heads, head_dim) beside a cache, to which k and v are written
    first; the log-sum-exp is (batch, heads, seqlen)."""
    rows = shape_of("q", q, DENSE)[1]
    cache.check()
    new = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    new = {name: array for name, array in new.items() if array is not None}
    if k is not None:
        shape_of("k", k, DENSE)
    if rotary_cos is not None:
        by_place = words.is_limited(rows, cache.room)
        new |= {"rotary_interleaved": rotary_interleaved, "rotary_by_place": by_place}
    told = cache.told() | new | words.asked(rows, cache.room)
    return calls.attention_with_cache(
        q, cache.k_cache, cache.v_cache, layout="bshd", return_lse=return_lse, **told
    )


def packed_beside_cache(
    q: Any,
    cache: Cache,
    words: FlashWords,
    return_lse: bool,
    *,
    cu_seqlens_q: Any,
    max_seqlen_q: int | None,
) -> Any:
    """Computes attention of packed queries, (total, heads, head_dim), beside a cache; the log-sum-exp is
    (heads, total). Raises ValueError where nothing says how long the longest is."""
    shape_of("q", q, PACKED)
    if max_seqlen_q is None:
        raise ValueError("cu_seqlens_q is given without max_seqlen_q, the most rows of a sequence: pass both")
    cache.check()
    told = cache.told() | words.asked(int(max_seqlen_q), cache.room)
    told |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": int(max_seqlen_q), "return_lse": return_lse}
    return calls.attention_with_cache(q, cache.k_cache, cache.v_cache, **told)
