"""The winners that studies hold: what `emit` falls back on when the out folder could not be written."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optuna.storages import BaseStorage
from optuna.study import get_all_study_names

from ...gen.families import family_named
from ...gen.limits import DeviceLimits
from ...gen.render import render
from ..evaluate.outcome import Status
from ..store.about import card_of
from ..store.ended_trials import ended_trials
from ..store.studies import UNREADABLE, open_storage, storage_errors
from . import library, records

#: Study attribute that holds the winner's record.
TUNED = "tuned"


def kernels_in_storage(where: str) -> list[library.Entry]:
    """Returns the winners of all studies kept in a storage: re-timed ones where a run came to its end, else
    the best trial so far. Sources are rendered anew; what this version cannot render is passed over.

    Raises:
        FlashgenError: the storage cannot be opened.
    """
    storage = open_storage(where)
    found: list[library.Entry] = []
    with storage_errors(where):
        for name in get_all_study_names(storage):
            study_id = storage.get_study_id_from_name(name)
            about = storage.get_study_user_attrs(study_id)
            with contextlib.suppress(*UNREADABLE):
                slug, _ = card_of(about)
                record = about.get(TUNED) or _best_record(storage, study_id, about)
                if record is None:
                    continue
                kernel = records.from_record(record, "")
                limits = DeviceLimits.from_dict(about["limits"])
                rendered = render(kernel.variant, kernel.problem, limits)
                kernel = replace(kernel, source=rendered.source)
                found.append(library.Entry(kernel, slug, rendered=rendered))
    return found


def _best_record(storage: BaseStorage, study_id: int, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of an unfinished study's best trial."""
    fine = [
        (trial.outcome.measurement, trial)
        for trial in ended_trials(storage, study_id, family_named(about["family"]))
        if trial.outcome.status is Status.OK and trial.outcome.measurement is not None
    ]
    if not fine:
        return None
    measurement, best = min(fine, key=lambda each: each[0].median_us)
    ended = best.at or datetime.datetime.now()
    return {
        **{k: about[k] for k in ("problem", "family", "device", "driver", "toolkit", "flashgen", "seed")},
        "variant": best.outcome.variant.to_dict(),
        "measurement": measurement.to_dict(),
        "arch": about["limits"]["arch"],
        "tuned_at": ended.astimezone(datetime.UTC).isoformat(timespec="seconds"),
    }
