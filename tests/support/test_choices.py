"""What is found to be legal, beside all that there is."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import preset
from flashgen.gen.variant import Illegal, Variant

from tests.support.choices import LegalChoices, problem_of
from tests.support.covering import pairwise

WHERE: dict[str, Sequence[Any]] = {
    "numbers": (("f16", "auto"), ("f32", "3xf16")),
    "dims": ((40, 40), (256, 256)),
    "causal": (False, True),
    "limits": (preset("h200"),),
}
#: The values that few parameters take; the others have their defaults. What is legal of them depends on
#: dtype, head dims, shared memory, registers and on each other.
TAKEN: dict[type[Variant], dict[str, Sequence[Any]]] = {
    Mma: {
        "parts": ("tf32", "f16"),
        "br": (16, 128),
        "rows_per_warp": (16, 32),
        "bc": (32, 128),
        "q_whole": (True, False),
        "stages": (0, 2),
        "poly_exp": (0, 2),
        "min_blocks": (1, 6),
    },
    Wgmma: {
        "br": (64, 192),
        "bc": (32, 256),
        "k_stages": (1, 3),
        "v_stages": (1, 3),
        "schedule": ("in_turn", "chained"),
        "q_in_registers": (False, True),
        "min_blocks": (1, 3),
        "split_by": ("rows", "tiles"),
    },
}


def factors(family: type[Variant]) -> dict[str, Sequence[Any]]:
    taken = TAKEN[family]
    return {**WHERE, **{p.name: taken.get(p.name, (p.default,)) for p in family.parameters()}}


def is_legal(family: type[Variant], values: Mapping[str, Any]) -> bool:
    variant = family(**{p.name: values[p.name] for p in family.parameters()})
    try:
        variant.check(problem_of(values), values["limits"])
    except Illegal:
        return False
    return True


def all_legal(family: type[Variant]) -> list[dict[str, Any]]:
    of_each = factors(family)
    every = (dict(zip(of_each, values, strict=True)) for values in product(*of_each.values()))
    return [values for values in every if is_legal(family, values)]


def pairs_of(all_values: Sequence[Mapping[str, Any]]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for values in all_values for pair in combinations(values.items(), 2)}


@pytest.mark.parametrize("family", TAKEN, ids=lambda family: family.family)
def test_just_what_is_legal_is_found(family: type[Variant]) -> None:
    legal = LegalChoices(family, factors(family), random.Random(0))
    expected = pairs_of(all_legal(family))
    every = [(place, x) for place, of_it in enumerate(legal.values) for x in range(len(of_it))]
    told = {True: 0, False: 0}
    for (a, x), (b, y) in combinations(every, 2):
        if a == b:
            continue
        found = legal.find({a: x, b: y}, legal.by_chance)
        pair = frozenset([(legal.names[a], legal.values[a][x]), (legal.names[b], legal.values[b][y])])
        assert (found is not None) == (pair in expected), pair
        if found is not None:
            assert (found[a], found[b]) == (x, y)
            assert is_legal(family, legal.assignment(found)), pair
        told[found is not None] += 1
    assert min(told.values()) > 10


@pytest.mark.parametrize("family", TAKEN, ids=lambda family: family.family)
def test_a_cover_of_few_has_every_pair(family: type[Variant]) -> None:
    rng = random.Random(0)
    legal = LegalChoices(family, factors(family), rng)
    every = all_legal(family)
    chosen = [legal.assignment(each) for each in pairwise(legal, lambda a, b: True, rng)]
    assert pairs_of(chosen) == pairs_of(every)
    assert len(chosen) < 20 < len(every)
    assert all(values in every for values in chosen)
