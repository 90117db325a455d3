"""The cost model against times of tensor-core kernels on a card: gathers them, judges it, fits it to them.

    python tests/calibrate.py gather RESULTS.json...   adds to tests/data/h200_mma_times.json.gz
    python tests/calibrate.py judge
    python tests/calibrate.py fit                      half a minute; prints better TENSOR_COEFFICIENTS

RESULTS.json holds a list of {"problem": {...}, "rows": [[ms, {parameter: value, ...}, registers, spilled],
...]}; more in a row is passed over. Parameters left out have their defaults. Left out is what failed (a time
from 1e6 on, a message where the registers would be), what spills, and what names parameters that there are no
more. Of a variant timed before, the later time counts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.gen.families.mma import Mma
from flashgen.gen.limits import DeviceLimits, preset
from flashgen.gen.problem import Problem
from flashgen.gen.work import Work
from flashgen.tuner.costmodel import TENSOR_COEFFICIENTS, Coefficients, predict_work

TIMES = Path(__file__).parent / "data" / "h200_mma_times.json.gz"
#: A kernel that spills more says little about the others.
MOST_SPILLED_BYTES = 32
FAILED_MS = 1e6
#: The coefficients that are fitted.
FITTED = (
    "overlap",
    "hiding",
    "memory_hiding",
    "idle_warp",
    "product_slots",
    "l2_bytes_per_cycle",
    "global_latency",
    "barrier_latency",
    "block_start",
    "launch_us",
)


@dataclass(frozen=True)
class Recording:
    """Times of variants on one problem, in microseconds, and the registers that the compiler gave them."""

    problem: Problem
    variants: tuple[Mma, ...]
    measured: np.ndarray
    registers: np.ndarray

    @property
    def name(self) -> str:
        p = self.problem
        return f"{p.dtype} d{p.head_dim} n{p.seqlen_q}{' causal' * p.causal}"


@lru_cache(maxsize=1)
def recordings() -> tuple[DeviceLimits, tuple[Recording, ...]]:
    """The card and what was timed on it."""
    times = json.loads(gzip.decompress(TIMES.read_bytes()))
    names = times["columns"][2:]
    sets = []
    for entry in times["sets"]:
        rows = entry["rows"]
        variants = tuple(Mma.from_dict(dict(zip(names, row[2:], strict=True))) for row in rows)
        measured, registers = (np.array([row[i] for row in rows]) for i in (0, 1))
        sets.append(Recording(Problem(**entry["problem"]), variants, measured, registers))
    return preset(times["preset"]), tuple(sets)


def ranks(times: np.ndarray) -> np.ndarray:
    """Equal times share the mean of their ranks."""
    _, inverse, counts = np.unique(times, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def correlation(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Spearman's, of ranks."""
    return float(np.corrcoef(ranks(measured), ranks(predicted))[0, 1])


# -- gather ---------------------------------------------------------------------------------------------


def gather(paths: Sequence[Path], card: str) -> None:
    columns = [p.name for p in Mma.parameters()]
    found: dict[Problem, dict[Mma, tuple[float, int]]] = {}
    if TIMES.exists():
        for recording in recordings()[1]:
            rows = zip(recording.variants, recording.measured, recording.registers, strict=True)
            found[recording.problem] = {variant: (float(us), int(count)) for variant, us, count in rows}
    for path in paths:
        for entry in json.loads(path.read_text()):
            timed = found.setdefault(Problem(**entry["problem"]), {})
            timed |= {variant: (us, count) for variant, us, count in _rows(entry["rows"], columns)}
    sets = [
        {
            "problem": asdict(problem),
            "rows": sorted([round(us, 1), count, *asdict(v).values()] for v, (us, count) in timed.items()),
        }
        for problem, timed in found.items()
    ]
    data = {
        "about": "Median times of mma kernels, to judge the cost model by. Kernels that spill are left out.",
        "preset": card,
        "columns": ["median_us", "registers", *columns],
        "sets": [entry for entry in sets if entry["rows"]],
    }
    TIMES.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))


