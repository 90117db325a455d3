"""`flashgen.attention` on emulated cards, held to float64, and what it refuses."""

from __future__ import annotations

import math

import flashgen
import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.errors import UsageError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.front import card

from tests.support.emulated import needs_compiler

CARD = "sim:gtx-1080"
ROWS, KEYS, D = 37, 70, 16


def arrays(dtype=np.float32, *, rows=ROWS, keys=KEYS, d=D, dv=None, heads=4, kv_heads=2, batch=1):
    rng = np.random.default_rng(3)
    shapes = (batch, heads, rows, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv or d)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def expected(q, k, v, *, causal=False, scoring=None, values=None, scale=None):
    problem = Problem(causal=causal, scoring=scoring or Scoring())
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return reference.attention(q, k, v, scale=scale, scores=problem.scores, values=values)


def assert_near(found, wanted, bound=2e-6):
    assert np.linalg.norm(found.astype(np.float64) - wanted) <= bound * np.linalg.norm(wanted)


@needs_compiler
def test_dense_attention_with_its_log_sum_exp_in_either_layout():
    q, k, v = arrays()
    o, lse = flashgen.attention(q, k, v, return_lse=True, device=CARD)
    wanted = expected(q, k, v)
    assert_near(o, wanted.o)
    assert np.abs(lse - wanted.lse).max() < 1e-5
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    made = np.full((1, ROWS, 4, D), np.nan, np.float32)
    found = flashgen.attention(*turned, layout="bshd", out=made, scale=0.3, device=CARD)
    assert found is made
    assert_near(made.swapaxes(1, 2), expected(q, k, v, scale=0.3).o)


CASES = [
    ("sim:a100", np.float16, 32, {"causal": True}),
    ("sim:h200", ml_dtypes.bfloat16, 64, {}),
    ("sim:a100", ml_dtypes.bfloat16, 33, {"causal": True, "rows": 1}),
    ("sim:gtx-1080", np.float32, 7, {"causal": True}),
]


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize(("card", "dtype", "d", "more"), CASES)
def test_types_cards_and_head_dims(card, dtype, d, more):
    told = dict(more)
    q, k, v = arrays(dtype, d=d, rows=told.pop("rows", ROWS))
    o = flashgen.attention(q, k, v, device=card, **told)
    assert o.dtype == q.dtype
    assert_near(o, expected(q, k, v, **told).o, 2e-6 if dtype is np.float32 else 1e-2)


@needs_compiler
@pytest.mark.thorough
def test_masks_and_changes_by_name_take_other_numbers_without_another_kernel(capfd):
    q, k, v = arrays()
    sinks = np.linspace(-1, 1, 4, dtype=np.float32)
    for window, softcap in (((11, 3), 5.0), ((10, 3), 2.0)):
        o = flashgen.attention(q, k, v, window=window, softcap=softcap, sinks=sinks, device=CARD)
        asked = Scoring(window=window, softcap=softcap, sinks=True)
        values = {"window_left": window[0], "window_right": window[1], "softcap": softcap, "sinks": sinks}
        assert_near(o, expected(q, k, v, scoring=asked, values=values).o)
    assert capfd.readouterr().err.count("building") <= 1


@needs_compiler
@pytest.mark.thorough
def test_a_bias_is_repeated_and_a_function_is_traced():
    q, k, v = arrays()
    bias = np.random.default_rng(1).standard_normal((4, 1, KEYS)).astype(np.float32)
    o = flashgen.attention(q, k, v, attn_mask=bias, device=CARD)
    whole = np.broadcast_to(bias[None], (1, 4, ROWS, KEYS))
    wanted = expected(q, k, v, scoring=Scoring(bias="f32"), values={"bias": whole}).o
    assert_near(o, wanted)
    by_function = flashgen.attention(
        q, k, v, score=lambda score, b, h, q, k: score + bias[h, 0, k], device=CARD
    )
    assert_near(by_function, wanted)
    text = flashgen.attention(q, k, v, score="score + slope[h] * k", slope=sinks_of(q), device=CARD)
    shifted = np.broadcast_to((sinks_of(q)[:, None] * np.arange(KEYS))[None, :, None], whole.shape)
    assert_near(text, expected(q, k, v, scoring=Scoring(bias="f32"), values={"bias": shifted}).o, 4e-6)
    seen = flashgen.attention(q, k, v, mask=lambda b, h, q, k: (k + h) % 3 > 0, device=CARD)
    hides = (np.arange(KEYS) + np.arange(4)[:, None])[None, :, None] % 3 > 0
    shown = np.broadcast_to(np.where(hides, 0.0, -np.inf), whole.shape)
    assert_near(seen, expected(q, k, v, scoring=Scoring(bias="f32"), values={"bias": shown}).o)


