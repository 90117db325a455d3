"""Gradients of what contenders compute, by their own backward pass, which alone is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .inputs import Inputs
from .unserved import Call, Unserved


def differentiated(make: Callable[[Inputs], Call], inputs: Inputs, *, rows_first: bool) -> Call:
    """Returns the call of the backward pass of what ``make`` makes a call of: it returns dq, dk and dv. The
    forward pass is made once, and keeps what the other needs.

    ``rows_first``: arrays lie as (batch, seqlen, heads, head_dim), as the contender likes them, so that none
    is copied. Raises `Unserved` where nothing is differentiated.
    """
    torch = inputs.torch

    def laid(x: Any) -> Any:
        """The array as it lies in memory."""
        return x.transpose(1, 2).contiguous() if rows_first else x

    def seen(x: Any) -> Any:
        """The array as (batch, heads, seqlen, head_dim)."""
        return x.transpose(1, 2) if rows_first else x

    with torch.enable_grad():
        leaves = tuple(laid(x).detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        q, k, v = map(seen, leaves)
        o = make(replace(inputs, q=q, k=k, v=v))()
    if not o.requires_grad:
        raise Unserved("computes no gradients")
    given = seen(laid(inputs.passed["dout"]))
    return lambda: tuple(map(seen, torch.autograd.grad(o, leaves, given, retain_graph=True)))
