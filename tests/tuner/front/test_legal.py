"""Odd calls: what is legal computes what it says; the rest is refused by the names that callers know."""

from __future__ import annotations

import sys
from typing import Any

import flashgen
import ml_dtypes
import numpy as np
import pytest
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.front.attend import call_of, differentiate, served_by
from flashgen.tuner.front.bound import bound_of
from flashgen.tuner.front.workshop import Workshop

from tests.support.emulated import needs_compiler
from tests.tuner.front.test_attention import CARD, KEYS, ROWS, D, arrays, assert_near, expected
from tests.tuner.front.test_cached import LENGTHS, caches, paged
from tests.tuner.front.test_cached import wanted as by_sequence

OTHER_BYTES = ">" if sys.byteorder == "little" else "<"


def other_bytes(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder(OTHER_BYTES))


# ---- numbers

NUMBERS = [np.int64, np.int32, np.uint8, np.array]


def told_of(**asked: Any) -> dict[str, float]:
    """The numbers that kernels are told of a call."""
    return served_by(bound_of(CARD), call_of(*arrays(), **asked))[2].scalars


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", ["chunk", "dilation", "always"])
def test_an_integer_of_numpy_is_told_from_another(name, kind):
    beside, read = ({"window": (2, 0)}, "always_keys") if name == "always" else ({}, name)
    assert [told_of(**{name: kind(n)}, **beside)[read] for n in (3, 5, 3)] == [3, 5, 3]


@pytest.mark.parametrize("kind", NUMBERS)
def test_sides_of_a_window_and_numbers_of_texts_are_told_apart(kind):
    found = [told_of(window=(kind(n), None)) for n in (3, 5)]
    assert [each["window_left"] for each in found] == [3, 5]
    found = [told_of(mask="q - k < far", far=kind(n)) for n in (3, 5)]
    assert [each["far"] for each in found] == [3, 5]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.array, np.int64])
def test_a_number_of_numpy_is_told_from_another(kind):
    assert [told_of(softcap=kind(n))["softcap"] for n in (3, 5)] == [3, 5]
    assert [told_of(score="score * by", by=kind(n))["by"] for n in (3, 5)] == [3, 5]


def test_a_tensor_of_one_number_is_told_from_another():
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    assert [told_of(chunk=torch.tensor(n))["chunk"] for n in (3, 5)] == [3, 5]
    assert [told_of(softcap=torch.tensor(n))["softcap"] for n in (3.0, 5.0)] == [3, 5]


# ---- refusals

STARTS = np.array([0, 4, 9], np.int32)

REFUSED = [
    ({"causal": "no"}, TypeError, "causal is 'no'; it must be True or False"),
    ({"causal": None}, TypeError, "causal is None; it must be True or False"),
    ({"return_lse": "yes"}, TypeError, "return_lse is 'yes'; it must be True or False"),
    ({"wait": 0}, TypeError, "wait is 0; it must be True or False"),
    ({"lists": 3}, TypeError, r"lists is a builtins.int; pass a TileLists\(\)"),
    ({"scale": "x"}, TypeError, "scale is 'x'; it must be a number"),
    ({"scale": float("nan")}, ValueError, "scale is nan; it must be a finite float32"),
    ({"softcap": "x"}, TypeError, "softcap is 'x'; it must be a number"),
    ({"softcap": float("nan")}, ValueError, "softcap is nan; it must be a positive number"),
    ({"chunk": 0}, ValueError, "chunk is 0; it must lie in 1..1073741824"),
    ({"chunk": 2**40}, ValueError, "chunk is 1099511627776; it must lie in 1..1073741824"),
    ({"dilation": 0}, ValueError, "dilation is 0; it must lie in 1.."),
    ({"chunk": 3.0}, TypeError, "chunk is 3.0; it must be an integer, 1 or more"),
    ({"chunk": True}, TypeError, "chunk is True; it must be an integer"),
    ({"window": (3.0, 0)}, TypeError, "a side of window is 3.0; it must be an integer, -1 or more"),
    ({"sinks": [1.0]}, TypeError, "sinks is a list; pass an array of q's library: float32"),
    ({"sinks": np.zeros(4)}, TypeError, "sinks is float64; served are float32"),
    ({"alibi_slopes": np.zeros((7, 3), np.float32)}, ValueError, r"alibi_slopes has the shape \(7, 3\)"),
    ({"lengths": 3}, TypeError, "lengths is a int; pass an array of q's library: int32"),
    ({"lengths": np.array([3])}, TypeError, "lengths is int64; served are int32"),
    ({"documents": np.zeros((1, KEYS))}, TypeError, "documents is float64; served are int32"),
    ({"attn_mask": np.ones((ROWS, KEYS))}, TypeError, "attn_mask is float64; served are float32, float16"),
    ({"attn_mask": np.ones((ROWS, KEYS), np.int32)}, TypeError, "attn_mask is int32; served are float32"),
    (
        {"attn_mask": np.ones(3, bool)},
        ValueError,
        r"attn_mask has the shape \(3,\), but must be \(1, 4, 37",
    ),
]


