"""Host compilers that lie, hang, babble or are no compilers: told each time, and never cached as good."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.build import compile as compile_module
from flashgen.tuner.build import toolchain
from flashgen.tuner.build.object_file import check_object_file
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import BuildError, FlashgenError
from flashgen.tuner.printable import is_plain

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CARD = preset("gtx-1080")
SMALL = Problem(batch=1, num_q_heads=1, num_kv_heads=1, seqlen_q=64, seqlen_k=64, head_dim=32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    toolchain._host_version.cache_clear()
    yield
    toolchain._host_version.cache_clear()


def kernel() -> Kernel:
    return render(FAMILIES["ladder"](br=64, bc=16), SMALL, CARD)


def compiler(tmp_path: Path, monkeypatch, script: str) -> None:
    path = tmp_path / "odd-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


TO_OUTPUT = 'while [ "$1" != -o ]; do [ $# = 0 ] && exit 0; shift; done; '
VERSION = '[ "$1" = --version ] && { echo "odd 1.0"; exit 0; }\n'


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f'{TO_OUTPUT}echo junk > "$2"', "wrote 5 bytes that are no object file"),
        (f'{TO_OUTPUT}: > "$2"', "wrote 0 bytes that are no object file"),
        ("exit 0", r"said that all is well and wrote no \.o file"),
        ("printf '\\033[31merror: \\377\\376 bad\\033[0m\\n'; exit 1", "error: \ufffd\ufffd bad"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
    ],
    ids=["junk", "nothing", "no file", "colours and no UTF-8", "crash"],
)
def test_a_compiler_that_makes_no_kernel_is_told_every_time(tmp_path, monkeypatch, script, words):
    compiler(tmp_path, monkeypatch, VERSION + script)
    chain = SimDevice("gtx-1080", CARD).toolchain()
    for _ in range(2):
        with pytest.raises(BuildError, match=words) as told:
            chain.build(kernel())
        assert is_plain(str(told.value).replace("\n", "")) or "\ufffd" in str(told.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@needs_compiler
def test_half_an_object_file_is_no_whole_one(tmp_path):
    build = SimDevice("gtx-1080", CARD).toolchain().build(kernel())
    check_object_file(build.artifact, "g++")
    data = build.artifact.read_bytes()
    for size in (10, 63, 64, len(data) // 2, len(data) - 1):
        (tmp_path / "half").write_bytes(data[:size])
        with pytest.raises(BuildError, match=r"g\+\+ said that all is well and wrote \d+ bytes"):
            check_object_file(tmp_path / "half", "g++")
    (tmp_path / "other").write_bytes(data[:4] + b"\x01" + data[5:])
    with pytest.raises(BuildError, match="another kind of machine"):
        check_object_file(tmp_path / "other", "g++")


def test_a_compiler_that_hangs_has_a_deadline(tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, f"{VERSION}sleep 600 & sleep 600")
    monkeypatch.setattr(compile_module.run_compiler, "__kwdefaults__", {"makes": None, "timeout_s": 0.5})
    began = time.monotonic()
    with pytest.raises(BuildError, match="odd-compiler did not finish within"):
        SimDevice("gtx-1080", CARD).toolchain().build(kernel())
    assert time.monotonic() - began < 10


def test_a_compiler_whose_version_hangs_has_a_deadline_and_names_the_way_out(tmp_path, monkeypatch, flashgen):
    # Its child holds the output open, which alone would be waited for without end.
    compiler(tmp_path, monkeypatch, "sleep 600 & sleep 600")
    monkeypatch.setattr(toolchain, "PROBE_TIMEOUT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(FlashgenError, match=r"--version did not answer within 0.5 s.*CXX"):
        toolchain.find_host_compiler()
    assert "did not answer" in flashgen("devices").stdout
    told = flashgen("tune", "--device", "sim:gtx-1080", "--d", "32", "--family", "ladder", code=1).stderr
    assert "did not answer" in told and time.monotonic() - began < 30


def test_a_version_of_odd_bytes_is_a_version(tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, "printf '\\377\\033[1modd\\033[0m 1.0\\n'")
    assert toolchain.find_host_compiler().version == "\ufffdodd 1.0"
