"""Commands in folders where somebody else has written: what is bad is named and passed over, the rest goes
on, and nothing of it reaches the terminal as it is."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import sqlite3
from pathlib import Path

import pytest
from flashgen.tuner.bench import figures
from flashgen.tuner.printable import is_plain

from tests.support import hostile
from tests.support.depth import sampled
from tests.support.hostile import BAD_DATABASES, BAD_JOURNALS, BAD_RECORDS, ESCAPES


def clean(result) -> str:
    """What a command printed, which holds nothing that a terminal obeys and no traceback."""
    text = result.stdout + result.stderr
    assert is_plain(text.replace("\n", "").replace("\t", "")), text
    assert "Traceback" not in text
    return text


def told(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("bad", sampled(BAD_RECORDS, 6))
def test_one_bad_record_is_named_and_the_others_are_listed_emitted_and_compared(flashgen, tmp_path, bad):
    hostile.write_kernel(tmp_path / "out", head_dim=40)
    hostile.write_kernel(tmp_path / "out", head_dim=48)
    hostile.damage(hostile.write_kernel(tmp_path / "out", head_dim=56).json, BAD_RECORDS[bad])
    listed = flashgen("list")
    assert "f32_d40" in clean(listed) and "f32_d48" in listed.stdout and "f32_d56" not in listed.stdout
    assert listed.stderr.startswith("note: passed over: ") and listed.stderr.count("f32_d56.json") == 1
    assert [each["name"][-7:] for each in json.loads(flashgen("list", "--json").stdout)] == [
        "f32_d40",
        "f32_d48",
    ]
    assert "wrote best.cu" in clean(flashgen("emit", "best.cu", "--preset", "h200", "--d", "40"))
    assert "f32_d48" in clean(flashgen("diff", "f32_d40", "f32_d48"))
    assert "f32_d56" in clean(flashgen("diff", "f32_d40", "out/nvidia_h200/f32_d56.cu", code=1))


@pytest.mark.parametrize("kind", ["fifo", "device", "large"])
def test_a_record_that_is_no_file_to_read_is_passed_over(flashgen, tmp_path, monkeypatch, kind):
    hostile.write_kernel(tmp_path / "out", head_dim=40)
    path = hostile.write_kernel(tmp_path / "out", head_dim=48).json
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        monkeypatch.setattr("flashgen.tuner.shelf.library.MAX_BYTES", 2**20)
        path.write_text(" " * 2**21)
    text = clean(flashgen("list"))
    assert "f32_d40" in text and "passed over" in text and "f32_d48.json" in text


def test_a_folder_s_name_is_escaped(flashgen, tmp_path):
    hostile.write_kernel(tmp_path / "out", slug=f"h[red]{ESCAPES}", head_dim=40)
    for command in (["list"], ["diff", "f32_d40", "f32_d40"]):
        assert r"h[red]\x1b]0;owned" in clean(flashgen(*command))
    assert "wrote best.cu" in clean(flashgen("emit", "best.cu"))
    (tmp_path / f"o{ESCAPES}").mkdir()
    assert r"\x1b" in clean(
        flashgen("list", "--out", f"o{ESCAPES}/none", "--storage", f"{ESCAPES}.db", code=1)
    )
    assert r"\x1b" in clean(flashgen("tune", f"--{ESCAPES}", code=2))


@pytest.mark.parametrize("bad", sampled(BAD_JOURNALS, 3))
def test_a_bad_journal_is_told_and_left_as_it_is(flashgen, tmp_path, bad):
    path = tmp_path / "trials.journal"
    hostile.write_study(path)
    path.write_bytes(BAD_JOURNALS[bad](path.read_bytes()))
    before = path.read_bytes()
    for command in (["list"], ["export", "x.json"], ["report", "x.html"], ["emit", "x.cu"]):
        result = flashgen(*command, "--storage", path.name, code=1)
        assert "trials.journal" in clean(result) and "--storage" in result.stderr
    assert path.read_bytes() == before
    assert not [each for each in tmp_path.iterdir() if "holder" in each.name or "lock" in each.name]


@pytest.mark.parametrize("bad", sampled(BAD_DATABASES, 4))
def test_a_database_in_which_something_else_wrote_is_no_traceback(flashgen, tmp_path, bad):
    path = tmp_path / "trials.sqlite3"
    name = hostile.write_study(path)
    with hostile.database(path) as made:
        made.execute(BAD_DATABASES[bad])
    found = []
    for command in (
        ["list"],
        ["export", "x.json"],
        ["report", "x.html"],
        ["emit", "x.cu"],
        ["record", "x.xz"],
    ):
        for words in ([], ["--study", name]) if command[0] == "export" else ([],):
            found.append(run_either(flashgen, *command, *words, "--storage", path.name))
    assert all(result.exit_code in (0, 1, 2) for result in found)
    assert any("trials.sqlite3" in clean(result) or result.exit_code == 0 for result in found)
    assert not (tmp_path.parent / "x").exists()


def run_either(flashgen, *arguments: str):
    """The result of a command that may succeed or fail, in a message."""
    for code in (0, 1, 2):
        try:
            return flashgen(*arguments, code=code)
        except AssertionError:
            continue
    raise AssertionError(arguments)


def test_a_trial_without_an_outcome_costs_that_trial(flashgen, tmp_path):
    path = tmp_path / "trials.sqlite3"
    hostile.write_study(path)
    with hostile.database(path) as made:
        made.execute(
            "UPDATE trial_user_attributes SET value_json = 'null' WHERE key = 'outcome' AND trial_id = 2"
        )
    result = flashgen("export", "x.json", "--storage", path.name)
    assert "2 trials of" in result.stdout
    assert re.search(
        r"note: passed over: 1 of 3 trials of \S+ cannot be read, the first of them trial 1",
        told(result.stderr),
    )


@pytest.mark.parametrize("tables", ["customers", "trials", "studies", "customers studies"])
def test_another_programs_database_gets_no_tables(flashgen, tmp_path, tables):
    path = tmp_path / "theirs.sqlite3"
    hostile.foreign_database(path, tables)
    before = path.read_bytes()
    for command in (["list"], ["export", "x.json"], ["import", "x.json"]):
        if command[0] == "import":
            (tmp_path / "x.json").write_text(json.dumps({}))
        assert (
            "theirs.sqlite3" in clean(flashgen(*command, "--storage", path.name, code=1))
            or command[0] == "import"
        )
    if tables != "trials":
        assert "another program" in flashgen("list", "--storage", path.name, code=1).stderr
    assert path.read_bytes() == before


def test_an_empty_database_and_ours_are_taken(flashgen, tmp_path):
    path = tmp_path / "trials.sqlite3"
    with hostile.database(path):
        pass
    name = hostile.write_study(path)
    # A table of another program beside ours is no reason to refuse.
    with hostile.database(path) as made:
        made.execute("CREATE TABLE theirs (id INTEGER)")
    assert name in clean(flashgen("export", "x.json", "--storage", path.name))


def test_a_text_file_named_as_a_journal_is_not_cut(flashgen, tmp_path):
    """Its last line has no end, which of a journal would be half a line."""
    (tmp_path / "notes.log").write_text("bought milk\nand bread")
    assert "notes.log" in clean(flashgen("list", "--storage", "notes.log", code=1))
    assert (tmp_path / "notes.log").read_text() == "bought milk\nand bread"


@pytest.mark.parametrize("suffix", ["sqlite3", "journal"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_storage_that_is_no_file_is_told(flashgen, tmp_path, suffix, kind):
    path = tmp_path / f"x.{suffix}"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
    result = flashgen("list", "--storage", path.name, code=1)
    assert "no regular file" in clean(result) or "folder" in result.stderr


#: Files of every kind that is read, and the command that reads it.
READERS = {
    "import": "import {}",
    "replay": "replay {}.gz",
    "validate module": "validate {}.py",
    "validate source": "validate {}.cu",
    "bench": "bench --from {}",
    "reference": "bench --from good.json --reference {}",
}


CONTENTS = ("nested", "binary", "escapes", "empty", "fifo", "device", "missing")


@pytest.mark.parametrize(("command", "what"), sampled(itertools.product(READERS, CONTENTS), 9))
def test_bad_files_of_every_kind_are_named(flashgen, tmp_path, command, what):
    names = ("device", "driver", "toolkit", "flashgen", "began")
    run = figures.BenchRun(arch=90, **dict.fromkeys(names, "x"))
    figures.write(tmp_path / "good.json", run)
    words = READERS[command].format("x").split()
    path = tmp_path / words[-1]
    contents = {"nested": hostile.DEEP, "binary": "\udcff\x00", "escapes": ESCAPES, "empty": ""}
    match what:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "missing":
            pass
        case _:
            data = contents[what].encode("utf-8", "surrogateescape")
            path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    result = run_either(flashgen, *words)
    assert result.exit_code in (1, 2) and path.name in clean(result)


LONG = "n" * 400


@pytest.mark.parametrize(
    "words",
    [
        f"emit {LONG}.cu --preset gtx-1080 --d 32 --family ladder --set br=64",
        f"emit {LONG}.py --preset gtx-1080 --d 32 --family ladder --set br=64",
        f"emit best.cu --preset gtx-1080 --d 32 --family ladder --set br=64 --cmake --out {LONG}",
        f"import {LONG}",
        f"export {LONG}.json --storage trials.sqlite3",
        f"report {LONG}.html --storage trials.sqlite3",
        f"record {LONG}.xz --storage trials.sqlite3",
        f"list --storage {LONG}",
        f"list --storage {LONG}.journal",
        f"validate {LONG}.cu",
        f"diff {LONG}.cu {LONG}.cu",
        f"renew {LONG}",
        f"replay {LONG}.xz",
        f"tune --device sim:gtx-1080 --d 32 --out {LONG}",
        f"tune --device sim:gtx-1080 --d 32 --storage {LONG}",
        f"bench --from {LONG}",
    ],
)
def test_a_name_of_400_characters_is_told(flashgen, tmp_path, words):
    hostile.write_study(tmp_path / "trials.sqlite3")
    result = run_either(flashgen, *words.split())
    if "--cmake" not in words:
        assert result.exit_code in (1, 2)
    clean(result)


@pytest.mark.parametrize(
    "command",
    [
        "list",
        "emit x.cu --preset gtx-1080 --d 32 --family ladder --set br=64",
        "tune --device sim:gtx-1080",
        "report",
    ],
)
def test_an_out_folder_of_links_in_a_circle_is_no_traceback(flashgen, tmp_path, command):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    clean(run_either(flashgen, *command.split(), "--out", "a"))


TARGETS = itertools.product(("emit", "export", "report"), ("device", "fifo", "link", "dangling"))


@pytest.mark.parametrize(("command", "kind"), sampled(TARGETS, 6))
def test_targets_are_files_or_links_to_files(flashgen, tmp_path, command, kind):
    hostile.write_study(tmp_path / "trials.sqlite3")
    name = {"emit": "x.cu", "export": "x.json", "report": "x.html"}[command]
    words = (
        ["--preset=gtx-1080", "--d=32", "--family=ladder", "--set=br=64"]
        if command == "emit"
        else ["--storage", "trials.sqlite3"]
    )
    target = tmp_path / name
    match kind:
        case "device":
            target.symlink_to("/dev/full")
        case "fifo":
            os.mkfifo(target)
        case "link":
            (tmp_path / "real").write_text("before")
            target.symlink_to("real")
        case "dangling":
            target.symlink_to("real")
    if kind in ("device", "fifo"):
        result = run_either(flashgen, command, name, *words)
        assert result.exit_code in (1, 2) and "no regular file" in clean(result)
        assert Path("/dev/full").is_char_device()
    else:
        clean(flashgen(command, name, *words))
        assert target.is_symlink() and len((tmp_path / "real").read_bytes()) > 100
    assert sqlite3.connect(tmp_path / "trials.sqlite3")


def test_plots_that_are_a_file_are_told_before_anything_is_timed(flashgen, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "plots").write_text("")
    result = flashgen("bench", "--plots", "plots", code=1)
    assert "the plots folder plots cannot be written" in clean(result) and "--plots" in result.stderr