@pytest.mark.parametrize(("told", "kind", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_refusal_speaks_of_the_keyword(told, kind, text):
    with pytest.raises(kind, match=text):
        flashgen.attention(*arrays(), device=CARD, **told)


READ = {
    "sinks": np.zeros(4, np.float32),
    "alibi_slopes": np.zeros(4, np.float32),
    "bias": np.zeros((ROWS, KEYS), np.float32),
    "attn_mask": np.zeros((ROWS, KEYS), np.float16),
    "lengths": np.ones(1, np.int32),
    "prefix": np.ones(1, np.int32),
    "documents": np.zeros((1, KEYS), np.int32),
    "tree": np.ones((1, ROWS), np.int64),
    "out": np.zeros((1, 4, ROWS, D), np.float32),
}


@pytest.mark.parametrize("name", ["q", "k", "v", *READ])
def test_bytes_in_the_order_of_other_machines_are_refused(name):
    told = dict(zip("qkv", arrays(), strict=True)) | ({name: READ[name]} if name in READ else {})
    told[name] = other_bytes(told[name])
    wanted = f"{name} is {OTHER_BYTES}.., whose bytes stand in another order .* pass {name}.astype"
    with pytest.raises(TypeError, match=wanted):
        flashgen.attention(**told, device=CARD)
    if name == "documents":
        with pytest.raises(TypeError, match="documents is"):
            flashgen.attention(*arrays(), documents=(told[name], told[name]), device=CARD)


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "seqused_k", "sinks"])
def test_they_are_refused_of_packed_sequences(name):
    told = {x: np.zeros((9, 2, D), np.float32) for x in "qkv"}
    told |= {
        "cu_seqlens_q": STARTS,
        "cu_seqlens_k": STARTS,
        "seqused_k": STARTS[1:],
        "sinks": READ["sinks"][:2],
    }
    told[name] = other_bytes(told[name])
    with pytest.raises(TypeError, match=f"{name} is {OTHER_BYTES}"):
        flashgen.attention_varlen(**told, max_seqlen_q=5, max_seqlen_k=5, device=CARD)


def test_texts_of_packed_sequences_read_what_is_passed():
    told = {"max_seqlen_q": 5, "max_seqlen_k": 5, "mask": "k < far", "device": CARD}
    x = np.zeros((9, 2, D), np.float32)
    with pytest.raises(ValueError, match="no expression reads scalar near; leave it out"):
        flashgen.attention_varlen(x, x, x, STARTS, STARTS, far=3, near=4, **told)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"max_seqlen_q": 3}, "max_seqlen_q= tells of packed queries: pass cu_seqlens_q as well"),
        ({"cu_seqlens_q": np.array([0, 3], np.int32)}, "max_seqlen_q= is missing: cu_seqlens_q is given"),
        ({"causal": 1}, "causal is 1; it must be True or False"),
        ({"plan": 3}, "plan is a builtins.int; pass a SequencePlan"),
    ],
)
def test_queries_beside_a_cache_are_told_of_by_keyword(told, text):
    q, slots = caches()
    with pytest.raises(TypeError, match=text):
        flashgen.attention_with_cache(q, *slots, layout="bshd", device=CARD, **told)


def test_what_no_kernel_serves_is_told_without_the_command_line():
    eight = [x.astype(ml_dtypes.float8_e4m3fn) for x in arrays()]
    with pytest.raises(ValueError, match="pass arrays of another type, or take another card") as refused:
        flashgen.attention(*eight, scales=(1, 1, 1), device=CARD)
    assert "--" not in str(refused.value)
    with pytest.raises(
        TypeError, match="scales= is taken with float8_e4m3fn alone, and q is float32: leave it"
    ):
        flashgen.attention(*arrays(), scales=(1, 1, 1), device=CARD)
    with pytest.raises(TypeError, match=r"scales is 3; pass three numbers, \(of_q, of_k, of_v\)"):
        flashgen.attention(*eight, scales=3, device="sim:h200")


# ---- arrays that lie oddly


