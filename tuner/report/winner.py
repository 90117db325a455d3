"""The winner that a report tells of: the last run's, or the best trial, with its source and its limits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...gen.emit.cuda import emit_cuda
from ...gen.limits import DeviceLimits
from ...gen.render import render
from ...gen.variant import Illegal, Variant
from ..errors import FlashgenError
from ..evaluate.outcome import Measurement, Status, TunedKernel
from ..predict.bounds import bounds_of
from ..search.importance import worth_of
from ..shelf import library, records
from ..shelf.winners import TUNED
from ..store.studies import UNREADABLE
from .chosen import Group
from .content import FamilyPart, Winner
from .read_study import ReadStudy


@dataclass(frozen=True)
class _Found:
    """A variant, its figures, and when a run tuned it; empty for a trial of a run that did not end."""

    variant: Variant
    measurement: Measurement
    tuned_at: str = ""


def winner_of(
    studies: Sequence[ReadStudy],
    parts: Sequence[FamilyPart],
    group: Group,
    limits: DeviceLimits,
    out: Path,
) -> Winner | None:
    """Returns the last run's winner, or the best trial where no run came to its end; None where none works.

    ``out`` is where the winner's file may be.
    """
    found = _last_tuned(studies) or _best_trial(parts)
    if found is None:
        return None
    variant, measurement = found.variant, found.measurement
    own = next((t for part in parts for t in part.trials if t.variant == variant), None)
    # A run that was interrupted leaves its best trial as the winner.
    retimed = bool(found.tuned_at) and (own is None or own.outcome.measurement != measurement)
    family = next((part for part in parts if part.family is type(variant)), None)
    timed = family.timed if family else ()
    times = [t.median_us for t in timed if t.median_us is not None]
    others = [t.prediction for t in timed if t.prediction is not None]
    about = next(study.about for study in studies if study.family is type(variant))
    source, note = _source(found, group, limits, out, str(about["device"]))
    return Winner(
        variant=variant,
        measurement=measurement,
        retimed=retimed,
        search_us=own.median_us if own and retimed else None,
        number=own.number if own else None,
        tuned_at=found.tuned_at,
        worth=worth_of(variant, [t.variant for t in timed], times) if times else (),
        bounds=bounds_of(
            variant, measurement.median_us, measurement.registers, others, group.problem, limits
        ),
        source=source,
        source_note=note,
    )


def _last_tuned(studies: Sequence[ReadStudy]) -> _Found | None:
    """The winner of the last run that came to its end."""
    tuned: list[TunedKernel] = []
    for study in studies:
        with contextlib.suppress(*UNREADABLE):
            tuned.append(records.from_record(study.about[TUNED], ""))
    if not tuned:
        return None
    last = max(tuned, key=lambda kernel: kernel.tuned_at)
    return _Found(last.variant, last.measurement, last.tuned_at)


def _best_trial(parts: Sequence[FamilyPart]) -> _Found | None:
    fine = [t.outcome for part in parts for t in part.trials if t.outcome.status is Status.OK]
    measured = [(o.variant, o.measurement) for o in fine if o.measurement is not None]
    if not measured:
        return None
    variant, measurement = min(measured, key=lambda each: each[1].median_us)
    return _Found(variant, measurement)


def _source(found: _Found, group: Group, limits: DeviceLimits, out: Path, device: str) -> tuple[str, str]:
    """The winner's source and where it comes from: its file, if that is still the winner's; else anew."""
    path = library.Paths.of(out, group.slug, group.problem.name).json
    with contextlib.suppress(FlashgenError):
        entry = library.read(path)
        if (entry.kernel.variant, entry.kernel.measurement) == (found.variant, found.measurement):
            return entry.kernel.source, f"as in {path.with_suffix('.cu')}"
    try:
        kernel = render(found.variant, group.problem, limits)
    except Illegal as error:
        return "", f"this version of flashgen would not write it any more ({error})"
    return emit_cuda(kernel, device=device, measurement=found.measurement.to_dict()), "rendered anew"
