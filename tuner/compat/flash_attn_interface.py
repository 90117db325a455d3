"""FlashAttention-3's functions by flashgen's kernels, as ``flashgen.compat.flash_attn_interface``.

Signatures, defaults and return values are those of hopper/flash_attn_interface.py, on every card that
flashgen has kernels for. Left out are qv, scales of eight bits and new rows of packed queries, all refused.
What needs no kernel, such as merging partial results, the arrays' own library computes.
"""

from __future__ import annotations

from typing import Any

from ...templates.runtime.arrays import _torch_of
from ..front.libraries import empty_like, library_of
from .caches import Cache
from .flash_calls import cached, dense, packed, packed_beside_cache
from .flash_words import FlashWords, check_deterministic

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


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
    log-sum-exp), the log-sum-exp as (batch, heads, seqlen_q) with -inf for rows that see no key, +inf where
    there is no key at all. ``num_splits``, ``pack_gqa`` and ``sm_margin`` are the kernel's own choice. Raises
    ValueError for qv and descales, otherwise as `flashgen.attention` does.
    """
    _check_unserved(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_deterministic(deterministic, q, k, v)
    words = FlashWords(
        softmax_scale, causal, window_size, softcap, attention_chunk=attention_chunk, version=3
    )
    return _of_keys(k, dense(q, k, v, words, return_attn_probs))


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_func` of all three in one array: (batch, seqlen, 3, heads, head_dim), or with
    ``num_heads_q`` (batch, seqlen, heads, head_dim), whose heads are first those of queries, then as many of
    keys as of values."""
    q, k, v = _parts_of(qkv, num_heads_q)
    asked = {"window_size": window_size, "attention_chunk": attention_chunk, "softcap": softcap}
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return flash_attn_func(
        *(q, k, v, softmax_scale, causal),
        **scales,
        **asked,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


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
    made = packed(
        *(q, k, v, words, return_attn_probs),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    return _of_keys(k, made)


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


def flash_attn_combine(
    out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None
) -> tuple[Any, Any]:
    """Merges what attention to parts of the keys gave, in the arrays' library.

    out_partial is (parts, batch, seqlen, heads, head_dim) and lse_partial, the natural log-sum-exps, (parts,
    batch, seqlen, heads), -inf where a part has no key that a row sees; other leading axes are taken alike.
    Returns (o, log-sum-exp), (batch, seqlen, heads, head_dim) of ``out_dtype``, None for that of out_partial,
    and (batch, seqlen, heads); o is written to ``out``, if there is one. Raises ValueError for shapes that do
    not go together.
    """
    shape, of_lse = tuple(out_partial.shape), tuple(lse_partial.shape)
    if len(shape) < 2 or of_lse != shape[:-1]:
        raise ValueError(
            f"out_partial has the shape {shape} and lse_partial {of_lse}; they must be (parts, batch, "
            "seqlen, heads, head_dim) and (parts, batch, seqlen, heads)"
        )
    library = library_of("out_partial", out_partial)
    highest = library.amax(lse_partial, 0)
    base = library.where(highest == -library.inf, 0.0, highest)
    weights = library.exp(lse_partial - base)[..., None]
    total = weights.sum(0)
    sees = total > 0
    total = library.where(sees, total, 1.0)
    # What a part without keys left is not read.
    made = library.where(weights > 0, weights * out_partial, 0.0).sum(0) / total
    lse = library.where(sees[..., 0], library.log(total[..., 0]) + base, -library.inf)
    if out is not None:
        out[...] = made
        return out, lse
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    return made.to(dtype) if _torch_of(made) is not None else made.astype(dtype), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any = None,
    headdim_v: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Returns an empty array like ``cache_seqlens``, to be passed on as ``scheduler_metadata``: kernels here
    need to be told nothing ahead."""
    return empty_like(cache_seqlens)


def _of_keys(k: Any, made: Any) -> Any:
    """Returns o, or o and the log-sum-exp, which is +inf where nobody has a key."""
    if not isinstance(made, tuple) or 0 not in k.shape:
        return made
    o, lse = made
    library = library_of("q", lse)
    return o, library.full_like(lse, library.inf)


def _parts_of(qkv: Any, num_heads_q: int | None) -> tuple[Any, Any, Any]:
    """Queries, keys and values of one array. Raises ValueError."""
    shape = tuple(qkv.shape)
    if len(shape) == 5 and shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    if len(shape) != 4:
        raise ValueError(
            f"qkv has the shape {shape}; it must be (batch, seqlen, 3, heads, head_dim), or with num_heads_q "
            "(batch, seqlen, heads, head_dim)"
        )
    of_keys, odd = (0, 0) if num_heads_q is None else divmod(shape[2] - num_heads_q, 2)
    if num_heads_q is None or odd or of_keys < 1:
        raise ValueError(
            f"num_heads_q is {num_heads_q}, and qkv has {shape[2]} heads: those behind num_heads_q must be "
            "as many of keys as of values"
        )
    last = num_heads_q + of_keys
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:last], qkv[:, :, last:]


def _check_unserved(**given: Any) -> None:
    """Raises ValueError for the first that is given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is given, and no kernel of flashgen.attention reads it: leave it out")
