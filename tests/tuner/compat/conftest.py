from __future__ import annotations

import pytest

from tests.support.front_stand_in import StandIn


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """What stands in for `flashgen.attention` and its companions."""
    return StandIn().put_in(monkeypatch)
