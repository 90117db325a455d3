"""Which cases every run tries, and which are left to the thorough run: `pytest -m thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], count: int) -> list[Any]:
    """The cases of a parametrized test, of which every run tries ``count``, evenly spread over all."""
    every = list(cases)
    tried = {i * len(every) // count for i in range(count)}
    return [case if i in tried else _thorough(case) for i, case in enumerate(every)]


def _thorough(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=(*case.marks, pytest.mark.thorough), id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)
