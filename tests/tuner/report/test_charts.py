"""Charts alone: where words stand."""

from __future__ import annotations

import re
from html import unescape

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.tuner.option_words import word
from flashgen.tuner.report.charts.labels import BOLD, fitted, text_width
from flashgen.tuner.report.charts.parallel import Line, Stops, parallel
from flashgen.tuner.report.charts.points import Mark, history
from flashgen.tuner.report.charts.svg import NAME_SIZE, NARROW, WIDE
from flashgen.tuner.report.charts.units import Unit
from flashgen.tuner.report.family_view import ordered

TEXT = re.compile(r'<text x="([-\d.]+)" y="([-\d.]+)" class="([^"]+)"(?: text-anchor="(\w+)")?>([^<]*)')


def boxes(drawing: str) -> list[tuple[str, float, float, float]]:
    """Each text with its left and right end and its baseline."""
    found = []
    for x, y, classes, anchor, words in TEXT.findall(drawing):
        width = text_width(unescape(words), NAME_SIZE) * (BOLD if "strong" in classes else 1)
        left = float(x) - {"middle": width / 2, "end": width, "": 0.0}[anchor]
        found.append((unescape(words), left, left + width, float(y)))
    return found


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", FAMILIES)
def test_labels_of_parallel_coordinates_do_not_touch(name, width):
    """Every choice of every parameter, the last one the winner's."""
    axes = []
    for parameter in FAMILIES[name].parameters():
        values = ordered(parameter)
        last = max(len(values) - 1, 1)
        stops = tuple((i / last, word(value)) for i, value in enumerate(values))
        axes.append(Stops(parameter.name, stops, len(values) - 1))
    drawing = parallel(axes, [Line((0.5,) * len(axes), 0, "trial 1", True)], "all", width)
    texts = boxes(drawing)
    words = [text for text, *_ in texts]
    assert all(axis.name in words for axis in axes)
    # The winner's values are always there; a tick stands at each of the others.
    assert all(axis.stops[-1][1] in words for axis in axes)
    assert drawing.count('class="stop"') == sum(len(axis.stops) for axis in axes)
    for i, (text, left, right, base) in enumerate(texts):
        assert left >= -1 and right <= width + 1, text
        for other, its_left, its_right, its_base in texts[i + 1 :]:
            apart = left >= its_right or its_left >= right or abs(base - its_base) >= NAME_SIZE
            assert apart, (text, other)


def test_labels_that_do_not_fit_are_left_out_evenly():
    stops = [(10.0 * i, f"{100 + i}") for i in range(21)]
    kept = [label.words for label in fitted(stops, -20, 220, 12.0, first=7)]
    assert {"100", "107", "120"} <= set(kept) and 4 <= len(kept) <= 8
    labels = fitted(stops, -20, 220, 12.0, first=7)
    assert not any(a.touches(b) for i, a in enumerate(labels) for b in labels[i + 1 :])
    (alone,) = fitted([(0.0, "a name that is far too long")], 0, 60, 12.0)
    assert (alone.left, alone.right) == (0, 60)


@pytest.mark.parametrize("trials", [3, 400, 20_000])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_numbers_along_the_history_stay_on_the_page(width, trials):
    marks = [Mark(float(n), 100.0 / n, 0, f"trial {n}") for n in range(1, trials + 1, max(trials // 50, 1))]
    drawing = history(marks, [], trials, Unit("us", 1.0), "all", width)
    assert all(left >= -1 and right <= width + 1 for _, left, right, _ in boxes(drawing))
    if trials == 20_000:
        assert ">20,000<" in drawing
