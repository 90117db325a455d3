"""The life of a worker process: it opens the device, then answers one request after another.

The messages either side sends are here too; `worker_life.WorkerLife` is the parent's side.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ...gen.problem import Problem
from ..build.protocol import Build
from ..cards.device import Device, Runner, Timing
from ..errors import CorruptedMemory, FlashgenError, LaunchError
from .adversarial import adversarial_findings, prove_promise
from .adversarial_inputs import Breadth, case_named
from .cases import Depth
from .validate import validate

#: What the sample of the real problem may cost an emulated card in the quick and in the full validation.
EMULATED_SAMPLE_FLOPS: dict[Depth, float] = {"quick": 2e7, "full": 4e8}
#: Pauses before timings that were disturbed are repeated: another process, or heat, may be gone by then.
REPEAT_AFTER_S = (0.5, 2.0)
#: The phases of a request, whose wall time is recorded.
VALIDATING, MEASURING = PHASES = ("validate", "measure")


# -- messages -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluate:
    build: Build
    problem: Problem
    best_us: float | None
    budget_ms: float
    seed: int


@dataclass(frozen=True)
class Validate:
    build: Build
    problem: Problem
    seed: int


@dataclass(frozen=True)
class Interleave:
    builds: tuple[Build, ...]
    problem: Problem
    rounds: int


@dataclass(frozen=True)
class ProvePromise:
    build: Build
    breadth: Breadth
    seed: int


@dataclass(frozen=True)
class TryAdversarial:
    """``cases`` are names, in the order in which they are tried."""

    build: Build
    cases: tuple[str, ...]
    seed: int


Request = Evaluate | Validate | Interleave | ProvePromise | TryAdversarial


@dataclass(frozen=True)
class Phase:
    """Sent ahead of the answer: what the process is about to do."""

    name: str


@dataclass(frozen=True)
class Step:
    """Sent ahead of the answer: where in a phase the process is, in words."""

    text: str


@dataclass(frozen=True)
class Answer:
    """A request's value or its error, and whether the process can go on."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    usable: bool = True


# -- answering -----------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Answers requests until the parent is gone. The process's whole life; never returns."""
    runner: Runner | None = None
    try:
        device: Device = pipe.recv()
        try:
            runner = device.open()
        except BaseException as error:
            pipe.send(Answer(error=_portable(error), trace=traceback.format_exc(), usable=False))
            os._exit(0)
        pipe.send(Answer())
        while True:
            request = pipe.recv()
            pipe.send(Phase("begin"))
            answer = _answer(pipe, runner, device.predicted, request)
            pipe.send(answer)
            if not answer.usable:
                # The device's context is lost: no destructor of ours may touch it.
                os._exit(0)
    except (EOFError, OSError):
        # The parent closed its end.
        if runner is not None:
            with contextlib.suppress(Exception):
                runner.close()
        os._exit(0)


def _answer(pipe: Connection, runner: Runner, emulated: bool, request: Request) -> Answer:
    try:
        return Answer(_carry_out(pipe, runner, emulated, request))
    except LaunchError as error:
        # A runner that cannot tell whether it survived has not.
        return Answer(error=_portable(error), usable=getattr(runner, "alive", False))
    except CorruptedMemory as error:
        # What else it wrote over nobody knows; the next build must not be blamed for it.
        return Answer(error=_portable(error), usable=False)
    except FlashgenError as error:
        return Answer(error=_portable(error))
    except Exception as error:
        return Answer(error=_portable(error), trace=traceback.format_exc(), usable=False)


def _carry_out(pipe: Connection, runner: Runner, emulated: bool, request: Request) -> Any:
    def run_suite(build: Build, problem: Problem, seed: int, depth: Depth) -> float:
        limit = EMULATED_SAMPLE_FLOPS[depth] if emulated else float("inf")
        pipe.send(Phase(VALIDATING))
        return validate(
            runner,
            build,
            seed=seed,
            depth=depth,
            problem=problem,
            max_sample_flops=limit,
            tell=lambda step: pipe.send(Step(step)),
        )

    match request:
        case Evaluate(build, problem, best_us, budget_ms, seed):
            error = run_suite(build, problem, seed, "quick")
            pipe.send(Phase(MEASURING))
            (timing,) = _undisturbed(
                lambda: [runner.measure(build, problem, best_us=best_us, budget_ms=budget_ms)]
            )
            return timing, error, runner.occupancy(build)
        case Validate(build, problem, seed):
            return run_suite(build, problem, seed, "full")
        case ProvePromise(build, breadth, seed):
            pipe.send(Phase(VALIDATING))
            return prove_promise(runner, build, breadth, seed=seed)
        case TryAdversarial(build, names, seed):
            pipe.send(Phase(VALIDATING))
            cases = [case_named(name, build.kernel.problem.dtype) for name in names]
            return list(adversarial_findings(runner, build, cases, seed=seed))
        case Interleave(builds, problem, rounds):
            pipe.send(Phase(MEASURING))
            timings = _undisturbed(lambda: runner.measure_interleaved(list(builds), problem, rounds=rounds))
            return [(timing, runner.occupancy(build)) for timing, build in zip(timings, builds, strict=True)]


def _undisturbed(measure: Callable[[], list[Timing]]) -> list[Timing]:
    """The timings, repeated after a pause while something speaks against them; what still does is kept with
    the last ones."""
    timings = measure()
    for pause_s in REPEAT_AFTER_S:
        if not any(timing.busy for timing in timings):
            break
        time.sleep(pause_s)
        timings = measure()
    return timings


def _portable(error: BaseException) -> BaseException:
    """The error as something that survives pickling: our own as they are, others as their text."""
    if isinstance(error, FlashgenError):
        plain = type(error)(*error.args)
        plain.__cause__ = None
        return plain
    return RuntimeError(f"{type(error).__name__}: {error}")
