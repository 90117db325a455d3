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
    classes = {*PRECISIONS["f32"], *(set(PRECISIONS) - {"f32"})}
    assert set(PROMISES) == classes


def test_automatic_float32_promises_no_less_than_multiply_adds():
    automatic, exact = promise_of(Problem()), promise_of(Problem(precision="ieee"))
    assert replace(automatic, row_share=0.0) == exact
    assert automatic.row_share <= automatic.tolerance


def test_what_a_class_loses_is_told():
    told = promise_of(Problem(precision="3xf16")).words()
    assert "2e-06 per head" in told and "elements of o to 2e-06 of their row's mean" in told
    assert "elements" not in promise_of(Problem(precision="ieee")).words()
