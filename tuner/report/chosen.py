"""Which studies a report tells of: the last tuned, or those that options ask for.

The families that competed for one problem on one card are studies of their own; they make one group if the
same compiler (and, of predictions, the same cost model) made them. Of a family whose kernels changed
meanwhile the last tuned study is in it; those of its earlier kernels make groups behind it.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage

from ...gen.families import family_named
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ..cards.slug import SIM_PREFIX, same_card
from ..errors import FlashgenError, UsageError
from ..request import Shapes
from ..store.about import card_of
from ..store.makers import cost_model_of
from ..store.places import without_password
from ..store.studies import UNREADABLE, open_storage, storage_errors

#: Groups that an error lists.
LISTED = 8
SUFFIXES = (".html", ".htm")
#: When a study's last trial was started, and its name.
_Found = tuple[datetime.datetime, str]


@dataclass(frozen=True)
class Group:
    """The studies of one problem and card, one of a family; ``last`` is when a trial was last started."""

    slug: str
    problem: Problem
    names: tuple[str, ...]
    last: datetime.datetime

    @property
    def label(self) -> str:
        return f"{self.slug}/{self.problem.name}"


def check_target(target: Path | None) -> None:
    """Raises UsageError unless a report can have that name."""
    if target is not None and target.suffix not in SUFFIXES:
        raise UsageError(f"cannot write a report to {str(target)!r}; name the file .html, as in report.html")
    if target is not None and target.is_dir():
        raise UsageError(f"{target} is a folder; name a file in it, as in {target / 'report.html'}")


def open_chosen(
    where: str, *, study: str | None, shapes: Shapes, card: str | None, emulated: bool
) -> tuple[BaseStorage, Group, int]:
    """Opens a storage; returns it, the group that `choose_group` finds in it, and how many others there are
    of its problem and card by other versions."""
    if study is not None and (shapes.is_given or card is not None):
        raise UsageError(
            "--study names the problem and the card; leave --device and the problem's options out"
        )
    check_storage(where)
    storage = open_storage(where)
    groups = groups_in(storage, where)
    group = choose_group(groups, where, study=study, shapes=shapes, card=card, emulated=emulated)
    return storage, group, sum(each.label == group.label for each in groups) - 1


def check_storage(where: str) -> None:
    """Raises FlashgenError for a file that is not there: opening it would make an empty one."""
    path = Path(where.split(":///", 1)[-1])
    if ("://" not in where or where.startswith("sqlite")) and not path.exists():
        raise FlashgenError(
            f"there are no trials: {without_password(where)} does not exist; tune with `flashgen tune "
            "--device 0 --d 64` (--device sim:gtx-1080 without a GPU), or name what "
            "holds trials with --storage or --out"
        )


def groups_in(storage: BaseStorage, where: str) -> list[Group]:
    """Returns every group of flashgen's studies in a storage, the last tuned first. Other studies are passed
    over."""
    found: dict[tuple[Any, ...], dict[str, list[_Found]]] = {}
    with storage_errors(where):
        for study in storage.get_all_studies():
            with contextlib.suppress(*UNREADABLE):
                about = study.user_attrs
                slug, _ = card_of(about)
                family_named(about["family"])
                DeviceLimits.from_dict(about["limits"])
                makers = (about["toolkit"], cost_model_of(about))
                key = (slug, Problem.from_dict(about["problem"]), *makers)
                last = _last_start(storage, storage.get_study_id_from_name(study.study_name))
                found.setdefault(key, {}).setdefault(about["family"], []).append((last, study.study_name))
    groups: list[Group] = []
    for (slug, problem, *_), families in found.items():
        newest_first = [sorted(members, reverse=True) for members in families.values()]
        for members in zip_longest(*newest_first):
            there = [each for each in members if each is not None]
            names = tuple(name for _, name in there)
            groups.append(Group(slug, problem, names, max(last for last, _ in there)))
    return sorted(groups, key=lambda group: group.last, reverse=True)


def _last_start(storage: BaseStorage, study_id: int) -> datetime.datetime:
    """When the study's last trial was started. Reads that one alone: a trial holds all its times."""
    count = storage.get_n_trials(study_id)
    if not count:
        return datetime.datetime.min
    trial = storage.get_trial(storage.get_trial_id_from_study_id_trial_number(study_id, count - 1))
    return trial.datetime_start or datetime.datetime.min


def choose_group(
    groups: Sequence[Group],
    where: str,
    *,
    study: str | None = None,
    shapes: Shapes,
    card: str | None = None,
    emulated: bool = False,
) -> Group:
    """Chooses the last tuned group that fits. ``card`` is the slug of one, ``emulated`` leaves only that out
    of real ones; ``study`` is a study's name or the start of it.

    Raises:
        FlashgenError: none fits; the message lists those there are.
    """
    shown = without_password(where)
    if not groups:
        raise FlashgenError(
            f"{shown} holds no study of flashgen's; tune with `flashgen tune --device 0 --d 64`, or name "
            "what holds one with --storage or --out"
        )
    if study is not None:
        fitting = [g for g in groups if any(_is_start(study, name) for name in g.names)]
        if not fitting:
            names = [name for group in groups for name in group.names]
            close = difflib.get_close_matches(study, [*names, *(g.label for g in groups)], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {_listed(groups)}"
            raise FlashgenError(f"{shown} holds no study {study!r}; {hint}")
        return fitting[0]
    fitting = list(groups)
    asked = []
    if card is not None:
        fitting = [g for g in fitting if same_card(g.slug, card)]
        if emulated:
            fitting = [g for g in fitting if g.slug.startswith(SIM_PREFIX)]
        asked.append(f"on {'the emulated ' if emulated else ''}{card}")
    if shapes.is_given:
        fitting = [g for g in fitting if shapes.fits(g.problem)]
        asked.insert(0, f"of {' '.join(shapes.words())}")
    if not fitting:
        raise FlashgenError(
            f"{shown} holds no study {' '.join(asked)}; there are {_listed(groups)}: ask for one of them "
            "with --study, or tune first"
        )
    return fitting[0]


def _is_start(asked: str, name: str) -> bool:
    return name == asked or name.startswith(asked.rstrip("/") + "/")


def _listed(groups: Sequence[Group]) -> str:
    labels = list(dict.fromkeys(group.label for group in groups))
    more = f" and {len(labels) - LISTED} more" if len(labels) > LISTED else ""
    return ", ".join(labels[:LISTED]) + more
