"""The life of the process that runs kernels: started when it is asked first, killed, and started again.

What kills the process does not kill the tuning run. `worker_process.serve` is its other side.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..cards.device import Device
from ..cards.lock import CardLock
from ..errors import FlashgenError
from .child_process import ChildProcess, Ended
from .worker_process import Answer, Request, Step, serve

#: Until the process has imported numpy and opened the device.
START_DEADLINE_S = 120.0
#: The reference's matrices are small, and compilers hold the other cores: threads that wait for one another
#: there take twenty times as long as one alone.
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
ONE_BLAS_THREAD: dict[str, str] = dict.fromkeys(BLAS_THREADS, "1")
#: No kernel ends a process so: the system short of memory, or a person.
KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
#: What a process is to do before it says what it has begun with.
OPENING, IDLE = "open the device", "take a request"


class TimedOut(FlashgenError):
    """The worker did not answer within its deadline and was killed."""


class Died(FlashgenError):
    """The worker process ended without an answer."""


class _DiedOtherwise(Died):
    """What ended it is hardly the request's doing: it was killed from outside."""


class _DiedIdle(_DiedOtherwise):
    """It ended before it began with the request."""


class WorkerProcess(ChildProcess):
    """A running worker process, and what it is to do."""

    phase: str = OPENING


class WorkerLife:
    """The process that owns a device's `Runner`, asked one request at a time.

    After a crash, a hang or an error that the device does not survive, the next request starts another
    process. A card that another process of this host times on is waited for: ``notify`` is told so, ``stop``
    ends the wait. ``step`` hears the steps of a request; ``seconds`` is the wall time of each phase of the
    last one. Use it from one thread at a time; any may call `kill`.
    """

    def __init__(
        self,
        device: Device,
        *,
        notify: Callable[[str], None],
        step: Callable[[str], None] = lambda text: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.device = device
        self.process: WorkerProcess | None = None
        self.seconds: dict[str, float] = {}
        self._lock = CardLock(device.lock_key) if device.lock_key else None
        self._notify, self._step = notify, step
        self._stop = stop
        self._told_of: set[str] = set()
        self._busy = self._killed = False

    def open(self) -> None:
        """Opens the device ahead of the first request, which raises what goes wrong here."""
        with contextlib.suppress(FlashgenError, RuntimeError), self._at_work():
            if self.process is None:
                self._start()

    def ask(self, request: Request, deadline_s: float) -> Any:
        """Returns the value of the process's answer.

        Raises:
            FlashgenError: what the request raised there; `TimedOut` and `Died` where there was no answer.
            RuntimeError: anything else that it raised.
        """
        with self._at_work():
            answer = self._answer_to(request, deadline_s)
        if not answer.usable:
            self._discard()
        if answer.error is not None:
            if not isinstance(answer.error, FlashgenError):
                raise RuntimeError(f"the worker process failed:\n{answer.trace}") from answer.error
            raise answer.error
        return answer.value

    def kill(self) -> None:
        """Ends the request under way in another thread, and any to come until `close`."""
        self._killed = True
        process = self.process
        if self._busy and process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process. The next request starts another."""
        self._end()
        self._killed = False
        if self._lock is not None:
            self._lock.close()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._card():
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    @contextlib.contextmanager
    def _card(self) -> Iterator[None]:
        """Holds the card's lock. What its holder does there counts towards no deadline of ours."""
        if self._lock is None:
            yield
            return

        def tell(holder: str) -> None:
            if holder not in self._told_of:
                self._told_of.add(holder)
                self._notify(
                    f"device {self.device.spec} is in use by {holder} of flashgen; taking turns with it"
                )

        def over() -> bool:
            return self._killed or (self._stop is not None and self._stop.is_set())

        with self._lock.held(tell=tell, over=over):
            yield

    def _answer_to(self, request: Request, deadline_s: float) -> Answer:
        """The answer, from a second process where the first one's death was not the request's doing."""
        try:
            return self._exchange(request, deadline_s)
        except _DiedOtherwise:
            if self._killed:
                raise FlashgenError("the run was ended") from None
        try:
            return self._exchange(request, deadline_s)
        except _DiedIdle as again:
            # Twice before it began: it is not this build.
            raise FlashgenError(str(again)) from None

    def _exchange(self, request: Request, deadline_s: float) -> Answer:
        process = self.process or self._start()
        process.phase = IDLE
        self.seconds = {}
        return self._converse(process, request, deadline_s)

    def _start(self) -> WorkerProcess:
        """Starts the process and waits until it has opened the device. Raises what that raised."""
        inherited = self._lock.inherited if self._lock is not None else ()
        process = self.process = WorkerProcess(serve, inherited=inherited, environment=ONE_BLAS_THREAD)
        try:
            answer = self._converse(process, self.device, START_DEADLINE_S)
        except (TimedOut, Died) as failure:
            # No build is to blame before the first request.
            raise FlashgenError(f"device {self.device.spec} cannot be used: {failure}") from None
        if answer.error is not None:
            self._discard()
            if isinstance(answer.error, FlashgenError):
                raise answer.error
            raise RuntimeError(f"the worker process could not start:\n{answer.trace}") from answer.error
        return process

    def _converse(self, process: WorkerProcess, message: Any, deadline_s: float) -> Answer:
        """Sends what is asked and awaits the answer. Kills a process that does not give one in time."""
        try:
            process.send(message)
            return self._listen(process, deadline_s)
        except Ended:
            raise self._obituary(process) from None
        except FlashgenError:
            raise
        except BaseException:
            # Interrupted: the answer that is still to come must not be taken for the next request's.
            self._discard()
            raise

    def _listen(self, process: WorkerProcess, deadline_s: float) -> Answer:
        phase_began = time.monotonic()
        deadline = phase_began + deadline_s
        while True:
            try:
                message = process.receive(deadline - time.monotonic())
            except TimeoutError:
                phase = process.phase
                self._discard()
                raise TimedOut(
                    f"no answer within {deadline_s:.0f} s while it was to {phase}; killed"
                ) from None
            if isinstance(message, Step):
                self._step(message.text)
                continue
            now = time.monotonic()
            self.seconds[process.phase] = now - phase_began
            if isinstance(message, Answer):
                return message
            process.phase, phase_began = message.name, now

    def _obituary(self, process: WorkerProcess) -> Died:
        """How the process ended and what it last said."""
        status, how, words = process.exit_status(), process.ending(), process.last_words()
        phase = process.phase
        self._discard()
        died = _DiedIdle if phase == IDLE else _DiedOtherwise if status in KILLED_FROM_OUTSIDE else Died
        return died(f"the worker process {how} while it was to {phase}" + (f": {words}" if words else ""))

    def _discard(self) -> None:
        """Kills the process; the next request starts another."""
        if self.process is not None:
            self.process.kill()
        self._end()

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.close()
