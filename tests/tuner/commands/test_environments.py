"""Commands where the surroundings are not as one expects: each works, or fails in one message, and soon.

A real process for each, in a folder and an environment of its own; the compiler's work comes from a cache
that is filled once. A handful run by default.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flashgen.tuner.files import SCRATCH_PREFIX, name_in_file
from flashgen.tuner.printable import is_plain, without_colours

from tests.support import hostile
from tests.support.caches import without_kernels
from tests.support.depth import sampled

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
PROGRAM = [sys.executable, "-c", "from flashgen.tuner.start import main; main()"]
HELD = ("br=64", "bc=32", "hoisted=true", "transposed=true", "coalesced=true", "stats_in_registers=true")
TUNE = ["tune", "--device", "sim:gtx-1080", "--d", "32", "--trials", "1", "--family", "ladder", "--jobs", "1"]
TUNE += [f"--set={each}" for each in HELD]
LIST, DEVICES, EXPORT = ["list"], ["devices", "--json"], ["export", "x.json", "--storage", "trials.sqlite3"]
EMIT = ["emit", "best.cu", "--preset", "gtx-1080", "--d", "32", "--family", "ladder", "--set", "br=64"]
REPORT = ["report", "x.html", "--storage", "trials.sqlite3"]
#: No command here takes longer, however much else is going on.
PATIENCE_S = 120.0
#: Capabilities by which root passes over permissions.
DAC_OVERRIDE, DAC_READ_SEARCH, CAPBSET_DROP = 1, 2, 24


@dataclass(frozen=True)
class Fault:
    """A command in odd surroundings: variables (None: not set), what is done in its folder before, limits of
    the process, and how it may end. ``says`` is what a failure tells."""

    command: list[str]
    codes: tuple[int, ...] = (0,)
    says: str = ""
    environment: dict[str, str | None] = field(default_factory=dict)
    prepare: Callable[[Path], Any] = lambda folder: None
    limits: dict[int, int] = field(default_factory=dict)
    before: Callable[[], Any] = lambda: None
    shell: str = ""
    """What follows the command on a shell's line: redirections."""


def plain_root() -> None:
    """A root for whom permissions hold."""
    libc = ctypes.CDLL(None)
    for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)


def locked(*names: str) -> Callable[[Path], None]:
    """Makes folders or files that nobody may write."""

    def prepare(folder: Path) -> None:
        for name in names:
            (folder / name).mkdir(exist_ok=True) if "." not in name else (folder / name).touch()
            (folder / name).chmod(0o555)

    return prepare


def file_at(name: str, text: str = "junk") -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return prepare


def compiler(script: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "cc").chmod(0o755)

    return prepare


def stale(folder: Path) -> None:
    """What killed processes leave: a lock, its holder, and files half written."""
    dead = name_in_file(hostile.dead_process())
    (folder / "t.journal").write_text("")
    holder = folder / f".t.journal@{dead}.holder"
    holder.write_text("")
    (folder / "t.journal.lock").symlink_to(holder)
    place = folder / "out" / "sim_gtx_1080"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{SCRATCH_PREFIX}{dead}@abc").write_text("half")


