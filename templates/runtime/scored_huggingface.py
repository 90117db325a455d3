"""Kernels with masks and changes of scores as an attention of Hugging Face's transformers."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from .arrays import _torch_of
from .huggingface import _make_mask


def _attend_scored(
    serve: Callable[..., Any],
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
    """As transformers calls an attention. `serve` computes with what is asked for by keyword, or returns
    None."""
    torch, window, sinks = _torch_of(query), others.get("sliding_window"), others.get("s_aux")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    rows, keys = query.shape[2], key.shape[2]
    windowed = attention_mask is None and window is not None and window < keys
    window = window or 0
    if dropout == 0 and others.get("position_bias") is None:
        asked: dict[str, Any] = {}
        if attention_mask is not None:
            asked["bias"] = attention_mask
        elif windowed:
            # Of causal models a window counts the row's own key.
            asked["window"] = (window - 1, 0) if causal else (window, window)
        if others.get("softcap"):
            asked["softcap"] = others["softcap"]
        if sinks is not None:
            asked["sinks"] = sinks.detach().float()
        # A single row is the latest, and what a mask says is all that holds.
        masked = causal and rows > 1 and attention_mask is None
        o = serve(torch, query, key, value, masked, scaling, True, asked)
        if o is not None:
            return o.transpose(1, 2).contiguous(), None
    if sinks is not None:
        raise ValueError(
            "no kernel here serves the attention sinks of these tensors, nor does PyTorch's attention: use "
            "'eager'"
        )
    if windowed:  # of which `_make_scored_mask` left the mask to the kernel
        attention_mask = _window_mask(torch, query, rows, keys, window, causal)
    arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
    return otherwise(module, query, key, value, attention_mask, **arguments)


def _window_mask(torch: Any, query: Any, rows: int, keys: int, window: int, causal: bool) -> Any:
    places = torch.arange(keys - rows, keys, device=query.device)[:, None]
    distance = places - torch.arange(keys, device=query.device)
    return (distance >= 0) & (distance < window) if causal else distance.abs() <= window


def _make_scored_mask(windows: Callable[[], bool], otherwise: Any, **asked: Any) -> Any:
    """As transformers asks for a mask. None where kernels serve the window that it says, and it says nothing
    else: then `_attend_scored` is told the window."""
    torch, padding = sys.modules["torch"], asked.get("attention_mask")
    rows, keys, window = asked.get("q_length"), asked.get("kv_length"), asked.get("local_size")
    if window is None or torch.compiler.is_compiling() or not asked.get("allow_is_causal_skip", True):
        return _make_mask(otherwise, **asked)
    if not (windows() and _is_sliding(asked) and rows in (1, keys)):
        return _make_mask(otherwise, **asked)
    return None if padding is None or bool(padding.all()) else otherwise(**asked)


def _is_sliding(asked: Mapping[str, Any]) -> bool:
    """Whether a mask is a causal window, as transformers puts it together, and not chunks, say."""
    parts: list[Any] = []
    for cell in getattr(asked.get("mask_function"), "__closure__", None) or ():
        parts += cell.cell_contents if isinstance(cell.cell_contents, tuple) else ()
    names = {getattr(part, "__qualname__", "").partition(".")[0] for part in parts}
    return names == {"sliding_window_overlay", "causal_mask_function"}
