"""What emitted modules offer, by the layout of what their kernels take."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem


@dataclass(frozen=True)
class Offer:
    """What a module offers: its functions, the one that computes attention first, and what is behind them.

    ``bound`` is the runtime's class whose methods they are, ``program`` what the module does when it is run,
    ``usual`` what a call of the first is always told.
    """

    functions: tuple[str, ...]
    bound: str
    program: str
    usual: str = "q, k, v"

    @property
    def call(self) -> str:
        """A call of the first function."""
        return f"{self.functions[0]}({self.usual})"


_ALL = ("explain", "register_torch", "use")
_CACHES = "q, k_cache, v_cache, page_table, seqused_k"
_GROWN = "q, k_cache, v_cache, k, v, cache_seqlens=keys"
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q=most, max_seqlen_k=most"
_PACKED_QUERIES = "cu_seqlens_q=cu_seqlens_q, max_seqlen_q=most"


def offer_of(problem: Problem, *, scored: bool = False, differentiable: bool = False) -> Offer:
    """Returns what a module of a problem's kernels offers, some of which are ``scored``: have masks or
    changes of scores. It is ``differentiable`` by kernels for gradients beside those. Of other libraries'
    functions flash-attn's alone know scales."""
    layout = problem.layout
    if problem.backward and layout.is_packed:
        functions, usual = ("gradients_varlen", *_ALL), f"q, k, v, o, lse, dout, {_LENGTHS}"
        return Offer(functions, "PackedGradients", "run_packed_gradients_module", usual)
    if problem.backward:
        functions, usual = ("gradients", *_ALL), "q, k, v, o, lse, dout"
        bound, program = ("Gradients", "run_gradients_module")
        if scored:
            bound, program = ("ScoredGradients", "run_scored_gradients_module")
        return Offer(functions, bound, program, usual)
    paged, packed = layout.is_paged, layout.is_packed
    if paged and packed:
        known, of = ("flash_attn_varlen_func",), f"{_CACHES}, {_PACKED_QUERIES}"
    elif paged:
        known, of = ("flash_attn_with_kvcache",), _CACHES
    elif packed:
        known, of = ("flash_attn_varlen_func", "register_transformers"), f"q, k, v, {_LENGTHS}"
    elif problem.append is not None:
        known, of = ("flash_attn_with_kvcache",), _GROWN
    else:
        known, of = ("register_transformers", "sdpa"), "q, k, v"
    if problem.latent:
        functions = ("attention_latent", *_ALL)
        if not paged:
            return Offer(functions, "LatentKeys", "run_module", "q, cache")
        return Offer(functions, "LatentAttention", "run_paged_module", "q, cache, page_table, seqused_k")
    if problem.has_scales or problem.has_key_scales:
        known = tuple(name for name in known if name.startswith("flash_"))
    if paged:
        return Offer(("attention_paged", *_ALL, *known), "PagedAttention", "run_paged_module", of)
    if problem.append is not None:
        return Offer(("attention_append", *_ALL, *known), "CacheAttention", "run_cache_module", of)
    if packed and differentiable:
        functions = ("attention_varlen", *_ALL, "gradients_varlen", *known)
        return Offer(functions, "DifferentiablePackedAttention", "run_differentiable_packed_module", of)
    if packed:
        return Offer(("attention_varlen", *_ALL, *known), "PackedAttention", "run_packed_module", of)
    if differentiable:
        functions = ("attention", *_ALL, "gradients", *known)
        bound, program = ("DifferentiableAttention", "run_differentiable_module")
        if scored:
            bound, program = ("DifferentiableScoredAttention", "run_differentiable_scored_module")
        return Offer(functions, bound, program, of)
    bound, program = ("ScoredAttention", "run_scored_module") if scored else ("Attention", "run_module")
    return Offer(("attention", *_ALL, *known), bound, program, of)
