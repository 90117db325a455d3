"""What a report tells of a tuned problem, as data: from a group of studies to frozen dataclasses."""

from __future__ import annotations

import contextlib
import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage
from optuna.study import load_study
from optuna.trial import FrozenTrial, TrialState

from ...gen.emit.module import emit_cuda
from ...gen.families import family_named
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Illegal, Variant
from ..errors import FlashgenError
from ..evaluate.outcome import Measurement, Outcome, Status
from ..evaluate.reasons import count_reasons
from ..predict.bounds import Bounds, bounds_of, predicted
from ..predict.catalogue import build_catalogue
from ..predict.prediction import Prediction
from ..predict.rank_correlation import spearman
from ..search.importance import Importance, Worth, importance, worth_of
from ..shelf import library
from ..shelf.winners import TUNED
from ..store.studies import OUTCOME, outcome_from_dict, storage_errors
from .chosen import Group

#: How a search names what proposed a trial.
ORIGIN = "origin"


@dataclass(frozen=True)
class Trial:
    """One trial; ``number`` counts those of all families in the order in which they ended."""

    number: int
    outcome: Outcome
    origin: str
    ended_at: datetime.datetime | None
    prediction: Prediction | None

    @property
    def variant(self) -> Variant:
        return self.outcome.variant

    @property
    def median_us(self) -> float | None:
        return self.outcome.measurement.median_us if self.outcome.measurement else None


@dataclass(frozen=True)
class Pruned:
    """A family's space: all combinations, what each rule removed, what is left."""

    total: int
    removed: Mapping[str, int]
    legal: int


@dataclass(frozen=True)
class FamilyPart:
    """One family's share of the report. ``unreadable`` counts trials with values that are none any more;
    ``rho`` is Spearman's between predicted and measured times."""

    family: type[Variant]
    trials: tuple[Trial, ...]
    unreadable: int
    pruned: Pruned | None
    importance: Importance | None
    rho: float | None

    @property
    def name(self) -> str:
        return self.family.family

    @property
    def timed(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.median_us is not None)

    @property
    def best_us(self) -> float:
        return min((t.median_us for t in self.trials if t.median_us is not None), default=float("inf"))


@dataclass(frozen=True)
class Winner:
    """The fastest kernel. ``retimed``: a run came to its end and timed the finalists once more; ``search_us``
    is what its trial took, where that is known, ``source_note`` where the source comes from."""

    variant: Variant
    measurement: Measurement
    retimed: bool
    search_us: float | None
    number: int | None
    tuned_at: str
    worth: tuple[Worth, ...]
    bounds: Bounds | None
    source: str
    source_note: str


@dataclass(frozen=True)
class Origin:
    """What one way of proposing variants found."""

    name: str
    trials: int
    best_us: float | None


@dataclass(frozen=True)
class Report:
    """All of it. ``families`` has the fastest first; ``older`` counts groups of the same problem and card by
    other versions, of which nothing is told."""

    problem: Problem
    device: str
    limits: DeviceLimits
    slug: str
    predicted: bool
    about: Mapping[str, str]
    studies: tuple[str, ...]
    families: tuple[FamilyPart, ...]
    trials: tuple[Trial, ...]
    winner: Winner | None
    statuses: Mapping[str, int]
    reasons: Mapping[str, int]
    origins: tuple[Origin, ...]
    in_flight: int
    older: int

    @property
    def timed(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.median_us is not None)

    @property
    def failed(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.median_us is None)

    def to_dict(self) -> dict[str, Any]:
        winner = self.winner
        bounds = winner.bounds if winner else None
        return {
            "problem": self.problem.to_dict(),
            "device": self.device,
            "predicted": self.predicted,
            "studies": list(self.studies),
            "trials": len(self.trials),
            "statuses": dict(self.statuses),
            "reasons": dict(self.reasons),
            "winner": None
            if winner is None
            else {
                "family": winner.variant.family,
                "variant": winner.variant.to_dict(),
                "median_us": winner.measurement.median_us,
                "retimed": winner.retimed,
                "limiter": bounds.limiter.name if bounds else None,
                "parts_us": {part.name: part.us for part in bounds.parts} if bounds else None,
            },
            "families": {
                part.name: {
                    "trials": len(part.trials),
                    "best_us": part.best_us if part.timed else None,
                    "importance": part.importance.shares if part.importance else None,
                    "spearman": part.rho,
                    "legal": part.pruned.legal if part.pruned else None,
                    "removed": dict(part.pruned.removed) if part.pruned else None,
                }
                for part in self.families
            },
        }


