"""Optuna samplers over a catalogue: each proposes legal variants that no trial has taken, and only those.

A trial's parameters are always those of the variant it tries. What is queued comes first; then each sampler
goes its own way.
"""

from __future__ import annotations

import random
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import isfinite, log
from typing import Any, ClassVar

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from ..predict.catalogue import Catalogue
from ..predict.ranking import Ranking
from ..store.studies import distributions
from .gaussian_process import process
from .random_forest import forest
from .sampler_names import SamplerName
from .surrogate import Model, Outlook, Seen, features, single_threaded, with_predictions

#: Trials before TPE models them.
TPE_STARTUP_TRIALS = 10
#: Times before a model learns from them: where the cost model ranks the first variants, and where none does.
RANKED_STARTUP, CHANCE_STARTUP = 5, 8
#: So many of the first trials are the fastest predicted. While no times have come back, as in a large batch,
#: every other one after them is.
RANKED_FIRST = 5
#: Variants drawn at random of which the fastest predicted is tried in between.
TOURNAMENT = 16
#: Variants that the cost model ranks before the first trial, and more of them at each later one: ranking
#: takes a third of a millisecond each, and a card is waiting.
FIRST_LOOK, NEXT_LOOK = 3000, 25
#: And as many again at most, of neighbours of the best of them.
FIRST_DESCENT = 600
#: Variants that a model scores at most; of more, the half that the cost model says is fastest, the rest any.
MOST_SCORED = 3000
#: Times, and failures, that a model is told of at most. A process learns from 400, and a forest's time grows
#: with them.
MOST_TOLD = 2000


class Origin(StrEnum):
    """Why a variant is tried."""

    DEFAULT = "default"
    PREDICTED = "predicted best"
    KNOWN = "known winner"
    SWEEP = "sweep"
    RANDOM = "random"
    MODEL = "model"


class LegalSampler(BaseSampler):
    """Base of the samplers over a catalogue. ``chosen`` is the row proposed last, and why; ``needs_trial``
    says whether a trial must be in the study before its parameters are chosen."""

    needs_trial: ClassVar[bool] = False

    def __init__(self, catalogue: Catalogue, *, seed: int) -> None:
        self.queue: deque[tuple[int, Origin]] = deque()
        self.chosen: tuple[int, Origin] | None = None
        self._catalogue = catalogue
        self._rng = random.Random(seed)
        self._space = {k: d for k, d in distributions(catalogue.family).items() if not d.single()}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        # What needs a trial reads the study by itself.
        trials = () if self.needs_trial else study.get_trials(deepcopy=False)
        ((row, _),) = self.propose(trials, trial, study)
        values = self._catalogue.variant(row).to_dict()
        return {name: values[name] for name in search_space}

    def propose(
        self, trials: Sequence[FrozenTrial], trial: FrozenTrial | None, study: Study, count: int = 1
    ) -> list[tuple[int, Origin]]:
        """Takes up to ``count`` rows that nobody has taken, and returns each with the reason why; ``trials``
        are the study's as last read, and ``trial`` is the one in the making, where it is among them."""
        rows: list[tuple[int, Origin]] = []
        choices = self._choices(study, trials, trial)
        while len(rows) < count and self._catalogue.num_unseen:
            self.chosen = self._queued() or next(choices)
            self._catalogue.take(self.chosen[0])
            rows.append(self.chosen)
        return rows

    def hear(self, number: int, row: int, us: float | None) -> None:
        """Hears that a trial of this process ended with that time, None if it failed: sooner than a study is
        read."""

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise NotImplementedError("all parameters are sampled together")

    @abstractmethod
    def _choices(
        self, study: Study, trials: Sequence[FrozenTrial], trial: FrozenTrial | None
    ) -> Iterator[tuple[int, Origin]]:
        """Rows that nobody has taken, as long as there are any: each is taken before the next is asked for.
        Where a trial must be there first, one row."""

    def _queued(self) -> tuple[int, Origin] | None:
        while self.queue:
            row, origin = self.queue.popleft()
            if self._catalogue.unseen[row]:
                return row, origin
        return None

    def _any(self) -> int:
        return self._catalogue.sample(1, self._rng)[0]


