"""What formulas cost, and how often."""

from __future__ import annotations

import random

import pytest
from flashgen.gen.expression import Apply, Expression, Kind, distinct
from flashgen.gen.formula.cost import Costs, Place, costs_of
from flashgen.gen.formula.parse import parse
from flashgen.gen.tree.functions import Unit

from ...support import formulas


def score(text: str) -> Expression:
    return parse(text, names=formulas.SCORE_NAMES, wanted=Kind.FLOAT, scalars=formulas.SCALARS)


def mask(text: str) -> Expression:
    return parse(text, names=formulas.MASK_NAMES, wanted=Kind.BOOL, scalars=formulas.SCALARS)


def counted(costs: Costs) -> dict[str, dict[str, float]]:
    return {
        place.name.lower(): {unit.value: number for unit, number in units.items()}
        for place, units in costs.units.items()
        if units
    }


@pytest.mark.parametrize(
    ("tree", "costs"),
    [
        (score("score * 2 + 1"), {"pair": {"fma": 1}}),
        (score("score * 2 * slope"), {"pair": {"fma": 2}}),
        (score("score + slope * (k - q)"), {"pair": {"alu": 1, "special": 1, "fma": 1}}),
        (score("score + bias[h]"), {"same": {"load": 1}, "pair": {"fma": 1}}),
        (score("score + bias[h, k]"), {"column": {"load": 1}, "pair": {"fma": 1}}),
        (score("score + bias[b, h, q, k]"), {"pair": {"load": 1, "fma": 1}}),
        (score("score * (slope * slope)"), {"same": {"fma": 1}, "pair": {"fma": 1}}),
        (score("abs(score)"), {}),
        (mask("doc[b, q] == doc[b, k]"), {"row": {"load": 1}, "column": {"load": 1}, "pair": {"alu": 1}}),
        (mask("q // 16 == k // 12"), {"row": {"alu": 1}, "column": {"fma": 1, "alu": 2}, "pair": {"alu": 1}}),
        (mask("(q - k) % n == 0"), {"pair": {"alu": 18, "special": 2}}),
    ],
)
def test_what_is_computed_how_often(tree: Expression, costs: dict[str, dict[str, float]]) -> None:
    assert counted(costs_of(tree)) == costs


def test_functions_of_short_types_cost_less() -> None:
    capped = score("tanh(score / 20) * 20")
    exact, fast = costs_of(capped), costs_of(capped, approximate=True)
    assert fast.total(Unit.FMA, 1, 1) < exact.total(Unit.FMA, 1, 1)
    assert counted(costs_of(score("tanh(score)"), approximate=True)) == {"pair": {"special": 1}}


def test_what_is_shared_is_counted_once() -> None:
    first, second = score("exp(score) + 1"), score("exp(score) - 1")
    alone, both = costs_of(first), costs_of(first, second)
    assert both.total(Unit.SPECIAL, 1, 1) == alone.total(Unit.SPECIAL, 1, 1) > 0
    assert both.total(Unit.FMA, 1, 1) == alone.total(Unit.FMA, 1, 1) + 1


def test_totals_are_of_rows_columns_and_pairs() -> None:
    costs = costs_of(mask("doc[b, q] == doc[b, k] and q // 16 == k // 16"))
    assert costs.total(Unit.LOAD, 3, 5) == 3 + 5 and costs.total(Unit.ALU, 3, 5) == 3 + 5 + 3 * 15
    assert [load.python() for load in costs.loads[Place.ROW]] == ["doc[b, q]"]
    assert costs.loads[Place.PAIR] == costs.loads[Place.SAME] == ()


@pytest.mark.parametrize("seed", range(30))
def test_every_function_of_a_formula_counts_somewhere(seed: int) -> None:
    rng = random.Random(seed)
    tree = formulas.drawn(rng, rng.choice(list(Kind)), 4)
    costs = costs_of(tree)
    loads = [load for place in Place for load in costs.loads[place]]
    assert len(loads) == len(set(loads)) == sum(units.get(Unit.LOAD, 0) for units in costs.units.values())
    nodes = [
        node for node in distinct(tree) if isinstance(node, Apply) and node.function not in ("abs", "mul")
    ]
    assert sum(sum(units.values()) for units in costs.units.values()) >= len(nodes)
