"""Emitted modules as a benchmark uses them: imported from their files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from ...gen.layout import DENSE, PACKED
from ..cards.score_values import by_keyword
from .inputs import Inputs
from .unserved import Call


def load(path: Path) -> ModuleType:
    """Imports the emitted module in a file."""
    spec = importlib.util.spec_from_file_location(f"flashgen_bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked_of(module: ModuleType, inputs: Inputs) -> dict[str, Any]:
    """Returns what a call of the module tells of masks and changes of scores, by keyword."""
    keywords = getattr(_kernel(module), "keywords", {})
    return by_keyword(keywords, {**inputs.values, **inputs.arrays})


def _lists_of(module: ModuleType) -> dict[str, Any]:
    """What keeps lists of the tiles that masks leave, where they are no intervals: the first call that has it
    makes them."""
    lists = getattr(module, "TileLists", None)
    return {} if lists is None else {"lists": lists()}


def call_of(module: ModuleType, inputs: Inputs, out: Any = None, *, same_bits: bool = False) -> Call:
    """Returns the call of a module's attention on inputs, into ``out`` where it is given. Which block takes
    what of packed sequences is planned anew by each call. ``same_bits``: of gradients, those that have the
    same bits every run are asked for."""
    p, given = inputs.problem, inputs.indices
    if p.latent:
        return _latent_call(module, inputs, out)
    if p.backward:
        return _gradients_call(module, inputs, {"deterministic": True} if same_bits else {})
    options: dict[str, Any] = {
        "causal": p.causal,
        "out": out,
        **asked_of(module, inputs),
        **_lists_of(module),
    }
    q, k, v = inputs.q, inputs.k, inputs.v
    if p.has_scales:
        q, k, v, options["scales"] = inputs.eight
    if p.layout is DENSE:
        return lambda: module.attention(q, k, v, **options)
    options["max_seqlen_k"] = max(p.lengths.k)
    if p.layout.is_packed:
        options["max_seqlen_q"] = max(p.lengths.q)
    if p.layout is PACKED:
        starts = given["cu_seqlens_q"], given["cu_seqlens_k"]
        return lambda: module.attention_varlen(q, k, v, *starts, **options)
    if p.layout.is_packed:
        options["cu_seqlens_q"] = given["cu_seqlens_q"]
    pages = given["page_table"], given["seqused_k"]
    return lambda: module.attention_paged(q, k, v, *pages, **options)


def _latent_call(module: ModuleType, inputs: Inputs, out: Any) -> Call:
    """The call of a module that takes rows before heads, and one cache of keys and values."""
    p, given = inputs.problem, inputs.indices
    q, cache, pages = inputs.q.transpose(1, 2), inputs.k, ()
    options = {"causal": p.causal, "out": None if out is None else out.transpose(1, 2)}
    if p.layout.is_paged:
        pages = given["page_table"], given["seqused_k"]
        options["max_seqlen_k"] = max(p.lengths.k)
    else:
        cache = cache.transpose(1, 2)
    return lambda: module.attention_latent(q, cache, *pages, **options).transpose(1, 2)


def _gradients_call(module: ModuleType, inputs: Inputs, told: dict[str, Any]) -> Call:
    """The call of a module's gradients, of what a forward pass has left."""
    arrays = (inputs.q, inputs.k, inputs.v, *(inputs.passed[name] for name in ("o", "lse", "dout")))
    options = {"causal": inputs.problem.causal, **told, **asked_of(module, inputs)}
    return lambda: module.gradients(*arrays, **options)


def compile_module(module: ModuleType, arch: int, causal: bool) -> bytes:
    """Returns what the module's first call under that mask would compile."""
    return module._bound.compile(_kernel(module).name, arch, causal)


def give_cubin(module: ModuleType, causal: bool, cubin: bytes) -> None:
    """Lets the module load what was compiled before, instead of compiling it."""
    module._bound.carry(_kernel(module).name, causal, cubin)


def _kernel(module: ModuleType) -> Any:
    """The module's only kernel, of outputs or of gradients."""
    (tuned,) = module.KERNELS if hasattr(module, "KERNELS") else module.GRADIENTS
    return tuned
