"""The kernels as an attention of Hugging Face's transformers."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from .arrays import _torch_of
from .tensors import _Tensors


def _register_transformers(attend: Callable[..., Any], make_mask: Callable[..., Any], name: str) -> None:
    """Both are told first what serves otherwise."""
    transformers = importlib.import_module("transformers")
    forward = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    sdpa_mask = importlib.import_module("transformers.masking_utils").sdpa_mask
    if "flash" in name:
        raise ValueError(f"transformers takes {name!r} for FlashAttention's; choose a name without 'flash'")
    transformers.AttentionInterface.register(name, functools.partial(attend, forward))
    transformers.AttentionMaskInterface.register(name, functools.partial(make_mask, sdpa_mask))


def _attend(
    tensors: _Tensors,
    otherwise: Any,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> Any:
    """As transformers calls an attention: (batch, heads, seqlen, head_dim) to (batch, seqlen, heads,
    head_dim)."""
    if others.get("s_aux") is not None:
        raise ValueError("attention sinks are computed neither here nor by PyTorch's attention: use 'eager'")
    torch = _torch_of(query)
    if attention_mask is None and dropout == 0 and others.get("position_bias") is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # A single row is the latest: it sees all keys.
        causal = bool(causal) and query.shape[2] > 1
        o = tensors.serve(torch, query, key, value, causal, scaling, True)
        if o is not None:
            return o.transpose(1, 2).contiguous(), None
    arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
    return otherwise(module, query, key, value, attention_mask, **arguments)


def _make_mask(otherwise: Any, **asked: Any) -> Any:
    """As transformers asks for a mask, which it makes while a graph is compiled or captured even where it
    says no more than `is_causal`, or nothing. None instead: then `_attend` is called without one, and a
    kernel can serve."""
    rows, keys, window = asked.get("q_length"), asked.get("kv_length"), asked.get("local_size")
    padded = asked.get("attention_mask") is not None
    if not padded and (window is None or keys is None or keys < window) and not _is_exporting():
        # The latest row alone, or a row for each key.
        if asked.get("allow_is_causal_skip") and (rows == keys or rows == 1):
            return None
        if asked.get("allow_is_bidirectional_skip"):
            return None
    return otherwise(**asked)


def _is_exporting() -> bool:
    """Whether torch.export traces, whose graphs are for other lengths, too."""
    return bool(sys.modules["torch"].compiler.is_exporting())


# Else torch.compile of PyTorch 2.11 and older takes it for True, whatever it returns.
_is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
