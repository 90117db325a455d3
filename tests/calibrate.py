"""The cost model against times of tensor-core kernels on a card: gathers them, judges it, fits it to them.

    python tests/calibrate.py mma gather RESULTS.json...   adds to tests/data/h200_mma_times.json.gz
    python tests/calibrate.py mma judge
    python tests/calibrate.py mma fit                      half a minute; prints better TENSOR_COEFFICIENTS

and so for wgmma, whose coefficients are GROUP_COEFFICIENTS.

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
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import DeviceLimits, preset
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Illegal, Variant
from flashgen.gen.work import Work
from flashgen.tuner.predict.block_model import TENSOR_COEFFICIENTS, Coefficients
from flashgen.tuner.predict.cost_model import predict_work
from flashgen.tuner.predict.rank_correlation import spearman
from flashgen.tuner.predict.warpgroup_model import GROUP_COEFFICIENTS, GroupCoefficients

DATA = Path(__file__).parent / "data"
#: A kernel that spills more says little about the others.
MOST_SPILLED_BYTES = 32
FAILED_MS = 1e6
#: What a search tried, who favours fast variants.
SEARCH = "search"
AnyCoefficients = Coefficients | GroupCoefficients
#: By family, the coefficients in use.
IN_USE: Mapping[str, AnyCoefficients] = {"mma": TENSOR_COEFFICIENTS, "wgmma": GROUP_COEFFICIENTS}
#: Those of them that are fitted.
FITTED = {
    "mma": (
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
    ),
    "wgmma": tuple(
        f.name
        for f in fields(GroupCoefficients)
        if f.name not in ("memory_hiding", "score_slots") and not f.name.startswith("split_")
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


def times_of(family: str) -> Path:
    return DATA / f"h200_{family}_times.json.gz"


@lru_cache
def recordings(family: str) -> tuple[DeviceLimits, tuple[Recording, ...]]:
    """The card and what was timed on it."""
    times = json.loads(gzip.decompress(times_of(family).read_bytes()))
    names = times["columns"][2:]
    sets = []
    for entry in times["sets"]:
        rows = entry["rows"]
        kind = FAMILIES[family]
        variants = tuple(kind.from_dict(dict(zip(names, row[2:], strict=True))) for row in rows)
        measured, registers = (np.array([row[i] for row in rows]) for i in (0, 1))
        sample = entry.get("sample", SEARCH)
        sets.append(Recording(sample, Problem(**entry["problem"]), variants, measured, registers))
    return preset(times["preset"]), tuple(sets)


# -- gather ---------------------------------------------------------------------------------------------


def gather(family: str, paths: Sequence[Path], card: str, sample: str) -> None:
    columns = [p.name for p in FAMILIES[family].parameters()]
    found: dict[tuple[str, Problem], dict[Variant, tuple[float, int]]] = {}
    if times_of(family).exists():
        for recording in recordings(family)[1]:
            rows = zip(recording.variants, recording.measured, recording.registers, strict=True)
            found[recording.sample, recording.problem] = {v: (float(us), int(n)) for v, us, n in rows}
    for path in paths:
        for entry in json.loads(path.read_text()):
            problem = Problem(**entry["problem"])
            timed = found.setdefault((sample, problem), {})
            timed |= {v: (us, count) for v, us, count in _rows(family, entry["rows"], problem, preset(card))}
    sets = [
        {
            "sample": name,
            "problem": asdict(problem),
            "rows": sorted([round(us, 1), count, *asdict(v).values()] for v, (us, count) in timed.items()),
        }
        for (name, problem), timed in found.items()
    ]
    data = {
        "about": f"Median times of {family} kernels, to judge the cost model by, without those that spill.",
        "preset": card,
        "columns": ["median_us", "registers", *columns],
        "sets": [entry for entry in sets if entry["rows"]],
    }
    times_of(family).write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))


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
def counted(family: str) -> tuple[tuple[Recording, tuple[tuple[Work, int], ...]], ...]:
    """Every recording with its variants' work and how many blocks of it were resident."""
    limits, sets = recordings(family)
    counts = []
    for recording in sets:
        works = []
        for variant, registers in zip(recording.variants, recording.registers, strict=True):
            launch = variant.launch(recording.problem, limits)
            resident = limits.blocks_per_sm(launch.threads, int(registers), launch.smem_bytes)
            works.append((variant.work(recording.problem, limits), resident))
        counts.append((recording, tuple(works)))
    return tuple(counts)


def predicted(family: str, coefficients: AnyCoefficients) -> list[tuple[Recording, np.ndarray]]:
    limits, _ = recordings(family)
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
        for recording, works in counted(family)
    ]


def judge(family: str, coefficients: AnyCoefficients) -> None:
    for recording, times in predicted(family, coefficients):
        first = recording.measured[np.argsort(times, kind="stable")[:20]].min() / recording.measured.min()
        print(
            f"{recording.name:26} {len(times):4} kernels, rank correlation "
            f"{spearman(recording.measured, times):.2f}, predicted / measured "
            f"{np.median(times / recording.measured):.2f}, best of the first twenty {first:.3f}"
        )


def loss(family: str, coefficients: AnyCoefficients) -> float:
    """The mean of squared errors of logarithms about each problem's own mean, which ranks do not feel and
    which weighs less. Fast variants weigh more; problems count by no more than 60 kernels."""
    total = weight = 0.0
    for recording, times in predicted(family, coefficients):
        errors = np.log(recording.measured / times)
        share = np.exp(1 - recording.measured / recording.measured.min())
        mean = np.average(errors, weights=share)
        spread = np.average(np.clip(errors - mean, -0.3, 0.3) ** 2, weights=share)
        kernels = min(len(times), 60)
        total += kernels * (spread + 0.1 * mean**2)
        weight += kernels
    return total / weight


def fit(family: str) -> AnyCoefficients:
    """One coefficient at a time by a factor, as long as one of them helps, then by a smaller factor."""
    best = IN_USE[family]
    least = loss(family, best)
    for step in (0.2, 0.1, 0.05, 0.02):
        improved = True
        while improved:
            improved = False
            for name in FITTED[family]:
                for factor in (1 + step, 1 / (1 + step)):
                    candidate = replace(best, **{name: getattr(best, name) * factor})
                    value = loss(family, candidate)
                    if math.isfinite(value) and value < least:
                        best, least, improved = candidate, value, True
        print(f"step {step}: {math.sqrt(least):.4f}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("family", choices=sorted(IN_USE))
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("gather")
    adding.add_argument("results", nargs="+", type=Path)
    adding.add_argument("--card", default="h200", help="the preset of the card that they were timed on")
    adding.add_argument("--sample", default=SEARCH, help="what was timed together")
    commands.add_parser("judge")
    commands.add_parser("fit")
    arguments = parser.parse_args()
    family = arguments.family
    actions: Mapping[str, Callable[[], None]] = {
        "gather": lambda: gather(family, arguments.results, arguments.card, arguments.sample),
        "judge": lambda: judge(family, IN_USE[family]),
        "fit": lambda: _print_fit(family),
    }
    actions[arguments.command]()


def _print_fit(family: str) -> None:
    fitted = fit(family)
    judge(family, fitted)
    for name in FITTED[family]:
        print(f"{name}={getattr(fitted, name):.4g}")


if __name__ == "__main__":
    main()
