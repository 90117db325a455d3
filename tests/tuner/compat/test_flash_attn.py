"""flash-attn's functions, beside what its own kernels make of the arguments, pair by pair."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from flashgen.compat import flash_attn, flash_attn_interface

from tests.support.front_stand_in import StandIn

RNG = np.random.default_rng(7)
WINDOWS = [(-1, -1), (2, -1), (-1, 1), (2, 1), (0, 0), (100, 0), (-1, 0), (3, 0), (5, 6), (6, 4)]
Array = Any


def arrays(
    rows: int, keys: int, batch: int = 2, heads: int = 4, kv_heads: int = 2, d: int = 8
) -> list[Array]:
    shapes = ((rows, heads), (keys, kv_heads), (keys, kv_heads))
    return [RNG.standard_normal((batch, n, h, d)).astype(np.float32) for n, h in shapes]


def flash_2(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array = None,
) -> tuple[Array, Array]:
    """o (rows, heads, d) and the log-sum-exp (heads, rows) of one sequence, as flash-attn 2 counts them."""
    (rows, heads, d), keys = q.shape, k.shape[0]
    left, right = window_size
    left = -1 if left >= keys else left
    right = 0 if causal else -1 if right >= keys else right
    o, lse = np.zeros((rows, heads, v.shape[2])), np.full((heads, rows), np.inf)
    for h in range(heads):
        of_keys = h // (heads // k.shape[1])
        for i in range(rows):
            place, found = i + keys - rows, {}
            for j in range(keys):
                if (left >= 0 and j < place - left) or (right >= 0 and j > place + right):
                    continue
                score = float(q[i, h] @ k[j, of_keys]) / math.sqrt(d)
                score = softcap * math.tanh(score / softcap) if softcap > 0 else score
                if alibi_slopes is not None:
                    # Under a causal mask alone the kernel adds the slope times the key's number.
                    distance = -j if left < 0 and right == 0 else abs(place - j)
                    score -= float(alibi_slopes[h]) * distance
                found[j] = score
            if found:
                highest = max(found.values())
                total = sum(math.exp(s - highest) for s in found.values())
                lse[h, i] = highest + math.log(total)
                o[i, h] = sum(math.exp(s - lse[h, i]) * v[j, of_keys] for j, s in found.items())
    return o, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_masks_are_flash_attns(
    front: StandIn, rows: int, keys: int, window: tuple[int, int], causal: bool
) -> None:
    q, k, v = arrays(rows, keys)
    o, lse, probabilities = flash_attn.flash_attn_func(
        q, k, v, causal=causal, window_size=window, return_attn_probs=True
    )
    for b in range(2):
        wanted, of_rows = flash_2(q[b], k[b], v[b], causal=causal, window_size=window)
        np.testing.assert_allclose(o[b], wanted, atol=1e-6)
        np.testing.assert_allclose(lse[b], of_rows, atol=1e-6)
    assert o.dtype == q.dtype and probabilities.shape == (0,) and probabilities.dtype == q.dtype
    assert front.last["layout"] == "bshd"


def test_a_window_that_hides_nothing_asks_for_no_kernel_of_windows(front: StandIn) -> None:
    q, k, v = arrays(5, 7)
    for window in ((-1, -1), (6, 4), (4096, 4096)):
        flash_attn.flash_attn_func(q, k, v, window_size=window)
        assert "window" not in front.last and not front.last["causal"]
    for window in ((-1, 0), (6, 0), (4095, 0)):
        flash_attn.flash_attn_func(q, k, v, window_size=window)
        assert "window" not in front.last and front.last["causal"]
    flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, -1))
    assert front.last["window"] == (3, 0) and front.last["causal"]


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_soft_caps_and_slopes(front: StandIn, window: tuple[int, int], causal: bool) -> None:
    q, k, v = arrays(4, 6)
    asked: dict[str, Any] = {"causal": causal, "window_size": window, "softcap": 0.7}
    slopes = RNG.random((2, 4)).astype(np.float32)
    o, lse, _ = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **asked)
    shared, _, _ = flash_attn.flash_attn_func(
        q, k, v, alibi_slopes=slopes[0], return_attn_probs=True, **asked
    )
    for b in range(2):
        wanted, of_rows = flash_2(q[b], k[b], v[b], alibi_slopes=slopes[b], **asked)
        np.testing.assert_allclose(o[b], wanted, atol=1e-6)
        np.testing.assert_allclose(lse[b], of_rows, atol=1e-6)
        np.testing.assert_allclose(
            shared[b], flash_2(q[b], k[b], v[b], alibi_slopes=slopes[0], **asked)[0], atol=1e-6
        )


def test_a_soft_cap_that_is_off_is_none(front: StandIn) -> None:
    for softcap in (0.0, -1.0):
        flash_attn.flash_attn_func(*arrays(2, 2), softcap=softcap)
        assert "softcap" not in front.last


def test_packed_arrays_are_taken_apart(front: StandIn) -> None:
    qkv = RNG.standard_normal((2, 5, 3, 4, 8)).astype(np.float32)
    q, k, v = (qkv[:, :, part] for part in range(3))
    wanted = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True)
    assert (flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, True) == wanted).all()
    assert (flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.0, 0.3, True) == wanted).all()
    assert front.last["scale"] == 0.3
    starts, flat = np.array([0, 5, 10], np.int32), qkv.reshape(10, 3, 4, 8)
    by_sequence = flash_attn.flash_attn_varlen_qkvpacked_func(flat, starts, 5, 0.0, 0.3, True)
    np.testing.assert_allclose(by_sequence.reshape(wanted.shape), wanted, atol=1e-6)
    again = flash_attn.flash_attn_varlen_kvpacked_func(
        flat[:, 0], flat[:, 1:], starts, starts, 5, 5, 0.0, 0.3, True
    )
    assert (again == by_sequence).all()


def test_rows_of_other_strides_are_copied(front: StandIn) -> None:
    q, k, v = arrays(5, 7)
    wanted = flash_attn.flash_attn_func(q, k, v)
    turned = [np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (q, k, v)]
    assert turned[0].strides[3] != 4
    assert (flash_attn.flash_attn_func(*turned) == wanted).all()
    starts = np.array([0, 5], np.int32)
    packed = flash_attn.flash_attn_varlen_func(
        turned[0][0], turned[1][0, :5], turned[2][0, :5], starts, starts, 5, 5
    )
    np.testing.assert_allclose(packed, flash_attn.flash_attn_func(q[:1], k[:1, :5], v[:1, :5])[0], atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (1, 1)])
@pytest.mark.parametrize("of_batch", [False, True])
def test_packed_sequences(front: StandIn, causal: bool, window: tuple[int, int], of_batch: bool) -> None:
    starts_q, starts_k = np.array([0, 3, 3, 8], np.int32), np.array([0, 5, 6, 8], np.int32)
    q = RNG.standard_normal((8, 4, 8)).astype(np.float32)
    k, v = RNG.standard_normal((2, 8, 2, 8)).astype(np.float32)
    slopes = RNG.random((3, 4) if of_batch else 4).astype(np.float32)
    o, lse, _ = flash_attn.flash_attn_varlen_func(
        *(q, k, v, starts_q, starts_k, 5, 5),
        causal=causal,
        window_size=window,
        alibi_slopes=slopes,
        return_attn_probs=True,
    )
    for i in range(3):
        rows, keys = (slice(*starts[i : i + 2]) for starts in (starts_q, starts_k))
        wanted, of_rows = flash_2(
            *(q[rows], k[keys], v[keys]),
            causal=causal,
            window_size=window,
            alibi_slopes=slopes[i] if of_batch else slopes,
        )
        np.testing.assert_allclose(o[rows], wanted, atol=1e-6)
        np.testing.assert_allclose(lse[:, rows], of_rows, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"dropout_p": 0.1}, "dropout_p is 0.1, and flashgen's kernels drop nothing: pass 0"),
        (
            {"q": np.zeros((2, 4, 8))},
            r"q has the shape \(2, 4, 8\); it must be \(batch, seqlen, heads, head_dim\)",
        ),
        ({"k": [1.0]}, "k is a builtins.list; pass an array"),
    ],
)
def test_what_is_refused_is_named(front: StandIn, asked: dict[str, Any], told: str) -> None:
    given = dict(zip("qkv", arrays(3, 3), strict=True)) | asked
    with pytest.raises((TypeError, ValueError), match=told):
        flash_attn.flash_attn_func(**given)
    assert not front.asked


def test_parts_of_packed_arrays_are_counted(front: StandIn) -> None:
    told = r"qkv has the shape \(2, 5, 2, 4, 8\); it must be \(batch, seqlen, 3, heads, head_dim\)"
    with pytest.raises(ValueError, match=told):
        flash_attn.flash_attn_qkvpacked_func(np.zeros((2, 5, 2, 4, 8)))
    with pytest.raises(ValueError, match=r"it must be \(total, 2, heads, head_dim\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(np.zeros((5, 4, 8)), np.zeros((5, 4, 8)), None, None, 5, 5)


# ---- caches

POOL = np.zeros((6, 4, 2, 8), np.float32)
TABLE = np.array([[3, 0, 4], [1, 2, 5]], np.int32)
USED = np.array([7, 9], np.int32)


def asked_of_cache(front: StandIn, **asked: Any) -> dict[str, Any]:
    given = {"q": np.zeros((2, 3, 4, 8), np.float32), "k_cache": POOL[:2], "v_cache": POOL[:2]} | asked
    with pytest.raises(NotImplementedError):
        flash_attn.flash_attn_with_kvcache(**given)
    return front.last


def test_a_cache_in_pages(front: StandIn) -> None:
    told = asked_of_cache(
        *(front,),
        k_cache=POOL,
        v_cache=POOL,
        block_table=TABLE,
        cache_seqlens=USED,
        causal=True,
        window_size=(5, 0),
    )
    assert told["page_table"] is TABLE and told["cache_seqlens"] is USED and told["window"] == (5, 0)
    assert told["layout"] == "bshd" and told["causal"]
    assert not {"k", "v", "rotary_cos", "cache_batch_idx", "rotary_interleaved"} & told.keys()
    # Twelve keys have room in a row of the table.
    assert "window" not in asked_of_cache(
        *(front,), k_cache=POOL, v_cache=POOL, block_table=TABLE, cache_seqlens=USED, window_size=(11, -1)
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_new_rows_are_told_of(front: StandIn, interleaved: bool) -> None:
    given = {"k": POOL[:2], "v": POOL[:2], "rotary_cos": POOL[0, :, 0], "rotary_sin": POOL[1, :, 0]}
    asks = {"cache_seqlens": USED, "cache_batch_idx": USED, "rotary_interleaved": interleaved}
    # A window that hides no key still has queries rotated by their own places, as in flash-attn, unless it is
    # as long as the caches, of four keys.
    for window, by_place in (((-1, -1), False), ((-1, 3), True), ((3, -1), True), ((4, 4), False)):
        told = asked_of_cache(front, **given, **asks, window_size=window)
        assert all(told[name] is array for name, array in given.items())
        assert told["cache_seqlens"] is USED and told["cache_batch_idx"] is USED
        assert (told["rotary_by_place"], told["rotary_interleaved"]) == (by_place, interleaved)
        assert "window" not in told
    assert asked_of_cache(front, **given, **asks, causal=True, window_size=(4, 4))["rotary_by_place"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"cache_leftpad": USED}, "cache_leftpad is given, and caches are read from their first slot"),
        ({"block_table": TABLE, "cache_batch_idx": USED}, "cache_batch_idx is given beside block_table"),
        (
            {"v_cache": POOL[:2].swapaxes(2, 3)},
            "the last axis of v_cache is not contiguous, and caches are never copied",
        ),
    ],
)
def test_what_caches_cannot_be_is_named(front: StandIn, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        flash_attn.flash_attn_with_kvcache(
            np.zeros((2, 1, 4, 8), np.float32), **{"k_cache": POOL[:2], "v_cache": POOL[:2]} | asked
        )
    assert not front.asked


def test_rows_of_a_cache_that_see_nothing_have_flash_attns_log_sum_exp(
    front: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    lse = np.array([[[-np.inf, 1.0, 2.0]]], np.float32)
    monkeypatch.setattr(
        front, "attention_with_cache", lambda *given, **told: (np.zeros(1), lse), raising=False
    )
    q = np.zeros((1, 3, 1, 8), np.float32)
    _, found = flash_attn.flash_attn_with_kvcache(
        q, POOL[:1], POOL[:1], cache_seqlens=np.array([2], np.int32), causal=True, return_softmax_lse=True
    )
    assert found.tolist() == [[[np.inf, 1.0, 2.0]]]
    _, shifted = flash_attn.flash_attn_with_kvcache(
        *(q, POOL[:1], POOL[:1]),
        cache_seqlens=np.array([2], np.int32),
        causal=True,
        alibi_slopes=np.array([0.5], np.float32),
        return_softmax_lse=True,
    )
    # Places are -1, 0 and 1.
    assert shifted.tolist() == [[[np.inf, 1.0, 2.5]]]


# ---- FlashAttention-3


def test_flash_attention_3_returns_two_and_minus_infinity(front: StandIn) -> None:
    q, k, v = arrays(5, 3)
    o, lse = flash_attn_interface.flash_attn_func(q, k, v, 0.5, True, return_attn_probs=True)
    assert front.last["scale"] == 0.5 and front.last["causal"]
    assert (lse[:, :, :2] == -np.inf).all() and (o[:, :2] == 0).all()
    flash_attn_interface.flash_attn_func(q, k, v, attention_chunk=2)
    assert front.last["chunk"] == 2


def test_flash_attention_3_counts_what_is_used_of_sequences(front: StandIn) -> None:
    starts = np.array([0, 4, 8], np.int32)
    q, k, v = (RNG.standard_normal((8, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    o, lse = flash_attn_interface.flash_attn_varlen_func(
        *(q, k, v, starts, starts, 4, 4),
        seqused_q=np.array([2, 4], np.int32),
        seqused_k=np.array([4, 1], np.int32),
        return_attn_probs=True,
    )
    wanted, of_rows = flash_2(q[:2], k[:4], v[:4])
    np.testing.assert_allclose(o[:2], wanted, atol=1e-6)
    np.testing.assert_allclose(lse[:, :2], of_rows, atol=1e-6)


def test_flash_attention_3_reads_caches_by_its_own_names(
    front: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "attention_with_cache", lambda *given, **told: (told, None), raising=False)
    q = np.zeros((5, 4, 8), np.float32)
    starts = np.array([0, 2, 5], np.int32)
    told, _, *more = flash_attn_interface.flash_attn_with_kvcache(
        *(q, POOL, POOL),
        page_table=TABLE,
        cache_seqlens=USED,
        cu_seqlens_q=starts,
        max_seqlen_q=3,
        causal=True,
        num_splits=4,
        return_softmax_lse=True,
    )
    assert more == [None, None] and told["cu_seqlens_q"] is starts and told["max_seqlen_q"] == 3
    assert told["page_table"] is TABLE and told["cache_seqlens"] is USED and told["causal"]
    with pytest.raises(ValueError, match="qv is given, and no kernel"):
        flash_attn_interface.flash_attn_with_kvcache(q, POOL, POOL, qv=q)
    with pytest.raises(ValueError, match="cu_seqlens_q is given without max_seqlen_q"):
        flash_attn_interface.flash_attn_with_kvcache(q, POOL, POOL, cu_seqlens_q=starts)


def test_flash_attention_3_rotates_queries_by_its_own_windows(front: StandIn) -> None:
    given = {"k": POOL[:2], "v": POOL[:2], "rotary_cos": POOL[0, :, 0], "rotary_sin": POOL[1, :, 0]}
    given |= {"q": np.zeros((2, 3, 4, 8), np.float32), "k_cache": POOL[:2], "v_cache": POOL[:2]}
    # Of three rows and four keys; chunks are windows, too.
    for asked, by_place in (
        ({}, False),
        ({"window_size": (-1, 1)}, True),
        ({"window_size": (-1, 2)}, False),
        ({"window_size": (2, -1)}, True),
        ({"window_size": (3, -1)}, False),
        ({"causal": True}, True),
        ({"attention_chunk": 9}, True),
    ):
        with pytest.raises(NotImplementedError):
            flash_attn_interface.flash_attn_with_kvcache(**given, cache_seqlens=USED, **asked)
        assert front.last["rotary_by_place"] == by_place, asked


def test_flash_attention_3_has_infinity_where_there_is_no_key_at_all(front: StandIn) -> None:
    q, k, v = arrays(3, 0)
    o, lse = flash_attn_interface.flash_attn_func(q, k, v, return_attn_probs=True)
    assert (lse == np.inf).all() and lse.shape == (2, 4, 3) and (o == 0).all()
    assert (flash_attn_interface.flash_attn_func(q, k, v) == 0).all()
    starts, none = np.array([0, 1, 3], np.int32), np.zeros(3, np.int32)
    o, lse = flash_attn_interface.flash_attn_varlen_func(
        q[0], k[0], v[0], starts, none, 2, 0, return_attn_probs=True
    )
    assert (lse == np.inf).all() and lse.shape == (4, 3) and (o == 0).all()


def test_flash_attention_3_takes_all_three_in_one_array(front: StandIn) -> None:
    q, k, v = arrays(5, 5)
    asked = {"window_size": (2, 1), "softcap": 2.0, "attention_chunk": 3, "return_attn_probs": True}
    wanted, of_rows = flash_attn_interface.flash_attn_func(q, k, v, 0.5, True, **asked)
    heads = np.concatenate([q, k, v], axis=2)
    o, lse = flash_attn_interface.flash_attn_qkvpacked_func(heads, 0.5, True, num_heads_q=4, **asked)
    assert (o == wanted).all() and (lse == of_rows).all()
    three = np.stack([q, q + 1, q - 1], axis=2)
    assert (
        flash_attn_interface.flash_attn_qkvpacked_func(three)
        == flash_attn_interface.flash_attn_func(q, q + 1, q - 1)
    ).all()
    for array, count, told in (
        (heads, None, "num_heads_q is None, and qkv has 8 heads"),
        (heads, 3, "num_heads_q is 3, and qkv has 8 heads: those behind num_heads_q must be as many of keys"),
        (heads, 8, "num_heads_q is 8"),
        (three[:, :, :2], None, r"qkv has the shape \(2, 5, 2, 4, 8\); it must be \(batch, seqlen, 3, heads"),
    ):
        with pytest.raises(ValueError, match=told):
            flash_attn_interface.flash_attn_qkvpacked_func(array, num_heads_q=count)
    with pytest.raises(ValueError, match="v_descale is given, and no kernel"):
        flash_attn_interface.flash_attn_qkvpacked_func(three, v_descale=q)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_flash_attention_3_merges_what_parts_of_the_keys_gave(front: StandIn, library: str) -> None:
    q, k, v = arrays(4, 9)
    asked = {"causal": True, "return_attn_probs": True}
    wanted, of_rows = flash_attn_interface.flash_attn_func(q, k, v, **asked)
    parts = []
    for keys in (slice(0, 3), slice(3, 9), slice(3, 3)):
        # Of the mask the last part alone knows: rows see all of the first, and of none nothing.
        told = asked if keys.start else {"return_attn_probs": True}
        parts.append(flash_attn_interface.flash_attn_func(q, k[:, keys], v[:, keys], **told))
    o, lse = (np.stack(each) for each in zip(*parts, strict=True))
    lse[2], o[2] = -np.inf, np.nan
    lse[:, 0, 1, 2] = -np.inf
    lse = lse.swapaxes(2, 3)
    given: Any = (o, lse)
    half: Any = np.float16
    if library == "torch":
        torch = pytest.importorskip("torch", reason="needs PyTorch")
        given, half = tuple(map(torch.from_numpy, given)), torch.float16
    merged, of_merged = flash_attn_interface.flash_attn_combine(*given)
    found, of_found = np.asarray(merged).copy(), np.asarray(of_merged).copy()
    assert (found[0, 2, 1] == 0).all() and of_found[0, 2, 1] == -np.inf
    found[0, 2, 1], of_found[0, 2, 1] = wanted[0, 2, 1], of_rows[0, 1, 2]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(of_found, of_rows.swapaxes(1, 2), atol=1e-6)
    assert merged.dtype == given[0].dtype
    narrow, _ = flash_attn_interface.flash_attn_combine(*given, out_dtype=half)
    assert narrow.dtype == half
    out = merged * 0
    same, _ = flash_attn_interface.flash_attn_combine(*given, out)
    assert same is out and bool((out == merged).all())
    with pytest.raises(ValueError, match=r"out_partial has the shape .* and lse_partial \(3, 2, 4, 4\)"):
        flash_attn_interface.flash_attn_combine(given[0][:, :, :3], given[1])


def test_nothing_is_scheduled_ahead(front: StandIn) -> None:
    told = flash_attn_interface.get_scheduler_metadata(2, 1, 64, 4, 2, 8, USED, page_size=4, causal=True)
    assert told.shape == (0,) and told.dtype == np.int32
    with pytest.raises(NotImplementedError):
        flash_attn_interface.flash_attn_with_kvcache(
            np.zeros((2, 3, 4, 8), np.float32), POOL[:2], POOL[:2], scheduler_metadata=told
        )
    assert "scheduler_metadata" not in front.last


# ---- torch


def test_tensors_stay_tensors(front: StandIn) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    q, k, v = (torch.from_numpy(x).to(torch.bfloat16) for x in arrays(5, 3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    o, lse, probabilities = flash_attn.flash_attn_func(
        q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    assert o.dtype is torch.bfloat16 and lse.dtype is torch.float32 and probabilities.dtype is torch.bfloat16
    assert probabilities.shape == (0,) and bool((lse[:, :, :2] == torch.inf).all())
    wanted = flash_2(*(x[0].float().numpy() for x in (q, k, v)), causal=True, alibi_slopes=slopes.numpy())[1]
    np.testing.assert_allclose(lse[0], wanted, atol=1e-5)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = [x.reshape(-1, *x.shape[2:])[:5] for x in (q, k, v)]
    _, lse, _ = flash_attn.flash_attn_varlen_func(
        *(*packed, starts, starts, 3, 3), causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    wanted = flash_2(*(x[2:].float().numpy() for x in packed), causal=True, alibi_slopes=slopes.numpy())[1]
    np.testing.assert_allclose(lse[:, 2:], wanted, atol=1e-5)


def test_gradients_of_the_same_bits_are_asked_of_pytorch(front: StandIn) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    q, k, v = (torch.from_numpy(x) for x in arrays(3, 3))
    flash_attn.flash_attn_func(q, k, v, deterministic=True)
    q.requires_grad_()
    with pytest.raises(ValueError, match="use_deterministic_algorithms"):
        flash_attn.flash_attn_func(q, k, v, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        flash_attn.flash_attn_func(q, k, v, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
