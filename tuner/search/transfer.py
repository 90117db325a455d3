"""What trials of neighbouring problems teach about this one: where the cost model was wrong there, it is
likely to be wrong here.

The error, as a logarithm, is learned over the variants' parameters, by the surrogate that searches use, and
added to the cost model's word. Between problems that differ in lengths, heads or mask alone it carries over
well: over 34 problems timed on an H200, two neighbours raise the rank correlation of predictions with times
from 0.83 to 0.91. Times themselves do not: what is best at 512 rows is not at 16384.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log

import numpy as np
from optuna.storages import BaseStorage
from optuna.study import get_all_study_names

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..evaluate.outcome import Outcome, Status
from ..predict.catalogue import Catalogue
from ..predict.prior import Prior, prior_of
from ..store.ended_trials import ended_trials
from ..store.makers import Makers
from ..store.studies import UNREADABLE
from .gaussian_process import process
from .nearness import masks_differ, scores_differ, shape_distance

#: Neighbours that are learned from, and the fewest times that teach anything.
NEIGHBOURS, FEWEST_TIMES = 2, 8
#: Doublings of a length that another mask counts as, and other masks and changes of scores beside it.
OTHER_MASK, OTHER_SCORES = 3.0, 4.0
#: Failures that are the source's and not the problem's.
SOURCE_FAILURES = (Status.COMPILE_FAILED, Status.SPILLED)


@dataclass(frozen=True)
class Lesson:
    """A neighbouring problem's finished trials, of the same family on the same card."""

    problem: Problem
    outcomes: tuple[Outcome, ...]


def neighbours(
    storage: BaseStorage, slug: str, problem: Problem, makers: Makers, family: type[Variant]
) -> list[Lesson]:
    """Returns the nearest problems that the storage holds enough trials of, nearest first: those of the same
    dtype, precision and head dims, of few query rows or many as it has itself, whatever their masks and
    changes of scores, whose trials the same makers made on the card of that slug."""
    near: list[tuple[float, str, Problem]] = []
    for name in get_all_study_names(storage):
        if not name.startswith(f"{slug}/{_arithmetic(problem)}") or f"/{family.family}/" not in name:
            continue
        about = storage.get_study_user_attrs(storage.get_study_id_from_name(name))
        if not makers.made(about):
            continue
        try:
            other = Problem.from_dict(about["problem"])
        except UNREADABLE:
            continue
        alike = (
            _arithmetic(other) == _arithmetic(problem) and other.has_few_queries == problem.has_few_queries
        )
        if other != problem and alike:
            masks = OTHER_MASK * masks_differ(other, problem) + OTHER_SCORES * scores_differ(other, problem)
            near.append((shape_distance(other, problem) + masks, name, other))
    lessons: dict[Problem, Lesson] = {}
    for _, name, other in sorted(near, key=lambda each: each[:2]):
        if other in lessons:
            continue
        trials = ended_trials(storage, storage.get_study_id_from_name(name), family)
        ended = tuple(trial.outcome for trial in trials)
        if sum(_has_time(outcome) for outcome in ended) >= FEWEST_TIMES:
            lessons[other] = Lesson(other, ended)
        if len(lessons) == NEIGHBOURS:
            break
    return list(lessons.values())


def informed(prior: Prior, catalogue: Catalogue, lessons: Sequence[Lesson], limits: DeviceLimits) -> Prior:
    """Returns the cost model's word on a catalogue's variants, corrected by what the lessons teach.

    What did not compile or spilled under the same masks will again: its source is the same.
    """
    codes: list[list[int]] = []
    errors: list[float] = []
    hopeless: set[int] = set()
    for lesson in lessons:
        found = _errors(lesson, limits)
        middle = float(np.median([error for _, error in found])) if found else 0.0
        for variant, error in found:
            codes.append(catalogue.encode(variant))
            # How wrong it is of all alike says nothing of the order.
            errors.append(error - middle)
        same = lesson.problem.causal == catalogue.problem.causal
        if same and not scores_differ(lesson.problem, catalogue.problem):
            rows = (catalogue.row(o.variant) for o in lesson.outcomes if o.status in SOURCE_FAILURES)
            hopeless.update(row for row in rows if row is not None)
    if not errors:
        return prior
    seen = np.array(codes, dtype=np.uint8).T
    everywhere = _columns(catalogue.family, catalogue.codes)
    correction = process(_columns(catalogue.family, seen), np.array(errors), everywhere, 0).mean

    def informed_us(variant: Variant) -> float:
        row = catalogue.row(variant)
        if row is None:
            return prior(variant)
        return float("inf") if row in hopeless else prior(variant) * exp(correction[row])

    return informed_us


def _arithmetic(problem: Problem) -> str:
    """What must be the same: dtype, precision and head dims."""
    return problem.stem.removesuffix(problem.scoring.stem)


def _has_time(outcome: Outcome) -> bool:
    return outcome.measurement is not None and outcome.status in (Status.OK, Status.SLOW)


def _errors(lesson: Lesson, limits: DeviceLimits) -> list[tuple[Variant, float]]:
    """Each timed variant and how much longer it took than the cost model says, as a logarithm."""
    prior = prior_of(lesson.problem, limits)
    found: list[tuple[Variant, float]] = []
    for outcome in lesson.outcomes:
        if _has_time(outcome) and outcome.measurement is not None:
            predicted = prior(outcome.variant)
            if isfinite(predicted) and predicted > 0:
                found.append((outcome.variant, log(outcome.measurement.median_us / predicted)))
    return found


def _columns(family: type[Variant], codes: np.ndarray) -> np.ndarray:
    """Choice indices as features that mean the same for every catalogue of the family: numbers by their rank
    among all choices, from 0 to 1, and one column per value of what has no order."""
    columns: list[np.ndarray] = []
    for parameter, row in zip(family.parameters(), codes, strict=True):
        choices = parameter.choices
        if len(choices) > 2 and not all(isinstance(choice, int) for choice in choices):
            columns += [row == code for code in range(len(choices))]
        else:
            sizes = [float(c) if isinstance(c, int) else i for i, c in enumerate(choices)]
            columns.append(np.argsort(np.argsort(sizes))[row] / max(1, len(choices) - 1))
    return np.stack(columns, axis=1).astype(np.float32)
