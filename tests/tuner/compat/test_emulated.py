"""Others' names on an emulated card: the arguments come to kernels, and the results are right."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashgen import compat
from flashgen.compat import flash_attn, flash_attn_interface, flex_attention
from flashgen.compat.transformers import register

from tests.support.emulated import needs_compiler
from tests.support.front_stand_in import attended
from tests.tuner.compat.test_transformers import tiny

pytestmark = [needs_compiler, pytest.mark.thorough]
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((1, 4, 20, 16)).astype(np.float32)
K, V = RNG.standard_normal((2, 1, 2, 36, 16)).astype(np.float32)


@pytest.fixture(autouse=True)
def on_an_emulated_card() -> Any:
    with compat.using(device="sim:gtx-1080"):
        yield


def near(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, atol=5e-6)


def test_flash_attention() -> None:
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (Q, K, V)]
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    asked = {"causal": True, "softcap": 2.0, "alibi_slopes": slopes}
    o, _, _ = flash_attn.flash_attn_func(*turned, window_size=(5, -1), return_attn_probs=True, **asked)
    near(o.swapaxes(1, 2), attended(Q, K, V, window=(5, 0), **asked)[0])


def test_scaled_dot_product_attention() -> None:
    wanted = attended(K[:, :1], Q[:, :1], Q[:, :1], window=(-1, 16))[0]
    near(compat.scaled_dot_product_attention(K[:, :1], Q[:, :1], Q[:, :1], is_causal=True), wanted)
    for scale in (0.0, -0.3):
        near(
            compat.scaled_dot_product_attention(Q, K, V, scale=scale, enable_gqa=True),
            attended(Q, K, V, scale=scale)[0],
        )
    mask = np.where(RNG.random((20, 36)) < 0.5, 0, np.finfo(np.float32).min).astype(np.float32)
    mask[3] = np.finfo(np.float32).min  # a row that is the mean of its values
    near(
        compat.scaled_dot_product_attention(Q, K, V, mask, enable_gqa=True),
        attended(Q, K, V, attn_mask=mask)[0],
    )


@pytest.mark.parametrize("scale", [None, 1e-3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_the_least_numbers_are_means_in_16_bits_too(dtype: str, scale: float | None) -> None:
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v = (x.astype(narrow) for x in (Q, K, V))
    mask = np.zeros((20, 36), np.float32)
    mask[3:5], mask[7, :30] = np.finfo(np.float32).min, np.finfo(np.float32).min
    with compat.using(device="sim:a100"):
        o = compat.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    wanted, _ = attended(q, k, v, attn_mask=mask, scale=scale)
    np.testing.assert_allclose(o.astype(np.float32), wanted, atol=1e-2)


def test_flex_attention_reads_what_functions_captured() -> None:
    documents = np.sort(RNG.integers(0, 3, (1, 36))).astype(np.int32)

    def document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return documents[b, q] == documents[b, k]

    def decaying(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - 0.1 * (h + 1) * abs(q - k)

    mask = flex_attention.and_masks(lambda b, h, q, k: q >= k, document)
    blocks = flex_attention.create_block_mask(mask, 1, None, 20, 36)
    o, lse = flex_attention.flex_attention(Q, K, V, decaying, blocks, enable_gqa=True, return_lse=True)
    wanted = attended(Q, K, V, mask=mask, score=decaying)
    near(o, wanted[0])
    near(lse, wanted[1])


def test_packed_sequences_of_flash_attention() -> None:
    starts = np.array([0, 7, 20], np.int32)
    q, k, v = (x[0].swapaxes(0, 1)[:20] for x in (Q, K, V))
    o, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, starts, starts, 13, 13, causal=True, window_size=(3, 0), return_attn_probs=True
    )
    for rows in (slice(0, 7), slice(7, 20)):
        one = (x[rows].swapaxes(0, 1)[None] for x in (q, k, v))
        wanted, of_rows = attended(*one, causal=True, window=(3, 0))
        near(o[rows].swapaxes(0, 1), wanted[0])
        near(lse[:, rows], of_rows[0])


def test_chunks_of_packed_sequences() -> None:
    starts = np.array([0, 20], np.int32)
    q, k, v = (x[0].swapaxes(0, 1)[:20] for x in (Q, K, V))
    o = flash_attn_interface.flash_attn_varlen_func(q, k, v, starts, starts, 20, 20, attention_chunk=6)
    wanted, _ = attended(*(x.swapaxes(0, 1)[None] for x in (q, k, v)), chunk=6)
    near(o.swapaxes(0, 1), wanted[0])


def test_a_cache_that_grows() -> None:
    cache = np.zeros((2, 2, 32, 2, 16), np.float32)
    keys = RNG.standard_normal((2, 2, 11, 2, 16)).astype(np.float32)
    cache[:, :, :9] = keys[:, :, :9]
    q, used = RNG.standard_normal((2, 2, 4, 16)).astype(np.float32), np.array([9, 6], np.int32)
    new = [np.stack([part[0, 9:11], part[1, 6:8]]) for part in keys]
    o, lse = flash_attn.flash_attn_with_kvcache(
        *(q, *cache, *new), cache_seqlens=used, causal=True, window_size=(5, 0), return_softmax_lse=True
    )
    for i, length in enumerate(used + 2):
        one = (x.swapaxes(0, 1)[None] for x in (q[i], *keys[:, i, :length]))
        wanted, of_rows = attended(*one, causal=True, window=(5, 0))
        near(o[i].swapaxes(0, 1), wanted[0])
        near(lse[i], of_rows[0])


def test_functions_of_tensors_have_captured_tensors() -> None:
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    documents = torch.arange(36) // 12
    blocks = flex_attention.create_block_mask(
        lambda b, h, q, k: documents[q] == documents[k], None, None, 20, 36
    )
    o = flex_attention.flex_attention(*map(torch.from_numpy, (Q, K, V)), block_mask=blocks, enable_gqa=True)
    seen = (documents[:20, None] == documents).numpy()
    near(o, attended(Q, K, V, attn_mask=seen)[0])


def test_lengths_that_functions_captured_are_of_pytorchs_own_integers() -> None:
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    lengths, far = torch.tensor([30]), torch.tensor([1 << 40])  # int64, as PyTorch makes integers

    def kept(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((k < lengths[b]) & (k < far[b])) | (q >= k)

    blocks = flex_attention.create_block_mask(kept, None, None, 20, 36)
    o = flex_attention.flex_attention(*map(torch.from_numpy, (Q, K, V)), block_mask=blocks, enable_gqa=True)
    near(o, attended(Q, K, V, attn_mask=np.broadcast_to(np.arange(36) < 30, (20, 36)))[0])
    below = -far
    blocks = flex_attention.create_block_mask(
        lambda b, h, q, k: (k >= below[b]) & (k < below[b] + far[b] + 7), None, None, 20, 36
    )
    o = flex_attention.flex_attention(*map(torch.from_numpy, (Q, K, V)), block_mask=blocks, enable_gqa=True)
    near(o, attended(Q, K, V, attn_mask=np.broadcast_to(np.arange(36) < 7, (20, 36)))[0])


@pytest.mark.parametrize("batch", ["padded", "packed"])
def test_models_of_transformers_are_trained(batch: str) -> None:
    """Of padded and of packed batches: gradients of all parameters are those of eager attention."""
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    register()
    ours, eager = (tiny(transformers, "llama", each).train() for each in ("flashgen", "eager"))
    eager.load_state_dict(ours.state_dict())
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    if batch == "padded":
        mask = torch.ones_like(ids)
        mask[0, 7:] = 0
        for model in (ours, eager):
            model(ids, attention_mask=mask).logits[mask.bool()].square().sum().backward()
    else:
        places = torch.cat([torch.arange(5), torch.arange(7)])[None]
        ours(ids[:1], position_ids=places).logits.square().sum().backward()
        for part in (ids[:1, :5], ids[:1, 5:]):
            eager(part).logits.square().sum().backward()
    for (name, found), wanted in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_flash_attentions_packed_sequences_differentiate() -> None:
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    starts = torch.tensor([0, 7, 20], dtype=torch.int32)
    q, k, v = (torch.from_numpy(x[0].swapaxes(0, 1)[:20].copy()).requires_grad_() for x in (Q, K, V))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    o = flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 13, 13, causal=True, alibi_slopes=slopes)
    grad = torch.randn(o.shape, generator=torch.manual_seed(3))
    found = torch.autograd.grad(o, (q, k, v), grad)
    parts = []
    for at in (slice(0, 7), slice(7, 20)):
        query, key, value = (x[at].transpose(0, 1) for x in (q, k, v))
        key, value = (x.repeat_interleave(2, 0) for x in (key, value))
        places = torch.arange(query.shape[1])
        apart = places[:, None] - places
        scores = query @ key.transpose(1, 2) / 4 - slopes[:, None, None] * apart.abs()
        parts.append((scores.masked_fill(apart < 0, -torch.inf).softmax(2) @ value).transpose(0, 1))
    for each, wanted in zip(found, torch.autograd.grad(torch.cat(parts), (q, k, v), grad), strict=True):
        near(each, wanted)
