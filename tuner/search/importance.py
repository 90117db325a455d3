"""What trials tell about parameters: how much each matters, and what the winner's value of it is worth."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from ...gen.variant import Value, Variant

#: With fewer trials an importance is noise: a tenth of them is what the others are compared with. From
#: ``ENOUGH_TRIALS`` on that tenth is enough to go by.
FEWEST_TRIALS, ENOUGH_TRIALS = 20, 100
#: With fewer trials of a value its best time is chance: the other parameters were not tried beside it.
FEWEST_OF_A_VALUE = 5


@dataclass(frozen=True)
class Importance:
    """``shares`` says by parameter, the largest first, how much its value decides whether a kernel is among
    the fastest tenth of those timed (PED-ANOVA), as a part of what all parameters decide. ``trials`` were
    timed."""

    shares: dict[str, float]
    trials: int

    @property
    def is_rough(self) -> bool:
        """Whether there are too few trials to rely on the order."""
        return self.trials < ENOUGH_TRIALS


@dataclass(frozen=True)
class Worth:
    """What the winner's value of a parameter is worth: the best time with it, of so many ``trials``, beside
    that with the best other one; ``rival`` is None where no other value was timed."""

    name: str
    doc: str
    value: Value
    best_us: float
    trials: int
    rival: Value | None
    rival_us: float | None
    rival_trials: int

    @property
    def is_chance(self) -> bool:
        """Whether one of the two values was timed too seldom to say that the other is better."""
        return min(self.trials, self.rival_trials) < FEWEST_OF_A_VALUE

    @property
    def loss(self) -> float | None:
        """How much longer the best kernel without the value takes, as a part."""
        return None if self.rival_us is None else self.rival_us / self.best_us - 1


class _Given(InMemoryStorage):
    """A storage that has had all its trials from the beginning. Adding them one by one copies each deeply,
    with a distribution per parameter, which are then compared again and again."""

    def __init__(self, trials: list[FrozenTrial]) -> None:
        super().__init__()
        self._given = trials

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return [trial for trial in self._given if states is None or trial.state in states]


def varied(variants: Sequence[Variant]) -> list[str]:
    """Returns the parameters that had more than one value, in the family's order."""
    if not variants:
        return []
    names = [p.name for p in type(variants[0]).parameters()]
    return [name for name in names if len({getattr(v, name) for v in variants}) > 1]


def importance(variants: Sequence[Variant], times_us: Sequence[float]) -> Importance | None:
    """Returns what each parameter matters for being fast; None where there are too few times to tell.

    Trials are handed over anew: those of an older version lack parameters that have a default since.
    """
    names = varied(variants)
    if len(variants) < FEWEST_TRIALS or not names or len(set(times_us)) < 2:
        return None
    choices = {p.name: p.choices for p in type(variants[0]).parameters()}
    seen = {name: {getattr(v, name) for v in variants} for name in names}
    distributions: dict[str, BaseDistribution] = {
        name: CategoricalDistribution([c for c in choices[name] if c in seen[name]]) for name in names
    }
    now = datetime.datetime.now()
    trials = [
        FrozenTrial(
            number=number,
            trial_id=number,
            state=TrialState.COMPLETE,
            value=math.log(us),
            datetime_start=now,
            datetime_complete=now,
            params={name: getattr(variant, name) for name in names},
            distributions=distributions,
            user_attrs={},
            system_attrs={},
            intermediate_values={},
        )
        for number, (variant, us) in enumerate(zip(variants, times_us, strict=True))
    ]
    study = optuna.create_study(storage=_Given(trials))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(), params=names)
    return Importance({name: float(share) for name, share in shares.items()}, len(variants))


def worth_of(winner: Variant, variants: Sequence[Variant], times_us: Sequence[float]) -> tuple[Worth, ...]:
    """Returns what the winner's value of each parameter is worth, by the times of its family's variants:
    first where there are enough trials to say, and the largest first."""
    found = []
    for parameter in type(winner).parameters():
        value = getattr(winner, parameter.name)
        times: dict[Value, list[float]] = {}
        for variant, us in zip(variants, times_us, strict=True):
            times.setdefault(getattr(variant, parameter.name), []).append(us)
        own = times.pop(value, [])
        rival = min(times, key=lambda other: min(times[other])) if times else None
        theirs = [] if rival is None else times[rival]
        found.append(
            Worth(
                name=parameter.name,
                doc=parameter.doc,
                value=value,
                best_us=min(own or times_us),
                trials=len(own),
                rival=rival,
                rival_us=min(theirs, default=None),
                rival_trials=len(theirs),
            )
        )
    return tuple(sorted(found, key=lambda worth: (worth.is_chance, -(worth.loss or 0.0))))
