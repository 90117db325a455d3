"""A stand-in for FlashAttention-4, beside that for PyTorch: (batch, seqlen, heads, head_dim), packed
sequences and keys in pages."""

import torch


def flash_attn_func(
    q, k, v, causal, window_size=(None, None), softcap=0.0, learnable_sink=None, deterministic=False
):
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    assert learnable_sink is None or learnable_sink.dtype == torch.bfloat16
    name = "fa4-det" if deterministic else "fa4"
    o = torch.attention(name, *by_heads, causal, window=window_size, softcap=softcap, sinks=learnable_sink)
    return o.transpose(1, 2), None


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_k=None,
    page_table=None,
    causal=False,
    window_size=(None, None),
    softcap=0.0,
    deterministic=False,
):
    options = {"window": window_size, "softcap": softcap}
    if page_table is not None:
        v, _ = torch.from_pages(v, page_table, seqused_k)
        k, starts = torch.from_pages(k, page_table, seqused_k)
        if cu_seqlens_q is not None:
            return torch.packed_attention("fa4", q, k, v, cu_seqlens_q.array, starts, causal, **options), None
        batch, rows = q.shape[:2]
        flat = q.reshape(-1, *q.shape[2:])
        o = torch.packed_attention(
            "fa4", flat, k, v, range(0, batch * rows + 1, rows), starts, causal, **options
        )
        return o.reshape(*q.shape), None
    starts_q, starts_k = cu_seqlens_q.array, cu_seqlens_k.array
    assert max_seqlen_q == max(starts_q[1:] - starts_q[:-1])
    assert max_seqlen_k == max(starts_k[1:] - starts_k[:-1])
    name = "fa4-det" if deterministic else "fa4"
    return torch.packed_attention(name, q, k, v, starts_q, starts_k, causal, **options), None
