"""PyTorch's own attention: scaled_dot_product_attention by each of its backends, and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...gen.expression import Expression, Load, Name, folded
from ...gen.problem import Problem
from ...gen.scoring.scores import BATCH, HEAD, KEY, QUERY, SCORE
from .formulas import Formula, added, changed, formula, visible
from .inputs import Inputs
from .unserved import Call, Unserved, check_memory

#: Bytes that an element of a mask takes while it is made, beside itself.
_MASK_MAKING_BYTES = 32


def unserved(problem: Problem) -> str:
    """Returns why PyTorch does not compute that problem without a mask; empty where it does."""
    if not problem.scoring.is_plain:
        return ""
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        return (
            f"PyTorch aligns the causal mask top-left, which differs for {problem.seqlen_q} queries and "
            f"{problem.seqlen_k} keys"
        )
    return ""


def sdpa(inputs: Inputs, backend: str | None, *, masked: bool = False) -> Call:
    """Returns a call of scaled_dot_product_attention, with one backend forced where it is named (SDPBackend's
    member). ``masked``: a mask says what PyTorch's causal one does not. Raises `Unserved`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]
    from torch.nn.functional import (  # pyright: ignore[reportMissingImports]
        scaled_dot_product_attention,
    )

    reason = unserved(inputs.problem)
    if reason and not masked:
        raise Unserved(reason)
    # PyTorch before 2.5 does not know the option; where heads are not grouped it is not needed.
    options: dict[str, Any] = {"enable_gqa": True} if inputs.grouped else {}
    if inputs.problem.scoring.is_plain and not reason:
        options["is_causal"] = inputs.problem.causal
    else:
        options["attn_mask"] = dense_mask(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    if backend is None:
        return lambda: scaled_dot_product_attention(q, k, v, **options)
    forced = getattr(SDPBackend, backend, None)
    if forced is None:
        raise Unserved(f"this PyTorch has no {backend}")

    def call() -> Any:
        with sdpa_kernel(forced):
            return scaled_dot_product_attention(q, k, v, **options)

    return call


def dense_mask(inputs: Inputs) -> Any:
    """Returns what is added to scores, -inf where a row does not see a key, as a tensor (batch, heads,
    seqlen_q, seqlen_k) of the problem's type, without copies along axes that it does not vary along.

    Raises:
        Unserved: scores are changed otherwise.
    """
    torch, p = inputs.torch, inputs.problem
    addend, condition = added(p), visible(p)
    if addend is None or p.scores.sinks:
        raise Unserved(f"takes no {'sinks' if p.scores.sinks else 'score that is changed but by a sum'}")
    as_it_is = addend == Load("bias", (BATCH, HEAD, QUERY, KEY)) and condition is None
    if as_it_is and inputs.arrays["bias"].dtype == inputs.q.dtype:
        return inputs.arrays["bias"]
    read = _varying(addend, inputs.arrays)
    if condition is not None:
        read |= _varying(condition, inputs.arrays)
    batches = range(p.batch) if BATCH.name in read else range(1)
    heads = range(p.num_q_heads) if HEAD.name in read else range(1)
    shape = (len(batches), len(heads), p.seqlen_q, p.seqlen_k)
    check_memory(torch, (len(batches) * len(heads) * 4 + _MASK_MAKING_BYTES) * p.seqlen_q * p.seqlen_k)
    mask = torch.empty(*shape, dtype=inputs.q.dtype, device="cuda")
    rows = torch.arange(p.seqlen_q, device="cuda")[:, None]
    keys = torch.arange(p.seqlen_k, device="cuda")[None, :]
    sums = formula(torch, addend, inputs.arrays)
    seen = None if condition is None else formula(torch, condition, inputs.arrays)
    for b in batches:
        for h in heads:
            pairs = {BATCH.name: b, HEAD.name: h, QUERY.name: rows, KEY.name: keys}
            mask[b, h] = sums(pairs)
            if seen is not None:
                mask[b, h].masked_fill_(~seen(pairs), float("-inf"))
    return mask.expand(p.batch, p.num_q_heads, p.seqlen_q, p.seqlen_k)


def _varying(expression: Expression, arrays: Mapping[str, Any]) -> frozenset[str]:
    """The names that an expression's value hangs on, where arrays repeat no axis."""

    def of(node: Expression, operands: list[frozenset[str]]) -> frozenset[str]:
        if isinstance(node, Name):
            return frozenset({node.name})
        if isinstance(node, Load):
            strides = arrays[node.buffer].stride()
            operands = [names for names, stride in zip(operands, strides, strict=True) if stride]
        return frozenset().union(*operands)

    return folded(expression, of)


def flex(inputs: Inputs) -> Call:
    """Returns a call of FlexAttention, compiled for just this shape, its masks and changes of scores; the
    blocks that a mask leaves are found before. Of its output gradients can be taken more than once."""
    from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
        create_block_mask,
        flex_attention,
    )

    torch, p = inputs.torch, inputs.problem
    # A function compiled for many shapes meets a limit, behind which it runs uncompiled.
    torch._dynamo.reset()
    if hasattr(torch._functorch.config, "donated_buffer"):
        # Compiled gradients would write over what a kept graph needs for the next ones.
        torch._functorch.config.donated_buffer = False
    condition, change = visible(p), changed(p)
    options: dict[str, Any] = {"enable_gqa": inputs.grouped}
    if change is not None:
        options["score_mod"] = _score_mod(formula(torch, change, inputs.arrays))
    if condition is not None:
        # As many masks as there are different ones.
        read = _varying(condition, inputs.arrays)
        batch = p.batch if BATCH.name in read else None
        heads = p.num_q_heads if HEAD.name in read else None
        mask_mod = _mask_mod(formula(torch, condition, inputs.arrays))
        lengths = (p.seqlen_q, p.seqlen_k)
        options["block_mask"] = create_block_mask(mask_mod, batch, heads, *lengths, device="cuda")
    if not p.scores.sinks:
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda: compiled(inputs.q, inputs.k, inputs.v, **options)
    sinks = inputs.arrays["sinks"][None, :, None]

    def with_sinks(q: Any, k: Any, v: Any, **options: Any) -> Any:
        o, lse = flex_attention(q, k, v, return_lse=True, **options)
        return o * torch.sigmoid(lse - sinks)[..., None].to(o.dtype)

    scaled = torch.compile(with_sinks, dynamic=False, fullgraph=True)
    return lambda: scaled(inputs.q, inputs.k, inputs.v, **options)


def _score_mod(told: Formula) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return told({SCORE.name: score, BATCH.name: b, HEAD.name: h, QUERY.name: q, KEY.name: k})

    return score_mod


def _mask_mod(told: Formula) -> Callable[..., Any]:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return told({BATCH.name: b, HEAD.name: h, QUERY.name: q, KEY.name: k})

    return mask_mod
