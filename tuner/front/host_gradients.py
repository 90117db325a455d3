"""Gradients of PyTorch's tensors on the host, by kernels on an emulated card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

#: Computes o and the log-sum-exp of tensors q, k and v.
Attends = Callable[[Any, Any, Any], tuple[Any, Any]]
#: Computes dq, dk, dv and the gradients of what else is differentiated, of tensors q, k, v, o, the
#: log-sum-exp, and the gradients of the last two.
Differentiates = Callable[[Any, Any, Any, Any, Any, Any, Any], tuple[Any, ...]]


def derived_of(torch: Any, tensors: tuple[Any, Any, Any], told: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns those of the tensors that kernels are ``told`` by keyword that need a gradient; None where
    neither they nor ``tensors``, q, k and v, need one."""
    if not torch.is_grad_enabled():
        return None
    more = {name: x for name, x in told.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    return more if more or any(x.requires_grad for x in tensors) else None


def attend_differentiably(
    torch: Any,
    tensors: tuple[Any, Any, Any],
    more: tuple[Any, ...],
    attends: Attends,
    differentiates: Differentiates,
) -> tuple[Any, Any]:
    """Returns o and the log-sum-exp of q, k and v, through which gradients are taken of these and of ``more``
    that the kernel reads."""
    found: tuple[Any, Any] = _function(torch).apply(attends, differentiates, *tensors, *more)
    return found


@cache
def _function(torch: Any) -> Any:
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, attends: Attends, differentiates: Differentiates, q: Any, k: Any, v: Any, *more: Any
        ) -> Any:
            o, lse = attends(q, k, v)
            ctx.save_for_backward(q, k, v, o, lse, *more)  # so that none is changed meanwhile
            ctx.differentiates = differentiates
            return o, lse

        @staticmethod
        def backward(ctx: Any, grad: Any, grad_lse: Any) -> Any:
            q, k, v, o, lse, *more = ctx.saved_tensors
            found = ctx.differentiates(q, k, v, o, lse, grad.contiguous(), grad_lse.contiguous())
            of = zip(found, (q, k, v, *more), strict=True)
            return (None, None, *(each.to(x.dtype).reshape(x.shape) for each, x in of))

    return Attention
