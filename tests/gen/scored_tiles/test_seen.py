"""How many tiles rows see where a predicate hides keys: the sample beside a count of all."""

from __future__ import annotations

import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scored_tiles.seen import partial_share, seen_shares
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.values import typical_values
from flashgen.gen.work import walk_tiles

LENGTH = 1500
SCORINGS = {
    "always": Scoring(window=(127, 0), always=4),
    "dilation": Scoring(dilation=2),
    "shown": Scoring(bias="u8"),
    "documents": Scoring(mask="doc[b, q] == doc[b, k]"),
    "blocks": Scoring(mask="q // 256 == k // 256 or k // 64 == 3"),
    "nothing": Scoring(mask="k % 2 == n", scalars=(("n", 7),)),
}


def counted(problem: Problem, br: int, bc: int) -> tuple[int, int]:
    """The tiles of keys that tiles of rows see, and those that some row does not see whole."""
    rows, keys = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    seen = problem.scores.visible(typical_values(problem), 0, 0, rows, keys, len(rows), len(keys))
    some = partial = 0
    for first_row in range(0, len(rows), br):
        for first_key in range(0, len(keys), bc):
            tile = seen[first_row : first_row + br, first_key : first_key + bc]
            some += bool(tile.any())
            partial += bool(tile.any() and not tile.all())
    return some, partial


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SCORINGS)
def test_the_sample_tells_how_many_tiles_are_walked(name, causal):
    problem = Problem(scoring=SCORINGS[name], causal=causal, seqlen_q=LENGTH, seqlen_k=LENGTH)
    for br, bc in ((128, 64), (64, 32)):
        some, partial = counted(problem, br, bc)
        walked = sum(walk.blocks * walk.tiles for walk in walk_tiles(problem, br, bc, 4, skips=False))
        assert walked == pytest.approx(some, rel=0.2, abs=4)
        if some:
            assert partial_share(problem, br, bc) == pytest.approx(partial / some, abs=0.15)


def test_intervals_need_no_sample():
    problem = Problem(scoring=Scoring(window=(127, 0)), seqlen_q=LENGTH, seqlen_k=LENGTH)
    assert (seen_shares(problem, 128, 64, 5) == 1.0).all()


def test_of_a_tree_the_last_tiles_alone_are_partial():
    problem = Problem(scoring=Scoring(tree=True), seqlen_q=16, seqlen_k=16 * 64)
    assert (seen_shares(problem, 16, 64, 1) == 1.0).all()
    assert partial_share(problem, 16, 64) == pytest.approx(1 / 16)


def test_warps_walk_no_more_than_their_block():
    problem = Problem(scoring=SCORINGS["always"], seqlen_q=4096, seqlen_k=4096)
    for walk in walk_tiles(problem, 128, 64, 4, skips=True):
        assert walk.warp_tiles <= 4 * walk.tiles
        assert walk.tiles <= 6


def test_a_long_sequence_is_looked_at_in_a_moment():
    problem = Problem(scoring=SCORINGS["always"], batch=1, seqlen_q=2**17, seqlen_k=2**17)
    walks = walk_tiles(problem, 128, 64, 4, skips=False)
    assert np.mean([walk.tiles for walk in walks]) < 100
