"""A pool that builds ahead what is likely to be asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from flashgen.gen.kernel import Kernel
from flashgen.tuner.build.ahead import PoolAhead
from flashgen.tuner.cards.device import Build
from flashgen.tuner.errors import BuildError, FlashgenError

from tests.support.fakes import fake_build
from tests.support.processes import gone


def kernel(source: str) -> Kernel:
    return replace(fake_build().kernel, source=source)


@dataclass
class GatedToolchain:
    """Begins with builds at once and ends each when its gate is open; what ``begun`` tells in order."""

    begun: list[str] = field(default_factory=list)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    version: str = "gated 1.0"

    def build(self, kernel: Kernel) -> Build:
        gate = self.gates.setdefault(kernel.source, threading.Event())
        self.begun.append(kernel.source)
        assert gate.wait(10)
        if "broken" in kernel.source:
            raise BuildError(f"error in {kernel.source}")
        if "full disk" in kernel.source:
            raise FlashgenError("No space left on device")
        return replace(fake_build(), kernel=kernel)

    def end(self, *sources: str) -> None:
        for source in sources:
            self.gates.setdefault(source, threading.Event()).set()


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def chain():
    made = GatedToolchain()
    yield made
    made.gates.clear()


def pool_of(chain: GatedToolchain, size: int) -> PoolAhead:
    return PoolAhead(chain, size)


def test_free_compilers_build_what_is_wanted_in_its_order(chain):
    with pool_of(chain, 2) as pool:
        asked = pool.submit(kernel("asked"))
        pool.want([kernel("first"), kernel("second"), kernel("third")])
        eventually(lambda: len(chain.begun) == 2)
        time.sleep(0.05)
        assert set(chain.begun) == {"asked", "first"}
        chain.end("first")
        eventually(lambda: len(chain.begun) == 3)
        assert chain.begun[2] == "second"
        chain.end("asked", "second", "third")
        assert isinstance(asked.result(10), Build)
        eventually(lambda: len(chain.begun) == 4)


def test_what_is_submitted_waits_for_nothing_that_is_built_ahead(chain):
    with pool_of(chain, 1) as pool:
        pool.want([kernel("ahead")])
        eventually(lambda: chain.begun == ["ahead"])
        asked = pool.submit(kernel("asked"))
        chain.end("asked")
        assert isinstance(asked.result(10), Build)
        chain.end("ahead")


def test_what_was_begun_ahead_is_built_once_for_whoever_asks(chain):
    longer = replace(kernel("source"), problem=replace(kernel("source").problem, seqlen_k=4096))
    with pool_of(chain, 1) as pool:
        pool.want([kernel("source")])
        eventually(lambda: chain.begun == ["source"])
        asked = pool.submit(longer)
        chain.end("source")
        build = asked.result(10)
        assert isinstance(build, Build) and build.kernel is longer and chain.begun == ["source"]


def test_what_fails_ahead_fails_in_turn(chain):
    with pool_of(chain, 2) as pool:
        pool.want([kernel("broken"), kernel("full disk")])
        chain.end("broken", "full disk")
        eventually(lambda: len(chain.begun) == 2)
        refused = pool.submit(kernel("broken")).result(10)
        assert isinstance(refused, BuildError) and "error in broken" in str(refused)
        with pytest.raises(FlashgenError, match="No space left"):
            pool.submit(kernel("full disk")).result(10)
        assert len(chain.begun) == 2


def test_what_is_being_built_in_turn_is_not_built_ahead(chain):
    with pool_of(chain, 2) as pool:
        asked = pool.submit(kernel("source"))
        pool.want([kernel("source")])
        chain.end("source")
        asked.result(10)
        time.sleep(0.05)
        assert chain.begun == ["source"]


def test_new_wishes_replace_those_that_wait(chain):
    with pool_of(chain, 1) as pool:
        pool.want([kernel("begun"), kernel("waiting")])
        eventually(lambda: chain.begun == ["begun"])
        pool.want([kernel("other"), kernel("begun")])
        chain.end("begun", "other")
        eventually(lambda: len(chain.begun) == 2)
        time.sleep(0.05)
        assert chain.begun == ["begun", "other"]


def test_dropping_leaves_what_is_built_ahead(chain):
    with pool_of(chain, 2) as pool:
        first = pool.submit(kernel("first"))
        eventually(lambda: chain.begun == ["first"])
        pool.want([kernel("ahead")])
        eventually(lambda: len(chain.begun) == 2)
        waiting = pool.submit(kernel("second")), pool.submit(kernel("third"))
        chain.end("first", "second")
        pool.drop()
        assert first.done() and waiting[1].cancelled()
        taken = pool.submit(kernel("ahead"))
        assert not taken.done()
        chain.end("ahead")
        assert isinstance(taken.result(10), Build)


class Sleeping:
    """Builds for ever, in a program."""

    version = "sleeping 1.0"

    def __init__(self, folder) -> None:
        self.folder = folder

    def build(self, kernel: Kernel) -> Build:
        from flashgen.tuner.processes import run_program

        told = self.folder / kernel.source
        script = (
            f"echo $$ > {told}; i=0; while true; do i=$((i + 1)); echo $i > {told}.count; sleep 0.02; done"
        )
        done = run_program(["/bin/sh", "-c", script], timeout_s=60)
        raise BuildError(done.ending())


def test_nothing_is_left_of_a_pool_and_nothing_moves_while_it_is_quiet(tmp_path):
    def counts() -> list[str]:
        return [(tmp_path / f"{name}.count").read_text() for name in ("asked", "ahead")]

    with PoolAhead(Sleeping(tmp_path), 2) as pool:
        asked = pool.submit(kernel("asked"))
        pool.want([kernel("ahead")])
        eventually(lambda: (tmp_path / "ahead.count").exists() and (tmp_path / "asked.count").exists())
        with pool.quiet():
            time.sleep(0.1)
            before = counts()
            time.sleep(0.3)
            assert counts() == before
        eventually(lambda: all(map(str.__ne__, counts(), before)))
        pids = [int((tmp_path / name).read_text()) for name in ("asked", "ahead")]
    assert all(map(gone, pids))
    assert isinstance(asked.result(), BuildError)
