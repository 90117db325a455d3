"""See torch."""

import torch

from .attention import using


def scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
    name = using[-1] if using else "sdpa"
    if isinstance(q, torch._Nested):
        parts = [x.array for x in (q, k, v)]
        return torch._Nested(
            torch.packed_attention("nested", *parts, q.starts, k.starts, is_causal), q.starts
        )
    assert enable_gqa or q.shape[1] == k.shape[1]
    if attn_mask is None:
        return torch.attention(name, q, k, v, is_causal)
    assert not is_causal and attn_mask.shape == (*q.shape[:3], k.shape[2]) and attn_mask.dtype == q.dtype
    return torch.attention(name, q, k, v, change=lambda scores: scores + attn_mask.array)