def sinks_of(q):
    return np.linspace(0.01, 0.02, q.shape[1], dtype=np.float32)


WRONG = [
    ({"q": np.float64}, TypeError, "q is float64; served are float32, float16, bfloat16: pass q.astype"),
    ({"d": 257}, ValueError, "q has the head dim 257; served are 1..256"),
    ({"keys": np.float16}, TypeError, "q is float32, k float16"),
    ({"heads": 3}, ValueError, "q has 3 heads, k and v have 2; theirs must divide q's"),
    ({"window": 5}, TypeError, r"window is 5; pass \(left, right\)"),
    ({"window": (-3, 0)}, ValueError, r"window is \(-3, 0\); a side must lie in -1 \(all keys\)..1073741824"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0; it must be a positive number"),
    ({"bias": np.zeros((2, 2), np.float64)}, TypeError, "bias is float64; served are float32"),
    ({"bias": 1.0}, TypeError, "bias is a float; pass an array"),
    ({"windows": (3, 3)}, TypeError, "windows= is no argument of attention"),
    ({"mask": 3}, TypeError, "mask is a int; pass a function as FlexAttention takes it, or its text"),
    ({"score": "score + nothing[q]"}, TypeError, "nothing= is missing: the text of mask= or score= reads it"),
    ({"score": "score + 1", "table": np.ones(3)}, TypeError, "table"),
    ({"layout": "sbhd"}, ValueError, "layout is 'sbhd'; choose 'bhsd' or 'bshd'"),
    ({"scale": math.inf}, ValueError, "scale is inf"),
    ({"device": "a100"}, ValueError, "device is 'a100'; leave it out"),
    ({"device": "sim:a99"}, UsageError, "unknown preset 'a99'"),
    ({"fallback": "numpy"}, ValueError, "fallback is 'numpy'; choose 'torch'"),
    ({"bias": np.zeros(1, np.float32), "attn_mask": np.zeros(1, np.float32)}, TypeError, "two names of one"),
]


@pytest.mark.parametrize(("told", "kind", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_a_refusal_names_the_argument_what_it_is_and_what_is_served(told, kind, text):
    told = dict(told)
    q, k, v = arrays(d=told.pop("d", D), heads=told.pop("heads", 4))
    q, k = q.astype(told.pop("q", q.dtype)), k.astype(told.pop("keys", k.dtype))
    with pytest.raises(kind, match=text):
        flashgen.attention(q, k, v, **{"device": CARD, **told})


@needs_compiler
@pytest.mark.thorough
def test_documents_are_told_by_ids_or_by_bounds():
    q, k, v = arrays(rows=40, keys=40)
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (1, 40))).astype(np.int32)
    same = np.where(ids[0][:, None] == ids[0][None], 0.0, -np.inf)
    shown = np.broadcast_to(same, (1, 4, 40, 40))
    wanted = expected(q, k, v, scoring=Scoring(bias="f32"), values={"bias": shown}).o
    begins, ends = (np.searchsorted(ids[0], ids, side).astype(np.int32) for side in ("left", "right"))
    for documents in (ids, (begins, ends)):
        for _ in range(2):
            assert_near(flashgen.attention(q, k, v, documents=documents, device=CARD), wanted)


@pytest.mark.parametrize("call", ["attention", "attention_varlen", "attention_with_cache"])
def test_without_a_card_arrays_of_the_host_are_told_how_to_emulate_one(call, monkeypatch):
    def none():
        raise RuntimeError("an NVIDIA GPU and its driver are needed: libcuda.so.1")

    monkeypatch.setattr(card, "_driver", none)
    q, starts = np.zeros((1, 4, 2, 16), np.float32), np.array([0, 4], np.int32)
    told = {
        "attention": ((q, q, q), {}),
        "attention_varlen": ((*(q[0],) * 3, starts, starts), {"max_seqlen_q": 4, "max_seqlen_k": 4}),
        "attention_with_cache": ((q.swapaxes(1, 2), q, q), {}),
    }
    arrays, lengths = told[call]
    with pytest.raises(RuntimeError, match=r'a.* GPU.* are needed.*device="sim:h200".*`flashgen devices`'):
        getattr(flashgen, call)(*arrays, **lengths)
