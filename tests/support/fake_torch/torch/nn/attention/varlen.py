"""See torch: of a PyTorch that knows pages, and causal masks as windows."""

import torch


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False,
    seqused_k=None, block_table=None,
):  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[-2]) and window_size in ((-1, -1), (-1, 0))
    if block_table is not None:
        value, _ = torch.from_pages(value, block_table, seqused_k)
        key, starts = torch.from_pages(key, block_table, seqused_k)
    else:
        starts = cu_seq_k.array
    assert max(starts[1:] - starts[:-1]) == max_k
    causal = window_size == (-1, 0)
    return torch.packed_attention("varlen", query, key, value, cu_seq_q.array, starts, causal)
