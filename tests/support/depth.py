"""Which cases every run tries, which `pytest -m thorough`, and which, in hours, `pytest -m exhaustive`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], count: int, *, thorough: int | None = None) -> list[Any]:
    """The cases of a parametrized test, of which every run tries ``count``, evenly spread over all.

    The thorough run tries ``thorough`` of the others, or all; what is then left is for the exhaustive one.
    """
    every = list(cases)
    tried = _spread(range(len(every)), count)
    rest = [i for i in range(len(every)) if i not in tried]
    left = set(rest) - _spread(rest, len(rest) if thorough is None else min(thorough, len(rest)))
    marks = {i: pytest.mark.exhaustive if i in left else pytest.mark.thorough for i in rest}
    return [_marked(case, marks[i]) if i in marks else case for i, case in enumerate(every)]


def _spread(places: Sequence[int], count: int) -> set[int]:
    return {places[i * len(places) // count] for i in range(count)}


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=(*case.marks, mark), id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=mark)
