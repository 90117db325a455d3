"""FlexAttention by flashgen's kernels: ``from flashgen.compat.flex_attention import flex_attention``.

Signatures and return values are those of torch.nn.attention.flex_attention, PyTorch 2.15. Functions of scores
and masks are traced once and become part of a kernel; nothing is compiled by torch, and torch is not needed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..front.libraries import library_of
from . import calls
from .block_mask import BlockMask, create_block_mask, create_mask, mask_function, noop_mask

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]


class AuxRequest(NamedTuple):
    """What `flex_attention` is to return beside the output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What `flex_attention` returned beside the output: the natural log-sum-exp of each row's scores, float32
    (batch, heads, seqlen_q), if asked for."""

    lse: Any = None
    max_scores: Any = None


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Computes attention whose scores ``score_mod(score, b, h, q_idx, kv_idx)`` changes, of the keys that
    ``block_mask`` lets rows see.

    query is (batch, heads, seqlen_q, head_dim), key (batch, kv_heads, seqlen_k, head_dim) and value (batch,
    kv_heads, seqlen_k, head_dim_v); fewer heads of keys need ``enable_gqa``. ``block_mask`` is of
    `create_block_mask`, flashgen's or PyTorch's. Returns the output; with ``return_lse`` also the natural
    log-sum-exp, -inf for rows that see nothing; with ``return_aux`` an `AuxOutput`. ``kernel_options`` say
    how PyTorch's kernel is made, and are not read.

    Raises NotImplementedError for other than four axes, ValueError for shapes that do not go together, for
    ``max_scores``, and for functions that no formula can say.
    """
    arrays = {"query": query, "key": key, "value": value}
    if any(len(array.shape) != 4 for array in arrays.values()):
        told = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
        raise NotImplementedError(
            f"arrays have the shapes {told}; each must be (batch, heads, seqlen, head_dim)"
        )
    if return_lse and return_aux is not None:
        raise ValueError(
            "return_lse and return_aux are both given: pass return_aux=AuxRequest(lse=True) alone"
        )
    if return_aux is not None and return_aux.max_scores:
        raise ValueError("return_aux asks for max_scores, which no kernel here keeps: ask for lse alone")
    _check_heads(int(query.shape[1]), int(key.shape[1]), enable_gqa)
    key, value = _of_batch(query, key, value, block_mask)
    mask = None if block_mask is None else mask_function(block_mask, int(query.shape[2]), int(key.shape[2]))
    asked = {"score": score_mod, "mask": mask, "scale": scale}
    with_lse = return_lse or (return_aux is not None and return_aux.lse)
    made = calls.attention(
        *(query, key, value),
        return_lse=with_lse,
        **{name: value for name, value in asked.items() if value is not None},
    )
    if return_aux is None:
        return made
    o, lse = made if with_lse else (made, None)
    return o, AuxOutput(lse)


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    told = f"query has {heads} heads, key and value have {kv_heads}"
    if enable_gqa and heads % kv_heads:
        raise ValueError(f"{told}; with enable_gqa their number must divide the query's")
    if not enable_gqa and heads != kv_heads:
        raise ValueError(f"{told}: pass enable_gqa=True where query heads share those of keys")


def _of_batch(query: Any, key: Any, value: Any, block_mask: Any) -> tuple[Any, Any]:
    """Keys and values of a batch of one, repeated where the mask is of the query's."""
    batch = int(query.shape[0])
    if key.shape[0] == value.shape[0] == batch:
        return key, value
    of_mask = None if block_mask is None else int(block_mask.shape[0])
    if key.shape[0] != 1 or value.shape[0] != 1 or of_mask != batch:
        raise ValueError(
            f"query is a batch of {batch}, key of {key.shape[0]} and value of {value.shape[0]}: they must be "
            "alike, or those of one beside a block_mask of the query's batch"
        )
    library = library_of("query", query)
    return tuple(library.broadcast_to(x, (batch, *x.shape[1:])) for x in (key, value))  # type: ignore[return-value]


def and_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is true where all of these are."""
    return _joined(operator.and_, mask_mods)


def or_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is true where any of these is."""
    return _joined(operator.or_, mask_mods)


def _joined(join: Callable[[Any, Any], Any], mask_mods: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    if not mask_mods or not all(map(callable, mask_mods)):
        raise TypeError(f"masks are joined that are functions, at least one, not {mask_mods!r}")

    def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return functools.reduce(join, (each(b, h, q_idx, kv_idx) for each in mask_mods))

    return joined
