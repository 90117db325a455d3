"""PyTorch's attention of sequences of lengths of their own: packed, nested, and by FlexAttention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ...gen.layout import DENSE
from .flash_attention import by_rows, packed_documents
from .inputs import Inputs
from .unserved import Call, Unserved


def varlen(inputs: Inputs) -> Call:
    """Returns a call of torch.nn.attention.varlen, of pages where this PyTorch has them, and of documents as
    packed sequences. Raises `Unserved`."""
    from torch.nn.attention.varlen import varlen_attn  # pyright: ignore[reportMissingImports]

    torch, p = inputs.torch, inputs.problem
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if p.causal:
        options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if inputs.grouped and "enable_gqa" in known:
        options["enable_gqa"] = True
    if p.scoring.documents:
        return _documents(inputs, varlen_attn, options)
    q, longest = inputs.q, (max(p.lengths.q), max(p.lengths.k))
    if p.layout.is_packed:
        starts = inputs.indices["cu_seqlens_q"]
    else:
        starts = torch.from_numpy(np.arange(p.batch + 1, dtype=np.int32) * p.seqlen_q).to("cuda")
        q = q.transpose(1, 2).reshape(-1, p.num_q_heads, p.head_dim)
    keys = inputs.indices.get("cu_seqlens_k")
    if p.layout.is_paged:
        if "block_table" not in known:
            raise Unserved("this PyTorch's knows no pages")
        options |= {"block_table": inputs.indices["page_table"], "seqused_k": inputs.indices["seqused_k"]}
    if p.layout.is_packed:
        return lambda: varlen_attn(q, inputs.k, inputs.v, starts, keys, *longest, **options)
    shape = (p.batch, p.seqlen_q, p.num_q_heads, p.head_dim_v)

    def call() -> Any:
        o = varlen_attn(q, inputs.k, inputs.v, starts, keys, *longest, **options)
        return o.reshape(shape).transpose(1, 2)

    return call


def _documents(inputs: Inputs, function: Callable[..., Any], options: dict[str, Any]) -> Call:
    """The call of a function of packed sequences on documents, one behind the other."""
    if inputs.problem.layout is not DENSE:
        raise Unserved("knows documents in sequences of one length alone")
    q, k, v = by_rows(inputs)
    packed, starts, longest = packed_documents(inputs, (q, k, v))
    shape = (*q.shape[:3], inputs.problem.head_dim_v)

    def call() -> Any:
        return function(*packed, starts, starts, longest, longest, **options).reshape(shape).transpose(1, 2)

    return call


def nested(inputs: Inputs) -> Call:
    """Returns a call of scaled_dot_product_attention on jagged tensors. Raises `Unserved`."""
    from torch.nn.functional import (  # pyright: ignore[reportMissingImports]
        scaled_dot_product_attention,
    )

    torch, p = inputs.torch, inputs.problem
    if p.causal and p.lengths.q != p.lengths.k:
        raise Unserved("PyTorch aligns the causal mask top-left, which differs where keys are not queries")

    def jagged(of: str, array: Any) -> Any:
        lengths = getattr(p.lengths, of)
        made = torch.nested.nested_tensor_from_jagged(
            array, inputs.indices[f"cu_seqlens_{of}"], min_seqlen=min(lengths), max_seqlen=max(lengths)
        )
        return made.transpose(1, 2)

    q, k, v = jagged("q", inputs.q), jagged("k", inputs.k), jagged("k", inputs.v)
    options: dict[str, Any] = {"enable_gqa": True} if inputs.grouped else {}

    def call() -> Any:
        o = scaled_dot_product_attention(q, k, v, is_causal=p.causal, **options)
        return o.transpose(1, 2).values()

    return call


def flex_packed(inputs: Inputs) -> Call:
    """Returns a call of FlexAttention on all sequences as one, of which each row sees its own sequence."""
    from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
        create_block_mask,
        flex_attention,
    )

    torch, p = inputs.torch, inputs.problem
    # A function compiled for many shapes meets a limit, behind which it runs uncompiled.
    torch._dynamo.reset()
    begins, ends = (torch.from_numpy(each).to("cuda") for each in seen_keys(inputs))

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k >= begins[q]) & (k < ends[q])

    mask = create_block_mask(mask_mod, None, None, p.total_q, p.total_k, device="cuda")
    q, k, v = (x.transpose(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v))
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call() -> Any:
        return compiled(q, k, v, block_mask=mask, enable_gqa=inputs.grouped)[0].transpose(0, 1)

    return call


def seen_keys(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first key that each packed row sees and the one behind the last, of all keys, int32."""
    p = inputs.problem
    begins, ends, first = [], [], 0
    for rows, keys in p.lengths.pairs:
        last = np.full(rows, keys)
        if p.causal:
            last = np.clip(np.arange(rows) + 1 + keys - rows, 0, keys)
        begins.append(np.full(rows, first))
        ends.append(first + last)
        first += keys
    return np.concatenate(begins).astype(np.int32), np.concatenate(ends).astype(np.int32)
