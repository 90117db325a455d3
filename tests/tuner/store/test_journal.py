"""The journal's lock, and the files that say who holds it: nothing of a killed process stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from flashgen.tuner.files import name_in_file
from flashgen.tuner.processes import process_name
from flashgen.tuner.store.journal import Journal, JournalLock
from flashgen.tuner.store.studies import open_storage

from tests.support import ROOT
from tests.support.hostile import dead_process

HOLDS = """
import sys, time
from pathlib import Path
from flashgen.tuner.store.journal import JournalLock
JournalLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_holder_is_there_for_as_long_as_the_lock(tmp_path):
    path = tmp_path / "trials.journal"
    path.write_text("")
    lock = JournalLock(path)
    lock.acquire()
    assert len(names(tmp_path)) == 3 and (tmp_path / "trials.journal.lock").exists()
    lock.release()
    assert names(tmp_path) == ["trials.journal"]
    open_storage(str(path))
    assert names(tmp_path) == ["trials.journal"]


def test_a_lock_of_a_killed_process_is_broken_at_once_and_nothing_of_it_stays(tmp_path):
    path = tmp_path / "trials.journal"
    path.write_text("")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    assert len(names(tmp_path)) == 3
    began = time.monotonic()
    lock = JournalLock(path)
    lock.acquire()
    assert time.monotonic() - began < 2
    lock.release()
    assert names(tmp_path) == ["trials.journal"]


def test_holders_that_hold_nothing_are_removed_by_the_next_who_comes(tmp_path):
    path = tmp_path / "trials[1].journal"
    path.write_text("")

    def holder(process: str) -> Path:
        made = tmp_path / f".{path.name}@{name_in_file(process)}.holder"
        made.write_text("")
        return made

    dead, elsewhere, old = holder(dead_process()), holder("elsewhere/1/1/1"), holder("elsewhere/2/2/2")
    mine = holder(process_name())
    os.utime(old, (0, 0))
    Journal(path)
    assert not dead.exists() and not old.exists() and elsewhere.exists() and mine.exists()


def test_threads_of_one_process_take_turns(tmp_path):
    path = tmp_path / "trials.journal"
    path.write_text("")
    inside: list[int] = []
    most: list[int] = []

    def use(number: int) -> None:
        lock = JournalLock(path)
        for _ in range(20):
            lock.acquire()
            inside.append(number)
            most.append(len(inside))
            assert (tmp_path / "trials.journal.lock").exists()  # leads to a file that is there
            inside.remove(number)
            lock.release()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 60 and names(tmp_path) == ["trials.journal"]