class ChanceSampler(LegalSampler):
    """Any variant, each as likely."""

    def _choices(
        self, study: Study, trials: Sequence[FrozenTrial], trial: FrozenTrial | None
    ) -> Iterator[tuple[int, Origin]]:
        while True:
            yield self._any(), Origin.RANDOM


class SweepSampler(LegalSampler):
    """Every variant, the fastest predicted first."""

    def __init__(self, catalogue: Catalogue, *, seed: int, ranking: Ranking | None = None) -> None:
        super().__init__(catalogue, seed=seed)
        self._ranking = ranking

    def _choices(
        self, study: Study, trials: Sequence[FrozenTrial], trial: FrozenTrial | None
    ) -> Iterator[tuple[int, Origin]]:
        if self._ranking is not None:
            self._ranking.look(len(self._catalogue))
        while True:
            yield self._any() if self._ranking is None else self._ranking.fastest(1)[0], Origin.SWEEP


class TpeSampler(LegalSampler):
    """What Optuna's TPE proposes, moved to the nearest legal variant."""

    needs_trial = True

    def __init__(self, catalogue: Catalogue, *, seed: int) -> None:
        super().__init__(catalogue, seed=seed)
        self._guide = tpe(seed)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._guide.after_trial(study, trial, state, values)

    def _choices(
        self, study: Study, trials: Sequence[FrozenTrial], trial: FrozenTrial | None
    ) -> Iterator[tuple[int, Origin]]:
        assert trial is not None
        proposed = self._guide.sample_relative(study, trial, dict(self._space))
        if proposed:
            row = self._catalogue.nearest(self._catalogue.family(**proposed))
            assert row is not None, "asked of an exhausted catalogue"
            yield row, Origin.MODEL
        else:
            yield self._any(), Origin.RANDOM


