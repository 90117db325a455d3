"""What rows see of the keys: the same to the kernel's C++, to numpy and to whoever counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.expression import maximum
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import CAUSAL_BOUND, DIAGONAL, FULL, ROW, Bound, Scores, scores_of
from flashgen.gen.work import walk_tiles
from flashgen.tuner.evaluate import reference

LENGTHS = [(1, 1), (5, 9), (9, 5), (1, 40), (40, 1), (33, 33)]


def window(left: int, right: int) -> Scores:
    """A row sees so many keys before and behind its own position."""
    return Scores(
        begins=(Bound(maximum(0, ROW + DIAGONAL - left)),),
        ends=(*FULL.ends, Bound(ROW + DIAGONAL + right + 1)),
    )


def seen(scores: Scores, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    begin, end = scores.interval(np.arange(seqlen_q), seqlen_q, seqlen_k)
    keys = np.arange(seqlen_k)
    return (keys >= begin[:, None]) & (keys < end[:, None])


def evaluated(text: str, **names: int) -> bool | int:
    """The value of a line of C++."""
    condition, _, branches = text.partition(" ? ")
    if branches:
        taken, _, other = branches.rpartition(" : ")
        return evaluated(taken if evaluated(condition, **names) else other, **names)
    python = text.replace("&&", " and ").replace("||", " or ").replace("!kCausal", "(not kCausal)")
    return eval(python.replace("args.", ""), {"min": min}, names)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_the_causal_mask_is_aligned_bottom_right(seqlen_q: int, seqlen_k: int) -> None:
    rows, keys = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    np.testing.assert_array_equal(
        seen(scores_of(causal=True), seqlen_q, seqlen_k), keys <= rows + seqlen_k - seqlen_q
    )
    assert seen(scores_of(causal=False), seqlen_q, seqlen_k).all()
    assert scores_of(causal=False).all_rows_alike and not scores_of(causal=True).all_rows_alike


@pytest.mark.parametrize("scores", [FULL, scores_of(causal=True), window(3, 0), window(2, 4)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_pairs_are_counted(scores: Scores, seqlen_q: int, seqlen_k: int) -> None:
    assert scores.visible_pairs(seqlen_q, seqlen_k) == seen(scores, seqlen_q, seqlen_k).sum()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_the_kernel_says_what_numpy_computes(causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    scores = scores_of(causal=causal)
    names = {"seqlen_k": seqlen_k, "diagonal": seqlen_k - seqlen_q, "kCausal": causal}
    for row in range(seqlen_q):
        _, end = scores.interval(row, seqlen_q, seqlen_k)
        assert max(0, evaluated(scores.end("row"), row=row, **names)) == end
        assert max(0, evaluated(scores.end(scores.before("stop")), stop=row + 1, **names)) == end
        for key in range(seqlen_k):
            crosses = evaluated(scores.crosses_end("key", "row"), key=key, row=row, **names)
            assert crosses == (key > end) or key <= 0
            assert evaluated(scores.sees_key("key", "row"), key=key, row=row, **names) == (key < end)


def test_flags_say_where_rows_differ() -> None:
    scores = scores_of(causal=False)
    assert scores.rows_may_be_empty() == scores.later_rows_see_more() == CAUSAL_BOUND.flag == "kCausal"
    assert FULL.rows_may_be_empty() == FULL.later_rows_see_more() == "false"


@pytest.mark.parametrize(
    ("scoring", "causal", "less"),
    [
        (Scoring(), True, True),
        (Scoring(), False, False),
        (Scoring(window=(127, 0)), True, True),
        (Scoring(window=(127, 127)), False, True),
        (Scoring(window=(127, 0), chunk=512), True, True),
        (Scoring(chunk=512), True, False),
        (Scoring(documents=4), True, False),
        (Scoring(lengths=True), False, False),
    ],
)
def test_the_first_rows_see_less_under_causal_masks_and_windows(scoring, causal, less):
    scores = Problem(causal=causal, scoring=scoring).scores
    assert scores.first_rows_see_less == less
    assert (scores.later_rows_see_more() == "true") == (less and scoring.window is not None)
    assert window(1, 0).rows_may_be_empty() == "true"


def test_the_reference_masks_what_rows_do_not_see() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 4)) for n in (9, 12, 12))
    found = reference.attention(q, k, v, scale=0.5, scores=window(3, 1))
    scores = np.where(seen(window(3, 1), 9, 12), 0.5 * q @ k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(scores)
    np.testing.assert_allclose(found.o, weights @ v / weights.sum(-1, keepdims=True))
    np.testing.assert_allclose(found.lse, np.log(weights.sum(-1)))


def test_walks_begin_where_rows_begin_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(seqlen_q=1024, seqlen_k=1024)
    monkeypatch.setattr(Problem, "scores", property(lambda self: window(127, 0)))
    walks = walk_tiles(replace(problem, batch=3), 128, 64, 4, skips=False)
    # 128 rows see 255 keys, in tiles of 64 from 128 before the first row on; the first block 128.
    assert sorted(walk.tiles for walk in walks) == [2, *[4] * 7]


@pytest.mark.parametrize(
    ("mask", "dtype", "wide"),
    [
        ("k < lens[b]", "i64", True),
        ("k >= lens[b]", "i64", True),
        ("k < lens[b] or q >= k", "i64", True),
        ("max(lens[b], q) % 2 == k % 2", "i64", True),
        ("k < lens[b]", "i32", False),
        ("lens[k] == q", "i64", False),
    ],
)
def test_places_are_compared_with_integers_of_eight_bytes(mask: str, dtype: str, wide: bool) -> None:
    """CUDA's min and max take no int beside a long long, so that kernels bring their own where these meet."""
    scores = Problem(head_dim=16, scoring=Scoring(mask=mask, buffers=(("lens", dtype),))).scores
    assert scores.compares_wide == wide
