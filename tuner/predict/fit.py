"""The cost model against times of tensor-core kernels on a card: gathers them, judges it, fits it to them.

    python -m flashgen.tuner.predict.fit mma TIMES.json.gz gather RESULTS.json...   adds to the times
    python -m flashgen.tuner.predict.fit mma TIMES.json.gz judge
    python -m flashgen.tuner.predict.fit mma TIMES.json.gz fit    half a minute; prints better coefficients

and so for wgmma. Those of an H200 are tests/data/h200_mma_times.json.gz and h200_wgmma_times.json.gz; what is
printed belongs into TENSOR_COEFFICIENTS and GROUP_COEFFICIENTS.

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
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.families import FAMILIES
from ...gen.limits import DeviceLimits, preset
from ...gen.problem import Problem
from ...gen.variant import Illegal, Variant
from ...gen.work import Work
from .block_model import TENSOR_COEFFICIENTS, Coefficients
from .cost_model import predict_work
from .rank_correlation import spearman
from .warpgroup_model import GROUP_COEFFICIENTS, GroupCoefficients

#: A kernel that spills more says little about the others.
MOST_SPILLED_BYTES = 32
FAILED_MS = 1e6
#: What a search tried, who favours fast variants.
SEARCH = "search"
AnyCoefficients = Coefficients | GroupCoefficients
#: By family, the coefficients in use.
IN_USE: Mapping[str, AnyCoefficients] = {"mma": TENSOR_COEFFICIENTS, "wgmma": GROUP_COEFFICIENTS}
#: Coefficients of `wgmma` that these times do not tell.
NOT_FITTED = (
    "score_slots",
    "products_in_turns",
    "copy",
    "copied_tile",
    "found_tile",
    "copy_hiding",
    "dram_efficiency",
    "left_in_l2",
    "out_of_step",
    "few_rows_efficiency",
)
#: By family, the coefficients that are fitted.
FITTED = {
    "mma": (
        "overlap",
        "hiding",
        "memory_hiding",
        "ahead_hiding",
        "idle_warp",
        "product_slots",
        "global_latency",
        "barrier_latency",
        "block_start",
    ),
    "wgmma": tuple(
        f.name
        for f in fields(GroupCoefficients)
        if f.name not in NOT_FITTED and not f.name.startswith("split_")
    ),
}


@dataclass(frozen=True)
class Recording:
    """Times of variants on one problem, in microseconds, and the registers that the compiler gave them.

    A ``sample`` was timed together: a card is warmer in the next one.
    """

    sample: str
    problem: Problem
    variants: tuple[Variant, ...]
    measured: np.ndarray
    registers: np.ndarray

    @property
    def name(self) -> str:
        p = self.problem
        grouped = f" kv{p.num_kv_heads}" * (p.num_kv_heads != p.num_q_heads)
        cached = f" m{p.seqlen_k} b{p.batch}" * p.has_few_queries
        sample = f"{self.sample} " * (self.sample != SEARCH)
        return f"{sample}{p.dtype} d{p.head_dim} n{p.seqlen_q}{cached}{' causal' * p.causal}{grouped}"


@dataclass(frozen=True)
class Times:
    """A file of times of one family's kernels."""

    family: str
    path: Path


@lru_cache
def recordings(times: Times) -> tuple[DeviceLimits, tuple[Recording, ...]]:
    """Reads a file of times: the card and what was timed on it."""
    data = json.loads(gzip.decompress(times.path.read_bytes()))
    names = data["columns"][2:]
    kind = FAMILIES[times.family]
    sets = []
    for entry in data["sets"]:
        rows = entry["rows"]
        variants = tuple(kind.from_dict(dict(zip(names, row[2:], strict=True))) for row in rows)
        measured, registers = (np.array([row[i] for row in rows]) for i in (0, 1))
        sample = entry.get("sample", SEARCH)
        sets.append(Recording(sample, Problem.from_dict(entry["problem"]), variants, measured, registers))
    return preset(data["preset"]), tuple(sets)


# -- gather ---------------------------------------------------------------------------------------------


def gather(times: Times, paths: Sequence[Path], card: str, sample: str) -> None:
    columns = [p.name for p in FAMILIES[times.family].parameters()]
    found: dict[tuple[str, Problem], dict[Variant, tuple[float, int]]] = {}
    if times.path.exists():
        for recording in recordings(times)[1]:
            rows = zip(recording.variants, recording.measured, recording.registers, strict=True)
            found[recording.sample, recording.problem] = {v: (float(us), int(n)) for v, us, n in rows}
    for path in paths:
        for entry in json.loads(path.read_text()):
            problem = Problem.from_dict(entry["problem"])
            timed = found.setdefault((sample, problem), {})
            timed |= {
                v: (us, count) for v, us, count in _rows(times.family, entry["rows"], problem, preset(card))
            }
    sets = [
        {
            "sample": name,
            "problem": problem.to_dict(),
            "rows": sorted([round(us, 1), count, *asdict(v).values()] for v, (us, count) in timed.items()),
        }
        for (name, problem), timed in found.items()
    ]
    data = {
        "about": f"Median times of {times.family}, to judge the cost model by, without those that spill.",
        "family": times.family,
        "preset": card,
        "columns": ["median_us", "registers", *columns],
        "sets": [entry for entry in sets if entry["rows"]],
    }
    times.path.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))


