"""Testing and timing builds on one card, in a process that may die of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from ...gen.problem import Problem
from ..build.protocol import Build
from ..cards.device import Device, Timing
from ..errors import FlashgenError
from .adversarial import Finding
from .adversarial_inputs import Breadth
from .measure import summarize
from .outcome import Outcome
from .verdict import failed, measured, spilled
from .worker_life import WorkerLife
from .worker_process import Evaluate, Interleave, ProvePromise, TryAdversarial, Validate

#: Until it has answered one request about one build.
DEADLINE_S = 60.0
FINAL_ROUNDS = 25


class Worker:
    """Tests and times one build at a time in a process of its own, ``life``, that owns a `Runner`.

    The process starts with the first request. After a crash, a hang or an error that the device does not
    survive, the next request starts another. Use it from one thread at a time. A card that another process of
    this host times on is waited for: ``notify`` is told so, ``stop`` ends the wait. ``doing`` hears how
    far a full validation is.
    """

    def __init__(
        self,
        device: Device,
        *,
        seed: int = 0,
        deadline_s: float = DEADLINE_S,
        notify: Callable[[str], None] = lambda text: None,
        doing: Callable[[str], None] = lambda text: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.device = device
        self.deadline_s = deadline_s
        self.life = WorkerLife(device, notify=notify, step=self._step, stop=stop)
        self._seed = seed
        self._doing = doing
        #: Before what is told of a full validation; None during others, which are short and many.
        self._which: str | None = None
        self._requests: Counter[Problem] = Counter()

    def start(self) -> None:
        """Opens the device ahead of the first request; what goes wrong here, that one raises."""
        self.life.open()

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
            return spilled(build, max_spill_bytes)
        try:
            request = Evaluate(build, problem, best_us, budget_ms, self._next_seed(problem))
            timing, error, occupancy = self.life.ask(request, self.deadline_s)
        except FlashgenError as failure:
            return failed(build, failure, self.life.seconds)
        return self._measured(build, problem, timing, error, occupancy)

    def validate_full(self, build: Build, problem: Problem, which: str = "validating in full") -> float:
        """Returns the largest per-head error over the full suite and a sample of the real problem. ``which``
        says what it is to who is told how far it is.

        Raises:
            WrongResult, CorruptedMemory, LaunchError, TimedOut, Died: what is wrong with the build.
        """
        # The suite is long on purpose; no candidate waits behind it.
        self._which = which
        self._doing(which)
        try:
            return self.life.ask(Validate(build, problem, self._next_seed(problem)), 10 * self.deadline_s)
        finally:
            self._which = None

    def prove_promise(self, build: Build, breadth: Breadth) -> int:
        """Returns on how many adversarial cases a build keeps its class's promise.

        Raises:
            BrokenPromise, CorruptedMemory, LaunchError, TimedOut, Died: what is wrong with the build.
        """
        # Not a seed of its own: what is promised holds for cases that everybody can repeat by name.
        return self.life.ask(ProvePromise(build, breadth, self._seed), 10 * self.deadline_s)

    def try_adversarial(self, build: Build, cases: Sequence[str]) -> list[Finding]:
        """Returns what each adversarial case of those names shows of a build. Raises as `prove_promise`, but
        for what breaks a promise."""
        return self.life.ask(TryAdversarial(build, tuple(cases), self._seed), 10 * self.deadline_s)

    def measure_interleaved(
        self, builds: Sequence[Build], problem: Problem, rounds: int = FINAL_ROUNDS
    ) -> list[Timing]:
        """Returns the builds' times, taken in turns. Raises LaunchError, TimedOut or Died."""
        return [timing for timing, _ in self._interleave(builds, problem, rounds)]

    def _interleave(
        self, builds: Sequence[Build], problem: Problem, rounds: int
    ) -> list[tuple[Timing, float]]:
        """The times and the occupancy of each."""
        deadline_s = self.deadline_s * (2 + len(builds))
        return self.life.ask(Interleave(tuple(builds), problem, rounds), deadline_s)

    def finals(
        self,
        builds: Sequence[Build],
        problem: Problem,
        errors: Sequence[float],
        quiet: AbstractContextManager[None] | None = None,
        *,
        rounds: int = FINAL_ROUNDS,
    ) -> list[Outcome]:
        """Times the finalists in turns, inside ``quiet``, and proves the fastest; one outcome each, in order.

        ``errors`` are those of their trials, and stay those of who is not the fastest. The fastest is
        validated in full and keeps its class's promise on adversarial inputs; those before it that do not
        are wrong.
        """
        with quiet or nullcontext():
            outcomes = self._time_in_turns(builds, problem, errors, rounds)
        self._prove_fastest(builds, problem, outcomes)
        return [outcomes[i] for i in range(len(builds))]

    def _time_in_turns(
        self, builds: Sequence[Build], problem: Problem, errors: Sequence[float], rounds: int
    ) -> dict[int, Outcome]:
        """The outcome of each by its place; those that do not survive it are left out of the turns."""
        outcomes: dict[int, Outcome] = {}
        running = list(range(len(builds)))
        self._doing(f"timing {len(running)} in turns")
        while running:
            try:
                found = self._interleave([builds[i] for i in running], problem, rounds)
            except FlashgenError as failure:
                if len(running) == 1:
                    outcomes[running[0]] = failed(builds[running[0]], failure, self.life.seconds)
                    break
                # One of them is to blame; each is tried alone, and those that survive together again.
                alone = [i for i in running if self._survives(i, builds[i], problem, outcomes)]
                if alone == running:
                    raise
                running = alone
                continue
            for i, (timing, occupancy) in zip(running, found, strict=True):
                outcomes[i] = self._measured(builds[i], problem, timing, errors[i], occupancy)
            break
        return outcomes

    def _prove_fastest(self, builds: Sequence[Build], problem: Problem, outcomes: dict[int, Outcome]) -> None:
        """Replaces the outcomes of the fastest builds by what is wrong with them, up to the first with which
        nothing is, whose error is then the full suite's."""
        timed = {i: each.measurement for i, each in outcomes.items() if each.measurement}
        for place, i in enumerate(sorted(timed, key=lambda i: timed[i].median_us), 1):
            which = "validating the fastest in full" if place == 1 else f"validating number {place} in full"
            try:
                error = self.validate_full(builds[i], problem, which)
                self.prove_promise(builds[i], "few")
            except FlashgenError as failure:
                outcomes[i] = failed(builds[i], failure, self.life.seconds)
                continue
            outcomes[i] = replace(outcomes[i], measurement=replace(timed[i], error=error))
            return

    def _survives(self, i: int, build: Build, problem: Problem, outcomes: dict[int, Outcome]) -> bool:
        try:
            self.measure_interleaved([build], problem, rounds=1)
        except FlashgenError as failure:
            outcomes[i] = failed(build, failure, self.life.seconds)
            return False
        return True

    def kill(self) -> None:
        """Ends the request under way in another thread, and any to come until `close`."""
        self.life.kill()

    def close(self) -> None:
        """Ends the process. The handle may be used again."""
        self.life.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        return measured(build, figures, stopped_early=timing.stopped_early, seconds=self.life.seconds)

    def _step(self, text: str) -> None:
        if self._which is not None:
            self._doing(f"{self._which}: {text}")

    def _next_seed(self, problem: Problem) -> int:
        """Fresh inputs for every request, the same again for the same run, whatever problems came before."""
        self._requests[problem] += 1
        return 1_000_003 * self._seed + self._requests[problem]
