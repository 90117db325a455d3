"""Looking out, while one problem is tuned, for what the next one's search will try first.

A process of its own works that out, and compilers that have nothing else to do build it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from ..build.ahead import PoolAhead
from ..evaluate.child_process import ChildProcess, Ended
from ..evaluate.worker_life import ONE_BLAS_THREAD
from .events import Event, FinalsStarted, Report
from .foresight import Foreseen, Question, Winning, serve
from .options import TuneOptions
from .spaces import Space

#: How long a problem whose turn has come waits for what is being foreseen of it: to begin anew takes longer,
#: unless that is a whole space's ranking.
PATIENCE_S = 5.0
#: How often waits look whether they are over.
POLL_S = 0.1

_log = logging.getLogger(__name__)


class Answering(Protocol):
    """What answers questions, one after the other: a `ChildProcess` that runs `serve`."""

    def send(self, message: Any) -> None: ...
    def receive(self, timeout_s: float) -> Any: ...
    def last_words(self) -> str: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


def start_process() -> Answering:
    """Starts a process that answers questions."""
    return ChildProcess(serve, environment=ONE_BLAS_THREAD)


class Lookout:
    """Has the first builds of a problem begun while the one before it is tuned.

    Tell it of each turn, and have it hear what goes on. Where it comes too late, or nothing is foreseen, a
    problem's turn goes as it would without. Leave the ``with`` block to end its process.
    """

    def __init__(
        self,
        pool: PoolAhead,
        toolkit: str,
        stop: threading.Event,
        start: Callable[[], Answering] | None = None,
    ) -> None:
        self._pool, self._toolkit, self._stop, self._start = pool, toolkit, stop, start or start_process
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._answered = threading.Condition()
        self._open_question: Question | None = None
        self._is_over = False
        self._now: TuneOptions | None = None
        self._next: TuneOptions | None = None
        self._foreseen: Foreseen | None = None
        self._process: Answering | None = None
        self._thread: threading.Thread | None = None

    def turn(self, options: TuneOptions, following: TuneOptions | None) -> Sequence[Space]:
        """Notes whose turn it is, and looks out for the ``following`` problem, if there is one.

        Returns the legal spaces of the one whose turn it is; none where they were not foreseen in time.
        """
        self._wait()
        with self._answered:
            foreseen, self._foreseen = self._foreseen, None
            self._now, self._next = options, following
        self._ask(None)
        return foreseen.spaces if foreseen is not None and foreseen.problem == options.problem else ()

    def heard_by(self, report: Report) -> Report:
        """Returns what hears of events and passes them on to ``report``.

        The winner of one problem is what the next one's search tries first: it looks again once that is
        nearly known.
        """

        def hear(event: Event) -> None:
            report(event)
            if isinstance(event, FinalsStarted) and self._now is not None:
                self._ask(Winning(self._now.problem, event.finalists[0]))

        return hear

    def close(self) -> None:
        """Ends the process, whatever it is at."""
        process, self._process = self._process, None
        if process is None:
            return
        self._questions.put(None)
        process.kill()
        if self._thread is not None:
            self._thread.join()
        process.close()

    def __enter__(self) -> Lookout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        """Waits for the first answer about the next problem, if one is to come."""
        deadline = time.monotonic() + PATIENCE_S
        with self._answered:
            while self._is_awaited and not self._stop.is_set() and time.monotonic() < deadline:
                self._answered.wait(POLL_S)

    @property
    def _is_awaited(self) -> bool:
        question = self._open_question
        return self._foreseen is None and question is not None and question.options is self._next

    def _ask(self, winning: Winning | None) -> None:
        if self._next is None or self._is_over:
            return
        if self._process is None:
            self._process = self._start()
            self._thread = threading.Thread(
                target=self._listen, args=(self._process,), daemon=True, name="lookout"
            )
            self._thread.start()
        question = Question(options=self._next, toolkit=self._toolkit, winning=winning)
        with self._answered:
            self._open_question = question
        self._questions.put(question)

    def _listen(self, process: Answering) -> None:
        """Passes questions on, the last of those that wait, and has built what is answered."""
        try:
            while (question := self._last_question()) is not None:
                process.send(question)
                foreseen = _answer_of(process)
                with self._answered:
                    if self._open_question is question:
                        self._open_question = None
                    self._answered.notify_all()
                    if foreseen is None or self._next is not question.options:
                        continue  # its turn has come
                    self._foreseen = foreseen
                self._pool.want(foreseen.kernels)
        except Ended:
            _log.debug("nothing is foreseen any more: %s", process.last_words())
        finally:
            with self._answered:
                self._is_over, self._open_question = True, None
                self._answered.notify_all()

    def _last_question(self) -> Question | None:
        question = self._questions.get()
        while question is not None and not self._questions.empty():
            question = self._questions.get()
        return question


def _answer_of(process: Answering) -> Foreseen | None:
    while True:
        with contextlib.suppress(TimeoutError):
            return process.receive(PATIENCE_S)
