"""PyTorch's attention by flashgen's kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...templates.runtime.arrays import _kind, _torch_of
from ..front.libraries import library_of, pytorchs_attention
from ..front.notice import say_once
from . import calls
from .added_masks import within_reach


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes what torch.nn.functional.scaled_dot_product_attention does, of torch tensors and of CuPy, JAX
    and numpy arrays.

    query is (..., heads, rows, head_dim), key (..., heads, keys, head_dim) and value (..., heads, keys,
    head_dim_v); leading axes, and heads without ``enable_gqa``, are broadcast. ``attn_mask`` broadcasts to
    (..., heads, rows, keys): true where a key is seen, or added to the scores; or it is PyTorch's
    causal_upper_left or causal_lower_right. ``is_causal`` is aligned to the first key: row i sees keys 0 ..
    i, however many there are. Rows that see nothing are zero.

    What no kernel serves of torch tensors, dropout above all, PyTorch computes, and stderr says so once.
    Raises ValueError and TypeError for arrays that do not go together, and of other libraries' arrays for
    what is not served.
    """
    torch = _torch_of(query)
    originals = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if dropout_p or (torch is not None and query.is_nested):
        why = f"dropout_p is {dropout_p}" if dropout_p else "query is a nested tensor"
        return _by_torch(torch, ValueError(why), *originals)
    library = library_of("query", query)
    asked: dict[str, Any] = {} if scale is None else {"scale": float(scale)}
    if attn_mask is not None:
        attn_mask, is_causal, aligned_last = _mask_of(attn_mask, is_causal)
        asked |= {"causal": True} if aligned_last else {}
    q, k, v, leading = _four_axes(library, query, key, value, enable_gqa)
    rows, keys = int(q.shape[2]), int(k.shape[2])
    most = max(len(array.shape) for array in (query, key, value))
    if 0 in (*q.shape, *k.shape):
        if torch is None:
            return library.zeros((*leading, *q.shape[1:3], v.shape[3])[-most:], dtype=query.dtype)
        return _pytorchs(torch, *originals)  # which has nothing to compute, but gradients to connect
    if attn_mask is not None:
        inner = (int(q.shape[1]), rows, keys)
        asked["attn_mask"] = _four_axes_of_mask(library, within_reach(attn_mask), leading, inner)
    if is_causal and rows < keys:  # later keys are seen by no row
        k, v = k[:, :, :rows], v[:, :, :rows]
    if is_causal:
        # As flashgen aligns masks to the last key, rows beyond the keys would see fewer.
        asked |= {"causal": True} if rows <= keys else {"window": (-1, rows - keys)}
    try:
        o = calls.attention(q, k, v, **asked)
    except (TypeError, ValueError) as error:
        if torch is None:
            raise
        return _by_torch(torch, error, *originals)
    return o if most == 4 else o.reshape((*leading, *o.shape[1:])[-most:])


def _mask_of(attn_mask: Any, is_causal: bool) -> tuple[Any, bool, bool]:
    """Returns the mask, whether rows see keys up to their own from the first, and from the last."""
    if is_causal:
        raise ValueError(
            "attn_mask and is_causal=True are both given: pass one, or put the causal mask in attn_mask"
        )
    if type(attn_mask).__name__ != "CausalBias":
        return attn_mask, False, False
    aligned_last = attn_mask.variant.name == "LOWER_RIGHT"
    return None, not aligned_last, aligned_last


def _by_torch(torch: Any, why: Exception, query: Any, *others: Any) -> Any:
    """Has PyTorch compute a call, and says so once; raises where its arrays are others."""
    if torch is None:
        raise ValueError(
            f"{why}, which PyTorch alone serves, and query is a {_kind(query)}: pass torch tensors or 0"
        )
    say_once(f"PyTorch computes a scaled_dot_product_attention that no kernel serves: {why}")
    return _pytorchs(torch, query, *others)


