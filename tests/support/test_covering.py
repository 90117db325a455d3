"""Variants drawn by chance are found wherever there are some: what tests on a card draw is never skipped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from flashgen.gen.families import family_named
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring

from tests.gpu import test_runner as runner
from tests.gpu import test_scored as scored
from tests.gpu import test_serving as serving
from tests.support.covering import draw

H100 = preset("h100")


def drawn_on_cards() -> Iterator[tuple[str, str, Problem, dict[str, Any]]]:
    """By name, the family, problem and held values of each kernel that tests on a card draw."""
    for name, asked in serving.ASKED.items():
        for family, dtype in serving.FAMILIES:
            yield f"{name}-{family}-{dtype}", family, serving.problem_of({**asked, "dtype": dtype}), {}
    for name, (family, asked, held) in serving.SPECIAL.items():
        yield name, family, serving.problem_of(asked), held
    for name in scored.ASKED:
        for family, dtype in scored.FAMILIES:
            yield f"scored {name}-{family}-{dtype}", family, scored.problem_of(dtype, name), {}


CASES = {name: case for name, *case in drawn_on_cards()}


@pytest.mark.parametrize("name", CASES)
def test_kernels_for_tests_on_cards_are_found(name: str) -> None:
    family, problem, held = CASES[name]
    (variant,) = draw(family_named(family), problem, H100, 1, random.Random(name), held)
    variant.check(problem, H100)
    assert held.items() <= variant.to_dict().items()


@pytest.mark.parametrize("problem", [*runner.PROBLEMS, *runner.TENSOR_PROBLEMS, *runner.PARTS_PROBLEMS])
def test_samples_for_tests_on_cards_are_found(problem: Problem) -> None:
    family = Wgmma if problem in runner.PARTS_PROBLEMS else None
    assert runner.sample(problem, H100, runner.SAMPLE, family)
    assert runner.sample(problem, H100, 1, family, held={"workspace_splits": 1})


def test_what_is_hardly_ever_legal_is_drawn_as_often_as_asked_and_the_same_of_a_seed() -> None:
    problem = Problem(dtype="bf16", head_dim=128, head_dim_v=128, scoring=Scoring(softcap=30.0))
    first, again = (
        draw(Wgmma, problem, H100, 5, random.Random(3), {"tangent": "cubic", "cluster": 2}) for _ in range(2)
    )
    assert first == again and len(set(first)) == 5
    assert {variant.cluster for variant in first} == {2}


def test_nothing_is_drawn_where_nothing_is_legal() -> None:
    assert draw(Wgmma, Problem(dtype="bf16"), preset("a100"), 1, random.Random(1)) == []
    held = {"splits": 4, "workspace_splits": 2}
    assert draw(Wgmma, Problem(dtype="bf16"), H100, 1, random.Random(1), held) == []
