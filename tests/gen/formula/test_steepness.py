"""How steep changes of scores are."""

from __future__ import annotations

import math

import pytest
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.formula.steepness import steepness
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import SCORE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score + table[h, k - q]", 1),
        ("8.0 * score - q", 8),
        ("-score / 4.0", 0.25),
        ("30.0 * tanh(score / 30.0)", 1),
        ("2.0 * tanh(score)", 2),
        ("score + 3.0 * score", 4),
        ("where(k < 3, 5.0 * score, abs(score))", 5),
        ("max(score, 3.0 * score)", 3),
        ("sigmoid(8.0 * score)", 2),
        ("floor(score)", math.inf),
        ("score * score", math.inf),
        ("exp(score)", math.inf),
        ("score * slope", math.inf),
    ],
)
def test_slopes_are_what_numbers_make_of_them(text, expected):
    change = Problem(scoring=Scoring(score=text, scalars=(("slope", 2.0),) if "slope" in text else ())).scores
    assert change.change is not None
    assert steepness(change.change, SCORE) == pytest.approx(expected)
    assert change.steepness == (max(1, expected) if math.isfinite(expected) else 1)


def test_parts_of_f16_may_lose_less_where_scores_grow():
    variant = Mma(br=32, bc=16, rows_per_warp=16, parts="f16")
    slopes = (("score + q", "1024.0"), ("12.5 * score", "12800.0"), ("1e36 * score", "1.024e+33"))
    for text, factor in slopes:
        problem = Problem(head_dim=64, scoring=Scoring(score=text))
        assert f"score_unit * (kD * {factor}f) <=" in render(variant, problem, preset("h200")).source
