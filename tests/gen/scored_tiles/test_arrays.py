"""Arrays that are read at each pair's own row and key."""

from __future__ import annotations

import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scored_tiles.arrays import bytes_that_say, tile_arrays
from flashgen.gen.scoring.asked import Scoring

PROBLEM = Problem(dtype="bf16", batch=2, num_q_heads=4, num_kv_heads=2, head_dim=64, seqlen_q=64, seqlen_k=99)
HIDES = (("hides", "u8"),)
#: Masks, and the array whose bytes alone say what rows see, intervals apart.
ASKED = {
    "an array": (Scoring(bias="u8"), "bias"),
    "an array in a window": (Scoring(bias="u8", window=(9, 0)), "bias"),
    "of fewer axes": (Scoring(mask="hides[q, b, k] != 0", buffers=HIDES), "hides"),
    "another number": (Scoring(mask="hides[q, k] != 1", buffers=HIDES), None),
    "turned": (Scoring(mask="hides[q, k] == 0", buffers=HIDES), None),
    "another key": (Scoring(mask="hides[q, k + 1] != 0", buffers=HIDES), None),
    "with a formula": (Scoring(mask="hides[q, k] != 0 and k % 5 != q % 5", buffers=HIDES), None),
    "wider numbers": (Scoring(mask="hides[q, k] != 0", buffers=(("hides", "i16"),)), None),
    "a formula": (Scoring(mask="k % 5 != q % 5"), None),
}


@pytest.mark.parametrize("name", ASKED)
def test_bytes_that_say_what_rows_see(name: str) -> None:
    scoring, wanted = ASKED[name]
    problem = Problem(**{**PROBLEM.to_dict(), "scoring": scoring})
    found = bytes_that_say(problem.scores.predicate, tile_arrays(problem.scores))
    assert (found and found.name) == wanted
    kernel = render(Wgmma(br=64, bc=64, seen_bits=True), problem, PRESETS["h200"])
    assert ("bytes_of_row(" in kernel.source) == (wanted is not None)
