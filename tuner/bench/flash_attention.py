"""FlashAttention-2, -3 and -4, which know windows, soft caps, chunks, sinks, packed sequences and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .inputs import Inputs
from .unserved import Call, Unserved

#: What each knows of `Scoring`.
FEATURES_2 = frozenset({"window", "softcap", "documents"})
FEATURES_3 = frozenset({"window", "chunk", "softcap", "documents"})
FEATURES_4 = frozenset({"window", "softcap", "sinks", "documents"})


def by_rows(inputs: Inputs) -> list[Any]:
    """Returns q, k and v as (batch, seqlen, heads, head_dim), the layout that these libraries are fastest
    with."""
    return [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)]


def flash_2(inputs: Inputs) -> Call:
    """Returns a call of FlashAttention-2 by its own library. Raises `Unserved`."""
    from flash_attn import flash_attn_interface as library  # pyright: ignore[reportMissingImports]

    asked = inputs.problem.scoring
    options: dict[str, Any] = {} if asked.window is None else {"window_size": asked.window}
    if inputs.problem.layout.is_paged:
        return _of_cache(library, inputs, options, table="block_table")
    return _call(library, inputs, options)


def flash_3(inputs: Inputs, **told: Any) -> Call:
    """Returns a call of FlashAttention-3, told what else it shall do. Raises `Unserved`."""
    import flash_attn_interface as library  # pyright: ignore[reportMissingImports]

    asked = inputs.problem.scoring
    options: dict[str, Any] = dict(told)
    if asked.window is not None:
        options["window_size"] = asked.window
    if inputs.problem.seqlen_q < inputs.problem.seqlen_k and not inputs.problem.backward:
        # It then says itself how many blocks share a row's keys, as it does of caches: by default one.
        options["num_splits"] = 0
    if asked.chunk:
        options["attention_chunk"] = asked.chunk
    if inputs.problem.latent:
        return _latent(library, inputs, options)
    if inputs.problem.layout.is_paged:
        return _of_cache(library, inputs, options, table="page_table")
    return _call(library, inputs, options)


def flash_mla(inputs: Inputs) -> Call:
    """Returns a call of FlashMLA, which computes latent attention alone. Raises `Unserved`."""
    import flash_mla as library  # pyright: ignore[reportMissingImports]

    p = inputs.problem
    if not p.latent:
        raise Unserved("computes latent attention alone")
    q, lengths = inputs.q.transpose(1, 2).contiguous(), inputs.indices["seqused_k"]
    planned = library.get_mla_metadata(lengths, p.seqlen_q * p.group, p.num_kv_heads)
    arrays = (q, inputs.k, inputs.indices["page_table"], lengths, p.head_dim_v)
    function = library.flash_mla_with_kvcache
    return _first_of(lambda: function(*arrays, *planned, causal=p.causal), lambda o: o.transpose(1, 2))


def flash_4(inputs: Inputs, **told: Any) -> Call:
    """Returns a call of FlashAttention-4, told what else it shall do. Raises `Unserved`."""
    from flash_attn import cute as library  # pyright: ignore[reportMissingImports]

    asked = inputs.problem.scoring
    options: dict[str, Any] = dict(told)
    if asked.window is not None:
        options["window_size"] = tuple(None if side < 0 else side for side in asked.window)
    if asked.sinks:
        options["learnable_sink"] = inputs.arrays["sinks"].to(inputs.torch.bfloat16)
    if inputs.problem.layout.is_paged:
        options |= {name: inputs.indices[name] for name in ("page_table", "seqused_k")}
        return _of_pages(library.flash_attn_varlen_func, inputs, options)
    return _call(library, inputs, options)


def _call(library: Any, inputs: Inputs, options: dict[str, Any]) -> Call:
    """The call of a library, in its packed form where there are packed sequences, or documents."""
    options = {**_usual(inputs), **options}
    if inputs.problem.layout.is_packed:
        arrays = (inputs.q, inputs.k, inputs.v)
        options |= _starts(inputs, "q") | _starts(inputs, "k")
        return _first_of(lambda: library.flash_attn_varlen_func(*arrays, **options), lambda o: o)
    q, k, v = by_rows(inputs)
    shape = (*q.shape[:3], inputs.problem.head_dim_v)
    if not inputs.problem.scoring.documents:
        return _first_of(lambda: library.flash_attn_func(q, k, v, **options), _heads_first(shape))
    packed, starts, longest = packed_documents(inputs, (q, k, v))
    options |= {f"cu_seqlens_{of}": starts for of in "qk"} | {f"max_seqlen_{of}": longest for of in "qk"}
    return _first_of(lambda: library.flash_attn_varlen_func(*packed, **options), _heads_first(shape))


def _of_cache(library: Any, inputs: Inputs, options: dict[str, Any], *, table: str) -> Call:
    """The call of a library that calls what lies in pages a cache."""
    options = {
        **options,
        "cache_seqlens": inputs.indices["seqused_k"],
        table: inputs.indices["page_table"],
    }
    return _of_pages(library.flash_attn_with_kvcache, inputs, options)


def _latent(library: Any, inputs: Inputs, options: dict[str, Any]) -> Call:
    """The call of a library that takes the columns of keys that are values apart from those that are not."""
    p = inputs.problem
    q = inputs.q.transpose(1, 2).contiguous()
    k = inputs.k if p.layout.is_paged else inputs.k.transpose(1, 2).contiguous()
    options = {**_usual(inputs), **options, "qv": q[..., : p.head_dim_v], "softmax_scale": p.head_dim**-0.5}
    if p.layout.is_paged:
        options["page_table"], options["cache_seqlens"] = (
            inputs.indices[name] for name in ("page_table", "seqused_k")
        )
    arrays = (q[..., p.head_dim_v :], k[..., p.head_dim_v :], k[..., : p.head_dim_v])
    shape = (*q.shape[:3], p.head_dim_v)
    return _first_of(lambda: library.flash_attn_with_kvcache(*arrays, **options), _heads_first(shape))


def _of_pages(function: Callable[..., Any], inputs: Inputs, options: dict[str, Any]) -> Call:
    """The call of a function of keys in pages, of packed queries or of as many in each sequence."""
    options = {**_usual(inputs), **options}
    if inputs.problem.layout.is_packed:
        options |= _starts(inputs, "q")
        return _first_of(lambda: function(inputs.q, inputs.k, inputs.v, **options), lambda o: o)
    q = inputs.q.transpose(1, 2).contiguous()
    shape = (*q.shape[:3], inputs.problem.head_dim_v)
    return _first_of(lambda: function(q, inputs.k, inputs.v, **options), _heads_first(shape))


def _usual(inputs: Inputs) -> dict[str, Any]:
    """What each of them calls the same."""
    softcap = inputs.problem.scoring.softcap
    return {"causal": inputs.problem.causal} | ({"softcap": softcap} if softcap else {})


def _starts(inputs: Inputs, of: str) -> dict[str, Any]:
    """Where packed sequences begin, and the most rows that one has."""
    longest = max(getattr(inputs.problem.lengths, of))
    return {f"cu_seqlens_{of}": inputs.indices[f"cu_seqlens_{of}"], f"max_seqlen_{of}": longest}


def _heads_first(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """What makes (batch, heads, seqlen, head_dim) of rows of (batch, seqlen, heads)."""
    return lambda o: o.reshape(shape).transpose(1, 2)


def _first_of(function: Callable[[], Any], shaped: Callable[[Any], Any]) -> Call:
    """The call that returns o, where a library may return more."""

    def call() -> Any:
        found = function()
        return shaped(found[0] if isinstance(found, tuple) else found)

    return call


def packed_documents(inputs: Inputs, by_row: Sequence[Any]) -> tuple[list[Any], Any, int]:
    """Returns such arrays with all documents one behind the other; where each begins, and the last ends, on
    the card; and the longest's length. Raises `Unserved` unless rows and keys are as many."""
    bounds, longest = document_bounds(inputs)
    packed = [x.reshape(-1, *x.shape[2:]) for x in by_row]
    return packed, inputs.torch.from_numpy(bounds).to("cuda"), longest


def document_bounds(inputs: Inputs) -> tuple[np.ndarray, int]:
    """Returns where the documents of all batches begin, one behind the other, and where the last ends, int32;
    and the longest's length. Raises `Unserved` unless rows and keys are as many."""
    p = inputs.problem
    if p.seqlen_q != p.seqlen_k:
        raise Unserved("packed, documents have as many queries as keys")
    first = np.arange(p.batch)[:, None] * p.seqlen_k
    begins = np.unique(np.asarray(inputs.values["document_begin"]) + first)
    bounds = np.append(begins, p.batch * p.seqlen_k).astype(np.int32)
    return bounds, int(np.diff(bounds).max())
