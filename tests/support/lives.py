"""A coordinator killed again and again: `python -m tests.support.lives OUT SUFFIX KILLS SEED`.

Imports once, then forks a coordinator for every life: starting Python takes longer than most lives. Most are
ended by SIGKILL, the others asked to by SIGINT or SIGTERM. The variants that were told stand in OUT/told, a
line each. After each life, whoever comes next finds all of them, no process that the life started, and no
file that it left; prints how many lives were killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashgen.gen.families import FAMILIES
from flashgen.gen.kernel import Kernel
from flashgen.gen.variant import Variant
from flashgen.tuner.build.compile import run_compiler
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.commands.terminal import ends_softly
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.store.studies import OUTCOME, open_storage
from flashgen.tuner.tune import coordinator, family_run
from flashgen.tuner.tune.events import TrialDone
from flashgen.tuner.tune.options import TuneOptions
from optuna.storages import BaseStorage
from optuna.study import get_all_study_names, load_study
from optuna.trial import FrozenTrial

from tests.support import stand_ins
from tests.support.stand_ins import PROBLEM, StandInDevice, StandInEvaluator, StandInToolchain

#: No life that ends by a kill is longer or shorter.
LONGEST_LIFE_S, SHORTEST_LIFE_S = 0.45, 0.005
#: How lives end, the most frequent way several times.
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
#: The variable by which the processes that lives start are known, and how long they may take to be gone.
MARK, GONE_S = "FLASHGEN_LIVES", 5.0
#: What stands in for a compiler: a process with a child that would outlive it.
COMPILER = ("/bin/sh", "-c", "sleep 60 >/dev/null 2>&1 & sleep 0.01; kill $!")
plain_cost = stand_ins.cost


def cost(variant: Variant) -> float:
    """No two alike, so that there is one winner."""
    return plain_cost(variant) + zlib.crc32(variant.name.encode()) / 2**32


@dataclass(frozen=True)
class RealToolchain(StandInToolchain):
    """Runs a program for each kernel, as compilers are."""

    def build(self, kernel: Kernel) -> Build:
        run_compiler(COMPILER, Path.cwd())
        return super().build(kernel)


def live(options: TuneOptions, told: int) -> None:
    def report(event: object) -> None:
        if isinstance(event, TrialDone):
            os.write(told, (json.dumps(event.outcome.variant.to_dict()) + "\n").encode())

    evaluator = StandInEvaluator()
    with ends_softly(lambda note: None) as stop:
        try:
            coordinator.tune(options, report=report, make_evaluator=lambda device: evaluator, stop=stop)
        except FlashgenError:
            # Asked to end before anything was found.
            if not stop.is_set():
                raise


def forked(run: Callable[[], None]) -> int:
    """A process of its own that runs a function; its status is 1 where that failed."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def live_and_die(options: TuneOptions, folder: Path, told: int, kills: int, seed: int) -> int:
    """Ends with the first life behind the last kill, or with what is not as it must be; returns the exit
    status."""
    rng = random.Random(seed)
    killed = 0
    while True:
        child, signum = forked(lambda: live(options, told)), 0
        if killed < kills:
            time.sleep(rng.uniform(SHORTEST_LIFE_S, LONGEST_LIFE_S))
            signum = rng.choice(SIGNALS)
            os.kill(child, signum)
            killed += 1
        _, ended = os.waitpid(child, 0)
        _, checked = os.waitpid(forked(lambda: check(folder, options.storage)), 0)
        status = 0 if os.WIFSIGNALED(ended) else os.waitstatus_to_exitcode(ended)
        if status or checked or (killed >= kills and not signum):
            print(
                json.dumps({"killed": killed, "by": signum, "seed": seed, "status": status, "check": checked})
            )
            return status or checked


def check(folder: Path, where: str) -> None:
    """Raises AssertionError unless all is there that was told, and nothing else is left."""
    deadline = time.monotonic() + GONE_S
    while left := processes_marked(os.environ[MARK]):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.02)
    if Path(where).exists():
        storage = open_storage(where)
        trials = [trial for study in get_all_study_names(storage) for trial in trials_of(storage, study)]
        kept = [json.dumps(trial.user_attrs[OUTCOME]["variant"], sort_keys=True) for trial in trials]
        lines = (folder / "told").read_text().splitlines()
        lost = {json.dumps(json.loads(line), sort_keys=True) for line in lines} - set(kept)
        assert not lost, f"told and lost: {lost}"
    files = [path.name for path in folder.iterdir() if path.name.endswith((".holder", ".lock"))]
    assert not files, f"files are left: {files}"


def trials_of(storage: BaseStorage, study: str) -> list[FrozenTrial]:
    every = load_study(study_name=study, storage=storage).get_trials(deepcopy=False)
    return [trial for trial in every if OUTCOME in trial.user_attrs]


def processes_marked(token: str) -> list[str]:
    """What runs with that value of the mark in its surroundings, but for this process and its parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = int(folder.name) in (os.getpid(), os.getppid())
            if not mine and f"{MARK}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name} {words}") if words else None
    return found


def main(out: str, suffix: str, kills: str, seed: str) -> int:
    stand_ins.cost = cost
    family_run.prior_of = lambda problem, limits: cost
    folder = Path(out)
    options = TuneOptions(
        device=StandInDevice(chain=RealToolchain()),
        problem=PROBLEM,
        families=(FAMILIES["ladder"],),
        held={"bc": 16, "br": 64, "hoisted": True},
        minutes=5,
        storage=str(folder / f"trials.{suffix}"),
        out=folder / "out",
        jobs=2,
    )
    told = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Nothing was started with it yet: this process itself bears no mark, its children do.
    os.environ[MARK] = f"{os.getpid()}-{seed}"
    os.chdir(folder)
    return live_and_die(options, folder, told, int(kills), int(seed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
