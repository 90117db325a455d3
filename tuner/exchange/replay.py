"""Searches replayed on recorded spaces: how soon each method finds how much of the optimum.

The share of the optimum is the best possible time over the best found so far. Ours are replayed as they run,
by `Search` on a study in memory; Kernel Tuner's strategies run in its own simulation mode.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna

from ...gen.variant import Variant
from ..errors import UsageError, suggestion
from ..evaluate.outcome import Measurement, Outcome, Status
from ..predict.prior import prior_of
from ..predict.rank_correlation import spearman
from ..search.ask_tell import Proposal, Search
from ..search.sampler_names import SamplerName
from ..store.liveness import Pulse
from . import strategies
from .recorded_spaces import Entry, RecordedSpace

#: After a sampler's name: it starts at random, and does not hear the cost model.
NO_PRIOR = ":no-prior"
KERNEL_TUNER = "kt:"
#: Samplers that the cost model orders or teaches.
PRIMED = (SamplerName.GP, SamplerName.FOREST, SamplerName.EXHAUSTIVE)
#: Evaluations at which methods are compared, and the share that is as good as the optimum.
MARKS, GOAL = (10, 25, 50, 100, 200), 0.97
#: The goal is to be reached within so many evaluations or so much of the space, whichever is more.
ALLOWED, ALLOWED_SHARE = 100, 0.05
#: Of the compared marks, those at which nobody should be ahead.
RACES = (50, 100, 200)
LOW, HIGH = 10, 90


@dataclass(frozen=True)
class Curves:
    """One method on one space: the share of the optimum after each evaluation, shape (seeds, evaluations)."""

    method: str
    shares: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return self.shares.mean(axis=0)

    def quantile(self, percent: float) -> np.ndarray:
        return np.percentile(self.shares, percent, axis=0)

    def at(self, evaluations: int) -> float | None:
        """The mean share then; None where the space has not so many variants."""
        return float(self.mean[evaluations - 1]) if evaluations <= self.shares.shape[1] else None

    def until(self, goal: float = GOAL) -> np.ndarray:
        """Evaluations until each seed reached the goal, infinite where it did not."""
        reached = self.shares >= goal
        return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, np.inf)


@dataclass(frozen=True)
class Replayed:
    """All methods on one space. ``rho`` is Spearman's of recorded and predicted times; None where too
    few are recorded."""

    name: str
    space: RecordedSpace
    rho: float | None
    curves: tuple[Curves, ...]

    @property
    def allowed(self) -> int:
        return max(ALLOWED, round(ALLOWED_SHARE * len(self.space.entries)))

    def ahead_of(self, method: str) -> list[tuple[int, str, float, float]]:
        """Where another method is ahead in the mean, by as much as is printed: evaluations, who, both
        shares."""
        own = next(c for c in self.curves if c.method == method)
        found = []
        for mark in RACES:
            for other in self.curves:
                mine, theirs = own.at(mark), other.at(mark)
                if mine is not None and theirs is not None and round(theirs, 3) > round(mine, 3):
                    found.append((mark, other.method, theirs, mine))
        return found

    def to_dict(self) -> dict[str, Any]:
        space = self.space
        return {
            "file": self.name,
            "problem": space.problem.to_dict(),
            "family": space.family.family,
            "card": space.limits.name,
            "variants": len(space.entries),
            "timed": sum(e.median_us is not None for e in space.entries),
            "best_us": space.best_us,
            "spearman": self.rho,
            "allowed_evaluations": self.allowed,
            "methods": [
                {
                    "method": c.method,
                    "mean": c.mean.round(5).tolist(),
                    f"p{LOW}": c.quantile(LOW).round(5).tolist(),
                    f"p{HIGH}": c.quantile(HIGH).round(5).tolist(),
                    "evaluations_to_goal": [int(n) if np.isfinite(n) else None for n in c.until()],
                }
                for c in self.curves
            ],
        }


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Which methods, from how many starts, how far, how many proposals out at once, on how many cores."""

    methods: tuple[str, ...]
    seeds: int = 20
    evaluations: int = max(MARKS)
    batch: int = 1
    jobs: int = 1


def default_methods() -> tuple[str, ...]:
    """Ours, what it is compared with, and Kernel Tuner's where that is installed."""
    gp, forest, tpe, random = map(
        str, (SamplerName.GP, SamplerName.FOREST, SamplerName.TPE, SamplerName.RANDOM)
    )
    theirs = [KERNEL_TUNER + name for name in strategies.STRATEGIES] if strategies.is_installed() else []
    return (gp, gp + NO_PRIOR, forest, tpe, random, *theirs)


