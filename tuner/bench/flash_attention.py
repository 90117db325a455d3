"""FlashAttention-3 and -4, which know windows, soft caps, chunks, sinks and packed documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .inputs import Inputs
from .unserved import Call, Unserved

#: What each knows of `Scoring`.
FEATURES_3 = frozenset({"window", "chunk", "softcap", "documents"})
FEATURES_4 = frozenset({"window", "softcap", "sinks", "documents"})


def by_rows(inputs: Inputs) -> list[Any]:
    """Returns q, k and v as (batch, seqlen, heads, head_dim), the layout that these libraries are fastest
    with."""
    return [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)]


def flash_3(inputs: Inputs) -> Call:
    """Returns a call of FlashAttention-3. Raises `Unserved`."""
    import flash_attn_interface as library  # pyright: ignore[reportMissingImports]

    asked = inputs.problem.scoring
    options: dict[str, Any] = {}
    if asked.window is not None:
        options["window_size"] = asked.window
    if asked.chunk:
        options["attention_chunk"] = asked.chunk
    return _call(library, inputs, options)


def flash_4(inputs: Inputs) -> Call:
    """Returns a call of FlashAttention-4. Raises `Unserved`."""
    from flash_attn import cute as library  # pyright: ignore[reportMissingImports]

    asked = inputs.problem.scoring
    options: dict[str, Any] = {}
    if asked.window is not None:
        options["window_size"] = tuple(None if side < 0 else side for side in asked.window)
    if asked.sinks:
        options["learnable_sink"] = inputs.arrays["sinks"].to(inputs.torch.bfloat16)
    return _call(library, inputs, options)


def _call(library: Any, inputs: Inputs, options: dict[str, Any]) -> Call:
    """The call of a library, in its packed form where there are documents."""
    options["causal"] = inputs.problem.causal
    if inputs.problem.scoring.softcap:
        options["softcap"] = inputs.problem.scoring.softcap
    q, k, v = by_rows(inputs)
    if not inputs.problem.scoring.documents:
        return _first_of(lambda: library.flash_attn_func(q, k, v, **options), q.shape[:3], inputs)
    bounds, longest = document_bounds(inputs)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    starts = inputs.torch.from_numpy(bounds).to("cuda")
    options |= {f"cu_seqlens_{of}": starts for of in "qk"} | {f"max_seqlen_{of}": longest for of in "qk"}
    return _first_of(lambda: library.flash_attn_varlen_func(*packed, **options), q.shape[:3], inputs)


def _first_of(function: Callable[[], Any], rows: tuple[int, ...], inputs: Inputs) -> Call:
    """The call that returns o as (batch, heads, seqlen, head_dim), where a library may return more."""
    shape = (*rows, inputs.problem.head_dim_v)

    def call() -> Any:
        found = function()
        return (found[0] if isinstance(found, tuple) else found).reshape(shape).transpose(1, 2)

    return call


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
