"""Several problems tuned one after the other, each from what the ones before it taught.

They share the storage, in which a search finds its neighbours' trials, the library, whose winners are tried
first, and the compiler's cache: a variant's source is the same for all lengths. While one is tuned, the next
one's first variants are built by compilers that would have nothing to do.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...gen.emit.options import card_option
from ...gen.problem import Problem
from ..build.ahead import PoolAhead
from ..errors import FlashgenError, NotServed, UsageError
from ..shelf import library
from ..shelf.bundle import bundle
from ..shelf.targets import write_target
from .coordinator import TuneOptions, TuneResult, tune_at
from .events import Doing, Event
from .lookout import Lookout
from .request import Competing, TuneRequest
from .workshop import MakeEvaluator, Premises, premises


class View(Protocol):
    """A listener that is told how a batch of problems goes on."""

    def __call__(self, event: Event) -> None:
        """Something happened to the problem under way."""
        ...

    def begin(self, problem: Problem, number: int, count: int) -> None:
        """Hears that the next problem begins, ``number`` of ``count``."""
        ...

    def note(self, text: str) -> None:
        """Shows the user a line at once."""
        ...


@dataclass(frozen=True)
class BatchResult:
    """What became of each problem: ``failed`` says by name why nothing serves or works.

    ``module`` holds all the kernels, where there are several.
    """

    results: tuple[TuneResult, ...]
    failed: Mapping[str, str]
    interrupted: bool
    module: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the batch as `flashgen tune --json` tells it."""
        return {
            "kernels": [result.to_dict() for result in self.results],
            "failed": dict(self.failed),
            "interrupted": self.interrupted,
            "module": str(self.module) if self.module is not None else None,
        }


def tune_kinds(request: TuneRequest, *, view: View, stop: threading.Event) -> list[BatchResult]:
    """Tunes the problems on each kind of card in turn, and writes a module of several kernels of a kind.

    Setting ``stop`` ends the run under way with its best so far, and leaves the rest.

    Raises:
        FlashgenError: as `tune_each` and `write_module`.
    """
    batches: list[BatchResult] = []
    for cards in request.kinds:
        limits = cards[0].limits
        if len(cards) > 1 or len(request.kinds) > 1:
            workers = "1 worker" if len(cards) == 1 else f"{len(cards)} workers"
            view.note(f"{limits.name}: {workers} ({', '.join(card.spec for card in cards)})")
        compete = functools.partial(request.competing, limits=limits)
        batch = tune_each(request.options(cards), request.problems, compete, view=view, stop=stop)
        if len(batch.results) > 1:
            words = [*request.words, card_option(limits.name, limits.arch)]
            batch = write_module(batch, request.out, request.module, words, note=view.note)
        batches.append(batch)
        if stop.is_set():
            break
    return batches


def tune_each(
    options: TuneOptions,
    problems: Sequence[Problem],
    compete: Callable[[Problem], Competing],
    *,
    view: View,
    stop: threading.Event,
    make_evaluator: MakeEvaluator | None = None,
    run: Callable[..., TuneResult] = tune_at,
) -> BatchResult:
    """Tunes problems in turn with the same options but for the families, which ``compete`` tells.

    ``options.minutes`` are for all of them: each gets an equal share of what is left. A problem that nothing
    serves is noted and passed over. Setting ``stop`` ends the one under way with its best so far, and leaves
    the rest.

    Raises:
        NotServed: nothing serves any of them; the message is the last one's.
        FlashgenError: as `tune`; what concerns no single problem ends them all.
    """
    started = time.monotonic()
    results: list[TuneResult] = []
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        # Not before a problem is served: nothing that is missing matters where none is.
        site = functools.cache(lambda: stack.enter_context(_site(options, view, stop, make_evaluator)))
        for number, problem in enumerate(problems):
            began, minutes = time.monotonic(), options.minutes
            if minutes is not None:
                left = minutes - (began - started) / 60
                minutes = max(left, 0.0) / (len(problems) - number)
            view.begin(problem, number + 1, len(problems))
            try:
                chosen = replace(_asked_of(options, problem, compete), minutes=minutes)
                place, lookout = site()
                view(Doing("enumerating and ranking the legal variants"))
                spaces = lookout.turn(chosen, _following(options, problems[number + 1 :], compete))
                report = lookout.heard_by(view)
                results.append(run(place, chosen, report=report, started=began, foreseen=spaces))
            except NotServed as error:
                if not results and (stop.is_set() or number == len(problems) - 1):
                    raise
                if not stop.is_set():
                    failed[problem.name] = str(error)
                    view.note(f"{problem.name} is left out: {error}")
            if stop.is_set():
                break
    return BatchResult(tuple(results), failed, stop.is_set())


@contextlib.contextmanager
def _site(
    options: TuneOptions, view: View, stop: threading.Event, make_evaluator: MakeEvaluator | None
) -> Iterator[tuple[Premises, Lookout]]:
    """What all problems are tuned with, and what looks out for the next."""
    view(Doing("looking for compilers and the trials of earlier runs"))
    toolchain = options.device.toolchain()
    with (
        PoolAhead(toolchain, options.jobs) as pool,
        premises(options, view, stop, make_evaluator, pool) as place,
        Lookout(pool, toolchain.version, stop) as lookout,
    ):
        yield place, lookout


def _asked_of(options: TuneOptions, problem: Problem, compete: Callable[[Problem], Competing]) -> TuneOptions:
    families, held = compete(problem)
    return replace(options, problem=problem, families=families, held=held)


def _following(
    options: TuneOptions, problems: Sequence[Problem], compete: Callable[[Problem], Competing]
) -> TuneOptions | None:
    """The options of the next problem that anything serves, if there is one."""
    for problem in problems:
        with contextlib.suppress(FlashgenError):  # which is told at its turn
            return _asked_of(options, problem, compete)
    return None


def write_module(
    batch: BatchResult, out: Path, name: str, command: Sequence[str], *, note: Callable[[str], None]
) -> BatchResult:
    """Writes a module of the batch's kernels, ``name`` in the card's folder.

    Where the library has a faster kernel it takes that. ``command`` is what emits the module again. What does
    not go together is noted.

    Raises:
        FlashgenError: it cannot be written.
    """
    files = [result.kept_faster or result.paths.json for result in batch.results]
    entries = [library.read(path, batch.results[0].slug) for path in files]
    path = out / batch.results[0].slug / f"{name}.py"
    try:
        text = bundle(entries, name=name, command=command)
    except UsageError as error:
        note(f"no module of all: {error}")
        return batch
    write_target(path, text)
    return replace(batch, module=path)
