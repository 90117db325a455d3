"""What the search for a problem will try first, worked out before its turn: its spaces, ranked, and kernels.

It is a guess, as what is tried first follows from what was found until then. Nothing of it is told to any
study: a search proposes the same whether it was foreseen or not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study, get_all_study_names

from ...gen.kernel import Kernel
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Illegal
from ..cards.slug import device_slug
from ..errors import FlashgenError
from ..evaluate.outcome import Outcome
from ..search.ask_tell import Proposal, Search
from ..search.transfer import neighbours
from ..shelf import library
from ..store.liveness import Pulse
from ..store.makers import name_of_study
from ..store.studies import open_storage, storage_errors
from .family_run import begin_search, makers_of
from .options import TuneOptions
from .plan import first_share
from .spaces import Space, legal_spaces
from .trial_loop import ASKED_AT_ONCE, most_in_flight
from .winner import tuned_kernel

#: Below compilers: whatever else the host does comes first.
NICENESS = 15


@dataclass(frozen=True)
class Winning:
    """The kernel that leads a problem under way, and is likely to be in the library once that is done."""

    problem: Problem
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Question:
    """What will the search with these ``options`` try first? ``winning`` leads what is tuned before it."""

    options: TuneOptions
    toolkit: str
    winning: Winning | None = None


@dataclass(frozen=True)
class Foreseen:
    """The legal spaces of a problem's families, with what the cost model says of those that were looked at,
    and the kernels that are likely to be tried first, in that order."""

    problem: Problem
    spaces: tuple[Space, ...]
    kernels: tuple[Kernel, ...]


class Foresight:
    """Answers one question after another; of one problem's, all but the first take little time."""

    def __init__(self) -> None:
        self._storages: dict[str, BaseStorage] = {}
        self._of: tuple[Any, ...] = ()
        self._spaces: tuple[Space, ...] = ()

    def answer(self, question: Question) -> Foreseen:
        """Returns what is foreseen.

        Raises:
            FlashgenError: nothing is: no variant is legal, or the trials cannot be read.
        """
        options = question.options
        storage = self._storages.get(options.storage)
        if storage is None:
            storage = self._storages[options.storage] = open_storage(options.storage)
        of = (options.problem, options.families, dict(options.held))
        if of != self._of:
            self._of, self._spaces = of, tuple(legal_spaces(options))
        known = _known(question)
        kernels: list[Kernel] = []
        with storage_errors(options.storage):
            for space in self._spaces:
                kernels += _first_kernels(question, space, len(self._spaces), storage, known)
        return Foreseen(options.problem, self._spaces, tuple(kernels))


def _known(question: Question) -> list[library.Entry]:
    """The library as it is likely to be at the problem's turn."""
    options, winning = question.options, question.winning
    known = library.entries(library.folders(options.out))
    if winning is None or winning.outcome.measurement is None:
        return known
    rendered = render(winning.outcome.variant, winning.problem, options.limits)
    kernel = tuned_kernel(
        options.device, rendered, winning.outcome.measurement, toolkit=question.toolkit, seed=options.seed
    )
    slug = device_slug(options.device)
    path = library.Paths.of(options.out, slug, winning.problem.name).json
    return [library.Entry(kernel, slug, path), *(entry for entry in known if entry.json_path != path)]


def _first_kernels(
    question: Question, space: Space, families: int, storage: BaseStorage, known: Sequence[library.Entry]
) -> Iterator[Kernel]:
    """The kernels that a family's search asks for before any of them was timed."""
    options, catalogue = question.options, space.catalogue
    problem, limits = catalogue.problem, catalogue.limits
    budget, _ = first_share(options, families)
    makers = makers_of(options, catalogue.family, question.toolkit)
    slug = device_slug(options.device)
    name = name_of_study(storage, slug, problem, catalogue.family, makers)
    lessons = neighbours(storage, slug, problem, makers, catalogue.family)
    # What is taken is taken of a copy; what is predicted is for all.
    space = replace(space, catalogue=replace(catalogue))
    with contextlib.closing(Pulse()) as pulse:
        search = begin_search(
            options, space, _copy_of(storage, name), lessons, known=known, budget=budget, pulse=pulse
        )
        most = most_in_flight(options.jobs, len(options.devices))
        if budget is not None:
            most = min(most, budget - len(search.earlier))
        for proposal in _asked(search, most, ASKED_AT_ONCE * len(options.devices)):
            with contextlib.suppress(Illegal):
                yield render(proposal.variant, problem, limits)


def _asked(search: Search, most: int, at_once: int) -> Iterator[Proposal]:
    """Asks as the trial loop does."""
    while most > 0:
        proposals = search.ask_many(min(most, at_once))
        if not proposals:
            return
        yield from proposals
        most -= len(proposals)


def _copy_of(storage: BaseStorage, name: str) -> Study:
    """A study of its own with the trials that have ended of the one of that name, if there is any."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    if name in get_all_study_names(storage):
        trials = storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False)
        study.add_trials(trial for trial in trials if trial.state.is_finished())
    return study


def serve(pipe: Connection) -> None:
    """Answers questions until the parent is gone, with None where nothing is foreseen. The process's whole
    life; never returns."""
    os.nice(NICENESS)
    foresight = Foresight()
    with contextlib.suppress(EOFError, OSError):
        while True:
            question: Question = pipe.recv()
            answer: Foreseen | None = None
            with contextlib.suppress(FlashgenError):
                answer = foresight.answer(question)
            pipe.send(answer)
    os._exit(0)