class SurrogateSampler(LegalSampler):
    """A model of the times scores every variant that nobody has taken; the most promising is next.

    It reads the study, so that whoever finished a trial teaches it. ``ranking``, the cost model's, orders the
    first trials and is one of the features; without it the first are drawn at random.
    """

    def __init__(
        self, catalogue: Catalogue, *, seed: int, model: Model = process, ranking: Ranking | None = None
    ) -> None:
        super().__init__(catalogue, seed=seed)
        self._model = model
        self._ranking = ranking
        self._features = features(catalogue)
        self._draws = np.random.default_rng(seed)
        self._seed = seed
        self._order: np.ndarray | None = None
        self._settled: set[int] = set()
        self._times: dict[int, float] = {}
        self._failed: set[int] = set()

    def hear(self, number: int, row: int, us: float | None) -> None:
        self._settled.add(number)
        self._note(row, us)

    def _choices(
        self, study: Study, trials: Sequence[FrozenTrial], trial: FrozenTrial | None
    ) -> Iterator[tuple[int, Origin]]:
        pending = self._learn(trials, trial)
        if self._ranking is not None:
            self._ranking.look(NEXT_LOOK if self._ranking.known.any() else FIRST_LOOK)
        if len(self._times) >= (CHANCE_STARTUP if self._ranking is None else RANKED_STARTUP):
            for row in self._most_promising(pending):
                yield row, Origin.MODEL
        tried = len(self._times) + len(self._failed) + len(pending)
        while True:
            yield self._start(tried)
            tried += 1

    def _start(self, tried: int) -> tuple[int, Origin]:
        if self._ranking is None:
            return self._any(), Origin.RANDOM
        if tried < RANKED_FIRST or tried % 2:
            best = self._ranking.fastest(1)
            if best:
                return best[0], Origin.PREDICTED
        some = self._catalogue.sample(TOURNAMENT, self._rng)
        return some[int(self._ranking.of(some).argmin())], Origin.RANDOM

    def _most_promising(self, pending: Sequence[int]) -> Iterator[int]:
        candidates = np.flatnonzero(self._catalogue.unseen)
        columns = self._features
        times, failed = self._learned_from()
        if self._ranking is not None:
            self._ranking.of([*times, *failed, *pending])
            looked_at = candidates[self._ranking.known[candidates]]
            candidates = looked_at if len(looked_at) else candidates
            columns = with_predictions(columns, self._ranking.log_us)
        if len(candidates) > MOST_SCORED:
            candidates = self._some(candidates)
        seen = Seen(list(times), list(times.values()), failed, pending)
        with single_threaded():
            outlook = Outlook(self._model, columns, seen, candidates, int(self._draws.integers(2**31)))
        for _ in candidates:
            with single_threaded():
                gains = outlook.gains()
            # Of equals any, so that where nothing is known it does not walk along the first parameter.
            best = int(self._draws.choice(np.flatnonzero(gains >= gains.max())))
            yield int(candidates[best])
            with single_threaded():
                outlook.choose(best)

    def _learned_from(self) -> tuple[dict[int, float], list[int]]:
        """The times and failures that a model is told of: of very many the fastest, which the search is
        about, and always the same of the rest, so that few of them are new to the cost model."""
        times, failed = self._times, list(self._failed)
        if len(times) > MOST_TOLD:
            by_time = sorted(times, key=times.__getitem__)
            fastest, rest = by_time[: MOST_TOLD // 2], by_time[MOST_TOLD // 2 :]
            kept = {*fastest, *self._same_of(rest, MOST_TOLD - len(fastest))}
            times = {row: log_us for row, log_us in times.items() if row in kept}
        return times, self._same_of(failed, MOST_TOLD)

    def _same_of(self, rows: list[int], most: int) -> list[int]:
        if len(rows) <= most:
            return rows
        if self._order is None:
            self._order = np.random.default_rng(self._seed).permutation(len(self._catalogue))
        return sorted(rows, key=self._order.__getitem__)[:most]

    def _some(self, candidates: np.ndarray) -> np.ndarray:
        """Returns as many of the candidates as a model scores."""
        sure = 0
        if self._ranking is not None:
            sure = MOST_SCORED // 2
            order = np.argsort(self._ranking.log_us[candidates], kind="stable")  # what is unknown comes last
            candidates = candidates[order]
        rest = self._draws.choice(candidates[sure:], MOST_SCORED - sure, replace=False)
        return np.sort(np.concatenate([candidates[:sure], rest]))

    def _learn(self, trials: Sequence[FrozenTrial], asked: FrozenTrial | None) -> list[int]:
        """Takes in what has ended since the last time. Returns the rows in flight."""
        pending = []
        for trial in trials:
            if trial.number in self._settled or (asked is not None and trial.number == asked.number):
                continue
            if trial.state.is_finished():
                self._settled.add(trial.number)
            row = self._catalogue.row_of(trial.params)
            if row is None or trial.state is TrialState.FAIL:
                continue
            if not trial.state.is_finished():
                pending.append(row)
            else:
                self._note(row, trial.value if trial.state is TrialState.COMPLETE else None)
        return pending

    def _note(self, row: int, us: float | None) -> None:
        if us and isfinite(us):
            self._times[row] = log(us)
            self._failed.discard(row)
        elif row not in self._times:
            self._failed.add(row)


def make_sampler(
    name: SamplerName, catalogue: Catalogue, *, seed: int, ranking: Ranking | None = None
) -> LegalSampler:
    match name:
        case SamplerName.GP:
            return SurrogateSampler(catalogue, seed=seed, ranking=ranking)
        case SamplerName.FOREST:
            return SurrogateSampler(catalogue, seed=seed, model=forest, ranking=ranking)
        case SamplerName.TPE:
            return TpeSampler(catalogue, seed=seed)
        case SamplerName.RANDOM:
            return ChanceSampler(catalogue, seed=seed)
        case SamplerName.EXHAUSTIVE:
            return SweepSampler(catalogue, seed=seed, ranking=ranking)


def tpe(seed: int) -> TPESampler:
    """Returns TPE with what its versions set differently by default set explicitly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=TPE_STARTUP_TRIALS
        )
