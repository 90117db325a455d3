"""Other libraries' names by flashgen's kernels on a real card, beside what those libraries compute there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from flashgen.compat import flash_attn, flash_attn_interface, scaled_dot_product_attention
from flashgen.compat import flex_attention as ours

from tests.support.torch_attention import assert_gradients, assert_near, attended
from tests.tuner.compat.test_transformers import tiny

ROWS, KEYS, D = 130, 200, 64


def drawn(torch: Any, *shapes: tuple[int, ...], dtype: str = "bfloat16") -> list[Any]:
    generator = torch.Generator(device="cuda").manual_seed(11)
    return [torch.randn(x, generator=generator, device="cuda").to(getattr(torch, dtype)) for x in shapes]


def rows_first(torch: Any, rows: int = ROWS, keys: int = KEYS) -> list[Any]:
    return drawn(torch, (2, rows, 4, D), (2, keys, 2, D), (2, keys, 2, D))


def turned(*tensors: Any) -> list[Any]:
    return [x.transpose(1, 2) for x in tensors]


# ---- flash-attn --------------------------------------------------------------------------------------------


def test_flash_attn_with_its_log_sum_exp(torch: Any) -> None:
    q, k, v = rows_first(torch)
    o, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(63, 0), return_attn_probs=True)
    wanted, wanted_lse = attended(torch, *turned(q, k, v), causal=True, window=(63, 0))
    assert_near(o.transpose(1, 2), wanted, 1e-2)
    assert (lse.double() - wanted_lse).abs().max() < 2e-2
    o, lse = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    wanted, wanted_lse = attended(torch, *turned(q, k, v), causal=True)
    assert_near(o.transpose(1, 2), wanted, 1e-2)
    assert (lse.double() - wanted_lse).abs().max() < 2e-2


def test_flash_attns_own_kernels_compute_the_same(torch: Any) -> None:
    cute = pytest.importorskip("flash_attn.cute", reason="needs FlashAttention-4", exc_type=ImportError)
    q, k, v = rows_first(torch)
    theirs = cute.flash_attn_func(q, k, v, causal=True)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert_near(flash_attn.flash_attn_func(q, k, v, causal=True), theirs.double(), 1e-2)


def test_gradients_of_what_is_packed_in_one_tensor(torch: Any) -> None:
    (qkv,) = drawn(torch, (2, ROWS, 3, 4, D))
    qkv.requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    o = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    wanted, _ = attended(torch, *(exact[:, :, i].transpose(1, 2) for i in range(3)), causal=True)
    assert_gradients(o, wanted.transpose(1, 2), [qkv], [exact], 3e-2)


def test_packed_sequences(torch: Any) -> None:
    q, k, v = rows_first(torch)
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (ROWS, KEYS)]
    packed = (x.flatten(0, 1) for x in (q, k, v))
    o = flash_attn.flash_attn_varlen_func(*packed, *starts, ROWS, KEYS, causal=True)
    wanted, _ = attended(torch, *turned(q, k, v), causal=True)
    assert_near(o.view(q.shape).transpose(1, 2), wanted, 1e-2)


def test_new_keys_are_written_to_pages_and_attended_to(torch: Any) -> None:
    rows, used, page = 3, (150, 64), 32
    q, k, v = rows_first(torch, rows, rows)
    caches = drawn(torch, *[(14, page, 2, D)] * 2)
    table = torch.randperm(14, generator=torch.Generator().manual_seed(2)).view(2, 7).to(torch.int32).cuda()
    lengths = torch.tensor(used, dtype=torch.int32, device="cuda")
    whole = [cache[table.long()].flatten(1, 2) for cache in caches]
    o = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True
    )
    for i, length in enumerate(used):
        keys, values = (
            torch.cat([old[i : i + 1, :length], new[i : i + 1]], 1)
            for old, new in zip(whole, (k, v), strict=True)
        )
        wanted, _ = attended(torch, *turned(q[i : i + 1], keys, values), causal=True)
        assert_near(o[i : i + 1].transpose(1, 2), wanted, 1e-2)
        assert torch.equal(caches[0][table[i].long()].flatten(0, 1)[: length + rows], keys[0])


# ---- FlexAttention -----------------------------------------------------------------------------------------


def functions(torch: Any) -> dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]]:
    """Changes of scores and masks by name."""
    documents = torch.arange(KEYS, device="cuda", dtype=torch.int32)[None].repeat(2, 1) // 70
    (table,) = drawn(torch, (4, 2 * KEYS), dtype="float32")

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 10.0 * torch.tanh(score / 10.0)

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, q_idx - kv_idx + KEYS]

    return {"soft cap": (soft_cap, causal), "bias": (relative, None), "documents": (None, document)}


@pytest.mark.parametrize("name", ["soft cap", "bias", "documents"])
def test_flex_attention(torch: Any, name: str) -> None:
    """Beside PyTorch's own, uncompiled, in float64; by masks of either library."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs FlexAttention")
    score, mask = functions(torch)[name]
    q, k, v = drawn(torch, (2, 4, ROWS, D), (2, 2, KEYS, D), (2, 2, KEYS, D))
    told = {"score_mod": score, "enable_gqa": True}
    lengths = (ROWS, KEYS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow uncompiled
        blocks = None if mask is None else flex.create_block_mask(mask, 2, None, *lengths, device=q.device)
        wanted = flex.flex_attention(*(x.double() for x in (q, k, v)), block_mask=blocks, **told)
    assert_near(ours.flex_attention(q, k, v, block_mask=blocks, **told), wanted, 1e-2)
    if mask is not None:
        blocks = ours.create_block_mask(mask, None, None, *lengths)
        assert_near(ours.flex_attention(q, k, v, block_mask=blocks, **told), wanted, 1e-2)


# ---- PyTorch, transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal, fewer rows", "mask", "bias", "grouped", "dropped"])
def test_scaled_dot_product_attention(torch: Any, name: str) -> None:
    kv_heads = 2 if name == "grouped" else 4
    q, k, v = drawn(torch, (2, 4, ROWS, D), (2, kv_heads, KEYS, D), (2, kv_heads, KEYS, D), dtype="float32")
    (bias,) = drawn(torch, (4, ROWS, KEYS), dtype="float32")
    asked: dict[str, Any] = {
        "causal, fewer rows": {"is_causal": True},
        "mask": {"attn_mask": bias > -1},
        "bias": {"attn_mask": bias},
        "grouped": {"enable_gqa": True},
        "dropped": {"dropout_p": 0.5},
    }[name]
    found = scaled_dot_product_attention(q, k, v, **asked)
    if name == "dropped":
        assert found.shape == q.shape  # PyTorch's, by chance
        return
    exact = {each: x.double() if x is bias else x for each, x in asked.items()}
    wanted = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), **exact)
    assert_near(found, wanted, 2e-6)


def test_a_model_of_transformers(torch: Any) -> None:
    """With padding and windows, in float32."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    compat = pytest.importorskip("flashgen.compat.transformers")
    compat.register()
    served, eager = (tiny(transformers, "mistral", each).cuda() for each in ("flashgen", "eager"))
    eager.load_state_dict(served.state_dict())
    ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(1)).cuda()
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    with torch.no_grad():
        for mask in (None, padding):
            found, wanted = (model(ids, attention_mask=mask).logits for model in (served, eager))
            counted = slice(None) if mask is None else mask.bool()
            distance = (found[counted] - wanted[counted]).norm() / wanted[counted].norm()
            assert math.isfinite(distance) and distance < 1e-4
