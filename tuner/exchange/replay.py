"""Searches replayed on recorded spaces: how soon each method finds how much of the optimum.

The share of the optimum is the best possible time over the best found so far. Ours are replayed as they run,
by `Search` on a study in memory; Kernel Tuner's strategies run in its own simulation mode.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np
import optuna

from ...gen.variant import Variant
from ..evaluate.outcome import Measurement, Outcome, Status
from ..predict.prior import prior_of
from ..predict.rank_correlation import spearman
from ..search.ask_tell import Proposal, Search
from ..search.sampler_names import SamplerName
from ..store.liveness import Pulse
from . import strategies
from .recorded_spaces import Entry, RecordedSpace
from .replay_curves import MARKS, Curves, Replayed
from .replay_methods import KERNEL_TUNER, PRIMED


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What to replay: the methods, starts and evaluations of each, proposals out at once, processes."""

    methods: tuple[str, ...]
    seeds: int = 20
    evaluations: int = max(MARKS)
    batch: int = 1
    jobs: int = 1


def replay(
    named: Sequence[tuple[str, RecordedSpace]],
    options: ReplayOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Replayed]:
    """Replays every method on every space; ``progress`` gets how many runs are done, of how many."""
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


#: One run: the index of its space, its method, its seed.
Task = tuple[int, str, int]
#: What a process of the pool replays on.
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
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The pool's processes hold the ends of its queues open for each other: none would see the parent die."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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
        """Spearman's of recorded and predicted times; None where it is none, and where the recorded ones are
        predictions themselves."""
        if self.space.predicted:
            return None
        pairs = [
            (entry.median_us, us)
            for entry, us in zip(self.space.entries, self.predicted_us, strict=True)
            if entry.median_us is not None
        ]
        return spearman([us for us, _ in pairs], [us for _, us in pairs])

    def shares(self, method: str, seed: int) -> np.ndarray:
        """Replays a search; returns the share of the optimum after each evaluation, 0 until one works."""
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