@dataclass(frozen=True)
class _Study:
    """A study as it was read."""

    name: str
    about: Mapping[str, Any]
    family: type[Variant]
    done: tuple[tuple[FrozenTrial, Outcome], ...]
    unreadable: int
    in_flight: int


def make_report(
    storage: BaseStorage,
    where: str,
    group: Group,
    *,
    out: Path,
    older: int = 0,
) -> Report:
    """Reads the group's studies and works out what there is to tell. ``out`` is where the winner's file may
    be."""
    with storage_errors(where):
        studies = [_read(storage, name) for name in group.names]
    about = studies[0].about
    problem, limits = group.problem, DeviceLimits(**about["limits"])
    by_family = _trials(studies, problem, limits)
    parts = [
        _family_part(study, by_family[study.name], problem, limits, bool(about["predicted"]))
        for study in studies
    ]
    parts.sort(key=lambda part: part.best_us)
    trials = sorted((t for each in by_family.values() for t in each), key=lambda t: t.number)
    return Report(
        problem=problem,
        device=str(about["device"]),
        limits=limits,
        slug=group.slug,
        predicted=bool(about["predicted"]),
        about={key: str(about.get(key, "")) for key in ("toolkit", "driver", "flashgen", "seed")},
        studies=group.names,
        families=tuple(parts),
        trials=tuple(trials),
        winner=_winner(studies, parts, problem, limits, group.slug, out),
        statuses=dict(Counter(str(t.outcome.status) for t in trials).most_common()),
        reasons=count_reasons(t.outcome for t in trials if t.median_us is None),
        origins=_origins(trials),
        in_flight=sum(study.in_flight for study in studies),
        older=older,
    )


def _read(storage: BaseStorage, name: str) -> _Study:
    study = load_study(study_name=name, storage=storage)
    about = study.user_attrs
    family = family_named(about["family"])
    done: list[tuple[FrozenTrial, Outcome]] = []
    unreadable = in_flight = 0
    for trial in study.get_trials(deepcopy=False):
        if trial.state is TrialState.RUNNING:
            in_flight += 1
        if OUTCOME not in trial.user_attrs or not trial.state.is_finished():
            continue
        try:
            done.append((trial, outcome_from_dict(family, trial.user_attrs[OUTCOME])))
        except (KeyError, TypeError, ValueError):
            unreadable += 1
    return _Study(name, about, family, tuple(done), unreadable, in_flight)


def _trials(
    studies: Sequence[_Study], problem: Problem, limits: DeviceLimits
) -> dict[str, tuple[Trial, ...]]:
    """The trials of each study, numbered across all of them in the order in which they ended."""
    every = [(trial, outcome, study.name) for study in studies for trial, outcome in study.done]
    every.sort(key=lambda each: (each[0].datetime_complete or datetime.datetime.min, each[0].number))
    found: dict[str, list[Trial]] = {study.name: [] for study in studies}
    for number, (trial, outcome, name) in enumerate(every, start=1):
        prediction = predicted(outcome.variant, problem, limits) if outcome.measurement else None
        origin = str(trial.user_attrs.get(ORIGIN, ""))
        found[name].append(Trial(number, outcome, origin, trial.datetime_complete, prediction))
    return {name: tuple(trials) for name, trials in found.items()}


