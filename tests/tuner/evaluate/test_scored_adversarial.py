"""Adversarial inputs beside masks and changes of scores: right kernels keep their promise, others do not."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.promise import promise_of
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.emulated import SimRunner
from flashgen.tuner.evaluate.adversarial import adversarial_findings, prove_promise
from flashgen.tuner.evaluate.adversarial_inputs import HIDDEN_CASES, adversarial_cases, case_named, cases_for
from flashgen.tuner.evaluate.allowed_errors import attend_exactly

from tests.support.depth import sampled
from tests.support.plain_kernel import CARD, changed_build, plain_build

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
ASKED = {
    "window": Scoring(window=(127, 0)),
    "window beside first keys": Scoring(window=(127, 3), always=4),
    "boolean": Scoring(bias="u8"),
    "softcap": Scoring(softcap=30.0),
    "alibi and bias": Scoring(alibi=True, bias="f16"),
    "sinks": Scoring(sinks=True),
    "all": Scoring(window=(100, 3), softcap=20.0, alibi=True, sinks=True, lengths=True, bias="f16"),
}


def problem_of(scoring: Scoring, dtype: str = "f32") -> Problem:
    return Problem(dtype=dtype, head_dim=16, head_dim_v=8, scoring=scoring)


def names(cases):
    return [case.name for case in cases]


def test_cases_suit_what_is_asked():
    plain = Problem(dtype="f16")
    assert names(cases_for(plain, "all")) == names(adversarial_cases("f16", "all"))
    asked = cases_for(problem_of(ASKED["window"], "f16"), "all")
    assert names(asked) == names((*adversarial_cases("f16", "few"), *HIDDEN_CASES))
    assert cases_for(problem_of(Scoring(score="exp(score)")), "all") == ()
    assert case_named(HIDDEN_CASES[0].name, "f16") is HIDDEN_CASES[0]


@needs_compiler
@pytest.mark.parametrize("dtype", sampled(["f32", "f16", "bf16"], 1))
@pytest.mark.parametrize("name", sampled(ASKED, 2))
def test_right_kernels_keep_their_promise(name, dtype):
    build = plain_build(problem_of(ASKED[name], dtype))
    tried = prove_promise(SimRunner(CARD), build, "few")
    assert tried == len(cases_for(build.kernel.problem, "few")) > 50


@needs_compiler
@pytest.mark.parametrize(
    ("name", "right", "wrong", "case"),
    [
        ("window", "begin = first_key_of(args, batch, row)", "begin = 0", "keys that no row sees NaN"),
        ("boolean", "if (!sees(args, batch, head, row, j)) continue;", "", "keys that no row sees 1e4"),
        ("boolean", "s <= top ? top : s", "s > top ? s : top", "an element of q NaN"),
        ("softcap", "tanhf(", "__tanh_of_rough_exponentials(", "scores of 1e4"),
    ],
)
def test_mistakes_break_it(name, right, wrong, case):
    if wrong.startswith("__tanh"):  # inf / inf
        wrong = "[](float x) { const float e = expf(2.0f * x); return (e - 1.0f) / (e + 1.0f); }("
    build = changed_build(problem_of(ASKED[name]), right, wrong)
    (found,) = adversarial_findings(SimRunner(CARD), build, [case_named(case, "f32")])
    assert not found.kept


def test_sinks_count_as_keys_of_value_zero():
    problem = replace(problem_of(ASKED["sinks"]), head_dim_v=16)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 6, 16)) for _ in range(3))
    sinks = np.array([1.0, -np.inf])
    promise = promise_of(problem)
    found = attend_exactly(q, k, v, scale=0.25, problem=problem, promise=promise, values={"sinks": sinks})
    scores = q @ k.swapaxes(2, 3) * 0.25
    total = np.exp(scores).sum(axis=-1) + np.exp(sinks)[None, :, None]
    np.testing.assert_allclose(found.o, np.exp(scores) @ v / total[..., None], rtol=1e-12)
    np.testing.assert_allclose(found.lse, np.log(total), rtol=1e-12)
    assert (found.slack > 0).all() and (found.slack < 1e-5).all()


def test_a_sink_counts_where_a_larger_score_may_be_lost():
    # Of the products of the first key, float32 may hold no sum of some and hold that of all.
    problem = replace(problem_of(ASKED["sinks"], "bf16"), head_dim_v=16)
    q, k, v = np.ones((1, 1, 1, 16)), np.zeros((1, 1, 2, 16)), np.ones((1, 1, 2, 16))
    k[0, 0, 0, :6] = (-3e38, -3e38, -3e38, 3e38, 3e38, 3.1e38)
    values, promise = {"sinks": np.array([1.0])}, promise_of(problem)
    found = attend_exactly(q, k, v, scale=0.25, problem=problem, promise=promise, values=values)
    without = 1 / (1 + np.e)  # the other key alone beside the sink
    np.testing.assert_allclose(found.o, 1.0)
    assert (np.abs(found.o - without) <= found.slack).all() and np.isinf(found.lse_slack).all()
    k[..., 0, :6] = (0, 0, 0, 0, 0, 1e37)
    found = attend_exactly(q, k, v, scale=0.25, problem=problem, promise=promise, values=values)
    assert (found.slack < 1e-6).all()


def test_a_cap_leaves_less_of_the_errors_of_large_scores():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 6, 16)) * size for size in (300, 300, 1))
    slacks = []
    for scoring in (Scoring(softcap=1e9), Scoring(softcap=5.0)):
        problem = replace(problem_of(scoring), head_dim_v=16)
        promise, values = promise_of(problem), {"softcap": scoring.softcap}
        found = attend_exactly(q, k, v, scale=0.25, problem=problem, promise=promise, values=values)
        slacks.append(found.lse_slack.mean())
    assert slacks[1] < slacks[0] / 100
