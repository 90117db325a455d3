"""See torch."""

import torch

from .attention import using


def scaled_dot_product_attention(q, k, v, is_causal=False, enable_gqa=False):
    assert enable_gqa or q.shape[1] == k.shape[1]
    return torch.attention(using[-1] if using else "sdpa", q, k, v, is_causal)
