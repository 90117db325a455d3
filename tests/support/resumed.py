"""A run of `tune` that goes on with a study of `large_studies`, on a stand-in for the card:
`python -m tests.support.resumed STORAGE TRIALS OUT` prints what it did."""

from __future__ import annotations

import gc
import json
import sys
import zlib
from pathlib import Path

from flashgen.gen.variant import Variant
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.options import TuneOptions

from tests.support import stand_ins
from tests.support.large_studies import FAMILY, LIMITS, PROBLEM
from tests.support.stand_ins import StandInDevice, StandInEvaluator


def cost(variant: Variant) -> float:
    """Slower than the study's fastest."""
    return 1e5 + zlib.crc32(variant.name.encode()) % 1000


def main(where: str, trials: str, out: str) -> None:
    # As the program does.
    gc.set_threshold(100_000, 50, 100)
    stand_ins.cost = cost
    options = TuneOptions(
        device=StandInDevice(limits=LIMITS),
        problem=PROBLEM,
        families=(FAMILY,),
        trials=int(trials),
        storage=where,
        out=Path(out),
        jobs=2,
    )
    evaluator = StandInEvaluator()
    result = tune(options, make_evaluator=lambda device: evaluator)
    told = {"run": result.trials_run, "earlier": result.trials_earlier, "finals": len(evaluator.finalists)}
    print(json.dumps(told | {"median_us": result.kernel.measurement.median_us}))


if __name__ == "__main__":
    main(*sys.argv[1:])
