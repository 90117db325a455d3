"""The kernel cache: whole entries or none."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from flashgen.tuner.build import cache
from flashgen.tuner.errors import BuildError, FlashgenError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Counts how often it is asked to build."""

    def __init__(self, content=b"machine code"):
        self.content = content
        self.calls = 0

    def __call__(self, path: Path):
        self.calls += 1
        path.write_bytes(self.content)
        return {"registers": 42}


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_second_request_is_a_hit(folder):
    build = Builder()
    first = cache.cached(["source", "flags"], ".cubin", build)
    second = cache.cached(["source", "flags"], ".cubin", build)
    assert (first.hit, second.hit, build.calls) == (False, True, 1)
    assert second.path.read_bytes() == b"machine code"
    assert second.path == first.path and second.path.suffix == ".cubin"
    assert second.metadata == first.metadata == {"registers": 42}


def test_every_part_counts():
    keys = {cache.cache_key(p) for p in (["ab", "c"], ["a", "bc"], ["abc"], ["ab", "c", ""], ["c", "ab"])}
    assert len(keys) == 5


@pytest.mark.parametrize(
    "damage", ["truncated artifact", "flipped bit", "no artifact", "half a record", "empty record"]
)
def test_damaged_entry_is_rebuilt(damage):
    build = Builder(b"x" * 1000)
    entry = cache.cached(["s"], ".so", build)
    record = entry.path.with_suffix(".json")
    if damage == "truncated artifact":
        os.truncate(entry.path, 500)
    elif damage == "flipped bit":
        entry.path.write_bytes(b"y" + b"x" * 999)
    elif damage == "no artifact":
        entry.path.unlink()
    elif damage == "half a record":
        record.write_text(record.read_text()[:20])
    else:
        record.write_text("[]")
    again = cache.cached(["s"], ".so", build)
    assert not again.hit and build.calls == 2
    assert again.path.read_bytes() == b"x" * 1000
    assert cache.cached(["s"], ".so", build).hit


def test_failed_build_leaves_nothing(folder):
    def fail(path: Path):
        path.write_bytes(b"half")
        (path.parent / "notes").write_text("scratch")
        raise BuildError("syntax error")

    with pytest.raises(BuildError, match="syntax error"):
        cache.cached(["s"], ".cubin", fail)
    assert files(folder) == []


def test_full_disk_is_one_clear_error_and_no_half_entry(folder, monkeypatch):
    real = os.fsync

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FlashgenError, match=r"No space left on device.*MiB free.*FLASHGEN_CACHE") as caught:
        cache.cached(["s"], ".cubin", Builder())
    assert str(folder) in str(caught.value)
    assert files(folder) == []
    monkeypatch.setattr(os, "fsync", real)
    assert not cache.cached(["s"], ".cubin", Builder()).hit


def test_disk_that_fills_during_the_build(folder):
    def fill(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FlashgenError, match="No space left on device"):
        cache.cached(["s"], ".cubin", fill)

    def forbidden(path):
        raise PermissionError(errno.EACCES, "a matter of the builder's own")

    with pytest.raises(PermissionError):
        cache.cached(["s"], ".cubin", forbidden)
    assert files(folder) == []


def test_disk_that_fills_before_the_record_is_no_hit_later(folder, monkeypatch):
    monkeypatch.setattr(cache, "write_text", _no_space)
    with pytest.raises(FlashgenError, match="No space left"):
        cache.cached(["s"], ".cubin", Builder())
    monkeypatch.undo()
    assert not cache._load(*_entry_files(folder, ["s"], ".cubin"))


def _no_space(path, text):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _entry_files(folder, parts, suffix):
    key = cache.cache_key(parts)
    return folder / key[:2] / f"{key}{suffix}", folder / key[:2] / f"{key}.json"


def test_unwritable_folder_names_the_way_out(folder, monkeypatch):
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("FLASHGEN_CACHE", str(folder.parent / "file" / "cache"))
    with pytest.raises(FlashgenError, match="FLASHGEN_CACHE"):
        cache.cached(["s"], ".cubin", Builder())


def test_concurrent_builders_agree(folder):
    barrier = threading.Barrier(8)
    entries = []

    def run(n: int):
        barrier.wait()
        entries.append(cache.cached(["s"], ".cubin", Builder(b"same")))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {e.path.read_bytes() for e in entries} == {b"same"} and len(entries) == 8
    assert cache.cached(["s"], ".cubin", Builder()).hit
    assert len(files(folder)) == 2


def test_scratch_of_killed_processes_is_cleared(folder):
    folder.mkdir()
    old, young = folder / ".scratch-old", folder / ".scratch-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    cache.cached(["s"], ".cubin", Builder())
    assert not old.exists() and young.exists()


def test_record_is_readable_json(folder):
    entry = cache.cached(["s"], ".cubin", Builder())
    record = json.loads(entry.path.with_suffix(".json").read_text())
    assert record["metadata"] == {"registers": 42}
