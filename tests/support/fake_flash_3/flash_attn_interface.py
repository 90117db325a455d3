"""A stand-in for FlashAttention-3, beside that for PyTorch: (batch, seqlen, heads, head_dim), packed
sequences and keys in pages. Of few rows it is faster where it may choose among how many blocks keys are
shared."""

import torch


def _named(deterministic, num_splits):
    return "fa3" + "-det" * deterministic + "-split" * (num_splits == 0)


def flash_attn_func(
    q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=1, deterministic=False
):
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    name = _named(deterministic, num_splits)
    return torch.attention(name, *by_heads, causal, window=window_size, softcap=softcap).transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=(-1, -1),
    softcap=0.0, num_splits=1, deterministic=False,
):  # fmt: skip
    starts_q, starts_k = cu_seqlens_q.array, cu_seqlens_k.array
    assert max_seqlen_q == max(starts_q[1:] - starts_q[:-1])
    assert max_seqlen_k == max(starts_k[1:] - starts_k[:-1])
    options = {"window": window_size, "softcap": softcap}
    name = _named(deterministic, num_splits)
    return torch.packed_attention(name, q, k, v, starts_q, starts_k, causal, **options)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q=None, max_seqlen_q=None, causal=False,
    window_size=(-1, -1), softcap=0.0, num_splits=0,
):  # fmt: skip
    k, starts = torch.from_pages(k_cache, page_table, cache_seqlens)
    v, _ = torch.from_pages(v_cache, page_table, cache_seqlens)
    name, options = _named(False, num_splits), {"window": window_size, "softcap": softcap}
    if cu_seqlens_q is not None:
        assert max_seqlen_q == max(cu_seqlens_q.array[1:] - cu_seqlens_q.array[:-1])
        return torch.packed_attention(name, q, k, v, cu_seqlens_q.array, starts, causal, **options)
    batch, rows = q.shape[:2]
    flat = q.reshape(-1, *q.shape[2:])
    starts_q = range(0, batch * rows + 1, rows)
    return torch.packed_attention(name, flat, k, v, starts_q, starts, causal, **options).reshape(*q.shape)
