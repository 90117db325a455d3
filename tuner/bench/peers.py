"""PyTorch's own attention, timed as a yardstick: in a process of its own, which may fail or be absent.

PyTorch lives in the device's primary context and may claim all of its memory; neither must touch our runs.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from statistics import median

from ...gen.problem import Problem
from ..evaluate.child_process import ChildProcess, Ended
from .event_timer import EventTimer
from .inputs import Inputs
from .torch_attention import sdpa
from .unserved import Call, tried

#: Backends of scaled_dot_product_attention, with SDPBackend's names of them; all but the last are fused.
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "memory-efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
#: The longest that all problems together may take.
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PeerTime:
    """One backend's median on one problem; None where it did not run, and then ``reason`` says why."""

    problem: int
    """Index of the problem in the list asked for."""
    backend: str
    fused: bool
    median_us: float | None
    reason: str = ""


@dataclass(frozen=True)
class _Request:
    problems: tuple[Problem, ...]
    device: int
    budget_ms: float


def torch_installed() -> bool:
    """Tells whether this interpreter finds PyTorch, without importing it."""
    return importlib.util.find_spec("torch") is not None


def torch_times(problems: Sequence[Problem], device: int, *, budget_ms: float = 200.0) -> Iterator[PeerTime]:
    """Times every backend of scaled_dot_product_attention in the problem's dtype, problem by problem, as
    `flashgen bench` does; ``budget_ms`` is for each backend on each problem.

    A backend that does not serve a problem is an entry with the reason. A child process that dies ends the
    list early, with one last entry that carries its last words.
    """
    deadline = time.monotonic() + TIMEOUT_S
    following = 0
    with ChildProcess(serve) as child:
        try:
            child.send(_Request(tuple(problems), device, budget_ms))
            while (entry := child.receive(deadline - time.monotonic())) is not None:
                following = min(entry.problem + 1, len(problems) - 1)
                yield entry
        except (Ended, TimeoutError) as failure:
            late = isinstance(failure, TimeoutError)
            reason = f"no end within {TIMEOUT_S:.0f} s" if late else child.reason()
            yield PeerTime(following, "torch", True, None, reason)
        finally:
            child.kill()


def serve(pipe: Connection) -> None:
    """Times the backends on every problem, in turns, and sends each time; None after the last.

    It is what the child process runs.
    """
    request: _Request = pipe.recv()
    import torch

    with torch.cuda.device(request.device), torch.no_grad():
        timer = EventTimer(torch)
        for index, problem in enumerate(request.problems):
            torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"
            for name, (median_us, reason) in _times(timer, problem, request.budget_ms).items():
                pipe.send(PeerTime(index, name, name != "math", median_us, reason))
    pipe.send(None)


def _times(timer: EventTimer, problem: Problem, budget_ms: float) -> dict[str, tuple[float | None, str]]:
    """Returns, by backend, the median microseconds, failing that the reason."""
    # Memory may not do for the inputs either, which is then every backend's reason.
    inputs = cache(lambda: Inputs.draw(timer.torch, problem))
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        if name == "flash" and problem.dtype == "f32":
            continue
        call, _, reasons[name] = tried(lambda backend=backend: sdpa(inputs(), backend))
        if call is None:
            timer.torch.cuda.empty_cache()
        else:
            calls[name] = call
    times_ms = timer.in_turns(calls, budget_ms * len(calls)) if calls else {}
    return {
        name: (1000 * median(times_ms[name]) if name in times_ms else None, reason)
        for name, reason in reasons.items()
    }
