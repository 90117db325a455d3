"""The ladder on a real card."""

import pytest
from flashgen.tuner.bench.ladder import run_ladder
from flashgen.tuner.bench.ladder_result import FASTEST, FUSED, SIMT, UNFUSED
from flashgen.tuner.bench.peers import torch_installed
from flashgen.tuner.cards.names import resolve
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.outcome import Status

pytestmark = pytest.mark.gpu


@pytest.fixture
def card():
    try:
        return resolve("0")
    except FlashgenError as error:
        pytest.skip(str(error))


def test_steps_are_right_and_get_faster(card):
    result = run_ladder(card, ["t10"], ["4.2.2", "4.2.5", "4.2.9", "4.2.10"])
    rows = {row.name: row for row in result.rows}
    ours = [rows[name] for name in ("4.2.2", "4.2.5", "4.2.9", "4.2.10", SIMT, FASTEST)]
    assert [row.status for row in ours] == [Status.OK] * 6, [row.reason for row in ours]
    times = [row.median_us for row in ours]
    assert times == sorted(times, reverse=True)
    assert all(0 < row.measurement.error < 2e-6 for row in ours)
    if torch_installed():
        assert rows[FUSED].median_us < rows[UNFUSED].median_us
    else:
        assert result.notes