@needs_compiler
def test_arrays_may_lie_as_they_like():
    q, k, v = arrays()
    wanted = expected(q, k, v).o
    wide = np.zeros((*k.shape[:3], 2 * D), np.float32)
    wide[..., ::2] = k
    backwards = np.ascontiguousarray(v[..., ::-1])[..., ::-1]
    read_only = q.copy()
    read_only.setflags(write=False)
    made = np.full((*q.shape[:2], 2 * ROWS, D), np.nan, np.float32)[:, :, ::-2]
    found = flashgen.attention(np.asfortranarray(q), wide[..., ::2], backwards, out=made, device=CARD)
    assert found is made
    assert_near(found, wanted)
    assert_near(flashgen.attention(read_only, k, v, device=CARD), wanted)
    steps = (q.strides[0] + q.itemsize, *q.strides[1:])  # of one batch, which nobody steps by
    odd = np.lib.stride_tricks.as_strided(q, q.shape, steps, writeable=False)
    assert_near(flashgen.attention(odd, k, v, device=CARD), wanted)
    shared = [np.broadcast_to(x[:, :1], (3, *x.shape[1:])) for x in (k, v)]
    found = flashgen.attention(np.broadcast_to(q, (3, *q.shape[1:])), *shared, device=CARD)
    assert_near(found[2], expected(q, k[:, :1].repeat(2, 1), v[:, :1].repeat(2, 1)).o[0])


@needs_compiler
@pytest.mark.thorough
def test_lengths_and_tables_may_lie_as_they_like_and_be_numbers_of_numpy():
    q, slots = caches()
    pages, table = paged(slots)
    told = {"layout": "bshd", "device": CARD}
    used = np.array(LENGTHS, np.int32).repeat(2)[::2]
    wide = table.repeat(2, 1)[:, ::2]
    given = {"page_table": wide, "seqused_k": used, **told}
    exact = by_sequence(q, slots)
    assert_near(flashgen.attention_with_cache(q, *pages, **given), exact)
    given = {"cu_seqlens_q": np.array([0, 3, 6], np.int32), "max_seqlen_q": np.int64(3), **given}
    o = flashgen.attention_with_cache(q.reshape(6, 4, D), *pages, max_seqlen_k=np.int64(48), **given)
    assert_near(o.reshape(q.shape), exact)
    x, y = (np.ones((9, 2, D), np.float32) * n for n in (1, 3))
    longest = {"max_seqlen_q": np.int32(5), "max_seqlen_k": np.int64(5)}
    assert_near(flashgen.attention_varlen(x, x, y, STARTS, STARTS, **longest, device=CARD), y)


def test_an_output_that_overlaps_itself_is_refused():
    q, k, v = arrays()
    out = np.lib.stride_tricks.as_strided(np.empty_like(q), q.shape, (0, 0, *q.strides[2:]))
    with pytest.raises(ValueError, match="out overlaps itself"):
        flashgen.attention(q, k, v, out=out, device=CARD)


# ---- nothing to compute

EMPTY = [{"rows": 0}, {"keys": 0}, {"batch": 0}, {"heads": 0, "kv_heads": 0}, {"rows": 0, "keys": 0}]
NOTHING_HIDES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 0)},
    "softcap": {"softcap": 3.0},
    "chunk": {"chunk": 3},
}


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
@pytest.mark.parametrize("name", [*NOTHING_HIDES, "bias", "attn_mask", "sinks", "documents", "lengths"])
def test_where_there_is_nothing_to_see_outputs_are_zero(name, sizes):
    q, k, v = arrays(**sizes)
    read = {
        "bias": np.zeros((q.shape[2], k.shape[2]), np.float32),
        "attn_mask": np.ones((q.shape[2], k.shape[2]), bool),
        "sinks": np.linspace(1, 2, q.shape[1], dtype=np.float32),
        "documents": np.zeros((len(k), k.shape[2]), np.int32),
        "lengths": np.zeros(len(k), np.int32),
    }
    told = NOTHING_HIDES.get(name, {name: read.get(name)})
    o, lse = flashgen.attention(q, k, v, return_lse=True, device=CARD, **told)
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    assert not o.any()
    of_nothing = read["sinks"][:, None] if name == "sinks" else -np.inf
    assert (lse == of_nothing).all()
    given, rows = np.ones_like(o), np.ones_like(lse)
    call = call_of(q, k, v, **told)
    wanted = ("sinks",) if name == "sinks" else ()
    found = differentiate(bound_of(CARD), call, o, lse, given, rows, wanted=wanted)
    assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]
    assert not any(x.any() for x in found[:3])
    if wanted:  # each row's log-sum-exp is the sink, where there are rows
        assert (found[3] == len(q) * q.shape[2]).all()


def test_packed_sequences_and_caches_of_nothing():
    q, none = np.ones((5, 2, D), np.float32), np.ones((0, 2, D), np.float32)
    of_q, of_none = np.array([0, 2, 5], np.int32), np.zeros(3, np.int32)
    told = {"max_seqlen_q": 3, "max_seqlen_k": 0, "return_lse": True, "device": CARD}
    o, lse = flashgen.attention_varlen(q, none, none, of_q, of_none, **told)
    assert o.shape == q.shape and not o.any() and (lse == -np.inf).all()
    told |= {"max_seqlen_q": 0, "max_seqlen_k": 3}
    o, lse = flashgen.attention_varlen(none, q, q, of_none, of_q, **told)
    assert o.shape == none.shape and lse.shape == (2, 0)
    _, slots = caches()
    for rows, used in ((0, 3), (3, 0)):
        queries = np.ones((2, rows, 4, D), np.float32)
        found = flashgen.attention_with_cache(queries, *slots, seqused_k=used, layout="bshd", device=CARD)
        assert found.shape == queries.shape and not found.any()


