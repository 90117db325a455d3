"""`flashgen.attention_with_cache` on emulated cards, held to float64 sequence by sequence."""

from __future__ import annotations

from typing import Any

import flashgen
import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.templates.runtime.paged_attention import PagedAttention
from flashgen.tuner.front.paged import MadePagedAttention

from tests.support.emulated import needs_compiler
from tests.tuner.front.test_attention import CARD, D, assert_near, expected

LENGTHS, PAGE, ROOM = (21, 40), 16, 48


def caches(dtype=np.float32):
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 3, 4, D)).astype(dtype)  # with rows before heads
    slots = [rng.standard_normal((2, ROOM, 2, D)).astype(dtype) for _ in "kv"]
    return q, slots


def paged(slots):
    """The same keys in pages that follow no rule, and their table."""
    table = np.array([[4, 0, 5], [2, 6, 1]], np.int32)
    pages = [np.zeros((7, PAGE, 2, D), x.dtype) for x in slots]
    for cache, whole in zip(pages, slots, strict=True):
        for sequence, row in zip(whole, table, strict=True):
            cache[row] = sequence.reshape(3, PAGE, 2, D)
    return pages, table


def wanted(q, slots, **asked):
    found = []
    for i, length in enumerate(LENGTHS):
        one = [x[i, :length].swapaxes(0, 1)[None] for x in slots]
        found.append(expected(q[i].swapaxes(0, 1)[None], *one, **asked).o[0].swapaxes(0, 1))
    return np.stack(found)


@needs_compiler
@pytest.mark.thorough
def test_slots_and_pages_are_attended_to():
    q, slots = caches()
    lengths = np.array(LENGTHS, np.int32)
    told = {"seqused_k": lengths, "causal": True, "layout": "bshd", "device": CARD}
    exact = wanted(q, slots, causal=True)
    assert_near(flashgen.attention_with_cache(q, *slots, **told), exact)
    pages, table = paged(slots)
    assert_near(flashgen.attention_with_cache(q, *pages, page_table=table, **told), exact)
    turned = [x[::-1] for x in slots]
    found = flashgen.attention_with_cache(
        q, *(np.ascontiguousarray(x) for x in turned), cache_batch_idx=np.array([1, 0]), **told
    )
    assert_near(found, exact)


@needs_compiler
@pytest.mark.thorough
def test_packed_queries_beside_pages():
    q, slots = caches()
    pages, table = paged(slots)
    o, lse = flashgen.attention_with_cache(
        q.reshape(6, 4, D),
        *pages,
        page_table=table,
        seqused_k=np.array(LENGTHS, np.int32),
        cu_seqlens_q=np.array([0, 3, 6], np.int32),
        max_seqlen_q=3,
        return_lse=True,
        device=CARD,
    )
    assert_near(o.reshape(q.shape), wanted(q, slots))
    assert lse.shape == (4, 6)


def test_a_card_proves_and_runs_them(driver, card):
    from tests.templates.test_paged import computing

    q, slots = caches()
    wide = [driver.own(np.concatenate([x] * 2, axis=3)) for x in (q, *slots)]
    with computing(driver, Problem(head_dim=2 * D, page_size=PAGE)):
        o = flashgen.attention_with_cache(
            *wide, seqused_k=np.array(LENGTHS, np.int32), layout="bshd", scale=0.1
        )
    assert_near(o, wanted(wide[0], wide[1:], scale=0.1))
    assert [each.problem.page_size for each in card.made_by.built] == [PAGE]


# ---- new rows

POOL, TABLE = (6, 16, 2, 8), np.array([[3, 0, 4], [1, 2, 5]], np.int32)


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """What kernels are asked for, which compute nothing."""
    found: list[Any] = []

    def note(self, q, k_cache, v_cache, page_table, seqused_k, **told):
        found.append((q, seqused_k, told))
        return q

    monkeypatch.setattr(MadePagedAttention, "check", lambda *given, **told: None)
    monkeypatch.setattr(PagedAttention, "attention_paged", note)
    return found


