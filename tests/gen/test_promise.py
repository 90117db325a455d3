"""Every class that a family computes says what it promises."""

from dataclasses import replace

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.problem import PRECISIONS, Problem
from flashgen.gen.promise import PROMISES, promise_of


@pytest.mark.parametrize("family", FAMILIES)
def test_each_class_of_a_family_has_a_promise_with_its_tolerance(family):
    for dtype, precisions in FAMILIES[family].serves.precisions.items():
        for precision in precisions:
            problem = Problem(dtype=dtype, precision=precision)
            assert promise_of(problem).tolerance == problem.tolerance


def test_nothing_else_has_one():
    named = {precision for precisions in PRECISIONS.values() for precision in precisions}
    classes = named | (set(PRECISIONS) - {"f32"})
    assert set(PROMISES) == classes


def test_automatic_float32_promises_what_multiply_adds_do_of_all_that_a_card_keeps():
    automatic = promise_of(Problem())
    assert automatic.row_share <= automatic.tolerance
    assert replace(automatic, row_share=0.0) == promise_of(Problem(precision="ieee"))


def test_what_a_class_loses_is_told():
    told = promise_of(Problem(precision="3xf16")).words()
    assert "2e-06 per head" in told and "elements of o to 2e-06 of their row's mean" in told
    exact = promise_of(Problem(precision="ieee")).words()
    assert "elements" not in exact and "numbers from 1e-38 on" in exact
