"""A tuning run as it goes on: on a terminal a live line that says what is waited for, lines elsewhere."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from ...gen.problem import Problem
from ...gen.variant import Variant
from ..evaluate.outcome import Outcome
from ..tune.coordinator import FinalsStarted, SearchGoesOn
from ..tune.events import Doing, Event, InFlight, Notice, SpaceReady, TrialDone
from .words import changed_settings, figures

#: Without a terminal, a line at least this often, so that a log shows that the run is alive, and at what.
LINE_SECONDS = 20.0


class RunView:
    """Shows the events of a tuning run, and at any moment what is waited for.

    On a terminal that is a live line with a spinner and the time it has taken; in a log it is a line once it
    takes long. Events may come from any thread.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        #: Whether the live line shows trials.
        self._searching = False
        self._best: Outcome | None = None
        self._families: set[str] = set()
        self._lock = threading.RLock()
        self._doing = ""
        self._last_line = time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> RunView:
        if not self._console.is_terminal:
            threading.Thread(target=self._tell_of_long_waits, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._lock:
            self._stop()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._show(event)

    def begin(self, problem: Problem, number: int, count: int) -> None:
        """Starts over: another problem's trials follow."""
        with self._lock:
            self._stop()
            self._best, self._families = None, set()
            if count > 1:
                self._print(f"-- {problem.name}, {number} of {count}")

    def note(self, text: str) -> None:
        """Prints a line that the user should see now."""
        self._print(text)

    def _show(self, event: Event) -> None:
        match event:
            case SpaceReady():
                self._space(event)
            case SearchGoesOn():
                self._go_on(event)
            case TrialDone():
                self._trial(event)
            case InFlight():
                self._in_flight(event)
            case Doing():
                self._wait_for(event.text)
            case Notice():
                self._print(event.text)
            case FinalsStarted():
                self._stop()
                count = len(event.finalists)
                timed = "" if count == 1 else f"timing the {count} fastest in turns, then "
                self._print(f"{timed}validating the fastest in full")

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
        self._search(event.family, event.earlier, event.budget)

    def _go_on(self, event: SearchGoesOn) -> None:
        self._stop()
        more = f"{event.budget - event.done} more trials" if event.budget else "the rest of the time"
        self._print(f"{event.family}: among the fastest so far, gets {more}")
        self._search(event.family, event.done, event.budget)

    def _search(self, family: str, done: int, budget: int | None) -> None:
        """Shows the trials of a family as a bar."""
        self._now("choosing the first variants")
        bar = (BarColumn(bar_width=10), MofNCompleteColumn(), TextColumn("{task.fields[best]}", markup=False))
        self._start(bar, family, budget, done)
        self._searching = True

    def _wait_for(self, text: str) -> None:
        """Shows what is done or waited for, beside no trials."""
        self._now(text)
        if self._progress is None or self._searching:
            self._stop()
            self._start((), "", None, 0)

    def _start(
        self, columns: tuple[ProgressColumn, ...], family: str, total: int | None, completed: int
    ) -> None:
        """Begins the live line: the spinner, the ``columns`` and what is waited for."""
        if not self._console.is_terminal or self._over.is_set():
            return
        doing = TextColumn(
            "{task.fields[doing]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        self._progress = Progress(
            SpinnerColumn(), TimeElapsedColumn(), *columns, doing, console=self._console, transient=True
        )
        self._task = self._progress.add_task(
            family, total=total, completed=completed, best="", doing=self._doing
        )
        self._progress.start()

    def _in_flight(self, event: InFlight) -> None:
        parts = [f"{event.on_cards} on the card"] if event.on_cards else []
        parts += [f"{event.compiling} compiling"] if event.compiling else []
        self._now(", ".join(parts) or "choosing the next variants")

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

    def _now(self, text: str) -> None:
        """What is waited for from now on."""
        self._doing = text
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, doing=text)

    def _tell_of_long_waits(self) -> None:
        """In a log, what is waited for while no other line comes."""
        while not self._over.wait(LINE_SECONDS / 10):
            with self._lock:
                quiet = time.monotonic() - self._last_line
                if self._doing and quiet > LINE_SECONDS and not self._over.is_set():
                    self._print(f"still at it: {self._doing}")

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
        self._searching = False
