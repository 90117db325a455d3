"""Texts of formulas: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from flashgen.gen.expression import Expression, Kind
from flashgen.gen.formula.error import FormulaError
from flashgen.gen.formula.parse import LONGEST_FORMULA, parse

from ...support import formulas
from ...support.depth import sampled


def score(text: str, **more: dict) -> Expression:
    return parse(
        text, names=formulas.SCORE_NAMES, wanted=Kind.FLOAT, **({"scalars": formulas.SCALARS} | more)
    )


def mask(text: str, **more: dict) -> Expression:
    return parse(text, names=formulas.MASK_NAMES, wanted=Kind.BOOL, **({"scalars": formulas.SCALARS} | more))


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("score + bias[h, k - q]", "score + bias[h, k - q]"),
        ("  score*2 if q>k else -inf", "where(q > k, score * 2.0, -inf)"),
        ("slope*(k-q)+score", "slope * float(k - q) + score"),
        ("tanh(score/20)*20", "tanh(score / 20.0) * 20.0"),
        ("clamp(score, -1, 1)", "min(max(score, -1.0), 1.0)"),
        ("score**2", "score * score"),
        ("pow(score, n)", "pow(score, float(n))"),
        ("score ** -1", "1.0 / score"),
        ("score // 2", "floor(score / 2.0)"),
        ("score % 2", "score - floor(score / 2.0) * 2.0"),
        ("1/q + score", "1.0 / float(q) + score"),
        ("min(score, q, 3)", "min(min(score, float(q)), 3.0)"),
        ("score + (q >= k)", "score + float(q >= k)"),
        ("minimum(score, 1) + +1", "min(score, 1.0) + 1.0"),
        ("sigmoid(score)", "sigmoid(score)"),
        ("score * float(bool(q))", "score * float(q != 0)"),
    ],
)
def test_scores(text: str, meaning: str) -> None:
    assert score(text).python() == meaning
    assert score(meaning) == score(text)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("doc[b,q]==doc[b,k] and q>=k", "doc[b, q] == doc[b, k] and q >= k"),
        ("0<=q-k<=n", "0 <= q - k and q - k <= n"),
        ("(q-k)%4==0 or not (k<2)", "(q - k) % 4 == 0 or not k < 2"),
        ("(q>=k) & (doc[b,q]==2)", "q >= k and doc[b, q] == 2"),
        ("~(q>k) | (k>3) ^ (q>3)", "not q > k or (k > 3) != (q > 3)"),
        ("(q & 3) == k >> 1 << 1", "(q & 3) == ((k >> 1) << 1)"),
        ("(k & doc[b, q]) != 0", "(k & doc[b, q]) != 0"),
        ("k < limits[0]", "k < limits[0]"),
        ("k < table[b, doc[b, q]]", "k < table[b, doc[b, q]]"),
        ("k < weights[h]", "float(k) < weights[h]"),
        ("k < n and True", "k < n"),
        ("xs[k] > slope", "float(xs[k]) > slope"),
        ("q >= k or k >= 0", "True"),
    ],
)
def test_masks(text: str, meaning: str) -> None:
    buffers = {"weights": "bf16"}
    assert mask(text, buffers=buffers).python() == meaning
    assert mask(meaning, buffers=buffers) == mask(text, buffers=buffers)


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 1, "the formula is empty"),
        ("   ", 1, "the formula is empty"),
        (
            "k < dco",
            5,
            "there is no dco: there are b, h, q, k, seqlen_q, seqlen_k, numbers .* --scalar dco=1",
        ),
        ("k < seqlen", 5, "there is no seqlen: did you mean seqlen_q?"),
        ("score < 1", 1, "there is no score"),
        ("doc[b,q] == doc[q]", 13, "doc has 2 indices elsewhere, but 1 here"),
        ("doc[b,q] == doc", 13, "doc is a buffer: it needs an index for each axis"),
        ("weights == 1", 1, "weights is a buffer"),
        ("q[b] > 1", 1, "q is a number and has no indices"),
        ("n[b] > 1", 1, "n is a scalar and has no indices"),
        ("min[b] > 1", 1, "min is a function and has no indices"),
        ("q > min", 5, "min is a function: call it"),
        ("doc[b, k * 0.5] == 1", 8, "index of doc must be an integer, as int"),
        ("doc[b, weights[h]] == 1", 8, "index of doc must be an integer: say --buffer weights=i32"),
        ("doc[b, :] == 1", 8, "no slices"),
        ("doc[b][q] == 1", 1, "all in one pair of brackets"),
        ("strange[b] == 1", 1, "strange cannot be of f8: there are f32"),
        ("int_[b] == 1 and auto[b] == 1", 18, "auto cannot be a name in a kernel"),
        ("fo(q) > 1", 1, "there is no function fo: did you mean floor?"),
        ("q + zzz(k) > 1", 5, "there is no function zzz: there are where, min"),
        ("__import__('os').system('x')", 1, "a formula has no attributes"),
        ("q.bit_length() > 1", 1, "a formula has no attributes"),
        ("q.real > 1", 1, "a formula has no attributes"),
        ("(lambda: q)() > 1", 2, "no calls but of its functions"),
        ("max(q, key=k) > 1", 1, "max takes operands by their place"),
        ("max(*q) > 1", 5, "no stars"),
        ("exp(q, k) > 1", 1, "exp takes 1 operand, not 2"),
        ("clamp(q, 1) > 1", 1, "clamp takes 3 operands, not 2"),
        ("[q > 1 for q in k]", 1, "no comprehensions"),
        ("[q]", 1, "no lists"),
        ("(q > 1, k > 1)", 1, "no tuples"),
        ("(x := q) > 1", 2, "no `:=`"),
        ("q == 'a'", 6, "numbers and truths, no str"),
        ("q == None", 6, "numbers and truths, no NoneType"),
        ("q == 1j", 6, "numbers and truths, no complex"),
        ("q is k", 1, "compares by <"),
        ("q in k", 1, "compares by <"),
        ("k >", 4, "cannot be read: invalid syntax"),
        ("  k > > 1", 7, "cannot be read: invalid syntax"),
        ("(k > 1", 1, "was never closed"),
        ("k > 1; q", 6, "cannot be read"),
        ("k > 1 # all", 7, "a formula has no '#'"),
        ("k >\n1", 4, r"a formula has no '\\n'"),
        ("k > \u00e9", 5, "a formula has no"),
        ("q >= k & doc[b, q] == 2", 6, "& binds tighter than comparisons"),
        ("q & 1 == 0", 1, "& binds tighter than comparisons"),
        ("q and k > 1", 1, "and takes truths, such as comparisons, not an int: write q != 0"),
        ("where(q, k, 1) > 0", 1, "the condition of where takes truths"),
        ("q / 0 > 1", 1, "division by zero: q / 0"),
        ("k > 1 and q % (2 - 2) == 1", 11, "division by zero: q % 0"),
        ("q << 40 > k", 1, "40 is not in 0 to 31"),
        ("q > 3000000000", 5, "integers have 32 bits"),
        ("q > 1 << 30 << 30", 5, "integers have 32 bits"),
        ("q", 1, "a mask must be true or false, but this is an int"),
        ("exp(q)", 1, "a mask must be true or false, but this is a float"),
        ("False", 1, "this mask is never true"),
        ("1 > 2 and q > k", 1, "this mask is never true"),
        ("k < 0", 1, "this mask is never true"),
    ],
)
def test_what_is_wrong_is_said_with_its_column(text: str, column: int, reason: str) -> None:
    with pytest.raises(FormulaError, match=reason) as caught:
        mask(text, buffers={"weights": "f32", "strange": "f8"})
    assert caught.value.column == column
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and lines[0].startswith(f"column {column}: ") and lines[2].index("^") == column + 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


@pytest.mark.parametrize(("text", "way"), [("q > k", "where"), ("q + k", "float")])
def test_a_score_is_a_float(text: str, way: str) -> None:
    with pytest.raises(FormulaError, match=rf"a score must be a float.*write {way}"):
        score(text)


@pytest.mark.parametrize(
    "text",
    [
        "-" * 9000 + "q > 1",
        "not " * 5000 + "(q > 1)",
        "(" * 300 + "q" + ")" * 300 + " > 1",
        "q" + " + 1" * 20000 + " > k",
        "9" * 5000 + " > q",
        "(" * 60 + "q" + "**16)" * 60 + " > k",
        "0x" + "f" * 5000 + " > q",
        "q > 1" + " " * LONGEST_FORMULA,
        "x" * 5000 + "[q] > 1",
        "q > 1 if " * 2000 + "q",
        "\x00",
        "q" + ".real" * 3000 + " > 1",
        "f(" * 150 + "q" + ")" * 150 + " > 1",
    ],
    ids=range(13),
)
def test_hostile_texts_are_refused_in_time(text: str) -> None:
    with pytest.raises(FormulaError) as caught:
        mask(text)
    assert len(str(caught.value)) < 500


def test_chains_may_be_long() -> None:
    terms = " + ".join(f"cos(float(k) * {number})" for number in range(1, 101))
    assert score(f"score + ({terms})").size > 500
    assert mask(" and ".join(f"k != {number}" for number in range(300))).size == 300 * 4 - 1


def test_the_caret_stands_under_what_is_wrong_in_long_texts() -> None:
    text = " and ".join(["k > 1"] * 40 + ["k > wrong"] + ["k > 1"] * 40)
    with pytest.raises(FormulaError) as caught:
        mask(text)
    _, shown, caret = str(caught.value).splitlines()
    assert shown[caret.index("^") :].startswith("wrong") and len(shown) < 90


@pytest.mark.parametrize("seed", sampled(range(300), 30))
def test_what_is_printed_is_read_again(seed: int) -> None:
    rng = random.Random(seed)
    for kind in (Kind.FLOAT, Kind.BOOL):
        tree = formulas.drawn(rng, kind, rng.randint(1, 5))
        if tree.size < 2:
            continue
        names = formulas.SCORE_NAMES
        again = parse(
            tree.python(), names=names, wanted=kind, buffers=formulas.BUFFERS, scalars=formulas.SCALARS
        )
        values = formulas.values(np.random.default_rng(seed), 30)
        np.testing.assert_array_equal(again.value(values), tree.value(values), err_msg=tree.python())
