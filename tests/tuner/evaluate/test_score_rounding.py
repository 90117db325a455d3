"""Errors of scores are followed through their change, and are bounds of what float32 does."""

from __future__ import annotations

import random

import numpy as np
import pytest
from flashgen.gen.expression import Kind, Name, apply, folded
from flashgen.gen.scoring.scores import SCORE
from flashgen.tuner.evaluate.score_rounding import UNIT, rounded_change

from tests.support.depth import sampled
from tests.support.formulas import drawn, values

S = Name("score", Kind.FLOAT)
POINTS = np.linspace(-8.0, 8.0, 101)


def errors(change, score_error=0.0, points=POINTS, **more):
    return rounded_change(change, {"score": points, "k": np.arange(points.size)}, score_error, **more)


@pytest.mark.parametrize(
    ("change", "slope"),
    [
        (S * 3.0, lambda s: np.full_like(s, 3.0)),
        (S * S, lambda s: 2 * np.abs(s)),
        (apply("tanh", S), lambda s: 1 / np.cosh(s) ** 2),
        (apply("exp", S), np.exp),
        (S - apply("float", Name("k")), np.ones_like),
        (apply("where", apply("eq", Name("k") % 2, 0), S, -S), np.ones_like),
    ],
)
def test_errors_arrive_multiplied_by_the_derivative(change, slope):
    found = errors(change, 1e-6)
    np.testing.assert_allclose(found.inherited, 1e-6 * slope(POINTS), rtol=1e-3, atol=1e-11)


def test_a_step_that_an_error_may_cross_counts_as_a_whole():
    points = np.array([0.5, 1.0 - 1e-8, 1.0 + 1e-8, 1.5])
    step = apply("where", apply("gt", S, 1.0), 5.0, 0.0)
    np.testing.assert_allclose(errors(step, 1e-6, points).inherited, [0, 5, 5, 0])
    np.testing.assert_allclose(errors(step, 1e-9, points).inherited, [0, 0, 0, 0])
    in_units = apply("floor", S) * 2.0
    np.testing.assert_allclose(errors(in_units, 1e-6, points).inherited, [0, 2, 2, 0], atol=1e-9)


def test_tangents_may_be_rough():
    rough = errors(30.0 * apply("tanh", S / 30.0), tanh_error=2.0**-11)
    cap = np.abs(30.0 * np.tanh(POINTS / 30.0))
    assert (rough.own >= cap * 2.0**-11).all() and (rough.own <= cap * 2.0**-11 * 1.01 + 1e-6).all()


def test_what_is_infinite_moves_nothing():
    found = errors(apply("where", apply("gt", S, 0.0), S, 0.0) + float("-inf"), 1e-6)
    assert np.isneginf(found.value).all() and (found.inherited == 0).all()


def in_float32(change, names):
    """The change by float32 arithmetic."""

    def visit(node, operands):
        operands = [x.astype(np.float32) if is_float(x) else x for x in map(np.asarray, operands)]
        found = np.asarray(node._compute(operands, names))
        return found.astype(np.float32) if is_float(found) else found

    with np.errstate(all="ignore"):
        return folded(change, visit).astype(np.float64)


def is_float(x):
    return x.dtype.kind == "f"


@pytest.mark.parametrize("seed", sampled(range(200), 20))
def test_float32_stays_within_the_errors_of_random_changes(seed):
    change = drawn(random.Random(seed), Kind.FLOAT, 4)
    names = values(np.random.default_rng(seed), 500)
    names["slope"] = names["slope"].astype(np.float32).astype(np.float64)
    exact = names["score"].astype(np.float32).astype(np.float64)
    moved = (exact * (1 + 1e-6)).astype(np.float32).astype(np.float64)
    found = rounded_change(change, {**names, "score": exact}, np.abs(exact) * 1.2e-6)
    computed = in_float32(change, {**names, SCORE.name: moved})
    ordinary = np.isfinite(found.value) & np.isfinite(computed) & (np.abs(found.value) > 1e-30)
    apart = np.abs(np.where(ordinary, computed - found.value, 0.0))
    # Twice: what two errors do together is more than what each does alone.
    allowed = 2.0 * (found.inherited + found.own) + 4 * UNIT * np.abs(np.where(ordinary, found.value, 0.0))
    assert (apart <= allowed).all()
