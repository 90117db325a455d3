"""A run of `tune` whose files may grow so far and no further: `python -m tests.support.full_disk LIMIT OUT
STORAGE`."""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

from flashgen.gen.families import FAMILIES
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.tune import coordinator, family_run
from flashgen.tuner.tune.options import TuneOptions

from tests.support.stand_ins import PROBLEM, StandInDevice, StandInEvaluator, cost


def main(limit: str, out: str, storage: str) -> int | str:
    family_run.prior_of = lambda problem, limits: cost
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    options = TuneOptions(
        device=StandInDevice(),
        problem=PROBLEM,
        families=(FAMILIES["ladder"],),
        held={"br": 64},
        trials=40,
        storage=storage,
        out=Path(out),
        jobs=2,
    )
    try:
        coordinator.tune(options, make_evaluator=lambda device: StandInEvaluator())
    except (FlashgenError, OSError) as error:
        return f"told: {error}"
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
