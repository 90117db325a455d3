"""A coordinator killed again and again: `python -m tests.support.lives OUT SUFFIX KILLS`.

Imports once, then forks a coordinator for every life: starting Python takes longer than most lives. The
variants that were told stand in OUT/told, a line each; prints how many lives were killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import zlib
from pathlib import Path

from flashgen.gen.families import FAMILIES
from flashgen.gen.variant import Variant
from flashgen.tuner.tune import coordinator, family_run
from flashgen.tuner.tune.events import TrialDone
from flashgen.tuner.tune.options import TuneOptions

from tests.support import stand_ins
from tests.support.stand_ins import PROBLEM, StandInDevice, StandInEvaluator

SEED = 7
#: No life that ends by a kill is longer.
LONGEST_LIFE_S = 0.45
plain_cost = stand_ins.cost


def cost(variant: Variant) -> float:
    """No two alike, so that there is one winner."""
    return plain_cost(variant) + zlib.crc32(variant.name.encode()) / 2**32


def live(options: TuneOptions, told: int) -> None:
    def report(event: object) -> None:
        if isinstance(event, TrialDone):
            os.write(told, (json.dumps(event.outcome.variant.to_dict()) + "\n").encode())

    evaluator = StandInEvaluator()
    coordinator.tune(options, report=report, make_evaluator=lambda device: evaluator)


def live_and_die(options: TuneOptions, told: int, kills: int) -> int:
    """Ends with the first life behind the last kill, or that fails; returns its exit status."""
    rng = random.Random(SEED)
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            try:
                live(options, told)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if killed < kills:
            time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
            os.kill(child, signal.SIGKILL)
            killed += 1
        _, ended = os.waitpid(child, 0)
        if not os.WIFSIGNALED(ended):
            status = os.waitstatus_to_exitcode(ended)
            print(json.dumps({"killed": killed, "status": status}))
            if status or killed >= kills:
                return status


def main(out: str, suffix: str, kills: str) -> int:
    stand_ins.cost = cost
    family_run.prior_of = lambda problem, limits: cost
    folder = Path(out)
    options = TuneOptions(
        device=StandInDevice(),
        problem=PROBLEM,
        families=(FAMILIES["ladder"],),
        held={"bc": 16, "br": 64, "hoisted": True},
        minutes=5,
        storage=str(folder / f"trials.{suffix}"),
        out=folder / "out",
        jobs=2,
    )
    told = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return live_and_die(options, told, int(kills))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
