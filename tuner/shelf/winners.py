"""The winners that studies hold: what `emit` falls back on when the out folder could not be written."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import replace
from typing import Any

from optuna.study import Study, get_all_study_names, load_study

from ...gen.families import family_named
from ...gen.limits import DeviceLimits
from ...gen.render import render
from ..evaluate.outcome import Status
from ..store.about import card_of
from ..store.studies import UNREADABLE, open_storage, outcomes, storage_errors
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
            study = load_study(study_name=name, storage=storage)
            with contextlib.suppress(*UNREADABLE):
                slug, _ = card_of(study.user_attrs)
                record = study.user_attrs.get(TUNED) or _best_record(study)
                if record is None:
                    continue
                kernel = records.from_record(record, "")
                rendered = render(
                    kernel.variant, kernel.problem, DeviceLimits.from_dict(study.user_attrs["limits"])
                )
                kernel = replace(kernel, source=rendered.source)
                found.append(library.Entry(kernel, slug, rendered=rendered))
    return found


def _best_record(study: Study) -> dict[str, Any] | None:
    """The record of an unfinished study's best trial."""
    about = study.user_attrs
    fine = [
        (outcome.measurement, outcome, trial)
        for trial, outcome in outcomes(study, family_named(about["family"]))
        if outcome.status is Status.OK and outcome.measurement is not None
    ]
    if not fine:
        return None
    measurement, best, trial = min(fine, key=lambda each: each[0].median_us)
    ended = trial.datetime_complete or datetime.datetime.now()
    return {
        **{k: about[k] for k in ("problem", "family", "device", "driver", "toolkit", "flashgen", "seed")},
        "variant": best.variant.to_dict(),
        "measurement": measurement.to_dict(),
        "arch": about["limits"]["arch"],
        "tuned_at": ended.astimezone(datetime.UTC).isoformat(timespec="seconds"),
    }
