"""One family's part of a tuning run: its study, its search, what it may spend and what it has found."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from optuna.study import Study

from ...gen.variant import Variant
from ..evaluate.outcome import Outcome
from ..predict.catalogue import Catalogue
from ..predict.cost_model import COST_MODEL
from ..predict.prior import prior_of, remembered
from ..search.ask_tell import Search
from ..search.sampler_names import SamplerName
from ..search.transfer import Lesson, informed, neighbours
from ..shelf import choice, library
from ..store.about import About
from ..store.liveness import Pulse
from ..store.makers import Makers, name_of_study
from ..store.studies import open_study, storage_errors
from ..version import flashgen_version
from .events import Doing, SpaceReady
from .options import TuneOptions
from .spaces import Space
from .workshop import Workshop


@dataclass
class FamilyRun:
    """One family's part of the run; ``budget`` counts the trials of its study, whoever made them.

    ``deadline`` is by the monotonic clock; either is None without such a bound. ``times_in_full`` is set
    where slow variants are not stopped early.
    """

    catalogue: Catalogue
    search: Search
    budget: int | None
    deadline: float | None
    times_in_full: bool
    done: list[Outcome] = field(default_factory=list)

    @property
    def family(self) -> type[Variant]:
        """The family that is searched."""
        return self.catalogue.family

    @property
    def all_outcomes(self) -> list[Outcome]:
        """The study's outcomes: those of earlier runs, of other coordinators, and of this run."""
        return self.search.earlier + self.search.others.outcomes + self.done

    @property
    def num_trials(self) -> int:
        """The number of the study's trials that have ended."""
        return len(self.search.earlier) + len(self.search.others.outcomes) + len(self.done)

    @property
    def best_us(self) -> float:
        """The fastest time of the study, infinite where nothing works yet."""
        return self.search.best_us or float("inf")

    @property
    def out_of_time(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline


def makers_of(options: TuneOptions, family: type[Variant], toolkit: str) -> Makers:
    """Returns what makes the trials of a family on the run's cards."""
    return Makers.of(family, toolkit, COST_MODEL if options.device.predicted else None)


def begin_search(
    options: TuneOptions,
    space: Space,
    study: Study,
    lessons: Sequence[Lesson],
    *,
    known: Iterable[library.Entry],
    budget: int | None,
    pulse: Pulse,
) -> Search:
    """Returns the search of a family's space, taught by what neighbouring problems found.

    ``known`` are the library's kernels, of which the nearest are tried first.
    """
    catalogue = space.catalogue
    problem, limits = catalogue.problem, catalogue.limits
    prior = remembered(prior_of(problem, limits), catalogue, space.predicted)
    return Search(
        catalogue,
        study,
        budget=budget,
        seed=options.seed,
        known=choice.nearest_variants(known, problem, limits, catalogue.family),
        prior=informed(prior, catalogue, lessons, limits),
        pulse=pulse,
        sampler=options.sampler,
    )


def open_family_run(
    options: TuneOptions,
    space: Space,
    share: tuple[int | None, float | None],
    shop: Workshop,
    known: Iterable[library.Entry],
) -> FamilyRun:
    """Opens the family's study and starts its search.

    ``share`` is the trials and minutes that the family may spend for now, ``known`` the library's kernels.
    """
    shop.report(Doing(f"{space.catalogue.family.family}: reading what was tried before"))
    started = time.monotonic()
    device, catalogue = options.device, space.catalogue
    problem, limits = catalogue.problem, catalogue.limits
    makers = makers_of(options, catalogue.family, shop.toolkit)
    about = About(
        problem=problem,
        limits=limits,
        family=catalogue.family,
        predicted=device.predicted,
        driver=device.driver,
        toolkit=shop.toolkit,
        flashgen=flashgen_version(),
        seed=options.seed,
        mark=makers.mark,
        identity=makers.identities[0],
        cost_model=makers.cost_model,
    )
    with storage_errors(options.storage):
        name = name_of_study(shop.storage, about.slug, problem, about.family, makers)
        lessons = neighbours(shop.storage, about.slug, problem, makers, about.family)
    study = open_study(shop.storage, options.storage, name, about.attributes())
    shop.report(Doing(f"{about.family.family}: ranking the variants by the cost model"))
    trials, minutes = share
    search = begin_search(options, space, study, lessons, known=known, budget=trials, pulse=shop.pulse)
    run = FamilyRun(
        catalogue,
        search,
        budget=trials,
        deadline=None if minutes is None else time.monotonic() + 60 * minutes,
        times_in_full=options.sampler is SamplerName.EXHAUSTIVE,
    )
    shop.report(
        SpaceReady(
            about.family.family,
            len(catalogue),
            catalogue.total,
            catalogue.removed,
            len(search.earlier),
            trials,
            search.sweeps,
            space.seconds + time.monotonic() - started,
            tuple(lesson.problem.name for lesson in lessons),
        )
    )
    return run
