"""Kernels of every family and class keep what they promise, on emulated cards."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from typing import Any

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.operation import BACKWARD
from flashgen.gen.problem import EIGHT, Problem
from flashgen.gen.promise import PROMISES, class_of
from flashgen.gen.render import render
from flashgen.tuner.accuracy.subjects import HOME_CARDS, HOME_CARDS_OF_EIGHT_BITS, Subject, Wanted, subjects
from flashgen.tuner.cards.emulated import PREFIX
from flashgen.tuner.cards.names import resolve
from flashgen.tuner.evaluate.adversarial import adversarial_findings
from flashgen.tuner.evaluate.adversarial_inputs import Breadth, adversarial_cases

from tests.support.covering import draw
from tests.support.depth import sampled
from tests.support.emulated import needs_compiler

#: Family, class and mask of all that there is.
KINDS = [
    (family, class_of(Problem(dtype=dtype, precision=precision)), causal)
    for family, each in FAMILIES.items()
    if BACKWARD not in each.serves.operations
    for dtype, precisions in each.serves.precisions.items()
    for precision in precisions
    for causal in (False, True)
    if (precision, family) not in (("auto", "simt"), ("auto", "ladder"))
]


def wanted(family: str, name: str, causal: bool, head_dim: int) -> Wanted:
    return Wanted(
        families=(FAMILIES[family],),
        dtypes=(name,) if name in ("f16", "bf16", "e4m3") else ("e4m3",) if name == EIGHT else ("f32",),
        precisions=(name if name not in ("f16", "bf16", "e4m3") else "auto",),
        masks=(causal,),
        head_dim=head_dim,
    )


def broken(subject: Subject, breadth: Breadth, groups: Container[str] = ()) -> list[str]:
    """What a kernel does not keep, case by case, of all or of some ``groups``."""
    build = subject.device.toolchain().build(subject.kernel)
    every = adversarial_cases(subject.kernel.problem.dtype, breadth)
    cases = [case for case in every if not groups or case.group in groups]
    found = adversarial_findings(subject.device.open(), build, cases)
    return [finding.words() for finding in found if not finding.kept]


def test_every_class_is_among_the_kinds():
    assert {name for _, name, _ in KINDS} == set(PROMISES)


@needs_compiler
@pytest.mark.parametrize(("family", "name", "causal"), sampled(KINDS, 2, thorough=10))
def test_a_kernel_of_each_class_keeps_its_promise(family, name, causal):
    (subject,) = subjects(wanted(family, name, causal, 16))
    told = broken(subject, "few")
    assert not told, f"{subject.kernel.variant.name}:\n" + "\n".join(told)


@needs_compiler
@pytest.mark.parametrize(("family", "name", "causal"), sampled(KINDS, 0, thorough=4))
def test_it_keeps_all_of_it_at_an_ordinary_head_dim(family, name, causal):
    (subject,) = subjects(wanted(family, name, causal, 64))
    told = broken(subject, "all")
    assert not told, f"{subject.kernel.variant.name}:\n" + "\n".join(told)


def drawn(family: str, dtype: str, precision: str, count: int, **held: Any) -> Iterator[Subject]:
    """Variants of a tensor-core family with any tiles, layouts and schedules, but for what is ``held``."""
    homes = HOME_CARDS | (HOME_CARDS_OF_EIGHT_BITS if dtype == "e4m3" else {})
    card = resolve(PREFIX + homes[family])
    problem = Problem(
        dtype=dtype, precision=precision, head_dim=32, batch=1, num_q_heads=2, num_kv_heads=1, causal=True
    )
    for variant in draw(FAMILIES[family], problem, card.limits, count, random.Random(7), held):
        yield Subject(render(variant, problem, card.limits), card)


@needs_compiler
@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("family", "dtype", "precision"),
    sampled(
        [
            *(("mma", "f32", name) for name in ("auto", "3xf16", "3xtf32", "tf32")),
            *(("wgmma", "f32", name) for name in ("auto", "3xf16")),
            *((name, dtype, "auto") for name in ("mma", "wgmma") for dtype in ("f16", "bf16")),
            ("mma", "e4m3", "auto"),
            ("wgmma", "e4m3", "auto"),
            ("wgmma", "e4m3", EIGHT),
        ],
        0,
        thorough=3,
    ),
)
def test_variants_by_chance_keep_their_promises(family, dtype, precision, count):
    told = [(subject, broken(subject, "few")) for subject in drawn(family, dtype, precision, count)]
    wrong = [f"{each.name}: {each.kernel.variant.name}: {lines}" for each, lines in told if lines]
    assert not wrong, "\n".join(wrong)


@needs_compiler
@pytest.mark.parametrize("precision", ["3xf16", pytest.param("3xtf32", marks=pytest.mark.thorough)])
def test_rows_that_see_nothing_of_a_share_of_keys_are_left_alone_by_its_values(precision):
    """A block multiplies values by the weights of all its rows, which are zero in some."""
    (subject,) = drawn("mma", "f32", precision, 1, br=16, workspace_splits=4)
    told = broken(subject, "few", groups=("NaN", "infinite"))
    assert not told, f"{subject.kernel.variant.name}:\n" + "\n".join(told)
