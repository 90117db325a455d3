"""Calls of `flashgen.attention` that are like one before, told by all that what is kept of it follows from.

PyTorch has a test of its own for whether tensors are as some others were, which code of torch.compile asks:
of types, shapes, strides, devices and gradients, and of modes and transformations around, all at once. It is
asked of the newest calls that were told the same; where those were others, all that are kept are looked up.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, cast

import numpy as np

from .again import keep
from .bound import Bound
from .known import KnownCalls, like_nothing

_P = ParamSpec("_P")

#: The types of what says the same whenever it is equal: other values may change and be equal to themselves.
CONSTANT = frozenset({bool, int, float, str, type(None), np.float64, np.float32})

#: So many of the newest calls that were told the same are asked: models have two kinds of layers in turn.
_MOST_ASKED = 2


def made_again(bound: Bound) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]:
    """Has a function make calls of tensors that are like one before by what is kept of that."""

    def of(function: Callable[_P, Any]) -> Callable[_P, Any]:
        find_out: Any = function

        # To take what a call tells by name is done sooner than to look up defaults of all that it may tell.
        @functools.wraps(find_out)
        def attention(q: Any, k: Any, v: Any, **told: Any) -> Any:
            torch: Any = sys.modules.get("torch")
            if torch is None or torch.compiler.is_dynamo_compiling():
                return find_out(q, k, v, **told)
            calls, arrays, out = bound.again, (q, k, v), None
            asked: Any = torch.is_grad_enabled()
            if told:
                asked, arrays, out = _apart(torch, asked, arrays, told)
            for known in calls.newest.get(asked, ()):
                if known.is_like(*arrays):
                    if torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is not q.dtype:
                        break
                    made = known.again(q, k, v, out, arrays)
                    if made is not None:
                        return made
                    break
            return _looked_up(torch, find_out, bound, calls, asked, arrays, out, told)

        return cast(Callable[_P, Any], attention)

    return of


def _apart(
    torch: Any, with_gradients: bool, arrays: tuple[Any, ...], told: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Any]:
    """Returns what a call is told but for its tensors, with these behind q, k and v, and ``out``. None for
    what is told where it may be another next time, though it is equal."""
    parts: list[Any] = [with_gradients]
    more: list[Any] = []
    out, tensor, parameter = None, torch.Tensor, torch.nn.Parameter
    for name, value in told.items():
        kind = type(value)
        if kind in CONSTANT:
            parts += name, kind, value
        elif kind is tensor or kind is parameter:
            parts += name, tensor
            more.append(value)
            if name == "out":
                out = value
        elif kind is tuple and name == "window":
            for side in value:
                if type(side) not in CONSTANT:
                    return None, arrays, None
            parts += name, value
        else:
            return None, arrays, None
    return tuple(parts), (*arrays, *more), out


def _looked_up(
    torch: Any,
    find_out: Callable[..., Any],
    bound: Bound,
    calls: KnownCalls,
    asked: Any,
    arrays: tuple[Any, ...],
    out: Any,
    told: Mapping[str, Any],
) -> Any:
    """Makes a call that is not like the newest which were told the same."""
    q, k, v, *_ = arrays
    key, derived = None, False
    if asked is not None and _are_in_memory(torch, arrays, out):
        key, derived = _key_of(asked, arrays)
    known = calls.get(key)
    if known is None:
        made = find_out(q, k, v, **told)
        if key is not None:
            keep(bound, calls, key, torch, arrays, told, derived=derived)
        return made
    made = known.again(q, k, v, out, arrays)
    if made is None:
        return find_out(q, k, v, **told)
    newest = calls.newest.get(asked, ())
    if known.is_like is like_nothing or known in newest:
        known.is_like = _likeness(torch, arrays) or known.is_like
    calls.newest[asked] = (known, *(each for each in newest if each is not known))[:_MOST_ASKED]
    return made


def _are_in_memory(torch: Any, arrays: tuple[Any, ...], out: Any) -> bool:
    """Whether a call's tensors are PyTorch's own, of which none is cast, and ``out`` is only written to."""
    q, k, v, *_ = arrays
    return (
        type(q) is type(k) is type(v) is torch.Tensor
        and not torch.compiler.is_compiling()
        and (not torch.is_autocast_enabled() or torch.get_autocast_dtype("cuda") is q.dtype)
        and (out is None or (type(out) is torch.Tensor and not out.requires_grad))
    )


def _key_of(asked: tuple[Any, ...] | bool, arrays: tuple[Any, ...]) -> tuple[Any, bool]:
    """Returns all that what is kept of a call follows from, and whether gradients are taken of it; None for
    the former where q, k and v differ in what they must not."""
    q, k, v, *beside = arrays
    dtype, device, keys, values = q.dtype, q.device, k.shape, v.shape
    if not (k.dtype is dtype is v.dtype and k.device == device == v.device):
        return None, False
    with_gradients = asked if type(asked) is bool else asked[0]
    derived = with_gradients and (q.requires_grad or k.requires_grad or v.requires_grad)
    # To ask for strides takes longer than to ask whether there is anything to tell of them, and to find out
    # the hash of what is equal longer than to compare it.
    key: list[Any] = [
        asked,
        derived,
        dtype,
        device,
        q.shape,
        None if q.is_contiguous() else q.stride(),
        keys,
        None if k.is_contiguous() else k.stride(),
        None if values == keys else values,
        None if v.is_contiguous() else v.stride(),
    ]
    for x in beside:
        derived = derived or (with_gradients and x.requires_grad)
        key += x.dtype, x.shape, None if x.is_contiguous() else x.stride(), x.device
    if beside:
        key.append(derived)
    return tuple(key), derived


def _likeness(torch: Any, arrays: tuple[Any, ...]) -> Callable[..., bool] | None:
    """What tells whether tensors are as those; None where this PyTorch has no such test, or one tensor is
    there twice, which it takes for another call."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make = getattr(guards, "TensorGuards", None)
    if make is None or len({*map(id, arrays)}) < len(arrays):
        return None
    try:
        is_like: Callable[..., bool] = make(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return is_like if is_like(*arrays) else None
    except (AttributeError, RuntimeError, TypeError):
        return None
