"""Bounds of a mask, and the rest of it, are the mask."""

from __future__ import annotations

import random

import numpy as np
import pytest
from flashgen.gen.expression import Expression, Kind
from flashgen.gen.formula.error import FormulaError
from flashgen.gen.formula.intervals import SplitMask, split_mask
from flashgen.gen.formula.parse import parse

from ...support import formulas
from ...support.depth import sampled

ROWS, KEYS = 24, 40


def mask_of(text: str) -> Expression:
    return parse(text, names=formulas.MASK_NAMES, wanted=Kind.BOOL, scalars={"n": 3, "w": 2})


def grid(rng: np.random.Generator) -> dict:
    values = formulas.values(rng, 1)
    values |= {"q": np.arange(ROWS)[:, None], "k": np.arange(KEYS)[None, :], "b": 1, "h": 1}
    lengths = {"seqlen_q": ROWS, "seqlen_k": KEYS, "lens": np.array([9, 17])}
    return (
        values
        | lengths
        | {name: int(rng.integers(-6, 12)) for name in ("n", "w")}
        | {"slope": 0.5, "score": 1.0}
    )


def check(mask: Expression, split: SplitMask, values: dict) -> None:
    """Bounds rise, and hold together with the rest where the mask does."""
    shape = (ROWS, KEYS)
    seen = np.ones(shape, bool)
    for bounds, holds in ((split.begins, np.greater_equal), (split.ends, np.less)):
        for bound in bounds:
            rows = np.broadcast_to(bound.value(values), (ROWS, 1))
            assert (np.diff(rows[:, 0]) >= 0).all() and not {"k", "h"} & bound.names(), bound
            seen &= holds(values["k"], rows)
    if split.rest is not None:
        seen &= np.broadcast_to(split.rest.value(values), shape)
    np.testing.assert_array_equal(seen, np.broadcast_to(mask.value(values), shape), err_msg=mask.python())


@pytest.mark.parametrize(
    ("text", "begins", "ends", "rest"),
    [
        ("q >= k", [], ["q + 1"], None),
        ("k < seqlen_k - 3", [], ["seqlen_k - 3"], None),
        ("abs(q - k) <= w", ["q - w"], ["q + w + 1"], None),
        ("0 <= q - k <= n", ["q - n"], ["q + 1"], None),
        ("not (k > q) and not (k < q - 4 or k > 99)", ["q - 4"], ["q + 1", "100"], None),
        ("k // 16 == q // 16", ["q // 16 * 16"], ["q // 16 * 16 + 16"], None),
        ("q // 16 >= k // 16", [], ["q // 16 * 16 + 16"], None),
        ("k < 8 or q >= k", [], ["max(8, q + 1)"], None),
        ("where(q > 4, k < q, k < 4)", [], ["max(q, 4)"], "where(q > 4, k < q, k < 4)"),
        ("k < lens[b]", [], ["lens[b]"], None),
        ("k == q", ["q"], ["q + 1"], None),
        ("2 * k <= q", [], ["q // 2 + 1"], None),
        ("max(q, k) - 5 < n", [], ["n + 5"], "max(q, k) - 5 < n"),
        (
            "abs(q // 8 - k // 8) <= 1 and abs(q % 8 - k % 8) <= 1",
            ["q // 8 * 8 - 8"],
            ["q // 8 * 8 + 16"],
            "abs(q % 8 - k % 8) <= 1",
        ),
        ("q >= k and doc[b, q] == doc[b, k]", [], ["q + 1"], "doc[b, q] == doc[b, k]"),
        # What may fall from row to row, depends on the head or is too large bounds nothing.
        ("k < doc[b, q]", [], [], "k < doc[b, q]"),
        ("k < h", [], [], "k < h"),
        ("k < q * n", [], [], "k < q * n"),
        ("q + k < 9", [], [], "q + k < 9"),
        ("k - 2147483647 < q", [], [], "k - 2147483647 < q"),
        ("k < 4 or q - k <= 9", [], [], "k < 4 or q - k <= 9"),
    ],
)
def test_what_bounds_the_keys(text: str, begins: list[str], ends: list[str], rest: str | None) -> None:
    mask = mask_of(text)
    split = split_mask(mask)
    found = [[each.python() for each in bounds] for bounds in (split.begins, split.ends)]
    assert found == [begins, ends] and (split.rest and split.rest.python()) == rest
    check(mask, split, grid(np.random.default_rng(0)))


def condition(rng: random.Random, depth: int) -> str:
    """A random condition that may bound keys."""
    if depth:
        left, right = condition(rng, depth - 1), condition(rng, depth - 1)
        form = rng.choice(
            ["({} and {})", "({} and {})", "({} or {})", "(not {} or {})", "where(q > 7, {}, {})"]
        )
        return form.format(left, right)
    number, divisor = rng.randint(-9, 12), rng.choice([2, 3, 8])
    row = rng.choice(
        ["q", "q", f"q // {divisor} * {divisor}", f"min(q, {number})", "seqlen_k - q", "n", f"q * {divisor}"]
    )
    key = rng.choice(
        ["k", "k", f"k // {divisor}", f"{divisor} * k", f"-k // {divisor}", f"(k + q) // {divisor}"]
    )
    other = rng.choice([f"{number}", "n", "lens[b]", f"n * {divisor}"])
    pair = rng.choice(
        [
            f"{row} - {key}",
            f"{key} - {row}",
            f"abs({row} - {key})",
            f"max({key}, {row})",
            f"min({key}, {row})",
        ]
    )
    return f"{pair} {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {other}"


def drawn_mask(rng: random.Random, depth: int) -> Expression:
    """A random mask that is not known to be never true."""
    while True:
        try:
            return mask_of(condition(rng, depth))
        except FormulaError as error:
            assert "never true" in error.reason


@pytest.mark.parametrize("seed", sampled(range(400), 15))
def test_bounds_and_the_rest_are_the_mask(seed: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    masks = [drawn_mask(rng, rng.randint(0, 3)) for _ in range(5)]
    masks += [formulas.drawn(rng, Kind.BOOL, rng.randint(1, 4)) for _ in range(5)]
    for mask in masks:
        check(mask, split_mask(mask), grid(numbers))


def test_many_random_masks_are_bounded() -> None:
    rng = random.Random(1)
    splits = [split_mask(drawn_mask(rng, number % 2)) for number in range(100)]
    assert sum(bool(each.begins or each.ends) for each in splits) > 20
    assert sum(each.rest is None for each in splits) > 8
