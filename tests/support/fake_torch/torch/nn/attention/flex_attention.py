"""See torch."""

import numpy as np

import torch


def pairs(batch, heads, seqlen_q, seqlen_k):
    """b, h, q and k of every score, as axes of an array."""
    axes = np.ix_(*map(np.arange, (batch or 1, heads or 1, seqlen_q, seqlen_k)))
    return [torch.Tensor(axis, torch.int32) for axis in axes]


def create_block_mask(mask, batch, heads, seqlen_q, seqlen_k, device):
    return mask(*pairs(batch, heads, seqlen_q, seqlen_k)).array.astype(bool)


def flex_attention(q, k, v, block_mask=None, score_mod=None, enable_gqa=False, return_lse=False):
    assert enable_gqa or q.shape[1] == k.shape[1]
    each = pairs(*q.shape[:3], k.shape[2])

    def changed(scores):
        return scores if score_mod is None else score_mod(torch.Tensor(scores), *each).array

    o, lse = torch.attention("flex", q, k, v, mask=block_mask, change=changed, return_lse=True)
    return (o, lse) if return_lse else o
