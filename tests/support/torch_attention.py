"""Attention by PyTorch's operations in float64, gradients included: what tensors on a card are held to."""

from __future__ import annotations

from typing import Any

#: How far o and gradients may be from float64, by the type of the tensors.
BOUNDS = {"float32": (2e-6, 1e-4), "float16": (2e-3, 1e-2), "bfloat16": (1e-2, 3e-2)}


def attended(
    torch: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> tuple[Any, Any]:
    """Returns o and the log-sum-exp of tensors (batch, heads, seqlen, head_dim), masks being aligned to the
    last key; a boolean bias is a mask."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    rows, keys = scores.shape[2:]
    places = torch.arange(rows, device=q.device)[:, None] + keys - rows
    behind = places - torch.arange(keys, device=q.device)
    (left, right), hidden = window, torch.zeros_like(behind, dtype=torch.bool)
    if causal:
        hidden = hidden | (behind < 0)
    if left >= 0:
        hidden = hidden | (behind > left)
    if right >= 0:
        hidden = hidden | (behind < -right)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * behind.abs()
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        scores = scores + bias.double()
    scores = scores.masked_fill(hidden, -torch.inf)
    beside = scores
    if sinks is not None:
        beside = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    lse = beside.logsumexp(3)
    return (scores - lse[..., None]).exp() @ v, lse


def assert_near(found: Any, wanted: Any, bound: float) -> None:
    """Within a bound relative to the norm."""
    assert found.shape == wanted.shape
    distance = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert distance <= bound, distance


def assert_gradients(found: Any, wanted: Any, tensors: Any, exact: Any, bound: float) -> None:
    """The gradients of ``tensors``, of which ``found`` was computed, beside those of their ``exact`` ones."""
    weights = found.detach().double().cos()
    (found * weights.to(found.dtype)).sum().backward()
    (wanted * weights.to(found.dtype).double()).sum().backward()
    for tensor, other in zip(tensors, exact, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert_near(tensor.grad, other.grad, bound)
