"""Which variant to try next: Optuna by ask and tell over the enumerated legal variants.

The study sees one categorical parameter per field of the family. What its sampler proposes is moved to the
nearest legal variant that no trial has taken, so a trial's parameters are always a variant that was tried,
and no variant is tried twice.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from ..gen.variant import Variant
from .catalogue import Catalogue
from .claims import Others
from .heartbeat import OWNER, Pulse
from .outcome import Outcome, Status
from .prior import Prior
from .study import OUTCOME, distributions, outcome_to_dict, outcomes, plain_figures

#: Spaces up to this size are swept whole unless the budget is smaller still.
SWEEP_MAX = 300
#: Finished trials before the model of them is asked.
STARTUP_TRIALS = 24
#: Of the model-guided proposals, every this many-th is a neighbour of the best instead.
NEIGHBOUR_EVERY = 3
#: Random variants among which the prior picks one, where there is a prior.
TOURNAMENT = 16
#: Spaces up to this size are ranked whole by the prior; of larger ones a sample, and what a descent meets.
PRIOR_WHOLE, PRIOR_SAMPLE, PRIOR_BUDGET = 10_000, 400, 1200


class Origin(StrEnum):
    """Why a variant is tried."""

    DEFAULT = "default"
    PREDICTED = "predicted best"
    KNOWN = "known winner"
    SWEEP = "sweep"
    RANDOM = "random"
    NEIGHBOUR = "neighbour of the best"
    MODEL = "model"


@dataclass(frozen=True)
class Proposal:
    """A variant to try, taken from the space until it is told."""

    variant: Variant
    row: int
    origin: Origin
    trial: Trial


class LegalSampler(BaseSampler):
    """Another sampler's proposals, moved onto the legal unseen variants; seeds and neighbours in between.

    Any sampler may guide: it is asked for all parameters together and may decline with an empty answer.
    """

    def __init__(self, catalogue: Catalogue, guide: BaseSampler, *, seed: int, prior: Prior | None) -> None:
        self.queue: deque[tuple[int, Origin]] = deque()
        self.best_row: int | None = None
        self.chosen: tuple[int, Origin] | None = None
        self._catalogue = catalogue
        self._guide = guide
        self._prior = prior
        self._rng = random.Random(seed)
        self._guided = 0
        self._space = {k: d for k, d in distributions(catalogue.family).items() if not d.single()}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self.chosen = self._choose(study, trial, search_space)
        row = self.chosen[0]
        self._catalogue.take(row)
        values = self._catalogue.variant(row).to_dict()
        return {name: values[name] for name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise NotImplementedError("all parameters are sampled together")

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._guide.after_trial(study, trial, state, values)

    def _choose(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> tuple[int, Origin]:
        while self.queue:
            row, origin = self.queue.popleft()
            if self._catalogue.unseen[row]:
                return row, origin
        proposed = self._guide.sample_relative(study, trial, search_space)
        if not proposed:
            return self._favourite(self._catalogue.sample(TOURNAMENT, self._rng)), Origin.RANDOM
        self._guided += 1
        if self.best_row is not None and self._guided % NEIGHBOUR_EVERY == 0:
            around = self._catalogue.neighbours(self.best_row)
            if len(around):
                some = self._rng.sample(around.tolist(), min(TOURNAMENT, len(around)))
                return self._favourite(some), Origin.NEIGHBOUR
        wanted = self._catalogue.family(**proposed)
        row = self._catalogue.nearest(wanted)
        assert row is not None, "asked of an exhausted catalogue"
        return row, Origin.MODEL

    def _favourite(self, rows: list[int]) -> int:
        if self._prior is None or len(rows) == 1:
            return rows[0]
        prior = self._prior
        return min(rows, key=lambda row: prior(self._catalogue.variant(row)))


class Search:
    """Asks a study for variants of a catalogue and tells it what became of them.

    Args:
        catalogue: the legal variants; what the study has tried is taken from it here.
        study: holds every outcome, those of earlier runs too.
        budget: trials this run may make, None without such a bound.
        seed: makes the proposals reproducible, given the same outcomes in the same order.
        known: winners to try first, of other problems or cards too: the nearest legal variant is.
        prior: predicted time of a variant; guides the first trials.
        guide: the sampler that proposes; TPE unless told otherwise.
        pulse: keeps the trials in flight alive in the eyes of other hosts.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        study: Study,
        *,
        budget: int | None = None,
        seed: int = 0,
        known: Iterable[Variant] = (),
        prior: Prior | None = None,
        guide: BaseSampler | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.study = study
        self.earlier: list[Outcome] = []
        self.others = Others(study, catalogue)
        self._num_noted = 0
        self._pulse = pulse or Pulse()
        self._sampler = LegalSampler(catalogue, guide or tpe(seed), seed=seed, prior=prior)
        study.sampler = self._sampler
        self._best_us = float("inf")
        for trial, outcome in outcomes(study, catalogue.family):
            # Under --set an earlier run may have tried what lies outside of this run's space.
            row = catalogue.row(outcome.variant)
            self.others.settled(trial.number, row)
            if row is not None:
                self.earlier.append(outcome)
                self._note(outcome)
        self.look_at_others()
        self.sweeps = catalogue.num_unseen <= min(SWEEP_MAX, budget if budget is not None else SWEEP_MAX)
        self._plan(known, prior, random.Random(seed))

    @property
    def exhausted(self) -> bool:
        return self.catalogue.num_unseen == 0

    @property
    def best_us(self) -> float | None:
        """Fastest so far in this space, earlier runs of the study included."""
        return None if self._best_us == float("inf") else self._best_us

    def look_at_others(self) -> None:
        """Learns what other coordinators of the study have finished, begun and left behind."""
        self.others.look()
        self._note_others()

    def _note_others(self) -> None:
        for outcome in self.others.outcomes[self._num_noted :]:
            self._note(outcome)
        self._num_noted = len(self.others.outcomes)

    def ask(self) -> Proposal | None:
        """The next variant, None when every legal one is tried or being tried."""
        while True:
            if self.exhausted:
                return None
            trial = self.study.ask()
            trial.set_user_attr(OWNER, self._pulse.owner)
            for parameter in self.catalogue.family.parameters():
                trial.suggest_categorical(parameter.name, parameter.choices)
            assert self._sampler.chosen is not None
            row, origin = self._sampler.chosen
            mine = self.others.gives(trial, row)
            self._note_others()
            if mine:
                self._pulse.add(trial)
                return Proposal(self.catalogue.variant(row), row, origin, trial)

    def tell(self, proposal: Proposal, outcome: Outcome) -> bool:
        """Records an outcome. A failure is PRUNED and infeasible, never a number that would mislead.

        Returns whether it was recorded: a coordinator that stood still for too long finds its trial given up
        by another, which tries the variant itself.
        """
        trial = proposal.trial
        self._pulse.remove(trial)
        try:
            trial.set_user_attr("origin", str(proposal.origin))
            for name, figure in plain_figures(outcome).items():
                trial.set_user_attr(name, figure)
            trial.set_user_attr(OUTCOME, outcome_to_dict(outcome))
            if outcome.measurement is not None and outcome.status in (Status.OK, Status.SLOW):
                self.study.tell(trial, outcome.measurement.median_us)
            else:
                if hasattr(trial, "set_constraint"):  # Optuna 5; before, PRUNED alone ranks it last
                    trial.set_constraint(str(outcome.status), 1.0)
                self.study.tell(trial, state=TrialState.PRUNED)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            if not self.others.given_up(trial):
                raise
            return False
        self._note(outcome)
        return True

    def abandon(self, proposal: Proposal) -> None:
        """Gives up a trial that was not carried out; a later run may try its variant."""
        self._pulse.remove(proposal.trial)
        self.study.tell(proposal.trial, state=TrialState.FAIL)

    def _note(self, outcome: Outcome) -> None:
        row = self._take(outcome.variant)
        measured = outcome.measurement
        if outcome.status is Status.OK and measured is not None and measured.median_us < self._best_us:
            self._best_us = measured.median_us
            self._sampler.best_row = row

    def _take(self, variant: Variant) -> int | None:
        row = self.catalogue.row(variant)
        if row is not None:
            self.catalogue.take(row)
        return row

    def _plan(self, known: Iterable[Variant], prior: Prior | None, rng: random.Random) -> None:
        """Queues the seeds and, in a small space, everything."""
        catalogue, queue = self.catalogue, self._sampler.queue
        if self.exhausted:
            return
        for variant in known:
            if type(variant) is catalogue.family:
                row = catalogue.nearest(variant, among_unseen=False)
                if row is not None:
                    queue.append((row, Origin.KNOWN))
        if prior is not None and not self.earlier:
            queue.append((predicted_fastest(catalogue, prior, rng)[0][1], Origin.PREDICTED))
        if not self.earlier:
            default = catalogue.nearest(catalogue.family(), among_unseen=False)
            assert default is not None
            queue.append((default, Origin.DEFAULT))
        if self.sweeps:
            rows = catalogue.sample(catalogue.num_unseen, rng)
            if prior is not None:
                rows.sort(key=lambda row: prior(catalogue.variant(row)))
            queue.extend((row, Origin.SWEEP) for row in rows)


def predicted_fastest(catalogue: Catalogue, prior: Prior, rng: random.Random) -> list[tuple[float, int]]:
    """Predicted time and row of the variants looked at, fastest first: all of a small space, else a random
    sample and a descent over neighbours from its best."""
    costs: dict[int, float] = {}

    def cost(row: int) -> float:
        if row not in costs:
            costs[row] = prior(catalogue.variant(row))
        return costs[row]

    whole = catalogue.num_unseen <= PRIOR_WHOLE
    best = min(catalogue.sample(PRIOR_WHOLE if whole else PRIOR_SAMPLE, rng), key=cost)
    while len(costs) < PRIOR_BUDGET and not whole:
        around = catalogue.neighbours(best).tolist()
        nearest = min(around, key=cost, default=best)
        if cost(nearest) >= cost(best):
            break
        best = nearest
    return sorted((us, row) for row, us in costs.items())


def tpe(seed: int) -> TPESampler:
    """TPE with what its versions set differently by default set explicitly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP_TRIALS)
