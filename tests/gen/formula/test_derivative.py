"""Derivatives agree with finite differences in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
from flashgen.gen.expression import Expression, Kind, Load, Name, apply, loads_of, maximum, replaced
from flashgen.gen.formula.derivative import derivative, gradients
from flashgen.gen.formula.parse import parse

from ...support import formulas
from ...support.depth import sampled

STEP = 1e-6


def score(text: str) -> Expression:
    return parse(text, names=formulas.SCORE_NAMES, wanted=Kind.FLOAT, scalars=formulas.SCALARS)


def check(expression: Expression, name: str, values: dict, found: Expression) -> int:
    """The derivative is the slope wherever that is the same on both sides; returns at how many points."""

    def at(step: float) -> np.ndarray:
        return np.broadcast_to(expression.value(values | {name: values[name] + step}), shape)

    shape = np.shape(values["score"])
    left, middle, right = at(-STEP), at(0.0), at(STEP)
    with np.errstate(all="ignore"):
        before, after, slope = (middle - left) / STEP, (right - middle) / STEP, (right - left) / (2 * STEP)
        size = 1e-3 + np.abs(slope) + 1e-4 * np.abs(middle)
        is_smooth = np.isfinite(slope) & (np.abs(after - before) < 1e-3 * size) & (size < 1e6)
    computed = np.broadcast_to(found.value(values), shape)
    error = np.abs(computed - slope)[is_smooth]
    assert (error <= 1e-3 * size[is_smooth]).all(), f"{expression.python()}\n{found.python()}"
    return int(is_smooth.sum())


@pytest.mark.parametrize(
    ("text", "by", "result"),
    [
        ("score * 2 + bias[h, k]", "score", "2.0"),
        ("score + float(q)", "slope", "0.0"),
        ("tanh(score / 20) * 20", "score", None),
        ("exp(score)", "score", "exp(score)"),
        ("-score", "score", "-1.0"),
        ("where(q >= k, score, -inf)", "score", "where(q >= k, 1.0, 0.0)"),
        ("floor(score) + float(int(score))", "score", "0.0"),
        ("max(score, 0)", "score", "where(max(score, 0.0) == 0.0, 0.0, 1.0)"),
        ("sigmoid(score)", "score", "sigmoid(score) * (1.0 - sigmoid(score))"),
        ("score / slope", "score", "1.0 / slope"),
        ("score - slope * (k - q)", "slope", "-float(k - q)"),
        ("pow(score, slope)", "score", "slope * pow(score, slope - 1.0)"),
    ],
)
def test_derivatives_are_as_short_as_by_hand(text: str, by: str, result: str | None) -> None:
    found = derivative(score(text), by)
    assert result is None or found.python() == result
    values = formulas.values(np.random.default_rng(0), 20)
    values["score"] = np.abs(values["score"]) + 0.1
    assert check(score(text), by, values, found) > 5


@pytest.mark.parametrize("seed", sampled(range(300), 30))
def test_derivatives_agree_with_finite_differences(seed: int) -> None:
    rng = random.Random(seed)
    values = formulas.values(np.random.default_rng(seed), 40)
    checked = 0
    for smooth in (True, False):
        tree = formulas.drawn(rng, Kind.FLOAT, rng.randint(1, 4), smooth=smooth)
        checked += sum(check(tree, name, values, derivative(tree, name)) for name in ("score", "slope"))
        for load in (each for each in loads_of(tree) if each.kind is Kind.FLOAT):
            named = replaced(tree, {load: Name("element", Kind.FLOAT)})
            element = values | {"element": np.broadcast_to(load.value(values), 40)}
            checked += check(
                named,
                "element",
                element,
                replaced(derivative(tree, load), {load: Name("element", Kind.FLOAT)}),
            )
    assert checked > 40


def test_saturated_functions_have_a_derivative() -> None:
    far = {"score": np.array([-1e4, -200.0, 200.0, 1e4])}
    for text in ("sigmoid(score)", "tanh(score)", "20 * tanh(score / 20)", "score * sigmoid(score)"):
        assert np.isfinite(derivative(score(text), "score").value(far)).all()


def test_gradients_of_arrays_are_by_the_element() -> None:
    tree = score("score * scale[h] + bias[h, k - q] + bias[h, 0] * 2 + dist[b, int(other[h])]")
    found = {load.python(): each.python() for load, each in gradients(tree).items()}
    assert found == {
        "scale[h]": "score",
        "bias[h, k - q]": "1.0",
        "bias[h, 0]": "2.0",
        "dist[b, int(other[h])]": "1.0",
    }


def test_of_what_is_no_float_there_is_no_derivative() -> None:
    with pytest.raises(ValueError, match="of a float, not of an int"):
        derivative(Name("q") + 1, "q")
    with pytest.raises(ValueError, match="not of a bool"):
        derivative(apply("lt", Name("q"), 1), "q")


def test_what_is_deep_has_a_derivative_in_time() -> None:
    deep: Expression = Name("score", Kind.FLOAT)
    for _ in range(1000):
        deep = apply("tanh", maximum(deep, Load("bias", (Name("h"),))) + deep)
    found = derivative(deep, "score")
    assert np.isfinite(found.value({"score": 0.1, "h": 0, "bias": np.zeros(1)}))
