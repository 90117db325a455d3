"""Kernel Tuner's strategies on a recorded space, in its own simulation mode.

Its search is its own, untouched: it is told which combinations of values there are, and looks up what each
takes in a cache file. It is no dependency of flashgen's; where it is not installed, nothing here is used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.variant import Value
from ..errors import FlashgenError
from .recorded_spaces import Entry, RecordedSpace

#: Kernel Tuner's strategies that do best on GPU kernels by its authors' and others' accounts.
STRATEGIES = ("bayes_opt", "diff_evo", "genetic_algorithm", "adaptive_tabu_greywolf", "hybrid_vndx")
KERNEL_NAME = "attention"


def is_installed() -> bool:
    return importlib.util.find_spec("kernel_tuner") is not None


def all_strategies() -> list[str]:
    """Returns the names of Kernel Tuner's strategies that search."""
    from kernel_tuner.interface import strategy_map

    # Two seek several objectives at once, one tries everything in order.
    return sorted(set(strategy_map) - {"nsga2", "nsga3", "brute_force"})


def simulate(space: RecordedSpace, strategy: str, seed: int, evaluations: int) -> list[float | None]:
    """Runs a strategy; returns the microseconds of the variants in the order in which it first evaluates
    them, None for one that fails. A strategy may give up before it has made all evaluations."""
    from kernel_tuner import tune_kernel

    columns = _columns(space)
    names = list(columns)
    by_key = {_key(entry, names): entry.median_us for entry in space.entries}
    random.seed(seed)
    np.random.seed(seed)
    with _cache_file(space, columns) as path, _silence():
        try:
            results, _ = tune_kernel(
                KERNEL_NAME,
                "",
                1,
                [],
                columns,
                cache=str(path),
                simulation_mode=True,
                restrictions=[_just_the_recorded(space, names)],
                strategy=strategy,
                strategy_options={"max_fevals": evaluations},
                quiet=True,
            )
        except ImportError as error:
            raise FlashgenError(
                f"Kernel Tuner's strategy {strategy} needs the module {error.name}, which is not installed; "
                "install it or name other strategies with --sampler"
            ) from error
    order = dict.fromkeys(",".join(str(result[name]) for name in names) for result in results)
    return [by_key[key] for key in order if key in by_key][:evaluations]


def _columns(space: RecordedSpace) -> dict[str, list[Value]]:
    """The values of the parameters that differ: Kernel Tuner walks their product."""
    columns: dict[str, list[Value]] = {}
    for parameter in space.family.parameters():
        present = {getattr(entry.variant, parameter.name) for entry in space.entries}
        if len(present) > 1:
            columns[parameter.name] = [choice for choice in parameter.choices if choice in present]
    return columns


def _key(entry: Entry, names: Sequence[str]) -> str:
    return ",".join(str(getattr(entry.variant, name)) for name in names)


def _just_the_recorded(space: RecordedSpace, names: Sequence[str]) -> Any:
    """What is recorded, as a constraint that speaks as soon as some parameters are set: its solver would walk
    millions of combinations that there are not."""
    from constraint import Constraint

    rows = [{name: getattr(entry.variant, name) for name in names} for entry in space.entries]
    known: dict[tuple[str, ...], set[tuple[Value, ...]]] = {}

    class Recorded(Constraint):
        def __call__(
            self,
            variables: Sequence[str],
            domains: dict,
            assignments: dict[str, Value],
            forwardcheck: bool = False,
            _unassigned: object = None,
        ) -> Any:  # its base declares no more than what it returns itself
            given = tuple(name for name in names if name in assignments)
            if given not in known:
                known[given] = {tuple(row[name] for name in given) for row in rows}
            return tuple(assignments[name] for name in given) in known[given]

        def __deepcopy__(self, _: object) -> Recorded:
            return self

    return Recorded()


@contextlib.contextmanager
def _cache_file(space: RecordedSpace, columns: dict[str, list[Value]]) -> Iterator[Path]:
    names = list(columns)
    cache: dict[str, Any] = {}
    for entry in space.entries:
        values = {name: getattr(entry.variant, name) for name in names}
        figures: dict[str, Any] = {"time": "RuntimeFailedConfig", "__error__": "RuntimeFailedConfig"}
        if entry.median_us is not None:
            figures = {"time": entry.median_us / 1e3, "times": [entry.median_us / 1e3]}
        times = dict.fromkeys(("compile_time", "verification_time", "benchmark_time"), 1.0)
        cache[_key(entry, names)] = values | figures | times
    document = {
        "device_name": space.limits.name,
        "kernel_name": KERNEL_NAME,
        "problem_size": 1,
        "tune_params_keys": names,
        "tune_params": columns,
        "objective": "time",
        "cache": cache,
    }
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder) / "cache.json"
        # It takes a file that ends otherwise for one cut short.
        path.write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")
        yield path


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """It prints what it does, and its strategies warn of divisions by zero."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
