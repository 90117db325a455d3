"""A tuning run as it goes on: a live bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ...gen.problem import Problem
from ...gen.variant import Variant
from ..evaluate.outcome import Outcome
from ..tune.coordinator import FinalsStarted, SearchGoesOn
from ..tune.events import Event, Notice, SpaceReady, TrialDone
from .words import changed_settings, figures

#: Without a terminal, a line at least this often, so that a log shows the run is alive.
LINE_SECONDS = 20.0


class RunView:
    """Shows the events of a tuning run: a live bar on a terminal, a few lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = None
        self._best: Outcome | None = None
        self._families: set[str] = set()
        self._last_line = time.monotonic()

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __call__(self, event: Event) -> None:
        match event:
            case SpaceReady():
                self._space(event)
            case SearchGoesOn():
                self._go_on(event)
            case TrialDone():
                self._trial(event)
            case Notice():
                self._print(event.text)
            case FinalsStarted():
                self._stop()
                measured = [o.measurement for o in event.finalists if o.measurement is not None]
                timed = "" if any(m.predicted for m in measured) else ", then timing them in turns"
                self._print(f"validating the {len(event.finalists)} fastest in full{timed}")

    def begin(self, problem: Problem, number: int, count: int) -> None:
        """Starts over: another problem's trials follow."""
        self._stop()
        self._best, self._families = None, set()
        if count > 1:
            self._print(f"-- {problem.name}, {number} of {count}")

    def note(self, text: str) -> None:
        """Prints a line that the user should see now."""
        self._print(text)

    def _space(self, event: SpaceReady) -> None:
        self._stop()
        self._families.add(event.family)
        earlier = f", {event.earlier} of them tried by earlier runs" if event.earlier else ""
        how = "; swept whole" if event.sweeps else ""
        self._print(
            f"{event.family}: {event.legal} legal variants of {event.total}{earlier}{how} "
            f"(enumerated in {event.seconds:.1f} s)"
        )
        if event.taught_by:
            self._print(f"{event.family}: starts from the trials of {' and '.join(event.taught_by)}")
        self._start_bar(event.family, event.earlier, event.budget)

    def _go_on(self, event: SearchGoesOn) -> None:
        self._stop()
        more = f"{event.budget - event.done} more trials" if event.budget else "the rest of the time"
        self._print(f"{event.family}: among the fastest so far, gets {more}")
        self._start_bar(event.family, event.done, event.budget)

    def _start_bar(self, family: str, done: int, budget: int | None) -> None:
        if self._console.is_terminal:
            progress = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[best]}"),
                console=self._console,
                transient=True,
            )
            self._task = progress.add_task(
                family, total=budget, completed=done, best="compiling the first variants"
            )
            progress.start()
            self._progress = progress

    def _trial(self, event: TrialDone) -> None:
        improved = event.best is not None and event.best is not self._best
        self._best = event.best
        live = self._progress is not None
        if improved or (not live and time.monotonic() - self._last_line > LINE_SECONDS):
            settings = f" ({self._variant_text(self._best.variant)})" if self._best is not None else ""
            budget = f"/{event.budget}" if event.budget else ""
            self._print(f"trial {event.number}{budget}: {self._best_text()}{settings}")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=event.number, best=self._best_text())

    def _best_text(self) -> str:
        if self._best is None or self._best.measurement is None:
            return "nothing works yet"
        return f"best {figures(self._best.measurement)}"

    def _variant_text(self, variant: Variant) -> str:
        family = f"{variant.family}: " if len(self._families) > 1 else ""
        return family + changed_settings(variant)

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
