"""Files that a person names: regular ones alone, whole or not at all, through links."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from flashgen.tuner import files
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.exchange.trial_files import read as read_trials
from flashgen.tuner.files import read_text, write_bytes, write_text
from flashgen.tuner.processes import process_name

ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="devices are made by root alone")


def odd_file(folder: Path, kind: str) -> Path:
    """Something that is no regular file."""
    path = folder / kind
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
        case "folder":
            path.mkdir()
        case "device":
            return Path("/dev/zero")
        case "full":
            return Path("/dev/full")
        case "link":
            os.mkfifo(folder / "behind")
            path.symlink_to("behind")
    return path


KINDS = {
    "fifo": "a FIFO",
    "socket": "No such device|a socket",
    "folder": "a folder",
    "device": "a device",
    "full": "a device",
    "link": "a FIFO",
}


@pytest.mark.parametrize(("kind", "words"), KINDS.items(), ids=list(KINDS))
def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path, kind, words):
    path = odd_file(tmp_path, kind)
    before = path.lstat()
    with pytest.raises(OSError, match=words):
        read_text(path)
    with pytest.raises(OSError, match=words.rpartition("|")[2]):
        write_text(path, "text")
    assert path.lstat().st_ino == before.st_ino and path.lstat().st_mode == before.st_mode


def test_an_import_reads_no_device_and_no_fifo_and_no_more_than_its_bound(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/zero"), tmp_path / "fifo"):
        with pytest.raises(FlashgenError, match=r"cannot be read: it is a (device|FIFO), no regular file"):
            read_trials(path)
    monkeypatch.setattr("flashgen.tuner.exchange.trial_files.MAX_FILE_BYTES", 10)
    (tmp_path / "large.json").write_text("x" * 11)
    with pytest.raises(FlashgenError, match="it has 11 bytes, at most 10 are read"):
        read_trials(tmp_path / "large.json")


def test_links_are_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "best.cu"
    target.write_text("before")
    target.chmod(0o640)
    (tmp_path / "best.cu").symlink_to("second")
    (tmp_path / "second").symlink_to(target)
    write_text(tmp_path / "best.cu", "after")
    assert (tmp_path / "best.cu").is_symlink() and (tmp_path / "second").is_symlink()
    assert target.read_text() == "after" and stat.S_IMODE(target.stat().st_mode) == 0o640
    dangling = tmp_path / "dangling"
    dangling.symlink_to("real/new")
    write_text(dangling, "new")
    assert dangling.is_symlink() and (tmp_path / "real" / "new").read_text() == "new"
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == ["best.cu", "new"]


def test_a_circle_of_links_is_told(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for use in (lambda path: write_text(path, ""), read_text):
        with pytest.raises(OSError, match="Too many levels"):
            use(tmp_path / "a")


def test_what_killed_writers_left_is_removed_and_others_scratch_is_not(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    host, _, started, namespace = process_name().split("/")
    left = tmp_path / f"{files.SCRATCH_PREFIX}{host}+{gone.pid}+{started}+{namespace}@abc"
    mine, old = tmp_path / files.scratch_name(), tmp_path / f"{files.SCRATCH_PREFIX}elsewhere+1+1+1@abc"
    for path in (left, mine, old):
        path.write_text("")
    write_bytes(tmp_path / "new", b"1")
    assert not left.exists() and mine.exists() and old.exists()
    os.utime(old, (0, 0))
    write_bytes(tmp_path / "new", b"2")
    assert not old.exists() and (tmp_path / "new").read_bytes() == b"2"


def test_a_file_that_many_write_is_one_of_theirs(tmp_path):
    texts = [f"{i}" * 100_000 for i in range(6)]
    threads = [threading.Thread(target=write_text, args=(tmp_path / "file", text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_text() in texts and len(list(tmp_path.iterdir())) == 1


def test_nothing_is_written_but_by_the_one_function():
    """Files that a person names go through `files`; what is written otherwise lies in scratch folders."""
    root = Path(files.__file__).parent
    direct = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for words in (".write_text(", ".write_bytes(", ".savefig(path", "os.replace(", ".rename(")
        if words in path.read_text(encoding="utf-8")
    }
    scratch = {"cards/emulated.py", "build/compile.py", "build/nvrtc.py", "bench/ceilings.py"}
    scratch |= {
        "bench/plan.py",
        "bench/ahead.py",
        "bench/own_module.py",
        "exchange/strategies.py",
        "predict/fit.py",
    }
    # What `cached` has made beside the cache.
    scratch |= {"front/proof.py", "front/workshop.py", "store/kept_identity.py"}
    assert direct == scratch
