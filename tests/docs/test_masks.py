"""docs/masks.md: its pictures and lines of code are those of the example, to the byte.

Mended by ``pytest tests/docs/test_masks.py --update-golden``.
"""

from __future__ import annotations

import ast
import inspect
import re

import pytest
from flashgen.templates.runtime.scored_attention import ScoredAttention
from flashgen.templates.runtime.scored_values import _FEATURES
from flashgen.tuner.view.mask_picture import svg

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


@pytest.mark.parametrize("name", pictures())
def test_a_call_names_what_the_module_reads(name: str) -> None:
    picture = pictures()[name]
    call = ast.parse(picture.call).body[0].value  # type: ignore[attr-defined]
    told = [each.arg for each in call.keywords]
    asked = picture.problem.scoring.to_dict()
    features = {_FEATURES[each][0] for each in asked if each in _FEATURES}
    known = {part for _, parts in _FEATURES.values() for part in parts}
    own = {each.name for each in picture.problem.scores.buffers} - known
    causal = {"causal"} if picture.problem.causal else set()
    # Biases and boolean masks are called as PyTorch calls them.
    assert sorted(told) == sorted({*features, *own, *causal} - {"bias"} | {"attn_mask"} & {*told})
    assert ("attn_mask" in told) == ("bias" in features)
    assert {*told} - own <= inspect.signature(ScoredAttention.attention).parameters.keys()
