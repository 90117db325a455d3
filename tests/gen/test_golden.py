"""Emitted CUDA is the same to the byte until a change says otherwise.

Two nets: every shipped kernel, rendered from its JSON, is its ``.cu`` but for comments; and a set of small
variants, which together have each feature of each family, is to the byte what ``golden/`` holds. Where a
change means to alter the text, `pytest tests/gen/test_golden.py --update-golden` writes the latter anew.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashgen.gen.families import family_named
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render

from tests.support import ROOT

GOLDEN = Path(__file__).parent / "golden"
#: Folders of shipped kernels, each by the preset of the card that they were tuned on.
SHIPPED = {"h200": ROOT / "out" / "nvidia_h200", "h100": ROOT / "out" / "nvidia_h100_80gb_hbm3"}
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())


def without_comments(source: str) -> list[str]:
    """The lines of code, without what stands behind them."""
    lines = [line.partition("//")[0].rstrip() for line in source.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("name", CASES)
def test_a_variant_renders_as_before(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    variant = family_named(case["family"])(**case["variant"])
    source = render(variant, Problem.from_dict(case["problem"]), PRESETS[case["card"]]).source
    golden = GOLDEN / f"{name}.cu"
    if request.config.getoption("--update-golden"):
        golden.write_text(source)
    assert source == golden.read_text()


def test_golden_files_are_those_of_the_cases() -> None:
    assert {path.stem for path in GOLDEN.glob("*.cu")} == set(CASES)


@pytest.mark.parametrize(
    ("card", "path"),
    [
        pytest.param(card, path, id=f"{card}-{path.stem}")
        for card, folder in SHIPPED.items()
        for path in sorted(folder.glob("*.json"))
    ],
)
def test_a_shipped_kernel_renders_from_its_record(card: str, path: Path) -> None:
    record = json.loads(path.read_text())
    variant = family_named(record["family"]).from_dict(record["variant"])
    limits = replace(PRESETS[card], name=record["device"])
    source = render(variant, Problem.from_dict(record["problem"]), limits).source
    assert without_comments(source) == without_comments(path.with_suffix(".cu").read_text())
