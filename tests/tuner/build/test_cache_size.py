"""The cache stays below its limit: what was not used for longest goes first."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from flashgen.tuner.build import cache, cache_size
from flashgen.tuner.errors import FlashgenError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHGEN_CACHE_LIMIT", raising=False)
    monkeypatch.setattr(cache, "_GROWTH", cache._Growth())
    return tmp_path / "cache"


def build(name: str, age_s: float = 0.0, num_bytes: int = 1000) -> Path:
    """An entry that was used so long ago."""

    def produce(path: Path) -> dict[str, object]:
        path.write_bytes(b"x" * num_bytes)
        return {}

    artifact = cache.cached([name], ".cubin", produce).path
    for path in artifact.parent.glob(f"{artifact.stem}.*"):
        os.utime(path, (time.time() - age_s,) * 2)
    return artifact


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("", 2 * 2**30), ("0", 0), ("1000", 1000), ("500M", 500 * 2**20), ("1.5 GiB", 3 * 2**29), ("4g", 2**32)],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, text: str, num_bytes: int) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_LIMIT", text)
    assert cache_size.limit_bytes() == num_bytes


@pytest.mark.parametrize("text", ["much", "-1", "4X", "G"])
def test_a_limit_that_is_no_size(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_LIMIT", text)
    with pytest.raises(FlashgenError, match=rf"FLASHGEN_CACHE_LIMIT is '{text}'; .* as in 500M or 4G"):
        cache_size.limit_bytes()


def test_what_was_not_used_for_longest_goes(folder: Path) -> None:
    oldest, used, young = build("a", 5000), build("b", 4000), build("c", 3000)
    build("b")  # a hit, which is noted
    assert cache_size.trim(folder, 2500) > 1000
    assert [path.exists() for path in (oldest, used, young)] == [False, True, True]
    assert not oldest.with_suffix(".json").exists()


def test_below_the_limit_all_stays(folder: Path) -> None:
    kept = [build(name, 5000) for name in "abc"]
    assert cache_size.trim(folder, 10_000) == 0 and all(path.exists() for path in kept)


def test_what_may_be_in_use_stays(folder: Path) -> None:
    in_use = build("a", cache_size.IN_USE_S / 2)
    assert cache_size.trim(folder, 0) == 0 and in_use.exists()


def test_a_build_trims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_LIMIT", "3000")
    old = [build(name, 5000 - index) for index, name in enumerate("abcd")]
    new = build("e")
    assert new.exists() and not old[0].exists() and old[3].exists()


def test_the_folder_is_looked_through_when_enough_was_added() -> None:
    growth, limit = cache._Growth(), 64_000
    looks = [growth.is_worth_a_look(400, limit) for _ in range(7)]
    assert looks == [True, False, False, True, False, False, True]


def test_clearing_leaves_what_is_not_ours(folder: Path) -> None:
    artifact = build("a")
    mine = artifact.parent / "notes.txt"
    mine.write_text("not flashgen's")
    use = cache_size.clear(folder)
    assert (use.entries, use.folder) == (1, folder) and use.num_bytes > 1000
    assert mine.exists() and not artifact.exists()
    assert cache_size.cache_use(folder).entries == 0


def test_another_process_may_remove_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("a", 5000)
    found = cache_size._entries(folder)
    cache_size.clear(folder)
    monkeypatch.setattr(cache_size, "_entries", lambda _: found)
    assert cache_size.trim(folder, 0) > 0


def test_what_goes_while_the_folder_is_looked_through_is_no_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("a", 5000)
    listed = list(folder.glob("[0-9a-f][0-9a-f]/*"))
    cache_size.clear(folder)
    monkeypatch.setattr(Path, "glob", lambda *_: listed)
    assert listed and cache_size.cache_use(folder).entries == 0
