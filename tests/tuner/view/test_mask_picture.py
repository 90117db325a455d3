"""Pictures of masks show each pair as it is, are the same to the byte, and small."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.view.mask_picture import HIDDEN, STRONGEST, legend, levels, svg, terminal_picture
from flashgen.tuner.view.picture_values import picture_values
from flashgen.tuner.view.score_matrix import ScoreMatrix, score_matrix
from rich.cells import cell_len
from rich.console import Console

SVG = "{http://www.w3.org/2000/svg}"


def problem(length: int = 20, *, causal: bool = True, **asked: Any) -> Problem:
    return Problem(seqlen_q=length, seqlen_k=length, causal=causal, scoring=Scoring(**asked))


def matrix(asked: Problem, **values: Any) -> ScoreMatrix:
    return score_matrix(asked, {**picture_values(asked), **values})


ASKED = {
    "causal": problem(),
    "window": problem(window=(5, 0), always=2),
    "chunk": problem(chunk=6, causal=False),
    "prefix": problem(prefix=5),
    "lengths": problem(lengths=True),
    "documents": problem(documents=4),
    "dilation": problem(dilation=3),
    "softcap": problem(softcap=3.0),
    "alibi": problem(alibi=True),
    "bias": problem(bias="f16", causal=False),
    "boolean": problem(bias="u8", causal=False),
    "sinks": problem(sinks=True),
    "table": problem(score="score + table[h, q - k]"),
    "own": problem(mask="doc[b, q] == doc[b, k]", causal=False),
}


def console(width: int = 80, encoding: str = "utf-8", colours: Any = None) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(width=width, file=file, force_terminal=colours is not None, color_system=colours)


def drawn(picture: str, size: int) -> dict[str, np.ndarray]:
    """Which cells have each class, read from the file's strokes."""
    root = ET.fromstring(picture)
    found = {}
    for path in root.iter(f"{SVG}path"):
        cells = np.zeros((size, size), dtype=bool)
        if path.get("class") in ("lines", "sink"):
            continue
        for x, y, run in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path.get("d", "")):
            cells[int(y), int(x) : int(x) + int(run)] = True
        found[path.get("class")] = cells
    return found


@pytest.mark.parametrize("name", ASKED)
def test_a_picture_shows_the_pairs_that_are_visible(name: str) -> None:
    asked = ASKED[name]
    values = picture_values(asked)
    rows = np.arange(20)
    seen = asked.scores.visible(values, 0, 0, rows, rows, 20, 20)
    made = matrix(asked)
    assert made.visible_share == seen.mean() and made.cell_rows == made.cell_keys == 1
    np.testing.assert_array_equal(levels(made) != HIDDEN, seen)
    picture = svg(made, name)
    cells = drawn(picture, 20)
    np.testing.assert_array_equal(np.logical_or.reduce(list(cells.values())), seen)
    assert sum(each.sum() for each in cells.values()) == seen.sum(), "a cell has two colours"
    lines = [each.plain for each in terminal_picture(made, console())]
    body = [line.partition("│")[2].rpartition("│")[0] for line in lines if "│" in line]
    shown = np.array([[cell != " " for cell in line[::2]] for line in body])
    np.testing.assert_array_equal(shown, seen)


@pytest.mark.parametrize("name", ASKED)
def test_a_picture_is_the_same_each_time_and_small(name: str) -> None:
    first, again = (svg(matrix(ASKED[name]), "a <mask> & more") for _ in range(2))
    assert first == again and len(first) < 6000
    root = ET.fromstring(first)
    assert root.findtext(f"{SVG}title") == "a <mask> & more"
    # In each mode every class that is drawn has a colour of its own.
    light, dark = root.findtext(f"{SVG}style", "").split("@media(prefers-color-scheme:dark)")
    classes = {each.get("class") for each in root.iter() if each.get("class")}
    for mode in (light, dark):
        colours = re.findall(r"\.(\w+)\{(?:fill|stroke):(#\w{6})", mode)
        assert classes == {name for name, _ in colours}
        by_class = dict(colours)
        assert by_class.pop("lines") == by_class["ground"]
        assert len(set(by_class.values())) == len(by_class)


def test_what_is_added_and_what_is_multiplied_are_told_apart() -> None:
    alibi = matrix(ASKED["alibi"])
    assert alibi.change is not None and not alibi.is_factor
    slope = 2 ** (-8 / 16)
    assert alibi.change[19, 0] == pytest.approx(-19 * slope) and np.isnan(alibi.change[0, 1])
    assert levels(alibi)[19, 0] == -STRONGEST and levels(alibi)[7, 7] == 0
    assert legend(alibi) == [(-STRONGEST, "-13"), (0, "0")]
    softcap = matrix(ASKED["softcap"])
    assert softcap.is_factor and softcap.change is not None
    known = softcap.change[~np.isnan(softcap.change)]
    assert 0 < known.min() < known.max() <= 1
    assert [words for _, words in legend(softcap)][-1] == "times 1"


def test_scores_that_become_minus_infinity_are_hidden() -> None:
    as_score = matrix(problem(causal=False, score="score if q >= k else -inf"))
    np.testing.assert_array_equal(levels(as_score), levels(matrix(problem())))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (300, 0), (100, 400)])
def test_cells_and_tiles_of_long_sequences_are_counted(causal: bool, window: Any) -> None:
    asked = Problem(seqlen_q=1000, seqlen_k=1500, causal=causal, scoring=Scoring(window=window))
    made = matrix(asked)
    seen = asked.scores.visible(picture_values(asked), 0, 0, np.arange(1000), np.arange(1500), 1000, 1500)
    assert (made.cell_rows, made.cell_keys) == (32, 64) and made.seen.shape == (32, 24)
    assert made.visible_share == pytest.approx(seen.mean()) and not made.is_sampled
    tiles = [
        seen[row : row + 64, key : key + 64].any() for row in range(0, 1000, 64) for key in range(0, 1500, 64)
    ]
    assert made.skipped_share == pytest.approx(1 - np.mean(tiles))
    cell = seen[64:96, 64:128]
    assert made.seen[2, 1] == pytest.approx(cell.mean())


def test_very_long_sequences_are_sampled() -> None:
    made = matrix(problem(40_000, window=(2000, 0)))
    assert made.is_sampled and made.visible_share == pytest.approx(2000 / 40_000, rel=0.1)
    assert made.skipped_share == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("name", ["causal", "sinks", "bias", "softcap"])
def test_a_terminal_picture_fits(name: str, width: int) -> None:
    scoring = ASKED[name].scoring
    made = matrix(Problem(seqlen_q=4000, seqlen_k=4000, causal=name != "bias", scoring=scoring))
    for shown in (console(width), console(width, "ascii")):
        lines = [each.plain for each in terminal_picture(made, shown)]
        assert max(map(cell_len, lines)) <= width
        "\n".join(lines).encode(shown.encoding)


def test_colours_are_for_terminals_alone() -> None:
    for colours, expected in (("truecolor", True), (None, False)):
        lines = terminal_picture(matrix(ASKED["alibi"]), console(colours=colours))
        assert any(line.spans for line in lines) == expected
