"""Which variant to try next: Optuna by ask and tell over the enumerated legal variants.

The study sees one categorical parameter per field of the family. Its sampler, one of `samplers`, proposes
nothing but legal variants that no trial has taken, so a trial's parameters are always a variant that was
tried, and no variant is tried twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import optuna
from optuna.study import Study
from optuna.trial import Trial, TrialState, create_trial

from ...gen.variant import Variant
from ..evaluate.outcome import Outcome, Status
from ..predict.catalogue import Catalogue
from ..predict.prior import Prior
from ..predict.ranking import Ranking
from ..store.liveness import OWNER, Pulse
from ..store.other_coordinators import OtherCoordinators
from ..store.studies import OUTCOME, distributions, outcome_to_dict, outcomes, plain_figures
from .sampler_names import SamplerName
from .samplers import FIRST_DESCENT, FIRST_LOOK, LegalSampler, Origin, make_sampler


@dataclass(frozen=True)
class Proposal:
    """A variant to try, taken from the space until it is told."""

    variant: Variant
    row: int
    origin: Origin
    trial: Trial


class Search:
    """Asks a study for variants of a catalogue and tells it what became of them.

    Args:
        catalogue: the legal variants; what the study has tried is taken from it here.
        study: holds every outcome, those of earlier runs too.
        budget: trials this run may make, None without such a bound.
        seed: makes the proposals reproducible, given the same outcomes in the same order.
        known: winners to try first, of other problems or cards too: the nearest legal variant is.
        prior: predicted time of a variant; guides the first trials.
        sampler: what proposes.
        seeded: whether known winners, the fastest predicted and the default come first.
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
        sampler: SamplerName = SamplerName.GP,
        seeded: bool = True,
        pulse: Pulse | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.study = study
        self.earlier: list[Outcome] = []
        self.others = OtherCoordinators(study, catalogue)
        self._num_noted = 0
        self._pulse = pulse or Pulse()
        ranking = None if prior is None else Ranking(catalogue, prior, seed)
        self._sampler: LegalSampler = make_sampler(sampler, catalogue, seed=seed, ranking=ranking)
        study.sampler = self._sampler
        self._best_us = float("inf")
        for trial, outcome in outcomes(study, catalogue.family):
            # Under --set an earlier run may have tried what lies outside of this run's space.
            row = catalogue.row(outcome.variant)
            self.others.settled(trial.number, row)
            if row is not None:
                self.earlier.append(outcome)
                self._sampler.hear(trial.number, row, _us(outcome))
                self._note(outcome, row)
        self.look_at_others()
        self.sweeps = sampler is SamplerName.EXHAUSTIVE or (
            budget is not None and catalogue.num_unseen <= budget - len(self.earlier)
        )
        if seeded and not self.exhausted:
            self._plan(known, ranking)

    @property
    def exhausted(self) -> bool:
        return self.catalogue.num_unseen == 0

    @property
    def best_us(self) -> float | None:
        """The fastest time so far in this space, earlier runs of the study included."""
        return None if self._best_us == float("inf") else self._best_us

    def look_at_others(self) -> None:
        """Learns what other coordinators of the study have finished, begun and left behind."""
        self.others.look()
        self._note_others()

    def _note_others(self) -> None:
        for outcome in self.others.outcomes[self._num_noted :]:
            self._note(outcome, self.catalogue.row(outcome.variant))
        self._num_noted = len(self.others.outcomes)

    def ask(self) -> Proposal | None:
        """Returns the next variant to try, None when every legal one is tried or being tried."""
        return next(iter(self.ask_many(1)), None)

    def ask_many(self, count: int) -> list[Proposal]:
        """Returns the next ``count`` variants, or as many as are left. The study is read once for all."""
        proposals: list[Proposal] = []
        while len(proposals) < count and not self.exhausted:
            begun = {p.trial.number: p for p in self._begin(count - len(proposals))}
            granted = self.others.grant({number: (p.trial, p.row) for number, p in begun.items()})
            self._note_others()
            for number in granted:
                self._pulse.add(begun[number].trial)
            proposals += [p for number, p in begun.items() if number in granted]
        return proposals

    def _begin(self, count: int) -> list[Proposal]:
        """Trials of up to ``count`` variants, which other coordinators may want too."""
        if self._sampler.needs_trial:
            trial = self.study.ask(dict(distributions(self.catalogue.family)))
            assert self._sampler.chosen is not None
            row, origin = self._sampler.chosen
            trial.set_user_attr(OWNER, self._pulse.owner)
            trial.set_user_attr("origin", str(origin))
            return [Proposal(self.catalogue.variant(row), row, origin, trial)]
        rows = self._sampler.propose(self.others.trials, None, self.study, count)
        return [
            Proposal(self.catalogue.variant(row), row, origin, self._new_trial(row, origin))
            for row, origin in rows
        ]

    def _new_trial(self, row: int, origin: Origin) -> Trial:
        """A trial with all its parameters in one write; suggested one by one, each would be a transaction."""
        family = self.catalogue.family
        template = create_trial(
            state=TrialState.RUNNING,
            params=self.catalogue.variant(row).to_dict(),
            distributions=dict(distributions(family)),
            user_attrs={OWNER: self._pulse.owner, "origin": str(origin)},
        )
        # As `Study.add_trial`, which does not say which trial it made.
        created = self.study._storage.create_new_trial(self.study._study_id, template_trial=template)
        return Trial(self.study, created)

    def tell(self, proposal: Proposal, outcome: Outcome) -> bool:
        """Records an outcome. A failure is PRUNED and infeasible, never a number that would mislead.

        Returns whether it was recorded: a coordinator that stood still for too long finds its trial given up
        by another, which tries the variant itself.
        """
        trial, us = proposal.trial, _us(outcome)
        self._pulse.remove(trial)
        try:
            for name, figure in plain_figures(outcome).items():
                trial.set_user_attr(name, figure)
            trial.set_user_attr(OUTCOME, outcome_to_dict(outcome))
            if us is not None:
                self.study.tell(trial, us)
            else:
                if hasattr(trial, "set_constraint"):  # Optuna 5; before, PRUNED alone ranks it last
                    trial.set_constraint(str(outcome.status), 1.0)
                self.study.tell(trial, state=TrialState.PRUNED)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            if not self.others.given_up(trial):
                raise
            return False
        self._sampler.hear(trial.number, proposal.row, us)
        self._note(outcome, proposal.row)
        return True

    def abandon(self, proposal: Proposal) -> None:
        """Gives up a trial that was not carried out; a later run may try its variant."""
        self._pulse.remove(proposal.trial)
        self.study.tell(proposal.trial, state=TrialState.FAIL)

    def _note(self, outcome: Outcome, row: int | None) -> None:
        if row is not None:
            self.catalogue.take(row)
        measured = outcome.measurement
        if outcome.status is Status.OK and measured is not None and measured.median_us < self._best_us:
            self._best_us = measured.median_us

    def _plan(self, known: Iterable[Variant], ranking: Ranking | None) -> None:
        """Queues what is tried first."""
        catalogue, queue = self.catalogue, self._sampler.queue
        for variant in known:
            if type(variant) is catalogue.family:
                row = catalogue.nearest(variant, among_unseen=False)
                if row is not None:
                    queue.append((row, Origin.KNOWN))
        if self.earlier:
            return
        default = catalogue.nearest(catalogue.family(), among_unseen=False)
        assert default is not None
        if ranking is not None:
            ranking.look(FIRST_LOOK)
            ranking.of([*(row for row, _ in queue), default])
            # Of a large space those drawn are few: downhill from the best of these, known ones, the default.
            ranking.descend(int(ranking.known.sum()) + FIRST_DESCENT)
            queue.extend((row, Origin.PREDICTED) for row in ranking.fastest(1))
        queue.append((default, Origin.DEFAULT))


def _us(outcome: Outcome) -> float | None:
    """The time that a study is told, None for a failure."""
    if outcome.measurement is None or outcome.status not in (Status.OK, Status.SLOW):
        return None
    return outcome.measurement.median_us
