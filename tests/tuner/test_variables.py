"""The environment's variables are few, and documented."""

from __future__ import annotations

import re

from flashgen.tuner.variables import VARIABLES, set_variables

from tests.support import ROOT

#: An access of the environment by a name, of which there may be several.
READ = re.compile(r"""(?:environ\.get\(|environ\[|getenv\()\s*["'](FLASHGEN_\w+)""")


def test_every_variable_that_is_read_is_documented() -> None:
    texts = [path.read_text() for top in ("tuner", "templates", "gen") for path in (ROOT / top).rglob("*.py")]
    read = {name for text in texts for name in READ.findall(text)}
    assert "FLASHGEN_CACHE" in read and read <= set(VARIABLES)


def test_the_page_has_them_all() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == VARIABLES


def test_those_that_are_set_are_told(monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", "clang++")
    assert set_variables() == {"CXX": "clang++"}
