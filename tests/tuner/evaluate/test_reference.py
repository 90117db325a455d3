"""The float64 reference against the definition, written out."""

import math

import numpy as np
import pytest
from flashgen.gen.scoring.scores import scores_of
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.reference import (
    DISTRIBUTIONS,
    LARGE_SCORE,
    attention,
    random_inputs,
)


def by_definition(q, k, v, scale, causal):
    """One row at a time, in plain Python."""
    batch, heads, n, d = q.shape
    group, m = heads // k.shape[1], k.shape[2]
    o = np.zeros(q.shape)
    lse = np.full(q.shape[:3], -np.inf)
    for b, h, i in np.ndindex(batch, heads, n):
        seen = min(m, i + 1 + m - n) if causal else m
        if seen <= 0:
            continue
        scores = [
            scale * math.fsum(float(x) * float(y) for x, y in zip(q[b, h, i], key, strict=True))
            for key in k[b, h // group, :seen]
        ]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        total = math.fsum(weights)
        lse[b, h, i] = top + math.log(total)
        for x in range(d):
            o[b, h, i, x] = math.fsum(
                w * float(row[x]) for w, row in zip(weights, v[b, h // group], strict=False)
            )
        o[b, h, i] /= total
    return o, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(5, 7), (7, 5), (1, 6), (6, 1), (6, 6)])
@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
def test_matches_the_definition(n, m, causal, scale):
    rng = np.random.default_rng(n * 10 + m)
    q, k, v = (rng.standard_normal((2, h, length, 3)) for h, length in ((4, n), (2, m), (2, m)))
    found = attention(q, k, v, scale=scale, scores=scores_of(causal=causal))
    o, lse = by_definition(q, k, v, scale, causal)
    np.testing.assert_allclose(found.o, o, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-12, atol=1e-14)


def test_rows_without_keys_are_zero_and_minus_infinity():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 1, 6, 4)), *(rng.standard_normal((1, 1, 2, 4)) for _ in "kv")
    found = attention(q, k, v, scale=1.0, scores=scores_of(causal=True))
    assert (found.o[0, 0, :4] == 0).all() and np.isneginf(found.lse[0, 0, :4]).all()
    assert np.isfinite(found.lse[0, 0, 4:]).all() and (found.o[0, 0, 4:] != 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_and_chosen_rows_agree_with_the_whole(monkeypatch, causal):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, h, length, 8)) for h, length in ((4, 70), (2, 50), (2, 50)))
    whole = attention(q, k, v, scale=0.4, scores=scores_of(causal=causal))
    rows = np.array([0, 3, 19, 20, 21, 44, 69])
    chosen = attention(q, k, v, scale=0.4, scores=scores_of(causal=causal), rows=rows)
    np.testing.assert_allclose(chosen.o, whole.o[:, :, rows], rtol=1e-13)
    np.testing.assert_allclose(chosen.lse, whole.lse[:, :, rows], rtol=1e-13)
    monkeypatch.setattr(reference, "MAX_SCORE_BYTES", 8 * 4 * 50 * 3)
    blocked = attention(q, k, v, scale=0.4, scores=scores_of(causal=causal))
    np.testing.assert_allclose(blocked.o, whole.o, rtol=1e-13, atol=1e-15)
    assert blocked.max_score == pytest.approx(whole.max_score)


def test_huge_scores_stay_finite():
    q, k, v = (np.full((1, 1, 3, 2), x) for x in (1000.0, -1000.0, 2.0))
    found = attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(found.o, 2.0)
    np.testing.assert_allclose(found.lse, -2e6 + math.log(3))
    assert found.max_score == 2e6


def test_values_may_have_columns_of_their_own():
    rng = np.random.default_rng(5)
    q, k = (rng.standard_normal((1, 2, n, 8)) for n in (6, 9))
    v = rng.standard_normal((1, 2, 9, 5))
    wide = attention(q, k, np.concatenate([v, v[..., :3]], axis=-1), scale=0.3, scores=scores_of(causal=True))
    found = attention(q, k, v, scale=0.3, scores=scores_of(causal=True))
    assert found.o.shape == (1, 2, 6, 5)
    np.testing.assert_allclose(found.o, wide.o[..., :5], rtol=1e-13)
    np.testing.assert_array_equal(found.lse, wide.lse)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_inputs_of_16_bits_are_the_float32_ones_rounded_and_taken_as_they_are(dtype):
    shapes = (1, 2, 7, 8), (1, 1, 9, 8)
    exact, rounded = (
        random_inputs("normal", *shapes, scale=0.3, rng=np.random.default_rng(6), dtype=d, head_dim_v=5)
        for d in ("f32", dtype)
    )
    for a, b in zip(exact, rounded, strict=True):
        assert b.dtype == numpy_dtype(dtype) and (b.astype(np.float32) != a).any()
        np.testing.assert_array_equal(a.astype(b.dtype), b)
    assert rounded[2].shape == (1, 1, 9, 5)
    found = attention(*rounded, scale=0.3)
    np.testing.assert_array_equal(found.o, attention(*(x.astype(float) for x in rounded), scale=0.3).o)
    assert np.abs(found.o - attention(*exact, scale=0.3).o).max() > 1e-5


#: So many different numbers are among normal ones of a type, however many are drawn.
MIN_DISTINCT = {"f32": 10**9, "f16": 500, "bf16": 100}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("scale", [0.125, 0.7, -0.3, 1e-4])
@pytest.mark.parametrize("head_dim", [1, 2, 64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_inputs_are_as_their_name_says(name, head_dim, scale, dtype):
    rng = np.random.default_rng(2)
    q, k, v = random_inputs(
        name, (1, 2, 40, head_dim), (1, 1, 300, head_dim), scale=scale, rng=rng, dtype=dtype
    )
    assert q.dtype == k.dtype == v.dtype == numpy_dtype(dtype)
    assert all(np.isfinite(x.astype(float)).all() for x in (q, k, v))
    assert len(np.unique(v.astype(float))) > min(150 * head_dim, MIN_DISTINCT[dtype])
    if head_dim > 2 or dtype == "f32":
        # Of one or two columns, little is left in 16 bits beside the large term.
        assert len(np.unique(q[0].astype(float))) > min(20 * head_dim, MIN_DISTINCT[dtype])
        assert len(np.unique(k[0, 0].astype(float), axis=0)) == 300, "keys must not be alike"
    if abs(scale) < 1e-3:
        return
    scores = (q[0, 0].astype(float) @ k[0, 0].T.astype(float)) * scale
    middle = np.median(scores, axis=0)
    if name == "uniform":
        assert np.abs(q).max() <= 3 and np.abs(v).max() > 2.9
    elif name == "negative":
        assert scores.max() < -104, "exp of every score underflows float32"
    elif name in ("rising", "falling"):
        ends = (middle[:20].mean(), middle[-20:].mean())
        low, high = ends if name == "rising" else ends[::-1]
        assert low < -LARGE_SCORE / 2 and high > LARGE_SCORE / 2
    elif name == "spiked":
        assert middle.max() > 30 and np.median(middle) < 10