def spoiled_cache(folder: Path) -> None:
    """A cache of which every artifact is cut in half."""
    shutil.copytree(os.environ["FLASHGEN_TEST_CACHE"], folder / "cache")
    for path in (folder / "cache").rglob("*.so"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def odd_times(folder: Path) -> None:
    """Files of 1970 and of the year 2100, and kernels tuned then."""
    for name, when in (("f32_d40", "1970-01-01T00:00:00+00:00"), ("f32_d48", "2100-01-01T00:00:00+00:00")):
        path = folder / "out" / "nvidia_h200" / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tuned_at": when}))
        os.utime(path, (0, 0) if when < "2" else (4e9, 4e9))


def deleted(folder: Path) -> None:
    (folder / "gone").mkdir()


NO_HOME = {"HOME": "/proc/none", "XDG_CACHE_HOME": None, "FLASHGEN_CACHE": None}
ASCII = {
    "LC_ALL": "C",
    "LANG": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
}

FAULTS: dict[str, Fault] = {
    # places that are missing or not to be written
    "read-only out": Fault(
        TUNE, (1,), "out folder out cannot be written", prepare=locked("out"), before=plain_root
    ),
    "out in /proc": Fault([*TUNE, "--out", "/proc/x"], (1,), "--out"),
    "out is a file": Fault(
        TUNE, (1,), "--out", prepare=lambda folder: (shutil.rmtree(folder / "out"), file_at("out")(folder))
    ),
    "read-only current folder": Fault(
        EMIT, (1,), "best.cu cannot be written", prepare=lambda f: f.chmod(0o555), before=plain_root
    ),
    "unreadable out": Fault(LIST, (0, 1, 2), prepare=lambda f: (f / "out").chmod(0), before=plain_root),
    "unreadable record": Fault(
        LIST,
        (0,),
        "passed over",
        prepare=lambda f: (f / "out/nvidia_h200/f32_d40.json").chmod(0),
        before=plain_root,
    ),
    "no HOME": Fault(LIST, environment={"HOME": None, "FLASHGEN_CACHE": None}),
    "HOME is not there": Fault(
        [*TUNE, "--trials", "1"],
        (1,),
        "FLASHGEN_CACHE",
        environment=NO_HOME,
        before=plain_root,
        prepare=lambda f: None,
    ),
    "HOME is a file": Fault(TUNE, (1,), "FLASHGEN_CACHE", environment={**NO_HOME, "HOME": "/dev/null"}),
    "HOME is not writable": Fault(
        TUNE,
        (1,),
        "FLASHGEN_CACHE",
        environment={**NO_HOME, "HOME": "{folder}/home"},
        prepare=locked("home"),
        before=plain_root,
    ),
    "HOME is not there, nothing is compiled": Fault(EMIT, environment=NO_HOME),
    "cache is a file": Fault(
        TUNE, (1,), "FLASHGEN_CACHE", environment={"FLASHGEN_CACHE": "{folder}/file"}, prepare=file_at("file")
    ),
    "cache is not writable": Fault(
        TUNE,
        (1,),
        "FLASHGEN_CACHE",
        environment={"FLASHGEN_CACHE": "{folder}/c"},
        prepare=locked("c"),
        before=plain_root,
    ),
    "cache of halves": Fault(TUNE, environment={"FLASHGEN_CACHE": "{folder}/cache"}, prepare=spoiled_cache),
    "cache of folders": Fault(TUNE, (1,), environment={"FLASHGEN_CACHE": "/proc"}),
    "TMPDIR is not there": Fault(TUNE, environment={"TMPDIR": "/nonexistent"}),
    "TMPDIR is a file": Fault(TUNE, environment={"TMPDIR": "/dev/null"}),
    "no folder for temporary files": Fault(
        TUNE, (0, 1), environment={"TMPDIR": "/nonexistent"}, prepare=lambda f: f.chmod(0o755)
    ),
    "current folder is gone": Fault(LIST, (0, 1), prepare=deleted, shell="cd gone; rmdir ../gone;"),
    "current folder is gone, writing": Fault(
        EMIT, (1,), "best.cu", prepare=deleted, shell="cd gone; rmdir ../gone;"
    ),
    "full stdout": Fault(DEVICES, (1,), "No space left", shell="> /dev/full"),
    "full stdout of a table": Fault(LIST, (1,), "No space left", shell="> /dev/full"),
    "full stderr": Fault(["list", "--d", "x"], (2,), shell="2> /dev/full"),
    "target on a full device": Fault(
        ["emit", "full.cu", *EMIT[2:]],
        (1,),
        "no regular file",
        prepare=lambda f: (f / "full.cu").symlink_to("/dev/full"),
    ),
    "disk takes no more": Fault(
        EMIT,
        (1,),
        "best.cu cannot be written: File too large",
        limits={resource.RLIMIT_FSIZE: 100},
        before=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    ),
    "disk takes no more trials": Fault(
        [*TUNE, "--storage", "t.journal"],
        (1,),
        "--storage",
        limits={resource.RLIMIT_FSIZE: 2000},
        before=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    ),
    "disk takes no more of a report": Fault(
        REPORT,
        (1,),
        "cannot",
        limits={resource.RLIMIT_FSIZE: 4000},
        before=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    ),
    # programs
    "empty PATH": Fault(TUNE, (1,), "no C++ compiler was found", environment={"PATH": ""}),
    "no PATH": Fault(DEVICES, environment={"PATH": None}),
    "PATH of nothing, nothing is compiled": Fault(EMIT, environment={"PATH": "/nonexistent"}),
    "compiler is not there": Fault(TUNE, (0, 1), environment={"CXX": "/nonexistent/g++"}),
    "compiler is a folder": Fault(TUNE, (0, 1), environment={"CXX": "/tmp"}),
    "compiler is no program": Fault(
        TUNE,
        (1,),
        environment={"CXX": "{folder}/cc"},
        prepare=lambda f: (compiler("")(f), (f / "cc").write_text("\x7fELF junk")),
    ),
    "compiler hangs when asked": Fault(
        TUNE,
        (1,),
        "did not answer within",
        environment={"CXX": "{folder}/cc"},
        prepare=compiler("sleep 999 & sleep 999"),
    ),
    "compiler writes junk": Fault(
        TUNE,
        (1,),
        "no object file",
        environment={"CXX": "{folder}/cc"},
        prepare=compiler('while [ $# -gt 1 ]; do [ "$1" = -o ] && echo junk > "$2"; shift; done; echo cc 1'),
    ),
    "compiler writes nothing": Fault(
        TUNE, (1,), "said that all is well", environment={"CXX": "{folder}/cc"}, prepare=compiler("echo cc 1")
    ),
    "compiler fails in colours": Fault(
        TUNE,
        (1,),
        "error: bad",
        environment={"CXX": "{folder}/cc"},
        prepare=compiler("[ $1 = --version ] && exec echo 1; printf '\\033[31merror: bad\\377'; exit 1"),
    ),
    "compiler crashes": Fault(
        TUNE,
        (1,),
        "SIGSEGV",
        environment={"CXX": "{folder}/cc"},
        prepare=compiler("[ $1 = --version ] && exec echo 1; kill -SEGV $$"),
    ),
    "nvcc hangs when asked": Fault(
        DEVICES,
        environment={"CUDA_HOME": "{folder}/cuda"},
        prepare=lambda f: (
            (f / "cuda/bin").mkdir(parents=True),
            compiler("sleep 999")(f),
            shutil.move(f / "cc", f / "cuda/bin/nvcc"),
        ),
    ),
    # the terminal
    "LANG=C": Fault(LIST, environment={"LC_ALL": "C", "LANG": "C"}),
    "ASCII alone": Fault(LIST, environment=ASCII),
    "ASCII alone, an error": Fault(["emit", "bést.txt"], (2,), "name the file .cu", environment=ASCII),
    "ASCII alone, a report": Fault(REPORT, environment=ASCII),
    "an unknown locale": Fault(LIST, environment={"LC_ALL": "xx_YY.nope"}),
    "one column": Fault(LIST, environment={"COLUMNS": "1"}),
    "no columns": Fault(LIST, environment={"COLUMNS": "0"}),
    "columns of words": Fault(LIST, environment={"COLUMNS": "many"}),
    "a million columns": Fault(LIST, environment={"COLUMNS": "1000000"}),
    "one column, tuning": Fault(TUNE, environment={"COLUMNS": "1"}),
    "a dumb terminal": Fault(LIST, environment={"TERM": "dumb", "FORCE_COLOR": "1"}),
    "closed stdout": Fault(DEVICES, (1,), "Bad file descriptor", shell=">&-"),
    "closed stderr": Fault(LIST, shell="2>&-"),
    "closed stderr, an error": Fault(["list", "--family", "x"], (2,), shell="2>&-"),
    "closed stdin": Fault(TUNE, shell="<&-"),
    "all closed": Fault(TUNE, (1,), shell="<&- >&- 2>&-"),
    "broken pipe": Fault(DEVICES, (1,), shell="| true"),
    "broken pipe of a table": Fault(
        ["space", "--device", "gtx-1080", "--family", "ladder"], (0, 1), shell="| head -c 1"
    ),
    # limits
    "few open files": Fault(LIST, (0, 1), limits={resource.RLIMIT_NOFILE: 16}),
    "few open files, tuning": Fault(TUNE, (0, 1), limits={resource.RLIMIT_NOFILE: 14}),
    "little memory": Fault(LIST, (0, 1), limits={resource.RLIMIT_AS: 400 * 2**20}),
    "little memory, tuning": Fault(TUNE, (0, 1), limits={resource.RLIMIT_AS: 900 * 2**20}),
    "a small stack": Fault(LIST, limits={resource.RLIMIT_STACK: 512 * 2**10}),
    "no core files": Fault(TUNE, limits={resource.RLIMIT_CORE: 0}),
    # storages and what others left
    "another program's database": Fault(
        TUNE, (1,), "another program", prepare=lambda f: hostile.foreign_database(f / "out/tuning.sqlite3")
    ),
    "a database of junk": Fault(
        TUNE, (1,), "not a database", prepare=file_at("out/tuning.sqlite3", "junk" * 100)
    ),
    "an empty database": Fault(TUNE, prepare=file_at("out/tuning.sqlite3", "")),
    "a database not to be written": Fault(
        EXPORT, (1,), "not writable", prepare=lambda f: (f / "trials.sqlite3").chmod(0o444), before=plain_root
    ),
    "a stale lock": Fault([*TUNE, "--storage", "t.journal"], prepare=stale),
    "a stale lock, listing": Fault(["list", "--storage", "t.journal"], prepare=stale),
    "odd times": Fault(LIST, prepare=odd_times),
    "an unknown time zone": Fault(EXPORT, environment={"TZ": "Foo/Bar"}),
    "a time zone far off": Fault(REPORT, environment={"TZ": "XXX-14"}),
    # the process
    "asserts switched off": Fault(TUNE, environment={"PYTHONOPTIMIZE": "2"}),
    "a mask that forbids all": Fault(EMIT, before=lambda: os.umask(0o777)),
    "signals ignored": Fault(
        LIST, before=lambda: [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]
    ),
    "threads of words": Fault(
        TUNE, (0, 1), environment={"OMP_NUM_THREADS": "many", "OPENBLAS_NUM_THREADS": "-5"}
    ),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """A cache that holds what `TUNE` compiles."""
    folder = tmp_path_factory.mktemp("warm")
    environment = {**os.environ, "FLASHGEN_CACHE": str(without_kernels(folder / "cache"))}
    done = subprocess.run([*PROGRAM, *TUNE], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "cache"


@needs_compiler
@pytest.mark.parametrize("name", sampled(FAULTS, 3, thorough=14))
def test_odd_surroundings_are_no_traceback(tmp_path, warm, monkeypatch, name):
    monkeypatch.setenv("FLASHGEN_TEST_CACHE", str(warm))
    fault = FAULTS[name]
    folder = tmp_path / "here"
    for head_dim in (40, 48):
        hostile.write_kernel(folder / "out", head_dim=head_dim)
    hostile.write_study(folder / "trials.sqlite3")
    fault.prepare(folder)
    given = {key: value and value.format(folder=folder) for key, value in fault.environment.items()}
    environment = {**os.environ, "FLASHGEN_CACHE": str(warm), **given}
    environment = {key: value for key, value in environment.items() if value is not None}
    try:
        done = run(fault, folder, environment)
    finally:
        for path in (folder, *folder.rglob("*")):
            path.is_symlink() or path.chmod(0o755)
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "Exception ignored" not in said, said
    assert is_plain(without_colours(said).replace("\n", "").replace("\t", "")), said
    assert done.returncode in fault.codes, (done.returncode, said)
    assert fault.says in " ".join(done.stderr.replace("\n", " ").split()), said
    left = [path.name for path in folder.rglob("*") if path.name.startswith(SCRATCH_PREFIX)]
    left += [path.name for path in folder.rglob("*") if path.name.endswith((".holder", ".lock"))]
    assert not left or fault.command[:2] == ["list", "--storage"], left


def run(fault: Fault, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    def before() -> None:
        fault.before()
        for limit, value in fault.limits.items():
            resource.setrlimit(limit, (value, value))

    command = [*PROGRAM, *fault.command]
    if fault.shell:
        line = '"$@" ' + fault.shell if not fault.shell.startswith("cd") else fault.shell + ' "$@"'
        # The status of the command itself, not of what reads its output.
        command = ["/bin/bash", "-c", f"set -o pipefail; {line}", "bash", *command]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=before,
        start_new_session=True,
    )
    try:
        # Whatever outlives the command holds its stderr open, and is waited for in vain.
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    told = [stream.decode(errors="surrogateescape") for stream in (stdout, stderr)]
    return subprocess.CompletedProcess(fault.command, process.returncode, *told)


def test_there_are_enough():
    assert len(FAULTS) >= 60
