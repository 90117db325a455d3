"""Changes of scores as threads make them, beside what they are: on numbers, and by what is left to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flashgen.gen.expression import Constant, Expression, Kind, Name, apply
from flashgen.gen.formula.affine import Affine, affine_in, least_value
from flashgen.gen.problem import Problem
from flashgen.gen.scored_tiles.change import (
    LOG2E,
    READ_KEY,
    SHIFT,
    STEP,
    TILE_KEY,
    TILE_KEYS,
    UNIT,
    TileChange,
    scaled_change,
    steady_change,
    tile_change,
)
from flashgen.gen.scored_tiles.gathering import COLUMN, FIRST_KEY, RAW, SCORE_SCALE
from flashgen.gen.scored_tiles.tangents import IS_SMALL, LARGEST, tangent_in_powers
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import KEY, QUERY, SCORE, Bound, Scores

from tests.support.scorings import SCORINGS, drawn_values

ROWS, KEYS = 40, 200
#: A thread's first keys of tiles of 32: one whole before a row's place, one around it, one behind it.
FIRST_KEYS = (66, 160, 162, 168)
COLUMNS = (0, 1, 9, 25)


def scores_of(scoring: Scoring, *, causal: bool = False) -> Scores:
    sizes = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": ROWS, "seqlen_k": KEYS}
    return Problem(scoring=scoring, causal=causal, **sizes).scores


def found_of(scores: Scores) -> TileChange:
    assert scores.change is not None
    return tile_change(scores.change, scores.along_keys, scores.ends)


def changed(tile: TileChange, known: dict[str, Any], raw: Any, scale: float) -> Any:
    """What a kernel makes of raw scores, in the order in which it does; powers are of any number."""
    values = {**known, RAW.name: raw, SCORE_SCALE.name: scale, TILE_KEYS.name: 32, IS_SMALL.name: False}
    factor = tile.factor.value(values)
    values |= {UNIT.name: 1 / factor, SHIFT.name: 0.0, LOG2E.name: 1.0}
    values[TILE_KEY.name] = known[FIRST_KEY.name] // 8 * 8
    for name, value in tile.row_values:
        values[name.name] = value.value(values)
    if tile.ramp:
        values[RAW.name] = raw + values[STEP.name] * (known["k"] - values[TILE_KEY.name])
    found = tile.body.value(values)
    for bend in tile.bends:
        if values[bend.is_met.name]:
            found = found + bend.body.value(values)
    return factor * found + values[SHIFT.name]


def assert_same(scores: Scores, values: dict[str, Any] | None = None, *, causal: bool = False) -> None:
    """For rows and keys on either side of the diagonal; under a causal mask for keys that are seen."""
    assert_change(found_of(scores), scores, values, causal=causal)
    assert scores.change is not None
    for ramp in (False, True):
        found = tile_change(scores.change, scores.along_keys, scores.ends, in_powers=True, ramp=ramp)
        assert_change(found, scores, values, causal=causal)


def assert_change(
    tile: TileChange, scores: Scores, values: dict[str, Any] | None, *, causal: bool = False
) -> None:
    raw, scale, change = np.linspace(-3.0, 3.0, 7), 0.3, scores.change
    assert change is not None
    for row in (0, 3, 17, 39):
        for first_key in FIRST_KEYS:
            for column in COLUMNS:
                key = first_key + column
                if (causal and key > row + KEYS - ROWS) or key >= KEYS:
                    continue
                known = {
                    **(values or {}),
                    "seqlen_q": ROWS,
                    "seqlen_k": KEYS,
                    "b": 1,
                    "h": 2,
                    "q": row,
                    "k": key,
                }
                places = {
                    FIRST_KEY.name: first_key,
                    COLUMN.name: column,
                    READ_KEY.name: key,
                    "kCausal": causal,
                }
                found = changed(tile, {**known, **places}, raw, scale)
                expected = change.value({**known, SCORE.name: raw * scale})
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name in SCORINGS if scores_of(SCORINGS[name], causal=True).change])
def test_a_tile_s_change_is_the_change(name, causal):
    problem = Problem(scoring=SCORINGS[name], causal=True, batch=2, num_q_heads=4, num_kv_heads=2)
    values = dict(drawn_values(problem, ROWS, KEYS))
    assert_same(scores_of(SCORINGS[name], causal=causal), {"softcap": 2.5, **values}, causal=causal)


@pytest.mark.parametrize(
    "score",
    [
        "-score",
        "k * 0.5",
        "score * score + score",
        "(score + 0.5 * (k - 3)) * 2",
        "score / (k + 1)",
        "2 - (score - abs(q - k)) / 4",
        "score + abs(abs(k - q) - 3)",
        "where(k < 90, score, score * 0.5) - 0.1 * abs(k - 170)",
        "score - 0.5 * abs(3 * q - 2 * k) + 0.25 * abs(k)",
        "tanh(score) * 3 + 0.5 * (q - k)",
    ],
)
def test_any_sum_is_taken_apart_rightly(score):
    for causal in (False, True):
        assert_same(scores_of(Scoring(score=score), causal=causal), causal=causal)


def values_by_name(tile: TileChange) -> dict[str, str]:
    return {name.name: value.python() for name, value in tile.row_values}


def test_alibi_takes_one_multiply_add():
    tile = found_of(scores_of(Scoring(alibi=True), causal=True))
    assert tile.body == RAW + STEP * apply("float", COLUMN)
    assert tile.factor == SCORE_SCALE and tile.factor_has_scale and tile.has_shift
    assert values_by_name(tile)["_ahead"] == "q + seqlen_k - seqlen_q - _first_key"
    assert values_by_name(tile)["_turned"] == "where(kCausal or _ahead >= 0, _slope, -_slope)"
    assert values_by_name(tile)["_bends"] == "not kCausal and _ahead >= 0 and _ahead < kBc"


def ramp_of(scoring: Scoring, *, causal: bool = True) -> TileChange:
    found = steady_change(Problem(scoring=scoring, causal=causal, num_q_heads=4, num_kv_heads=2), ramp=True)
    assert found is not None
    return found


def test_a_steady_step_rides_on_the_products():
    tile = ramp_of(Scoring(alibi=True))
    assert tile.ramp and tile.body == RAW and not tile.changes_raw
    assert values_by_name(tile)["_shift"] == "_rise * float(_ahead)"
    assert values_by_name(tile)["_rise"] == "kLog2e * _turned"
    assert [name.name for name, _ in tile.ramp_values] == ["_ahead", "_turned", "_step"]
    assert "_step" not in [name.name for name, _ in tile.change_values]
    assert [name.name for name in tile.kept_values] == ["_slope"]
    biased = ramp_of(Scoring(alibi=True, bias="f32"))
    assert biased.ramp and biased.body.python() == "_raw + bias[b, h, q, _read_key] * _unit"
    affine = ramp_of(Scoring(score="score * 2 + 0.5 * k"), causal=False)
    assert affine.ramp and affine.has_steady_step and not affine.ramp_values


def test_what_turns_or_is_not_added_to_raw_scores_does_not():
    assert not ramp_of(Scoring(alibi=True), causal=False).ramp  # its sign is another behind the diagonal
    assert not ramp_of(Scoring(alibi=True, softcap=20.0)).ramp
    assert not ramp_of(Scoring(score="score * gain[h] + 0.1 * k")).ramp
    assert not ramp_of(Scoring(softcap=20.0)).ramp
    assert not ramp_of(Scoring(bias="f32")).ramp


def test_what_rows_see_tells_the_side_of_a_kink():
    """Where a bound always holds, there is none; where it may not, it is looked for."""
    distance = apply("float", apply("abs", QUERY - KEY))
    change = SCORE - distance
    own = tile_change(change, ends=(Bound(Name("row", nonnegative=True) + 1),))
    assert not own.bends and values_by_name(own)["_turned"] == "-1.0"
    assert tile_change(change, ends=(Bound(Name("row", nonnegative=True) + 2),)).bends
    assert "kCausal" not in str(
        values_by_name(found_of(scores_of(Scoring(alibi=True, prefix=9), causal=True)))
    )


def test_what_a_change_shares_is_left_to_the_exponentials():
    capped = found_of(scores_of(Scoring(softcap=30.0)))
    assert capped.factor.python() == "softcap" and not capped.factor_has_scale and not capped.has_shift
    assert capped.tangent is not None
    assert capped.tangent.written.python() == "tanh(_raw * (_score_scale * (1.0 / softcap)))"
    assert capped.body == capped.tangent.either
    change = scores_of(Scoring(softcap=30.0)).change
    assert change is not None
    scaled = scaled_change(change).tangent
    assert scaled is not None and scaled.written.python() == "tanh(_raw * (1.0 / softcap))"
    by_bias = found_of(scores_of(Scoring(bias="f32")))
    assert (
        by_bias.body.python() == "_raw + bias[b, h, q, _read_key] * _unit" and by_bias.factor == SCORE_SCALE
    )
    of_rows = found_of(scores_of(Scoring(score="score * 2 + gain[h, q]")))
    assert of_rows.body == RAW and of_rows.has_shift and not of_rows.changes_raw and of_rows.reads_rows
    assert not found_of(scores_of(Scoring(score="score * 2"))).acts


@pytest.mark.parametrize(("approximate", "error"), [(True, 2**-11), (False, 2**-23)])
@pytest.mark.parametrize("cap", [1e-3, 30.0, 1e4])
def test_small_tangents_are_had_by_multiply_adds(approximate, error, cap):
    change = scores_of(Scoring(softcap=30.0)).change
    assert change is not None
    tile = tile_change(change, approximate=approximate)
    assert tile.tangent is not None
    names = {"softcap": cap, SCORE_SCALE.name: 0.125}

    def is_small(raw: float) -> bool:
        assert tile.tangent is not None
        return bool(tile.tangent.is_small.value({**names, LARGEST.name: raw}))

    raw = np.geomspace(1e-12, 1.0, 10_000) * cap * 8
    raw = np.array([each for each in raw if is_small(each)])
    assert raw.max() * 0.125 / cap > (0.79 if approximate else 0.59) and not is_small(raw.max() * 1.01)
    for sign in (-1.0, 1.0):
        found = tile.body.value({**names, RAW.name: sign * raw, IS_SMALL.name: True})
        expected = np.tanh(sign * raw * 0.125 / cap)
        assert np.abs(found / expected - 1).max() <= error


@pytest.mark.parametrize(
    ("number", "approximate"), [(2, True), (3, True), (3, False), (4, False), (5, False)]
)
def test_tangents_within_exponents_are_near_and_keep_the_order(number, approximate):
    change = scores_of(Scoring(softcap=30.0)).change
    assert change is not None
    tile = tile_change(change, approximate=approximate, small_tangents=False)
    assert tile.tangent is None
    found = tangent_in_powers(tile.body, number, approximate=approximate)
    assert found is not None and len(found.coefficients) == number
    assert found.factor.python() == "_score_scale * (1.0 / softcap)"
    x = np.linspace(1e-6, found.largest, 10_000)
    tangents = sum(each * x ** (2 * i + 1) for i, each in enumerate(found.coefficients))
    error = 2**-11 if approximate else 2**-23.45
    assert np.abs(tangents / np.tanh(x) - 1).max() <= error and (np.diff(tangents) > 0).all()
    with_slopes = scores_of(Scoring(softcap=30.0, alibi=True)).change
    assert with_slopes is not None
    sloped = tile_change(with_slopes, small_tangents=False).body
    assert tangent_in_powers(sloped, number, approximate=approximate) is None


@pytest.mark.parametrize("number", [3, 4, 5])
def test_tangents_within_exponents_are_those_of_float32_when_computed_in_it(number):
    change = scores_of(Scoring(softcap=30.0)).change
    assert change is not None
    found = tangent_in_powers(tile_change(change, small_tangents=False).body, number, approximate=False)
    assert found is not None
    x = np.linspace(1e-6, found.largest, 100_000, dtype=np.float32)
    square, factor = x * x, np.zeros_like(x)
    for each in reversed(found.coefficients):
        factor = (square.astype(float) * factor + np.float32(each)).astype(np.float32)  # rounded once
    assert np.abs(x.astype(float) * factor / np.tanh(x.astype(float)) - 1).max() <= 2**-22.9


def test_what_is_no_number_is_not_small():
    tile = found_of(scores_of(Scoring(softcap=30.0)))
    assert tile.tangent is not None
    for raw, scale in ((np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan)):
        values = {"softcap": 30.0, SCORE_SCALE.name: scale, LARGEST.name: raw}
        assert not tile.tangent.is_small.value(values)
    change = scores_of(Scoring(softcap=30.0)).change
    assert change is not None
    powers = tile_change(change, approximate=True).tangent
    assert powers is not None  # of a cap beyond these the fifth power is none of float32
    assert not powers.is_small.value({"softcap": 1e9, SCORE_SCALE.name: 1.0, LARGEST.name: 1.0})


def test_tangents_that_vary_more_than_the_score_are_as_written():
    for score in (
        "tanh(score * gain[q])",
        "tanh(score + k)",
        "tanh(score) + tanh(score * 2)",
        "tanh(gain[h, k])",
    ):
        assert found_of(scores_of(Scoring(score=score))).tangent is None
    assert found_of(scores_of(Scoring(score="tanh(score) - tanh(score) * 2"))).tangent is not None


def test_a_factor_of_unknown_sign_stays_with_the_change():
    for score in ("score * gain[h]", "-score", "score * gain[h] + 0.1 * k"):
        tile = found_of(scores_of(Scoring(score=score)))
        assert not tile.has_factor and SCORE_SCALE.name in tile.body.names()


def test_scalars_may_have_the_names_of_a_kernel_s_own_variables():
    scores = scores_of(Scoring(score="score + raw * k + column", scalars=(("raw", 0.5), ("column", 2.0))))
    assert_same(scores, {"raw": 0.5, "column": 2.0})
    assert scores.statements(found_of(scores).body)[1] == "raw + step * float(column)"
    assert any("args.raw" in line for line in scores.definitions(found_of(scores).row_values))


# -- integers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("integer", "times"),
    [
        (KEY, 1),
        (QUERY - 2 * KEY + 3, -2),
        (-(KEY - QUERY) * 3, -3),
        (QUERY, 0),
        (KEY * KEY, None),
        (apply("floor_div", KEY, 2), None),
    ],
)
def test_integers_are_affine_or_not(integer: Expression, times: int | None):
    found = affine_in(KEY, integer)
    if times is None:
        assert found is None
        return
    assert isinstance(found, Affine) and found.times == times
    for key in (0, 5):
        assert found.at(Constant(key)).value({"q": 11}) == integer.value({"q": 11, "k": key})


def test_what_an_integer_is_at_least():
    any_integer = Name("n")
    assert least_value(QUERY + 3) == 3
    assert least_value(QUERY + any_integer - (any_integer - 1)) == 1
    assert least_value(KEY - QUERY) == -np.inf
    assert least_value(QUERY - Name("x", Kind.INT)) == -np.inf
