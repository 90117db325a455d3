"""flashgen's kernels as an attention of Hugging Face's transformers: ``attn_implementation="flashgen"``.

`register` gives transformers' own glue for flash-attn functions with flash-attn's signatures, so that packed
batches, padding, windows, soft caps, sinks and paged caches come as they do there. Masks that flash-attn does
not know, such as images that see all of themselves, are made as for "sdpa", and served by kernels too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ...templates.runtime.packed_huggingface import _OWN_MASKS, _parts_of
from . import calls
from .added_masks import within_reach
from .caches import Cache
from .flash_calls import cached, dense, packed
from .flash_words import FlashWords, check_deterministic, check_dropout

__all__ = ["register"]

#: By which names models ask for flashgen's kernels.
_NAMES: set[str] = set()


def register(name: str = "flashgen") -> None:
    """Makes transformers know flashgen's kernels by that name: then pass ``attn_implementation=name``.

    Raises ImportError without transformers, and for versions older than 4.56.
    """
    transformers = importlib.import_module("transformers")
    try:
        glue = importlib.import_module("transformers.modeling_flash_attention_utils")
        by_flash = importlib.import_module("transformers.integrations.flash_attention")
        masks = importlib.import_module("transformers.masking_utils")
        _NAMES.add(name)
        _wrap(glue, "_lazy_imports", _functions_of(glue))
        # Models that list implementations of flash-attention would take one of these for any other.
        _wrap(transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", lambda name: name)
        attend = functools.partial(_attend, by_flash.flash_attention_forward)
        make_mask = functools.partial(_make_mask, masks.flash_attention_mask, masks.sdpa_mask)
        transformers.AttentionInterface.register(name, attend)
        transformers.AttentionMaskInterface.register(name, make_mask)
    except (ImportError, AttributeError) as error:
        told = getattr(transformers, "__version__", "of no version")
        raise ImportError(
            f"transformers {told} has no place for an attention's functions ({error}): install 4.56 or newer"
        ) from error


def _wrap(owner: Any, function: str, answer: Callable[[str], Any]) -> None:
    """Has one of transformers' functions, which is told the name of an implementation, answer for flashgen's
    names by itself, once."""
    theirs = getattr(owner, function)
    if getattr(theirs, "is_of_flashgen", False):
        return

    @functools.wraps(theirs)
    def asked(*given: Any, **told: Any) -> Any:
        named = [each for each in (*given, *told.values()) if isinstance(each, str) and each in _NAMES]
        return answer(named[0]) if named else theirs(*given, **told)

    asked.is_of_flashgen = True  # type: ignore[attr-defined]
    setattr(owner, function, asked)


def _functions_of(glue: Any) -> Callable[[str], Any]:
    def functions(name: str) -> tuple[Any, ...]:
        found = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
        # Older versions know no function of caches.
        return (*(found if _takes_caches(glue) else found[:2]), glue._pad_input, glue._unpad_input)

    return functions


def _takes_caches(glue: Any) -> bool:
    return hasattr(glue, "_flash_with_kvcache_fn")


def _attend(
    by_flash: Callable[..., Any],
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **others: Any,
) -> Any:
    """As transformers calls an attention: (batch, heads, seqlen, head_dim) to (batch, seqlen, heads,
    head_dim)."""
    if others.get("position_bias") is not None:
        raise ValueError("position_bias is given, which is not served here: use attn_implementation='sdpa'")
    if attention_mask is None or attention_mask.dim() == 2:
        told = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux, **others}
        return by_flash(module, query, key, value, attention_mask, **told)
    check_dropout(dropout)
    words = FlashWords(scaling, softcap=softcap or 0.0, sinks=_sinks(s_aux))
    asked = words.asked(int(query.shape[2]), int(key.shape[2]))
    o = calls.attention(query, key, value, attn_mask=within_reach(attention_mask), **asked)
    return o.transpose(1, 2).contiguous(), None


def _make_mask(by_flash: Callable[..., Any], by_sdpa: Callable[..., Any], **asked: Any) -> Any:
    """As transformers asks for a mask: of padding where flash-attn's functions are told the rest by their
    arguments, else of all pairs."""
    parts = _parts_of(asked.get("mask_function"))
    names = {getattr(part, "__qualname__", "").partition(".")[0] for part in parts}
    packs = "packed_sequence_mask_function" in names
    # The glue finds sequences in positions of a single row alone.
    told = names <= _OWN_MASKS and not (packs and asked.get("batch_size", 1) > 1)
    return by_flash(**asked) if told else by_sdpa(**asked)


def _sinks(s_aux: Any) -> Any:
    return None if s_aux is None else s_aux.float()


# ---- flash-attn's functions, with the sinks that transformers passes where a function names them


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Any = None,
) -> Any:
    """Computes attention of (batch, seqlen, heads, head_dim), with a logit a head in the denominator."""
    check_dropout(dropout_p)
    check_deterministic(deterministic, q, k, v)
    words = FlashWords(softmax_scale, causal, window_size, softcap, sinks=_sinks(s_aux))
    return dense(q, k, v, words, return_lse=False)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    block_table: Any = None,
    s_aux: Any = None,
) -> Any:
    """Computes attention of packed sequences, with a logit of each head in the denominator."""
    check_dropout(dropout_p)
    check_deterministic(deterministic, q, k, v)
    words = FlashWords(softmax_scale, causal, window_size, softcap, sinks=_sinks(s_aux))
    return packed(
        *(q, k, v, words, False),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_table=block_table,
    )


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    cache_seqlens: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Any = None,
) -> Any:
    """Computes attention beside a cache to which k and v are written, with a logit of each head in the
    denominator."""
    words = FlashWords(softmax_scale, causal, window_size, softcap, sinks=_sinks(s_aux))
    cache = Cache(k_cache, v_cache, cache_seqlens, block_table=block_table)
    return cached(q, cache, words, False, k=k, v=v)
