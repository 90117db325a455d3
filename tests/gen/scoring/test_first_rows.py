"""Rows that see a key, by solved bounds and by asking one row after the other."""

from __future__ import annotations

import numpy as np
import pytest
from flashgen.gen.expression import Constant, Name, apply
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.first_rows import first_row_behind, first_rows_behind
from flashgen.gen.scoring.meaning import asked_scores
from flashgen.gen.scoring.scores import DIAGONAL, KEY, NUM_KEYS, NUM_ROWS, ROW

CHUNK = Name("chunk", nonnegative=True)
LENGTHS = [(7, 19), (19, 7), (12, 12)]
SOLVED = {
    "row itself": ROW + DIAGONAL + 1,
    "before the row": ROW + DIAGONAL - Name("left"),
    "where there is a window": apply(
        "where", apply("lt", Name("left"), Constant(0)), Constant(0), ROW + DIAGONAL - Name("left")
    ),
    "the greater of two": apply("max", ROW + DIAGONAL + 1, Name("left") + 3),
    "the lesser of two": apply("min", ROW + DIAGONAL + 4, NUM_KEYS),
    "the same for all rows": Name("left") + 2,
    "where its chunk begins": apply("floor_div", ROW + DIAGONAL, CHUNK) * CHUNK,
    "where it ends": CHUNK * (1 + apply("floor_div", ROW + DIAGONAL, CHUNK)),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("left", [-1, 0, 3, 40])
@pytest.mark.parametrize("name", SOLVED)
def test_the_first_row_behind_a_key_is_the_first_that_is(name: str, left: int, lengths: tuple[int, int]):
    num_rows, num_keys = lengths
    bound, solved = SOLVED[name], first_row_behind(SOLVED[name])
    assert solved is not None
    shared = {"left": left, "chunk": 5, "diagonal": num_keys - num_rows}
    shared |= {"seqlen_q": num_rows, "seqlen_k": num_keys}
    for key in range(num_keys):
        asked = [int(bound.value({**shared, ROW.name: row})) > key for row in range(num_rows)]
        first = asked.index(True) if True in asked else num_rows
        assert np.clip(int(solved.value({**shared, KEY.name: key})), 0, num_rows) == first


@pytest.mark.parametrize(
    ("bound", "solved"),
    [
        (NUM_KEYS, Constant(0)),
        (Constant(0), NUM_ROWS),
        (ROW + ROW, None),
        (apply("floor_div", ROW, CHUNK) * 3, None),
        (ROW * Name("left"), None),
        (apply("floor_div", ROW, Name("left")) * Name("left"), None),
    ],
)
def test_bounds_of_all_rows_are_behind_all_keys_or_none(bound: object, solved: object):
    assert first_row_behind(bound) == solved  # type: ignore[arg-type]


def test_named_masks_are_solved():
    def kinds(**asked: object) -> list[str]:
        scores = asked_scores(Scoring(**asked), causal=True)  # type: ignore[arg-type]
        return [each for each in ("begins", "ends") if first_rows_behind(scores, each) is None]

    assert kinds(window=(4, 2)) == kinds(prefix=8) == kinds(lengths=True) == kinds(softcap=5.0) == []
    assert kinds(mask="k <= q + 5") == kinds(always=2, window=(4, 2)) == kinds(chunk=8) == []
    assert kinds(documents=3) == []
    assert kinds(mask="k <= q // 3") == ["ends"]
    place = "args.seqlen_k - args.seqlen_q"
    limits = [
        ("kCausal", f"key + 1 - ({place} + 1)"),
        ("", f"(args.window_right < 0 ? 0 : key + 1 - ({place} + args.window_right + 1))"),
    ]
    scores = asked_scores(Scoring(window=(4, 2)), causal=True)
    assert first_rows_behind(scores, "ends") == (limits, True)


def test_documents_tell_of_each_other():
    scores = asked_scores(Scoring(documents=3), causal=True)
    begins, ends = (first_rows_behind(scores, each) for each in ("begins", "ends"))
    place = "args.seqlen_k - args.seqlen_q"
    assert begins == ([("", f"document_end_at(args, batch, own) - ({place})")], False)
    assert ends is not None and not ends.are_certain
    assert ends.limits[1] == ("", f"document_begin_at(args, batch, own) - ({place})")
