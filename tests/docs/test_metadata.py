"""What the project says of itself: packages, license, versions, what is checked before a commit."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from flashgen.gen.families import family_named
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.tuner.predict.cost_model import predict

from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: The folder of each of the project's packages.
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]


def test_every_package_is_in_the_wheel() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    folders = {FOLDERS.get(name) or str(Path(*name.split(".")[1:])) for name in listed}
    there = {
        str(init.parent.relative_to(ROOT))
        for top in ("gen", "tuner", "templates", "out")
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert there <= folders, f"pyproject.toml does not list {sorted(there - folders)}"
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


def test_the_license_is_the_one_that_is_stated() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0" and PROJECT["project"]["license-files"] == [
        "LICENSE"
    ]
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and "APPENDIX: How to apply" in text
    assert "Apache License 2.0" in (ROOT / "README.md").read_text()


def test_the_changelog_knows_this_version() -> None:
    releases = re.findall(
        r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert releases[0] == "Unreleased" and PROJECT["project"]["version"] == releases[1]
    assert releases[1:] == sorted(releases[1:], reverse=True)


def test_before_a_commit_is_checked_what_ci_checks() -> None:
    hooks = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text()
    for tool in ("ruff check", "ruff format", "pyright --pythonpath .venv/bin/python"):
        assert any(tool in hook for hook in hooks) and tool in ci, tool
    (tests,) = (hook for hook in hooks if "pytest" in hook)
    for path in re.findall(r"tests/\S+", tests):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_card_that_there_can_be(name: str) -> None:
    card = PRESETS[name]
    assert [other for other in PRESETS if PRESETS[other].slug == card.slug] == [name]
    assert card.smem_per_block <= card.smem_per_sm and card.max_threads_per_sm % 32 == 0
    assert card.arch in {60, 61, 70, 75, 80, 86, 89, 90, 100, 120}, "say what limits.py knows of it"
    simt = family_named("simt")(br=32, threads_per_block=64, lanes=8, bc=16, min_blocks=1)
    assert 0 < predict(simt, Problem(), card).median_us < 1e6
