"""See torch."""

import torch


def create_block_mask(mask, batch, heads, seqlen_q, seqlen_k, device):
    assert mask(0, 0, seqlen_q - 1, seqlen_k - 1) and not mask(0, 0, 0, seqlen_k - seqlen_q + 1)
    return "causal"


def flex_attention(q, k, v, block_mask, enable_gqa):
    return torch.attention("flex", q, k, v, block_mask == "causal")