def turned(x, place, cos, sin, interleaved):
    """A row of columns as flash-attn rotates it."""
    x, half = x.copy(), cos.shape[1]
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for i, (one, other) in enumerate(pairs):
        c, s = cos[place, i], sin[place, i]
        x[..., one], x[..., other] = x[..., one] * c - x[..., other] * s, x[..., one] * s + x[..., other] * c
    return x


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("mask", "by_place"),
    [({}, False), ({"causal": True}, True), ({"window": (3, None)}, True), ({"rotary_by_place": True}, True)],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_new_rows_are_rotated_and_written_behind_the_keys(asked, interleaved, mask, by_place, layout):
    rng = np.random.default_rng(3)
    angles = rng.random((16, 3))
    tables = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    q, k, v = (rng.standard_normal((2, 2, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    slots, used = np.array([2, 0]), np.array([3, 9], np.int32)
    k_cache, v_cache = (np.zeros((3, 16, 2, 8), np.float32) for _ in "kv")
    given = [x.swapaxes(1, 2) if layout == "bhsd" else x for x in (q, k, v)]
    flashgen.attention_with_cache(
        *(given[0], k_cache, v_cache),
        **(tables | mask),
        k=given[1],
        v=given[2],
        cache_seqlens=used,
        cache_batch_idx=slots,
        rotary_interleaved=interleaved,
        layout=layout,
        device=CARD,
    )
    found, counted, told = asked[0]
    found = found.swapaxes(1, 2) if layout == "bhsd" else found
    for b, t in np.ndindex(2, 2):
        place = used[b] + t
        wanted = turned(k[b, t], place, np.cos(angles), np.sin(angles), interleaved)
        np.testing.assert_allclose(k_cache[slots[b], place], wanted, atol=1e-6)
        np.testing.assert_allclose(v_cache[slots[b], place], v[b, t])
        wanted = turned(q[b, t], place if by_place else used[b], np.cos(angles), np.sin(angles), interleaved)
        np.testing.assert_allclose(found[b, t], wanted, atol=1e-6)
    assert np.count_nonzero(v_cache.any((2, 3))) == 4
    assert counted.tolist() == [5, 11] and told["causal"] == ("causal" in mask)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_new_rows_go_to_the_pages_of_their_places(asked, kv_layout):
    k, v = np.random.default_rng(4).standard_normal((2, 2, 3, 2, 8)).astype(np.float32)
    pages, used = [np.zeros(POOL, np.float32) for _ in "kv"], np.array([14, 31], np.int32)
    caches = [np.ascontiguousarray(x.swapaxes(1, 2)) if kv_layout == "HND" else x for x in pages]
    q, told = np.zeros((2, 3, 4, 8), np.float32), {"layout": "bshd", "kv_layout": kv_layout, "device": CARD}
    flashgen.attention_with_cache(q, *caches, page_table=TABLE, k=k, v=v, cache_seqlens=used, **told)
    rows_first = [x.swapaxes(1, 2) if kv_layout == "HND" else x for x in caches]
    for b, t in np.ndindex(2, 3):
        page, place = TABLE[b, (used[b] + t) // 16], (used[b] + t) % 16
        assert (rows_first[0][page, place] == k[b, t]).all() and (rows_first[1][page, place] == v[b, t]).all()
    assert asked[0][1].tolist() == [17, 34]
    one = {"page_table": TABLE[:1], "k": k[:1], "v": v[:1], **told}
    flashgen.attention_with_cache(q[:1], *caches, cache_seqlens=4, **one)
    assert asked[1][1] is None and asked[1][2]["max_seqlen_k"] == 7
    assert (rows_first[0][3, 4:7] == k[0]).all()
    with pytest.raises(ValueError, match="k has 3 rows behind 46 keys, and the cache has room for 48"):
        flashgen.attention_with_cache(q[:1], *caches, cache_seqlens=46, **one)


@needs_compiler
@pytest.mark.thorough
def test_a_cache_grows_on_an_emulated_card():
    """Rows that are left of sequences are written and seen, of torch's tensors in their own memory."""
    q, slots = caches()
    told = {"causal": True, "layout": "bshd", "device": CARD}
    used = np.array(LENGTHS, np.int32) - 2
    new = [np.stack([x[i, n : n + 2] for i, n in enumerate(used)]) for x in slots]
    grown = [np.where(np.arange(ROOM)[:, None, None] < used[:, None, None, None], x, 0) for x in slots]
    exact = wanted(q, slots, causal=True)
    o = flashgen.attention_with_cache(q, *grown, k=new[0], v=new[1], cache_seqlens=used, **told)
    assert_near(o, exact)
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    pages, table = paged(slots)
    for cache in pages:
        for i, n in enumerate(used):
            cache[table[i, n // PAGE], n % PAGE :] = 0
            cache[table[i, n // PAGE + 1 :]] = 0
    tensors = [torch.from_numpy(x) for x in (q, *pages, *new, used, table)]
    given = dict(zip(("k", "v", "cache_seqlens", "page_table"), tensors[3:], strict=True))
    assert_near(flashgen.attention_with_cache(*tensors[:3], **given, **told).numpy(), exact)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"k": 1, "cache_seqlens": 3}, "k is given without v"),
        ({"v": 1}, "v is given without k"),
        ({"k": 1, "v": 1}, "k is given without cache_seqlens"),
        ({"rotary_cos": 1}, "rotary_cos and rotary_sin go together"),
        ({"rotary_cos": 1, "rotary_sin": 1}, "rotary_cos is given without k"),
        ({"cache_seqlens": 3, "seqused_k": 3}, "both count the keys of the cache"),
        (
            {"k": 1, "v": 1, "cache_seqlens": 3, "cu_seqlens_q": np.array([0, 1, 2]), "max_seqlen_q": 1},
            "k is given beside cu_seqlens_q",
        ),
    ],
)
def test_what_does_not_go_together_is_named(told, text):
    q, slots = caches()
    with pytest.raises(ValueError, match=text):
        flashgen.attention_with_cache(q, *slots, layout="bshd", device=CARD, **told)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"page_table": np.zeros((2, 3), np.int32), "cache_batch_idx": np.zeros(2)}, "beside page_table"),
        ({"kv_layout": "DNH"}, "kv_layout is 'DNH'; choose 'NHD' or 'HND'"),
        ({"kv_layout": "HND"}, "caches of slots have rows first"),
        ({"seqused_k": np.array([99, 1], np.int32)}, "seqused_k is 99 at sequence 0"),
        ({"seqused_k": 99}, "there is room for 48 keys, in 3 pages of 16"),
    ],
)
def test_what_tells_no_cache_is_refused(told, text):
    q, slots = caches()
    with pytest.raises(ValueError, match=text):
        flashgen.attention_with_cache(q, *slots, layout="bshd", device=CARD, **told)
