"""Kernels made at run time are told as emitted modules tell them."""

from __future__ import annotations

import importlib
from dataclasses import fields

import pytest
from flashgen.gen.limits import preset
from flashgen.gen.render import render
from flashgen.tuner.front.entry import entry_of, outline_of
from flashgen.tuner.shelf import library

from tests.support.depth import sampled

#: What differs: of the runtime's own, and functions.
APART = ("launches", "measurement", "device", "sees", "change", "cubins", "source", "workspace", "plan_ints")
#: Sequences, heads of queries and of keys, and rows, that a plan is counted for.
PLANNED = (17, 8, 2, 5000)


def shipped() -> list[library.Entry]:
    return library.entries([library.shipped_folder()])


@pytest.mark.parametrize("at", sampled(range(0, len(shipped()), 4), 5))
def test_an_entry_is_that_of_the_shipped_module(at):
    slug, tuned = shipped()[at].slug, shipped()[at].kernel
    entry = entry_of(render(tuned.variant, tuned.problem, preset("h200")), tuned.device)
    module = importlib.import_module(f"flashgen.out.{slug}.{tuned.problem.name}")
    (told,) = module.KERNELS if hasattr(module, "KERNELS") else module.GRADIENTS
    for field in fields(told):
        if field.name not in APART:
            assert getattr(entry, field.name) == getattr(told, field.name), field.name
    sizes = [getattr(tuned.problem, name) for name in told.counted]
    if told.plan_ints is not None:
        assert entry.plan_ints is not None and entry.plan_ints(*PLANNED) == told.plan_ints(*PLANNED)
    for mine, theirs in zip(entry.launches, told.launches, strict=True):
        assert mine.count(*sizes) == theirs.count(*sizes)
        for field in fields(theirs):
            if field.name != "count":
                assert getattr(mine, field.name) == getattr(theirs, field.name), field.name
    outline = outline_of(tuned.problem)
    assert getattr(outline, "reads", None) == getattr(entry, "reads", None)
