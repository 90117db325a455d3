"""What a forward pass leaves kernels of gradients, on torch's current card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...gen.problem import Problem
from ...gen.scoring.scores import BATCH, HEAD, KEY, QUERY, SCORE
from .formulas import changed, formula, visible
from .unserved import Unserved


def forward_pass(
    torch: Any, problem: Problem, arrays: tuple[Any, Any, Any], read: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns ``o`` and ``lse`` of q, k and v, computed in float32 head by head and rounded, and ``dout``,
    drawn. ``read`` are the arrays of masks and of changes of scores. Raises `Unserved` for sinks."""
    p = problem
    if p.scores.sinks:
        raise Unserved("gradients beside sinks are not timed")
    q, k, v = arrays
    shape = (p.batch, p.num_q_heads, p.seqlen_q, p.head_dim_v)
    o, lse = torch.full(shape, 0.0, dtype=q.dtype, device="cuda"), torch.zeros(*shape[:3], device="cuda")
    condition, change = visible(p), changed(p)
    seen = None if condition is None else formula(torch, condition, read)
    become = None if change is None else formula(torch, change, read)
    rows = torch.arange(p.seqlen_q, device="cuda")[:, None]
    keys = torch.arange(p.seqlen_k, device="cuda")[None, :]
    for b in range(p.batch):
        for h in range(p.num_q_heads):
            kv_head = h // p.group
            key, value = (x[b, kv_head].float() for x in (k, v))
            scores = torch.matmul(q[b, h].float(), key.transpose(0, 1)) * p.head_dim**-0.5
            pairs = {BATCH.name: b, HEAD.name: h, QUERY.name: rows, KEY.name: keys}
            if become is not None:
                scores = become({SCORE.name: scores, **pairs})
            if seen is not None:
                scores.masked_fill_(~seen(pairs), float("-inf"))
            lse[b, h] = torch.logsumexp(scores, 1)
            o[b, h] = torch.matmul(torch.softmax(scores, 1), value).to(q.dtype)
    return {"o": o, "lse": lse, "dout": torch.randn(*shape, device="cuda").to(q.dtype)}