def _rows(
    family: str, rows: Sequence[Sequence[Any]], problem: Problem, limits: DeviceLimits
) -> list[tuple[Variant, float, int]]:
    kind, kept = FAMILIES[family], []
    names = {p.name for p in kind.parameters()}
    for ms, values, registers, spilled, *_ in rows:
        works = ms < FAILED_MS and isinstance(registers, int) and spilled <= MOST_SPILLED_BYTES
        if not works or not set(values) <= names:
            continue
        variant = kind.from_dict(asdict(kind()) | values)
        try:
            variant.check(problem, limits)
        except Illegal:
            continue
        kept.append((variant, 1e3 * ms, registers))
    return kept


# -- judge and fit --------------------------------------------------------------------------------------


@lru_cache
def counted(times: Times) -> tuple[tuple[Recording, tuple[tuple[Work, int], ...]], ...]:
    """Returns every recording with its variants' work and how many blocks of it were resident."""
    limits, sets = recordings(times)
    counts = []
    for recording in sets:
        works = []
        for variant, registers in zip(recording.variants, recording.registers, strict=True):
            launch = variant.launch(recording.problem, limits)
            resident = limits.blocks_per_sm(launch.threads, int(registers), launch.smem_bytes)
            works.append((variant.work(recording.problem, limits), resident))
        counts.append((recording, tuple(works)))
    return tuple(counts)


def predicted(times: Times, coefficients: AnyCoefficients) -> list[tuple[Recording, np.ndarray]]:
    limits, _ = recordings(times)
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
        for recording, works in counted(times)
    ]


def judge(times: Times, coefficients: AnyCoefficients) -> None:
    for recording, expected in predicted(times, coefficients):
        first = recording.measured[np.argsort(expected, kind="stable")[:20]].min() / recording.measured.min()
        print(
            f"{recording.name:26} {len(expected):4} kernels, rank correlation "
            f"{spearman(recording.measured, expected):.2f}, predicted / measured "
            f"{np.median(expected / recording.measured):.2f}, best of the first twenty {first:.3f}"
        )


def loss(times: Times, coefficients: AnyCoefficients) -> float:
    """Returns the mean of squared errors of predicted times' logarithms about each problem's own mean, which
    ranks do not feel and which weighs less. Fast variants weigh more; problems count by no more than 60
    kernels."""
    total = weight = 0.0
    for recording, expected in predicted(times, coefficients):
        errors = np.log(recording.measured / expected)
        share = np.exp(1 - recording.measured / recording.measured.min())
        mean = np.average(errors, weights=share)
        spread = np.average(np.clip(errors - mean, -0.3, 0.3) ** 2, weights=share)
        kernels = min(len(expected), 60)
        total += kernels * (spread + 0.1 * mean**2)
        weight += kernels
    return total / weight


def fit(times: Times) -> AnyCoefficients:
    """Fits the coefficients in use to a file of times: changes one at a time by a factor, as long as one of
    them helps, then by a smaller factor."""
    best = IN_USE[times.family]
    least = loss(times, best)
    for step in (0.2, 0.1, 0.05, 0.02):
        improved = True
        while improved:
            improved = False
            for name in FITTED[times.family]:
                for factor in (1 + step, 1 / (1 + step)):
                    candidate = replace(best, **{name: getattr(best, name) * factor})
                    value = loss(times, candidate)
                    if math.isfinite(value) and value < least:
                        best, least, improved = candidate, value, True
        print(f"step {step}: {math.sqrt(least):.4f}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("family", choices=sorted(IN_USE))
    parser.add_argument("times", type=Path, help="the file of times")
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("gather")
    adding.add_argument("results", nargs="+", type=Path)
    adding.add_argument("--card", default="h200", help="the preset of the card that they were timed on")
    adding.add_argument("--sample", default=SEARCH, help="what was timed together")
    commands.add_parser("judge")
    commands.add_parser("fit")
    arguments = parser.parse_args()
    times = Times(arguments.family, arguments.times)
    actions: Mapping[str, Callable[[], None]] = {
        "gather": lambda: gather(times, arguments.results, arguments.card, arguments.sample),
        "judge": lambda: judge(times, IN_USE[times.family]),
        "fit": lambda: _print_fit(times),
    }
    actions[arguments.command]()


def _print_fit(times: Times) -> None:
    fitted = fit(times)
    judge(times, fitted)
    for name in FITTED[times.family]:
        print(f"{name}={getattr(fitted, name):.4g}")


if __name__ == "__main__":
    main()
