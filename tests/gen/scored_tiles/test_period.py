"""Keys that rows see at every so many, told apart from the rest of a predicate."""

from __future__ import annotations

import numpy as np
import pytest
from flashgen.gen.expression import Expression, Kind, apply, conjuncts
from flashgen.gen.problem import Problem
from flashgen.gen.scored_tiles.period import Period, split_period
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import KEY, Scores


def scores_of(**asked) -> Scores:
    return Problem(scoring=Scoring(**asked)).scores


def asked_of_pairs(period: Period) -> Expression:
    return apply("eq", period.body, apply("floor_mod", KEY, period.steps))


#: Masks, and what a row's place is, by how many keys are apart.
PERIODS = {
    "q % 4 == k % 4": ("q", "4"),
    "k % 4 == (q + 7) % 4": ("q + 7", "4"),
    "(q - k) % 3 == 0": ("q", "3"),
    "0 == (k - q) % 3": ("q", "3"),
    "(k + 2 - q * n) % 40 == 0": ("-(2 - q * n)", "40"),
}
#: Of heads, of what is read, of nothing that is known to divide, at other keys, or that rounds down nowhere.
NONE = (
    "(q + h) % 4 == k % 4",
    "doc[b, q] % 4 == k % 4",
    "q % n == k % n",
    "(q - 2 * k) % 3 == 0",
    "(q - k) % 3 == 1",
    "q % 3 == k % 4",
    "(q + k) % 3 == 0",
    "(q - k) % 3 == 0 or k < 4",
    "k % 7 == h",
)


def test_a_dilation_is_told_apart():
    scores = scores_of(dilation=3)
    period, rest = split_period(scores.predicate)
    assert period is not None and rest is None and asked_of_pairs(period) == scores.predicate
    assert period.body.operands[0].c() == "q + seqlen_k - seqlen_q" and period.steps.c() == "dilation"
    both = scores_of(dilation=3, bias="u8", always=3, window=(9, 0)).predicate
    period, rest = split_period(both)
    assert period is not None and rest is not None and both is not None
    assert {asked_of_pairs(period), *conjuncts(rest)} == set(conjuncts(both))


@pytest.mark.parametrize("mask", PERIODS)
@pytest.mark.parametrize("beside", ["", " and k % 7 != h"])
def test_masks_are_the_same_in_parts(mask, beside):
    scalars = (("n", 2),) if "n" in mask else ()
    predicate = scores_of(mask=mask + beside, scalars=scalars).predicate
    period, rest = split_period(predicate)
    assert predicate is not None and period is not None and (rest is None) == (not beside)
    assert (period.body.operands[0].c(), period.steps.c()) == PERIODS[mask]
    values = {"q": np.arange(40)[:, None], "k": np.arange(50)[None], "h": 3, "n": 2}
    parts = asked_of_pairs(period).value(values) & (True if rest is None else rest.value(values))
    assert (parts == predicate.value(values)).all() and predicate.kind is Kind.BOOL


@pytest.mark.parametrize("mask", NONE)
def test_what_else_there_is_stays(mask):
    predicate = scores_of(mask=mask, scalars=(("n", 2),) if "n" in mask else ()).predicate
    assert split_period(predicate) == (None, predicate)


def test_nothing_is_told_of_nothing():
    assert split_period(None) == (None, None)
