"""Expressions print what they compute."""

from __future__ import annotations

import random

import numpy as np
import pytest
from flashgen.gen.expression import Constant, Expression, Name, divided_up, maximum, minimum

NAMES = ("a", "b", "c")


def drawn(rng: random.Random, depth: int) -> Expression:
    if depth == 0:
        return rng.choice([*map(Name, NAMES), Constant(rng.randint(1, 9), rng.choice(["", "kBr"]))])
    left, right = drawn(rng, depth - 1), drawn(rng, depth - 1)
    return rng.choice(
        [
            lambda: left + right,
            lambda: left + rng.randint(0, 5),
            lambda: left - 1,
            lambda: left - right,
            lambda: left * right,
            lambda: left // Constant(rng.randint(1, 7)),
            lambda: divided_up(left, Constant(rng.randint(1, 7), "kBr")),
            lambda: minimum(left, right),
            lambda: maximum(left, right),
        ]
    )()


@pytest.mark.parametrize("seed", range(60))
def test_python_and_numpy_agree(seed: int) -> None:
    rng = random.Random(seed)
    expression = drawn(rng, 3)
    values = {name: rng.randint(1, 99) for name in NAMES}
    assert eval(expression.python(), {"min": min, "max": max}, values) == expression.value(values)
    arrays = {name: np.full(3, value) for name, value in values.items()}
    assert (np.asarray(expression.value(arrays)) == expression.value(values)).all()
    assert expression.names() <= set(NAMES)


@pytest.mark.parametrize("seed", range(60))
def test_names_can_be_replaced(seed: int) -> None:
    rng = random.Random(seed)
    expression, other = drawn(rng, 3), drawn(rng, 2)
    values = {name: rng.randint(1, 99) for name in NAMES}
    replaced = expression.with_names({"a": other})
    assert replaced.value(values) == expression.value(values | {"a": other.value(values)})


def test_what_is_printed_reads_as_written_by_hand() -> None:
    rows, tile = Name("rows", nonnegative=True), Constant(128, "kBr")
    assert divided_up(rows, tile).c() == "(rows + kBr - 1) / kBr"
    assert divided_up(rows, tile).python() == "(rows + 128 - 1) // 128"
    assert divided_up(rows, 1) == rows
    assert (rows + 1 - 1).c() == "rows" and (rows - 2 + 1).c() == "rows - 1"
    assert (rows * (rows // Name("b", nonnegative=True))).c() == "rows * (rows / b)"
    assert (Name("first") - 1 + Name("diagonal") + 1).c(
        {"first": "q_tile * kBr"}
    ) == "q_tile * kBr + diagonal"
    assert (Name("x") * 2).c({"x": "a ? b : c"}) == "(a ? b : c) * 2"