# ---- caches that are written to

NEW = np.ones((2, 3, 2, D), np.float32)
BEHIND = np.array([5, 9], np.int32)

UNWRITTEN = [
    ({"scale": float("nan")}, "scale is nan"),
    ({"v": NEW[..., :8]}, r"v has the shape \(2, 3, 2, 8\); with these .* must be \(2, 3, 2, 16\)"),
    ({"v": NEW[:, :2]}, r"v has the shape \(2, 2, 2, 16\)"),
    ({"k": NEW.astype(np.float64)}, "k is float64, and k_cache float32"),
    ({"k": NEW[0]}, r"k has the shape \(3, 2, 16\); it must be \(batch, rows, heads, head_dim\)"),
    (
        {"cache_seqlens": np.array([5, 46], np.int32)},
        "k has 3 rows behind 46 keys of sequence 1, and",
    ),
    ({"cache_seqlens": np.array([5, 9])}, "cache_seqlens is int64; served are int32"),
    ({"cache_seqlens": np.array([5], np.int32)}, r"cache_seqlens has the shape \(1,\), but must be \(2,\)"),
    ({"cache_seqlens": -1}, "cache_seqlens is -1; it must be 0 or more"),
    (
        {"cache_batch_idx": np.array([0, 2])},
        "cache_batch_idx has 2 at sequence 1, where new rows",
    ),
    ({"out": np.zeros((2, 3, 4, D), np.float16)}, "out is float16"),
    ({"out": np.zeros((2, 2, 4, D), np.float32)}, "out has"),
    ({"sinks": np.zeros(3, np.float32)}, r"sinks has the shape \(3,\)"),
    ({"q": np.zeros((2, 3, 3, D), np.float32)}, "q has 3 heads, k and v have 2; theirs must divide q's"),
    ({"q": np.zeros((2, 3, 4, D), np.float16)}, "q is float16, k float32"),
    ({"rotary_cos": np.ones((4, 4)), "rotary_sin": np.ones((4, 4))}, "rotary_cos has 4 positions"),
    (
        {"rotary_cos": np.ones((60, 4)), "rotary_sin": np.ones((60, 3))},
        "rotary_cos and rotary_sin have",
    ),
]


@pytest.mark.parametrize(("told", "text"), UNWRITTEN, ids=lambda value: str(value)[:40])
def test_a_refused_call_leaves_the_cache_as_it_was(told, text):
    q, slots = caches()
    told = {"q": q, "k": NEW, "v": NEW, "cache_seqlens": BEHIND, "layout": "bshd", "device": CARD, **told}
    before = [x.copy() for x in slots]
    with pytest.raises((TypeError, ValueError), match=text):
        flashgen.attention_with_cache(told.pop("q"), *slots, **told)
    assert all((x == y).all() for x, y in zip(slots, before, strict=True))


def test_pages_that_the_cache_has_not_are_not_written():
    q, slots = caches()
    pages, table = paged(slots)
    before = [x.copy() for x in pages]
    table[1, 0] = -1
    told = {"k": NEW, "v": NEW, "layout": "bshd", "device": CARD}
    with pytest.raises(ValueError, match="page_table has -1 at sequence 1, where new rows are written"):
        flashgen.attention_with_cache(q, *pages, page_table=table, cache_seqlens=BEHIND, **told)
    used = np.array(LENGTHS, np.int32)  # whose new rows are in pages that there are
    with pytest.raises(ValueError, match="page_table has page -1 at sequence 1, place 0"):
        flashgen.attention_with_cache(q, *pages, page_table=table, cache_seqlens=used, **told)
    assert all((x == y).all() for x, y in zip(pages, before, strict=True))


def test_a_kernel_that_cannot_be_built_leaves_the_cache_as_it_was(monkeypatch):
    def none(*given: Any, **told: Any) -> Any:
        raise FlashgenError("there is no compiler")

    monkeypatch.setattr(Workshop, "serve", none)
    q, slots = caches()
    before = [x.copy() for x in slots]
    told = {"k": NEW, "v": NEW, "cache_seqlens": BEHIND, "layout": "bshd", "device": CARD}
    with pytest.raises(RuntimeError, match="there is no compiler"):
        flashgen.attention_with_cache(q, *slots, **told)
    assert all((x == y).all() for x, y in zip(slots, before, strict=True))
