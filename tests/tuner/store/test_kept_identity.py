"""The identity of a family is found out once for each state of its sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from flashgen.gen import identity as identity_module
from flashgen.tuner.store import kept_identity as kept_module
from flashgen.tuner.store.kept_identity import kept_identity


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of families whose kernels were rendered, with a cache of the test's own."""
    names: list[str] = []

    def noted(name: str) -> str:
        names.append(name)
        return f"{name} of sources {len(names)}"

    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity_module, "identity", noted)
    return names


def test_kernels_are_rendered_once_for_the_same_sources(found: list[str]) -> None:
    assert {kept_identity("simt") for _ in range(3)} == {"simt of sources 1"}
    assert kept_identity("mma") == "mma of sources 2" and found == ["simt", "mma"]


def test_other_sources_have_an_identity_of_their_own(found: list[str], monkeypatch) -> None:
    before = kept_identity("simt")
    monkeypatch.setattr(kept_module, "_digest_of_sources", lambda: "of other texts")
    assert kept_identity("simt") != before and found == ["simt", "simt"]


def test_sources_are_told_apart_by_every_text(tmp_path: Path, monkeypatch) -> None:
    template, module = tmp_path / "templates" / "a.jinja", tmp_path / "gen" / "b.py"
    digests = set()
    for text in ("one", "two"):
        for path in (template, module):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            folders = ((template.parent, "*.jinja"), (module.parent, "*.py"))
            monkeypatch.setattr(kept_module, "_SOURCES", folders)
            digests.add(kept_module._digest_of_sources.__wrapped__())
    assert len(digests) == 4


def test_where_nothing_can_be_kept_it_is_found_out(found: list[str], monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no folder")
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "taken"))
    assert kept_identity("simt") == "simt of sources 1" and kept_identity("simt") == "simt of sources 2"


def test_a_family_without_a_sample_is_an_error(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    with pytest.raises(LookupError, match="no sample"):
        kept_identity("unheard-of")
