"""Calls drawn at random on emulated cards, of each kind several with other sizes and numbers, in float64.

`python -m tests.tuner.front.test_drawn_calls 0 100 12` holds twelve calls of each of a hundred other kinds to
what they must return, by the kernels that would serve them, and says of each what became of it.
"""

from __future__ import annotations

import contextlib
import sys
import time

import pytest
from flashgen.gen.variant import Illegal
from flashgen.tuner.front import bound, candidates
from flashgen.tuner.front.workshop import Workshop
from flashgen.tuner.serving import serving_families

from tests.support.emulated import needs_compiler
from tests.tuner.front.drawn import draw, hold

#: Seeds of kinds that are soon built, of each function.
FEW = (11, 14, 119)
MORE = tuple(range(300, 310))


@pytest.fixture
def soon_chosen(monkeypatch):
    """Has calls of all sizes take the first legal kernel of a family's own: one to build for a kind."""

    def first(self, stepped, problem, repeating):
        limits = self.card.limits
        for family in serving_families(problem, limits):
            with contextlib.suppress(Illegal):
                family().check(problem, limits)
                return [candidates.Candidate(family(), 1.0, 1.0, "issue")]
        return candidates.candidates(problem, limits, (), repeating=repeating)

    monkeypatch.setattr(bound, "_WORKSHOPS", {})
    monkeypatch.setattr(Workshop, "_remembered", first)
    bound.forget_choices()
    yield
    monkeypatch.undo()
    bound.forget_choices()


@needs_compiler
@pytest.mark.parametrize("seed", FEW)
def test_a_few_drawn_calls_return_what_is_asked(seed, soon_chosen):
    hold(seed, 10)


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("seed", MORE)
def test_drawn_calls_return_what_is_asked(seed, soon_chosen):
    hold(seed, 20)


def main(first: int, end: int, calls: int) -> int:
    failed = 0
    for seed in range(first, end):
        kind, function = draw(seed)
        began, became = time.monotonic(), "as it should be"
        try:
            hold(seed, calls)
        except AssertionError as error:
            failed, became = failed + 1, str(error)
        told = f"{seed} {function} {kind.card} d {kind.d}/{kind.dv} {' '.join(kind.features)}"
        print(f"{told}, {time.monotonic() - began:.1f} s: {became}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])) > 0)
