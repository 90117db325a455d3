"""A stand-in for FlashAttention-4, beside that for PyTorch: (batch, seqlen, heads, head_dim), packed too."""

from itertools import pairwise

import torch


def flash_attn_func(q, k, v, causal, window_size=(None, None), softcap=0.0, learnable_sink=None):
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    assert learnable_sink is None or learnable_sink.dtype == torch.bfloat16
    o = torch.attention("fa4", *by_heads, causal, window=window_size, softcap=softcap, sinks=learnable_sink)
    return o.transpose(1, 2), None


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal,
    window_size=(None, None),
    softcap=0.0,
):
    o = q[:] * 0
    bounds = cu_seqlens_q.array
    assert cu_seqlens_k is cu_seqlens_q and max_seqlen_q == max_seqlen_k == max(bounds[1:] - bounds[:-1])
    for begin, end in pairwise(bounds):
        part = [x[None, begin:end] for x in (q, k, v)]
        found, _ = flash_attn_func(*part, causal, window_size, softcap)
        o[begin:end] = found[0]
    return o, None
