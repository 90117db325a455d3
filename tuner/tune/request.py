"""What a person asks of tuning: problems, cards of one kind or several, what competes, and the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Value, Variant
from ..cards.device import Device
from ..option_words import one_family, parse_settings
from ..search.sampler_names import SamplerName
from ..serving import serving_families
from .options import DEFAULT_SIM_TRIALS, DEFAULT_TRIALS, TuneOptions

#: The families that compete for a problem, and the parameters held.
Competing = tuple[tuple[type[Variant], ...], Mapping[str, Value]]


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """Problems to tune on each kind of card, and what may be spent on it.

    ``kinds`` has the cards of each kind. Where no ``families`` are named, all that serve a problem compete.
    ``settings`` are ``name=value`` texts of parameters to hold. Several problems make a module, called
    ``module``, which the options ``words`` emit again.
    """

    kinds: tuple[tuple[Device, ...], ...]
    problems: tuple[Problem, ...]
    families: tuple[type[Variant], ...]
    settings: tuple[str, ...]
    trials: int | None
    minutes: float | None
    sampler: SamplerName
    seed: int
    storage: str
    out: Path
    jobs: int
    module: str
    words: tuple[str, ...]

    def competing(self, problem: Problem, limits: DeviceLimits) -> Competing:
        """Returns the families that compete for a problem on a card, and the parameters held.

        Raises:
            UsageError: a setting is none of the family's.
            NotServed: no family computes the problem there.
        """
        families = self.families or serving_families(problem, limits, self.settings)
        return families, parse_settings(one_family(families), self.settings) if self.settings else {}

    def options(self, cards: tuple[Device, ...]) -> TuneOptions:
        """Returns the options of a run for the first problem on cards of one kind."""
        trials = self.trials
        if trials is None and self.minutes is None and self.sampler is not SamplerName.EXHAUSTIVE:
            trials = DEFAULT_SIM_TRIALS if cards[0].predicted else DEFAULT_TRIALS
        return TuneOptions(
            device=cards[0],
            more_devices=cards[1:],
            problem=self.problems[0],
            families=self.families,
            trials=trials,
            minutes=self.minutes,
            sampler=self.sampler,
            seed=self.seed,
            storage=self.storage,
            out=self.out,
            jobs=self.jobs,
        )
