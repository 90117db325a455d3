"""What rivals are told of masks and changes of scores: conditions and sums, as users write them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.values import typical_values
from flashgen.tuner.bench.formulas import added, changed, visible
from flashgen.tuner.suites import SUITES

ROWS, KEYS = 24, 40


def pairs(problem: Problem, b: int, h: int) -> dict[str, object]:
    rows, keys = np.arange(problem.seqlen_q)[:, None], np.arange(problem.seqlen_k)[None, :]
    return {**typical_values(problem), "b": b, "h": h, "q": rows, "k": keys}


@pytest.mark.parametrize("name", SUITES["masks"].problems)
def test_they_say_what_the_problem_says(name):
    problem = SUITES["masks"].problems[name]
    asked = problem.scoring
    if asked.window is not None:
        asked = replace(asked, window=(9, 0))
    asked = replace(asked, chunk=asked.chunk and 7, prefix=asked.prefix and 20)
    small = {"batch": 2, "num_q_heads": 2, "num_kv_heads": 1, "seqlen_q": ROWS, "seqlen_k": KEYS}
    problem = replace(problem, **small, head_dim=8, head_dim_v=8, scoring=asked)
    rows, keys, values = np.arange(ROWS), np.arange(KEYS), typical_values(problem)
    scores = np.random.default_rng(0).normal(size=(ROWS, KEYS))
    for b, h in ((0, 0), (1, 1)):
        place = (b, h, rows, keys, ROWS, KEYS)
        condition, change, addend = visible(problem), changed(problem), added(problem)
        seen = True if condition is None else condition.value(pairs(problem, b, h))
        shape = (ROWS, KEYS)
        assert np.array_equal(np.broadcast_to(seen, shape), problem.scores.visible(values, *place))
        after = problem.scores.changed(values, scores, *place)
        told = pairs(problem, b, h) | {"score": scores}
        assert np.allclose(scores if change is None else change.value(told), after)
        if addend is not None:
            assert np.allclose(scores + addend.value(pairs(problem, b, h)), after)
        assert (addend is None) == bool(asked.softcap)


def test_numbers_are_constants_and_conditions_stand_once():
    windowed = Problem(causal=True, scoring=Scoring(window=(127, 0)))
    condition = visible(windowed)
    assert condition is not None and condition.python() == "k >= q - 127 and k < q + 1"
    assert visible(Problem()) is None and changed(Problem()) is None
    unlimited = Problem(scoring=Scoring(window=(-1, -1), softcap=30.0))
    told = visible(unlimited)
    assert told is None or told.python() == "k < seqlen_k".replace("seqlen_k", "4096")
    capped = changed(unlimited)
    assert capped is not None and capped.python() == "30.0 * tanh(score * 0.03333333333333333)"


def test_only_sums_are_sums():
    for text, told in {
        "score + q * 0.5": "float(q) * 0.5",
        "1.0 + score": "1.0",
        "score * 2.0": None,
        "score - score": None,
        "1.0 - score": None,
        "where(q < k, score, 0.0)": None,
    }.items():
        found = added(Problem(scoring=Scoring(score=text)))
        assert (
            None if found is None else found.python().removesuffix(" + 0.0").removeprefix("0.0 + ")
        ) == told
