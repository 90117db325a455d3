"""Three coordinators on one study, of which the last dies with trials in flight: each on a host of its own,
as far as it can tell. `python -m tests.support.hosts FOLDER STORAGE HELD`, HELD being JSON.

Imports once, then forks. What each tried stands in FOLDER/tried-NAME, a line each, behind which "stuck" says
that the doomed one holds a trial. Prints the name, winner and counts of each that lived to tell.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flashgen.gen.families import FAMILIES
from flashgen.tuner import processes
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.store import liveness
from flashgen.tuner.tune import coordinator, family_run
from flashgen.tuner.tune.events import TrialDone
from flashgen.tuner.tune.options import TuneOptions

from tests.support.stand_ins import PROBLEM, StandInDevice, StandInEvaluator, cost

DOOMED = "doomed"
NAMES = ("one", "two", DOOMED)
PATIENCE_S = 60


class Host:
    """One coordinator, and what it waits for so that each takes part however busy the machine is."""

    def __init__(self, name: str, folder: Path, options: TuneOptions, deadline: float) -> None:
        self.name, self.folder, self.options, self.deadline = name, folder, options, deadline
        self.evaluator = StandInEvaluator()
        self.evaluator.on_evaluate = self.before_trial

    def waits_for_doomed(self) -> bool:
        stuck = self.folder / f"tried-{DOOMED}"
        is_stuck = stuck.exists() and stuck.read_bytes().endswith(b"stuck")
        return not is_stuck and time.monotonic() < self.deadline

    def before_trial(self) -> None:
        (self.folder / f"ready-{self.name}").touch()
        while len(list(self.folder.glob("ready-*"))) < len(NAMES):
            time.sleep(0.01)
        time.sleep(0.03)
        begun = len(self.evaluator.evaluated)
        if self.name == DOOMED and begun == 2:
            while (self.folder / f"tried-{DOOMED}").read_bytes().count(b"{") < 2:  # the last is being told
                time.sleep(0.01)
            os.write(self.tried, b"stuck")
            time.sleep(1000)
        # On a busy machine the others would leave it nothing to hold.
        while self.name != DOOMED and begun >= 2 and self.waits_for_doomed():
            time.sleep(0.01)

    def report(self, event: object) -> None:
        if isinstance(event, TrialDone):
            os.write(self.tried, (json.dumps(event.outcome.variant.to_dict()) + "\n").encode())

    def live(self) -> None:
        processes.socket.gethostname = lambda: self.name
        self.tried = os.open(self.folder / f"tried-{self.name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        result = coordinator.tune(
            self.options, report=self.report, make_evaluator=lambda device: self.evaluator
        )
        counts = [result.trials_run, result.trials_earlier, result.trials_elsewhere]
        # At once: another host may write at the same time.
        os.write(1, json.dumps([self.name, result.kernel.variant.to_dict(), counts]).encode() + b"\n")


def fork(host: Host) -> int:
    child = os.fork()
    if child == 0:
        try:
            host.live()
        except BaseException as error:
            print(f"{host.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def options_of(name: str, folder: Path, storage: str, held: dict[str, Any]) -> TuneOptions:
    return TuneOptions(
        device=StandInDevice(),
        problem=PROBLEM,
        families=(FAMILIES["ladder"],),
        held=held,
        minutes=5,
        storage=storage,
        out=folder / name,
        jobs=2,
        sampler=SamplerName.RANDOM,
    )


def main(folder: str, storage: str, held: str) -> int | str:
    liveness.BEAT_SECONDS, liveness.GRACE_SECONDS = 0.03, 3.0
    family_run.prior_of = lambda problem, limits: cost
    deadline = time.monotonic() + PATIENCE_S
    at = Path(folder)
    hosts = {
        name: Host(name, at, options_of(name, at, storage, json.loads(held)), deadline) for name in NAMES
    }
    children = {name: fork(host) for name, host in hosts.items()}
    while hosts[DOOMED].waits_for_doomed():
        if os.waitid(os.P_PID, children[DOOMED], os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.01)
    os.kill(children[DOOMED], signal.SIGKILL)
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
    return 0 if codes == {"one": 0, "two": 0, DOOMED: -signal.SIGKILL} else json.dumps(codes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
