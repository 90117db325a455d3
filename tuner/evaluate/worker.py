"""The handle of the process that runs kernels: what kills it does not kill the tuning run."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...gen.problem import Problem
from ..build.protocol import Build
from ..cards.device import Device, Timing
from ..cards.lock import CardLock
from ..errors import CorruptedMemory, FlashgenError, LaunchError
from .child_process import ChildProcess, Ended
from .comparison import WrongResult
from .measure import summarize
from .outcome import Measurement, Outcome, Status
from .worker_process import PHASES, Answer, Evaluate, Interleave, Request, Validate, serve

#: Until the process has imported numpy and opened the device.
START_DEADLINE_S = 120.0
#: Until it has answered one request about one build.
DEADLINE_S = 60.0
FINAL_ROUNDS = 25
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


class _Process(ChildProcess):
    """A running worker process, and what it is to do."""

    phase: str = OPENING


class Worker:
    """A process that owns a `Runner` and tests and times one build at a time.

    It starts with the first request. After a crash, a hang or an error that the device does not survive, the
    next request starts another. Use it from one thread at a time. A card that another process of this host
    times on is waited for: ``notify`` is told so, ``stop`` ends the wait.
    """

    def __init__(
        self,
        device: Device,
        *,
        seed: int = 0,
        deadline_s: float = DEADLINE_S,
        notify: Callable[[str], None] = lambda text: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.device = device
        self.deadline_s = deadline_s
        self._lock = CardLock(device.lock_key) if device.lock_key else None
        self._notify = notify
        self._stop = stop
        self._told_of: set[str] = set()
        self._seed = seed
        self._requests = 0
        self._process: _Process | None = None
        self._seconds: dict[str, float] = {}
        self._busy = self._killed = False

    # -- requests --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Opens the device ahead of the first request; what goes wrong here, that one raises."""
        with contextlib.suppress(FlashgenError, RuntimeError), self._card():
            self._busy = True
            try:
                if self._process is None:
                    self._start()
            finally:
                self._busy = False

    def evaluate(
        self,
        build: Build,
        problem: Problem,
        *,
        best_us: float | None = None,
        budget_ms: float = 200.0,
        max_spill_bytes: int = 0,
    ) -> Outcome:
        """Validates and times one build: every way it can fail is an outcome.

        A build that spills more than ``max_spill_bytes`` is not run. Raises FlashgenError only for what is
        not the build's fault: no device, no memory for the problem.
        """
        if build.spill_bytes > max_spill_bytes:
            reason = f"{build.spill_bytes} bytes of registers spilled to memory, {max_spill_bytes} allowed"
            return self._outcome(build, Status.SPILLED, reason)
        try:
            request = Evaluate(build, problem, best_us, budget_ms, self._next_seed())
            timing, error, occupancy = self._ask(request)
        except FlashgenError as failure:
            return self._failed(build, failure)
        return self._measured(build, problem, timing, error, occupancy)

    def validate_full(self, build: Build, problem: Problem) -> float:
        """The largest per-head error over the full suite and a sample of the real problem.

        Raises:
            WrongResult, CorruptedMemory, LaunchError, TimedOut, Died: what is wrong with the build.
        """
        # The suite is long on purpose; no candidate waits behind it.
        return self._ask(Validate(build, problem, self._next_seed()), deadline_s=10 * self.deadline_s)

    def measure_interleaved(
        self, builds: Sequence[Build], problem: Problem, rounds: int = FINAL_ROUNDS
    ) -> list[Timing]:
        """The builds' times, taken in turns. Raises LaunchError, TimedOut or Died."""
        return [timing for timing, _ in self._interleave(builds, problem, rounds)]

    def _interleave(
        self, builds: Sequence[Build], problem: Problem, rounds: int
    ) -> list[tuple[Timing, float]]:
        """The times and the occupancy of each."""
        deadline_s = self.deadline_s * (2 + len(builds))
        return self._ask(Interleave(tuple(builds), problem, rounds), deadline_s=deadline_s)

    def finals(
        self, builds: Sequence[Build], problem: Problem, *, rounds: int = FINAL_ROUNDS
    ) -> list[Outcome]:
        """Validates the finalists in full and times those that pass in turns; one outcome each, in order."""
        outcomes: dict[int, Outcome] = {}
        errors: dict[int, float] = {}
        for i, build in enumerate(builds):
            try:
                errors[i] = self.validate_full(build, problem)
            except FlashgenError as failure:
                outcomes[i] = self._failed(build, failure)
        passed = list(errors)
        while passed:
            try:
                found = self._interleave([builds[i] for i in passed], problem, rounds)
            except FlashgenError as failure:
                if len(passed) == 1:
                    outcomes[passed[0]] = self._failed(builds[passed[0]], failure)
                    break
                # One of them is to blame; each is tried alone, and those that survive together again.
                alone = [i for i in passed if self._survives(i, builds[i], problem, outcomes)]
                if alone == passed:
                    raise
                passed = alone
                continue
            for i, (timing, occupancy) in zip(passed, found, strict=True):
                outcomes[i] = self._measured(builds[i], problem, timing, errors[i], occupancy)
            break
        return [outcomes[i] for i in range(len(builds))]

    def _survives(self, i: int, build: Build, problem: Problem, outcomes: dict[int, Outcome]) -> bool:
        try:
            self.measure_interleaved([build], problem, rounds=1)
        except FlashgenError as failure:
            outcomes[i] = self._failed(build, failure)
            return False
        return True

    def kill(self) -> None:
        """From another thread: ends the request under way there, and any to come until `close`."""
        self._killed = True
        process = self._process
        if self._busy and process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process. The handle may be used again."""
        self._end()
        self._killed = False
        if self._lock is not None:
            self._lock.close()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- outcomes --------------------------------------------------------------------------------------------

    def _measured(
        self, build: Build, problem: Problem, timing: Timing, error: float, occupancy: float
    ) -> Outcome:
        figures = summarize(
            timing,
            build,
            problem,
            occupancy=occupancy,
            error=error,
            predicted=self.device.predicted,
        )
        if timing.stopped_early:
            reason = f"{figures.median_us:.0f} us, more than twice the best so far"
            return self._outcome(build, Status.SLOW, reason, figures)
        return self._outcome(build, Status.OK, measurement=figures)

    def _failed(self, build: Build, failure: FlashgenError) -> Outcome:
        """The outcome of a failure that is the build's; others are raised again."""
        if isinstance(failure, TimedOut):
            return self._outcome(build, Status.TIMED_OUT, str(failure))
        if isinstance(failure, WrongResult | CorruptedMemory):
            return self._outcome(build, Status.WRONG, str(failure))
        if isinstance(failure, LaunchError | Died):
            return self._outcome(build, Status.LAUNCH_FAILED, str(failure))
        raise failure

    def _outcome(
        self, build: Build, status: Status, reason: str = "", measurement: Measurement | None = None
    ) -> Outcome:
        seconds = {"compile": build.seconds}
        if status is not Status.SPILLED:
            seconds |= {phase: self._seconds[phase] for phase in PHASES if phase in self._seconds}
        return Outcome(
            variant=build.kernel.variant,
            status=status,
            reason=reason,
            measurement=measurement,
            seconds=seconds,
        )

    # -- the process -----------------------------------------------------------------------------------------

    def _next_seed(self) -> int:
        """Fresh inputs for every request, the same again for the same run."""
        self._requests += 1
        return 1_000_003 * self._seed + self._requests

    def _ask(self, request: Request, *, deadline_s: float | None = None) -> Any:
        with self._card():
            self._busy = True
            try:
                answer = self._answer_to(request, deadline_s or self.deadline_s)
            finally:
                self._busy = False
        if not answer.usable:
            self._discard()
        if answer.error is not None:
            if not isinstance(answer.error, FlashgenError):
                raise RuntimeError(f"the worker process failed:\n{answer.trace}") from answer.error
            raise answer.error
        return answer.value

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
        process = self._process or self._start()
        process.phase = IDLE
        self._seconds = {}
        return self._converse(process, request, deadline_s)

    def _start(self) -> _Process:
        """Starts the process and waits until it has opened the device. Raises what that raised."""
        inherited = self._lock.inherited if self._lock is not None else ()
        process = self._process = _Process(serve, inherited=inherited, environment=ONE_BLAS_THREAD)
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

    def _converse(self, process: _Process, message: Any, deadline_s: float) -> Answer:
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

    def _listen(self, process: _Process, deadline_s: float) -> Answer:
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
            now = time.monotonic()
            self._seconds[process.phase] = now - phase_began
            if isinstance(message, Answer):
                return message
            process.phase, phase_began = message.name, now

    def _obituary(self, process: _Process) -> Died:
        """How the process ended and what it last said."""
        status, how, words = process.exit_status(), process.ending(), process.last_words()
        phase = process.phase
        self._discard()
        died = _DiedIdle if phase == IDLE else _DiedOtherwise if status in KILLED_FROM_OUTSIDE else Died
        return died(f"the worker process {how} while it was to {phase}" + (f": {words}" if words else ""))

    def _discard(self) -> None:
        """Kills the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
        self._end()
