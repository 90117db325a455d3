"""Arguments have the names, the order and the defaults of the originals, as recorded and as installed."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import flashgen.compat as compat
import pytest
from flashgen.tuner.compat import flash_attn, flash_attn_interface, flex_attention

_TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
#: flash-attn 2.8.3, flash_attn/flash_attn_interface.py.
FLASH_2 = {
    "flash_attn_func": f"q, k, v, {_TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {_TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {_TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_TAIL}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False",
}
_TAIL_3 = (
    "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
#: FlashAttention-3, hopper/flash_attn_interface.py.
FLASH_3 = {
    "flash_attn_func": f"q, k, v, {_TAIL_3}",
    "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, seqused_q=None, seqused_k=None, {_TAIL_3}",
    "flash_attn_qkvpacked_func": "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, "
    "num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    # Its qkv_dtype is torch.bfloat16 where nobody says, which nobody reads here.
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=None, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
    "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
    "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, "
    "k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
    "pack_gqa=None, sm_margin=0, return_softmax_lse=False",
}
#: PyTorch 2.15, torch/nn/attention/flex_attention.py.
FLEX = {
    "flex_attention": "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, "
    "return_lse=False, kernel_options=None, *, return_aux=None",
    "create_block_mask": "mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False, "
    "separate_full_blocks=True, compute_dq_write_order=False, dq_kv_order=True",
    "create_mask": "mod_fn, B, H, Q_LEN, KV_LEN, device=None",
    "and_masks": "*mask_mods",
    "or_masks": "*mask_mods",
    "noop_mask": "batch, head, token_q, token_kv",
}
#: PyTorch 2.15, torch/nn/functional.py: it has no signature to look at.
SDPA = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False"
ROOMS = {"flash_attn": (flash_attn, FLASH_2), "flash_attn_3": (flash_attn_interface, FLASH_3)}
ROOMS |= {"flex_attention": (flex_attention, FLEX)}
#: Where installed originals are.
ORIGINALS = {
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "flex_attention": "torch.nn.attention.flex_attention",
}
CASES = [(room, name) for room, (_, recorded) in ROOMS.items() for name in recorded]


def arguments(function: Any) -> str:
    """A function's arguments without their types."""
    signature = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))[1:-1]


@pytest.mark.parametrize(("room", "name"), CASES)
def test_arguments_are_those_recorded_of_the_original(room: str, name: str) -> None:
    module, recorded = ROOMS[room]
    assert arguments(getattr(module, name)) == recorded[name]


@pytest.mark.parametrize("room", ROOMS)
def test_all_that_is_offered_is_recorded(room: str) -> None:
    module, recorded = ROOMS[room]
    offered = {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    assert offered == set(recorded)


def test_arguments_of_scaled_dot_product_attention() -> None:
    assert arguments(compat.scaled_dot_product_attention) == SDPA


@pytest.mark.parametrize(("room", "name"), CASES)
def test_arguments_are_those_of_the_installed_original(room: str, name: str) -> None:
    """Older versions know fewer of them, at the end."""
    theirs = pytest.importorskip(ORIGINALS[room], reason=f"needs {ORIGINALS[room]}")
    if not hasattr(theirs, name):
        pytest.skip(f"this {ORIGINALS[room]} has no {name}")
    have, wanted = (arguments(getattr(each, name)) for each in (ROOMS[room][0], theirs))
    assert have.startswith(wanted.replace("=torch.bfloat16", "=None").rstrip(")")), wanted


def test_names_of_the_package_are_those_of_the_room() -> None:
    for name in ("flash_attn", "flash_attn_interface", "flex_attention", "transformers"):
        short, long = (
            importlib.import_module(f"flashgen.{where}.{name}") for where in ("compat", "tuner.compat")
        )
        assert all(getattr(short, each) is getattr(long, each) for each in long.__all__)
    from flashgen.tuner.compat import scaled_dot_product_attention

    assert compat.scaled_dot_product_attention is scaled_dot_product_attention