def _rows(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> list[tuple[Mma, float, int]]:
    kept = []
    for ms, values, registers, spilled, *_ in rows:
        works = ms < FAILED_MS and isinstance(registers, int) and spilled <= MOST_SPILLED_BYTES
        if works and set(values) <= set(names):
            kept.append((Mma.from_dict(asdict(Mma()) | values), 1e3 * ms, registers))
    return kept


# -- judge and fit --------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def counted() -> tuple[tuple[Recording, tuple[tuple[Work, int], ...]], ...]:
    """Every recording with its variants' work and how many blocks of it were resident."""
    limits, sets = recordings()
    counts = []
    for recording in sets:
        works = []
        for variant, registers in zip(recording.variants, recording.registers, strict=True):
            launch = variant.launch(recording.problem, limits)
            resident = limits.blocks_per_sm(launch.threads, int(registers), launch.smem_bytes)
            works.append((variant.work(recording.problem, limits), resident))
        counts.append((recording, tuple(works)))
    return tuple(counts)


def predicted(coefficients: Coefficients) -> list[tuple[Recording, np.ndarray]]:
    limits, _ = recordings()
    return [
        (
            recording,
            np.array(
                [
                    predict_work(work, recording.problem, limits, resident, coefficients).median_us
                    for work, resident in works
                ]
            ),
        )
        for recording, works in counted()
    ]


def judge(coefficients: Coefficients) -> None:
    for recording, times in predicted(coefficients):
        first = recording.measured[np.argsort(times, kind="stable")[:20]].min() / recording.measured.min()
        print(
            f"{recording.name:26} {len(times):4} kernels, rank correlation "
            f"{correlation(recording.measured, times):.2f}, predicted / measured "
            f"{np.median(times / recording.measured):.2f}, best of the first twenty {first:.3f}"
        )


def loss(coefficients: Coefficients) -> float:
    """The mean of squared errors of logarithms about each problem's own mean, which ranks do not feel and
    which weighs less. Fast variants weigh more; problems count by no more than 60 kernels."""
    total = weight = 0.0
    for recording, times in predicted(coefficients):
        errors = np.log(recording.measured / times)
        share = np.exp(1 - recording.measured / recording.measured.min())
        mean = np.average(errors, weights=share)
        spread = np.average(np.clip(errors - mean, -0.3, 0.3) ** 2, weights=share)
        kernels = min(len(times), 60)
        total += kernels * (spread + 0.1 * mean**2)
        weight += kernels
    return total / weight


def fit(start: Coefficients, names: Sequence[str] = FITTED) -> Coefficients:
    """One coefficient at a time by a factor, as long as one of them helps, then by a smaller factor."""
    best, least = start, loss(start)
    for step in (0.2, 0.1, 0.05, 0.02):
        improved = True
        while improved:
            improved = False
            for name in names:
                for factor in (1 + step, 1 / (1 + step)):
                    candidate = replace(best, **{name: getattr(best, name) * factor})
                    value = loss(candidate)
                    if math.isfinite(value) and value < least:
                        best, least, improved = candidate, value, True
        print(f"step {step}: {math.sqrt(least):.4f}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("gather")
    adding.add_argument("results", nargs="+", type=Path)
    adding.add_argument("--card", default="h200", help="the preset of the card that they were timed on")
    commands.add_parser("judge")
    commands.add_parser("fit")
    arguments = parser.parse_args()
    actions: Mapping[str, Callable[[], None]] = {
        "gather": lambda: gather(arguments.results, arguments.card),
        "judge": lambda: judge(TENSOR_COEFFICIENTS),
        "fit": _print_fit,
    }
    actions[arguments.command]()


def _print_fit() -> None:
    fitted = fit(TENSOR_COEFFICIENTS)
    judge(fitted)
    for name in FITTED:
        print(f"{name}={getattr(fitted, name):.4g}")


if __name__ == "__main__":
    main()
