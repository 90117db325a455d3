"""A report's content, gathered from the trials of a group of studies."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from optuna.storages import BaseStorage

from ...gen.families import family_named
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.space import enumerate_space
from ...gen.variant import Variant
from ..evaluate.reasons import count_reasons
from ..predict.bounds import predicted
from ..predict.peak import peak_of
from ..predict.prediction import Prediction
from ..predict.rank_correlation import spearman
from ..search.importance import importance
from ..store.studies import storage_errors
from .charts.svg import thinned
from .chosen import Group
from .content import MOST_PREDICTED, FamilyPart, Origin, Pruned, Report, Trial
from .read_study import ReadStudy, about_study, read_study
from .winner import winner_of


def make_report(
    storage: BaseStorage,
    where: str,
    group: Group,
    *,
    out: Path,
    older: int = 0,
) -> Report:
    """Reads the group's studies and works out what there is to tell.

    ``where`` names the storage in errors, ``out`` is where the winner's file may be, ``older`` counts groups
    of the same problem and card by other versions.
    """
    problem = group.problem
    with storage_errors(where):
        abouts = [about_study(storage, name) for name in group.names]
        about = abouts[0]
        limits = DeviceLimits.from_dict(about["limits"])
        # Before any trial is read: to walk a space takes as much memory for a while as thousands of trials.
        pruned = [_pruned(family_named(each["family"]), problem, limits) for each in abouts]
        studies = [read_study(storage, name, each) for name, each in zip(group.names, abouts, strict=True)]
    by_family = _trials(studies, problem, limits)
    parts = [
        _family_part(study, by_family[study.name], removed, bool(about["predicted"]))
        for study, removed in zip(studies, pruned, strict=True)
    ]
    parts.sort(key=lambda part: part.best_us)
    trials = sorted((t for each in by_family.values() for t in each), key=lambda t: t.number)
    return Report(
        problem=problem,
        device=str(about["device"]),
        limits=limits,
        peak=peak_of(problem, limits),
        slug=group.slug,
        predicted=bool(about["predicted"]),
        about={key: str(about.get(key, "")) for key in ("toolkit", "driver", "flashgen", "seed")},
        studies=group.names,
        families=tuple(parts),
        trials=tuple(trials),
        winner=winner_of(studies, parts, group, limits, out),
        statuses=dict(Counter(str(t.outcome.status) for t in trials).most_common()),
        reasons=count_reasons(t.outcome for t in trials if t.median_us is None),
        origins=_origins(trials),
        in_flight=sum(study.in_flight for study in studies),
        older=older,
    )


def _trials(
    studies: Sequence[ReadStudy], problem: Problem, limits: DeviceLimits
) -> dict[str, tuple[Trial, ...]]:
    """The trials of each study, numbered across all of them in the order in which they ended."""
    every = [(trial, study.name) for study in studies for trial in study.done]
    every.sort(key=lambda each: (each[0].at or datetime.datetime.min, each[0].number))
    predictions = {study.name: _predictions(study, problem, limits) for study in studies}
    found: dict[str, list[Trial]] = {study.name: [] for study in studies}
    for number, (trial, name) in enumerate(every, start=1):
        prediction = predictions[name].get(trial.number)
        found[name].append(Trial(number, trial.outcome, trial.origin, trial.at, prediction))
    return {name: tuple(trials) for name, trials in found.items()}


def _predictions(study: ReadStudy, problem: Problem, limits: DeviceLimits) -> dict[int, Prediction | None]:
    """What the cost model says of the study's timed trials, by their number; of at most `MOST_PREDICTED`,
    evenly chosen from the fastest to the slowest."""
    timed = [(t.outcome.measurement.median_us, t) for t in study.done if t.outcome.measurement is not None]
    if len(timed) > MOST_PREDICTED:
        timed.sort(key=lambda each: each[0])
        timed = [timed[i] for i in thinned(len(timed), MOST_PREDICTED)]
    return {trial.number: predicted(trial.outcome.variant, problem, limits) for _, trial in timed}


def _pruned(family: type[Variant], problem: Problem, limits: DeviceLimits) -> Pruned:
    space = enumerate_space(family, problem, limits)
    return Pruned(space.total, space.removed, len(space))


def _family_part(study: ReadStudy, trials: tuple[Trial, ...], pruned: Pruned, emulated: bool) -> FamilyPart:
    timed = [(t.variant, t.median_us, t.prediction) for t in trials if t.median_us is not None]
    variants, times = [v for v, _, _ in timed], [us for _, us, _ in timed]
    both = [(p.median_us, us) for _, us, p in timed if p is not None]
    return FamilyPart(
        family=study.family,
        trials=trials,
        unreadable=study.unreadable,
        pruned=pruned,
        importance=importance(variants, times),
        rho=None if emulated else spearman([p for p, _ in both], [us for _, us in both]),
    )


def _origins(trials: Sequence[Trial]) -> tuple[Origin, ...]:
    names = list(dict.fromkeys(t.origin for t in trials if t.origin))
    found = []
    for name in names:
        theirs = [t for t in trials if t.origin == name]
        times = [t.median_us for t in theirs if t.median_us is not None]
        found.append(Origin(name, len(theirs), min(times, default=None)))
    return tuple(found)