def _family_part(
    study: _Study, trials: tuple[Trial, ...], problem: Problem, limits: DeviceLimits, emulated: bool
) -> FamilyPart:
    timed = [(t.variant, t.median_us, t.prediction) for t in trials if t.median_us is not None]
    variants, times = [v for v, _, _ in timed], [us for _, us, _ in timed]
    both = [(p.median_us, us) for _, us, p in timed if p is not None]
    catalogue = build_catalogue(study.family, problem, limits)
    return FamilyPart(
        family=study.family,
        trials=trials,
        unreadable=study.unreadable,
        pruned=Pruned(catalogue.total, dict(catalogue.removed), len(catalogue)),
        importance=importance(variants, times),
        rho=None if emulated else spearman([p for p, _ in both], [us for _, us in both]),
    )


def _winner(
    studies: Sequence[_Study],
    parts: Sequence[FamilyPart],
    problem: Problem,
    limits: DeviceLimits,
    slug: str,
    out: Path,
) -> Winner | None:
    """The last run's winner; the best trial where none came to its end."""
    found: tuple[Variant, Measurement, bool, str] | None = None
    for study in studies:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            kernel = library.from_record(study.about[TUNED], "")
            if found is None or kernel.tuned_at > found[3]:
                found = (kernel.variant, kernel.measurement, True, kernel.tuned_at)
    fine = [t for part in parts for t in part.trials if t.outcome.status is Status.OK]
    if found is None and fine:
        best = min(fine, key=lambda t: t.median_us or float("inf"))
        assert best.outcome.measurement is not None
        found = (best.variant, best.outcome.measurement, False, "")
    if found is None:
        return None
    variant, measurement, retimed, tuned_at = found
    own = next((t for part in parts for t in part.trials if t.variant == variant), None)
    # A run that was interrupted leaves its best trial as the winner.
    retimed = retimed and (own is None or own.outcome.measurement != measurement)
    family = next((part for part in parts if part.family is type(variant)), None)
    timed = family.timed if family else ()
    times = [t.median_us for t in timed if t.median_us is not None]
    others = [t.prediction for t in timed if t.prediction is not None]
    about = next(study.about for study in studies if study.family is type(variant))
    source, note = _source(variant, measurement, problem, limits, slug, out, about)
    return Winner(
        variant=variant,
        measurement=measurement,
        retimed=retimed,
        search_us=own.median_us if own and retimed else None,
        number=own.number if own else None,
        tuned_at=tuned_at,
        worth=worth_of(variant, [t.variant for t in timed], times) if times else (),
        bounds=bounds_of(variant, measurement.median_us, measurement.registers, others, problem, limits),
        source=source,
        source_note=note,
    )


def _source(
    variant: Variant,
    measurement: Measurement,
    problem: Problem,
    limits: DeviceLimits,
    slug: str,
    out: Path,
    about: Mapping[str, Any],
) -> tuple[str, str]:
    """The winner's source and where it comes from: its file, if that is still the winner's; else anew."""
    path = library.Paths.of(out, slug, problem.name).json
    with contextlib.suppress(FlashgenError):
        entry = library.read(path)
        if (entry.kernel.variant, entry.kernel.measurement) == (variant, measurement):
            return entry.kernel.source, f"as in {path.with_suffix('.cu')}"
    try:
        kernel = render(variant, problem, limits)
    except Illegal as error:
        return "", f"this version of flashgen would not write it any more ({error})"
    return emit_cuda(kernel, device=str(about["device"]), measurement=measurement.to_dict()), "rendered anew"


def _origins(trials: Sequence[Trial]) -> tuple[Origin, ...]:
    names = list(dict.fromkeys(t.origin for t in trials if t.origin))
    found = []
    for name in names:
        theirs = [t for t in trials if t.origin == name]
        times = [t.median_us for t in theirs if t.median_us is not None]
        found.append(Origin(name, len(theirs), min(times, default=None)))
    return tuple(found)
