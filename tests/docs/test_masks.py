"""docs/masks.md: its pictures and lines of code are those of the example, to the byte.

Mended by ``pytest tests/docs/test_masks.py --update-golden``.
"""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT
from tests.support.markdown import Page, replaced
from tests.support.masks_page import PICTURES, pictures, section

PAGE = ROOT / "docs" / "masks.md"


@pytest.mark.parametrize("name", pictures())
def test_a_picture_is_what_is_drawn_now(name: str, request: pytest.FixtureRequest) -> None:
    drawing, path = pictures()[name].drawing(), PICTURES / f"{name}.svg"
    if request.config.getoption("--update-golden"):
        drawing.write(path)
        return
    from flashgen.tuner.view.mask_picture import svg

    assert path.read_text(encoding="utf-8") == svg(drawing.matrix, drawing.title)
    assert path.stat().st_size < 6000


def test_the_page_shows_every_picture_with_its_lines(request: pytest.FixtureRequest) -> None:
    text = made = PAGE.read_text(encoding="utf-8")
    for name in pictures():
        made = replaced(made, "mask", name, section(name))
    if request.config.getoption("--update-golden"):
        PAGE.write_text(made, encoding="utf-8")
    else:
        assert made == text


def test_no_picture_is_left_over() -> None:
    assert {path.stem for path in PICTURES.iterdir()} == set(pictures())
    shown = re.findall(r"\(masks/(\w+)\.svg\)", Page(PAGE).text)
    assert sorted(shown) == sorted(pictures())