def parse_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The methods called ``names``, each once. Raises UsageError."""
    known = [str(name) for name in SamplerName] + [name + NO_PRIOR for name in PRIMED]
    for name in names:
        if name.startswith(KERNEL_TUNER):
            if not strategies.is_installed():
                raise UsageError(f"{name} needs Kernel Tuner; get it with `pip install kernel_tuner`")
            theirs = strategies.all_strategies()
            if name.removeprefix(KERNEL_TUNER) not in theirs:
                close = suggestion(name, [KERNEL_TUNER + each for each in theirs])
                raise UsageError(f"Kernel Tuner has no strategy {name.removeprefix(KERNEL_TUNER)!r}; {close}")
        elif name not in known:
            raise UsageError(f"unknown sampler {name!r}; {suggestion(name, known)}")
    return tuple(dict.fromkeys(names))


def replay(
    named: Sequence[tuple[str, RecordedSpace]],
    options: ReplayOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Replayed]:
    """Replays every method on every space. ``progress`` hears of runs that are done, of how many."""
    replayers = [Replayer.of(space, options) for _, space in named]
    tasks = [
        (index, method, seed)
        for index in range(len(named))
        for method in options.methods
        for seed in range(options.seeds)
    ]
    found: dict[tuple[int, str, int], np.ndarray] = {}
    for task, shares in _carried_out(replayers, tasks, options.jobs):
        found[task] = shares
        progress(len(found), len(tasks))
    results = []
    for index, (name, space) in enumerate(named):
        curves = [
            Curves(method, np.stack([found[index, method, seed] for seed in range(options.seeds)]))
            for method in options.methods
        ]
        results.append(Replayed(name, space, replayers[index].rho, tuple(curves)))
    return results


Task = tuple[int, str, int]
#: Of a process of the pool: what it replays on.
_replayers: list[Replayer] = []


def _carried_out(
    replayers: list[Replayer], tasks: list[Task], jobs: int
) -> Iterator[tuple[Task, np.ndarray]]:
    if jobs == 1:
        for index, method, seed in tasks:
            yield (index, method, seed), replayers[index].shares(method, seed)
        return
    # Fresh processes: a fork would share the threads' locks of those who hold one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, _receive, (replayers,)) as pool:
        futures = {pool.submit(_replay_one, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _receive(replayers: list[Replayer]) -> None:
    _replayers[:] = replayers


def _replay_one(task: Task) -> np.ndarray:
    index, method, seed = task
    return _replayers[index].shares(method, seed)


@dataclass(frozen=True)
class Replayer:
    """A space, what the cost model says of it, and how far it is searched."""

    space: RecordedSpace
    predicted_us: tuple[float, ...]
    evaluations: int
    batch: int

    @classmethod
    def of(cls, space: RecordedSpace, options: ReplayOptions) -> Replayer:
        prior = prior_of(space.problem, space.limits)
        predictions = tuple(prior(entry.variant) for entry in space.entries)
        return cls(space, predictions, min(options.evaluations, len(space.entries)), options.batch)

    @property
    def rho(self) -> float | None:
        pairs = [
            (entry.median_us, us)
            for entry, us in zip(self.space.entries, self.predicted_us, strict=True)
            if entry.median_us is not None
        ]
        measured, predicted = np.array(pairs).T
        return spearman(measured, predicted)

    def shares(self, method: str, seed: int) -> np.ndarray:
        """The share of the optimum after each evaluation, 0 until something works."""
        if method.startswith(KERNEL_TUNER):
            times = strategies.simulate(self.space, method.removeprefix(KERNEL_TUNER), seed, self.evaluations)
        else:
            times = self._search(method, seed)
        best_us = self.space.best_us
        found = [0.0 if us is None else best_us / us for us in times]
        # Who gives up early stays where it is.
        found += [0.0] * (self.evaluations - len(found))
        return np.maximum.accumulate(found)

    def _search(self, method: str, seed: int) -> list[float | None]:
        """Microseconds of the variants in the order in which they are evaluated."""
        name, _, rest = method.partition(":")
        sampler = SamplerName(name)
        primed = sampler in PRIMED and not rest
        entries = {entry.variant: entry for entry in self.space.entries}
        predicted = dict(zip(entries, self.predicted_us, strict=True))

        def prior(variant: Variant) -> float:
            return predicted[variant]

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="minimize")
        pulse = Pulse()
        search = Search(
            self.space.catalogue(),
            study,
            seed=seed,
            prior=prior if primed else None,
            sampler=sampler,
            seeded=primed,
            pulse=pulse,
        )
        times: list[float | None] = []
        flight: list[Proposal] = []
        try:
            while len(times) < self.evaluations:
                flight += search.ask_many(self.batch - len(flight))
                proposal = flight.pop(0)
                entry = entries[proposal.variant]
                search.tell(proposal, _outcome(entry))
                times.append(entry.median_us)
        finally:
            pulse.close()
        return times


def _outcome(entry: Entry) -> Outcome:
    if entry.median_us is None:
        return Outcome(variant=entry.variant, status=entry.status, reason=entry.reason)
    measurement = Measurement(
        times_us=(entry.median_us,),
        median_us=entry.median_us,
        spread=entry.spread or 0.0,
        tflops=0.0,
        registers=entry.registers or 0,
        spill_bytes=entry.spill_bytes or 0,
        smem_bytes=0,
        occupancy=0.0,
        error=0.0,
    )
    return Outcome(variant=entry.variant, status=Status.OK, measurement=measurement)