def _pytorchs(torch: Any, *originals: Any) -> Any:
    *arguments, scale, enable_gqa = originals
    return pytorchs_attention(torch.nn.functional)(*arguments, scale=scale, enable_gqa=enable_gqa)


def _four_axes(
    library: Any, query: Any, key: Any, value: Any, enable_gqa: bool
) -> tuple[Any, Any, Any, tuple[int, ...]]:
    """The arrays as (batch, heads, rows or keys, head_dim), and the leading axes that a batch stands for."""
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        shape = tuple(getattr(array, "shape", ()))
        if len(shape) < 2:
            raise ValueError(f"{name} has the shape {shape}; it must be (..., heads, seqlen, head_dim)")
    shapes = {name: (1,) * (3 - len(array.shape)) + tuple(array.shape) for name, array in arrays.items()}
    leading = _broadcast({name: shape[:-3] for name, shape in shapes.items()})
    wanted = _heads({name: int(shape[-3]) for name, shape in shapes.items()}, enable_gqa)
    folded = []
    for name, array in arrays.items():
        shape = (*leading, wanted[name], *shapes[name][-2:])
        array = array.reshape(shapes[name]) if len(array.shape) < 3 else array
        array = _repeated(library, array, wanted[name]) if enable_gqa else array
        array = library.broadcast_to(array, shape) if tuple(array.shape) != shape else array
        folded.append(array if len(shape) == 4 else array.reshape((math.prod(leading), *shape[-3:])))
    q, k, v = folded
    return q, k, v, leading


def _broadcast(leading: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return tuple(np.broadcast_shapes(*leading.values()))
    except ValueError:
        told = ", ".join(f"{name} {shape}" for name, shape in leading.items())
        raise ValueError(f"leading axes do not broadcast: {told}") from None


def _heads(heads: dict[str, int], enable_gqa: bool) -> dict[str, int]:
    """How many heads each array must have, where those of keys and values divide those of queries."""
    query, of_keys = heads["query"], {heads["key"], heads["value"]}
    if enable_gqa:
        if all(each and not query % each for each in of_keys):
            return heads | dict.fromkeys(("key", "value"), math.lcm(*of_keys))
        told = f"query has {query} heads, key {heads['key']} and value {heads['value']}"
        raise ValueError(f"{told}; with enable_gqa the numbers of key and value heads divide the query's")
    most = max(query, *of_keys)
    if not {query, *of_keys} <= {1, most}:
        told = f"query has {query} heads, key {heads['key']} and value {heads['value']}"
        raise ValueError(
            f"{told}, which do not broadcast: pass enable_gqa=True where query heads share those of keys"
        )
    # A single head of keys and values is read as it lies.
    shared = most if len(of_keys) > 1 else of_keys.pop()
    return {"query": most, "key": shared, "value": shared}


def _repeated(library: Any, array: Any, heads: int) -> Any:
    """The array with each of its heads repeated until there are so many."""
    *leading, own, rows, columns = array.shape
    if own == heads:
        return array
    each = library.broadcast_to(array[..., None, :, :], (*leading, own, heads // own, rows, columns))
    return each.reshape((*leading, heads, rows, columns))


def _four_axes_of_mask(library: Any, mask: Any, leading: tuple[int, ...], inner: tuple[int, ...]) -> Any:
    """The mask with at most four axes, which broadcast to (batch, heads, rows, keys)."""
    shape, whole = tuple(mask.shape), (*leading, *inner)
    if len(shape) > len(whole) or any(
        each not in (1, of) for each, of in zip(shape[::-1], whole[::-1], strict=False)
    ):
        raise ValueError(f"attn_mask has the shape {shape}; it must broadcast to {whole}")
    if len(shape) <= 3 or len(whole) == 4:
        return mask
    outer = (1,) * (len(whole) - len(shape)) + shape
    if all(each == 1 for each in outer[:-3]):
        return mask.reshape(shape[-3:])
    return library.broadcast_to(mask.reshape(outer), (*leading, *outer[-3:])).reshape((-1, *outer[-3:]))
