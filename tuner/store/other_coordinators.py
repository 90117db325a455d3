"""Several coordinators on one study: which variants the others hold, and who gets one that two want.

A storage has no way to say "this variant is mine" at once, so it takes two steps. A coordinator writes a
trial with its parameters, which say that it wants the variant, then reads the others' trials. Of two that
want the same one, either each sees the other, or one of them read before the other had written. Who sees a
rival that holds the variant, or one with a lower number, gives way; the lowest waits until its rivals have
decided. What is decided is written at once, so that two with several trials each never wait for one another.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from ..evaluate.outcome import Outcome
from ..predict.catalogue import Catalogue
from .liveness import Watch
from .studies import OUTCOME, outcome_of

#: User attribute of a trial whose coordinator has made sure that nobody else tries its variant.
HELD = "held"
#: Between two looks at a rival that has not decided yet.
LOOK_SECONDS = 0.05


class OtherCoordinators:
    """The trials of the study that other coordinators made, as they come and go.

    ``outcomes`` is what they finished since this one joined, ``in_flight`` how many variants of the catalogue
    they hold, ``trials`` all of the study as last read. Rows of the catalogue are taken and given back here.
    """

    def __init__(self, study: Study, catalogue: Catalogue) -> None:
        self.outcomes: list[Outcome] = []
        self.trials: list[FrozenTrial] = []
        self._study = study
        self._catalogue = catalogue
        self._watch = Watch()
        self._own: dict[int, int | None] = {}
        self._settled: set[int] = set()
        self._held: dict[int, int] = {}
        self._done_rows: set[int] = set()

    @property
    def in_flight(self) -> int:
        return len(self._held)

    def settled(self, number: int, row: int | None) -> None:
        """Notes a trial that had ended when this coordinator joined, and its row of the catalogue."""
        self._settled.add(number)
        if row is not None:
            self._done_rows.add(row)

    def look(self) -> None:
        """Reads the study once: what others finished is in ``outcomes``, what the dead held is free."""
        self._sort(self._read())

    def _read(self) -> list[FrozenTrial]:
        self.trials = self._study.get_trials(deepcopy=False)
        return self.trials

    def grant(self, wanted: Mapping[int, tuple[Trial, int]]) -> set[int]:
        """Returns which of its own trials, by number, this coordinator may carry out; with each the row that
        its parameters name. The rest are over, and other coordinators try those variants."""
        self._own.update({number: row for number, (_, row) in wanted.items()})
        undecided, granted = dict(wanted), set()
        while True:
            trials = self._read()
            self._sort(trials)
            rivals: dict[int, list[FrozenTrial]] = defaultdict(list)
            for rival in trials:
                if rival.number in self._held:
                    rivals[self._held[rival.number]].append(rival)
            for number, (trial, row) in list(undecided.items()):
                mine = self._decide(number, row, rivals[row])
                if mine is None:
                    continue
                del undecided[number]
                if mine:
                    trial.set_user_attr(HELD, True)
                    granted.add(number)
                else:
                    self._own[number] = None
                    self._study.tell(trial, state=TrialState.FAIL)
            if not undecided:
                return granted
            time.sleep(LOOK_SECONDS)

    def _decide(self, number: int, row: int, rivals: Sequence[FrozenTrial]) -> bool | None:
        """Whether that trial gets the row; None while its rivals have not decided."""
        if row in self._done_rows or any(HELD in t.user_attrs or t.number < number for t in rivals):
            return False
        return None if rivals else True

    def given_up(self, trial: Trial) -> bool:
        """Tells whether another coordinator took this one's trial for a dead one's. Its variant is free
        then."""
        state = next(t.state for t in self._study.get_trials(deepcopy=False) if t.number == trial.number)
        if state is not TrialState.FAIL:
            return False
        row = self._own.pop(trial.number, None)
        if row is not None:
            self._held[trial.number] = row
        self._release(trial.number)
        return True

    def _sort(self, trials: Sequence[FrozenTrial]) -> None:
        """Takes and gives back rows as the trials say."""
        for trial in trials:
            if trial.number in self._settled or trial.number in self._own:
                continue
            match trial.state:
                case TrialState.RUNNING:
                    self._running(trial)
                case TrialState.COMPLETE | TrialState.PRUNED:
                    self._settled.add(trial.number)
                    outcome = self._ended(trial)
                    if outcome is not None:
                        self.outcomes.append(outcome)
                case TrialState.FAIL:
                    self._settled.add(trial.number)
                    self._release(trial.number)

    def _running(self, trial: FrozenTrial) -> None:
        if not self._watch.lives(trial):
            # Another coordinator may have found that out first.
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                self._study.tell(trial.number, state=TrialState.FAIL)
            self._release(trial.number)
            return
        row = self._catalogue.row_of(trial.params)
        if row is not None:
            self._held[trial.number] = row
            self._catalogue.take(row)

    def _ended(self, trial: FrozenTrial) -> Outcome | None:
        """The outcome, if it is of this catalogue."""
        self._held.pop(trial.number, None)
        if OUTCOME not in trial.user_attrs:
            return None
        outcome = outcome_of(trial, self._catalogue.family)
        row = None if outcome is None else self._catalogue.row(outcome.variant)
        if outcome is None or row is None or row in self._done_rows:
            return None
        self._catalogue.take(row)
        self._done_rows.add(row)
        return outcome

    def _release(self, number: int) -> None:
        row = self._held.pop(number, None)
        if row is None or row in self._done_rows:
            return
        if row not in self._held.values() and row not in self._own.values():
            self._catalogue.release(row)
