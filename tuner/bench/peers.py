"""PyTorch's own attention, timed as a yardstick: in a process of its own, which may fail or be absent.

PyTorch lives in the device's primary context and may claim all of its memory; neither must touch our runs.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import IO, Any

from ...gen.problem import Problem
from .contenders import Call, Inputs, sdpa, tried
from .event_timer import EventTimer

#: Of scaled_dot_product_attention, by SDPBackend's names of them; all but the last are fused.
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "memory-efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
#: For all problems together.
TIMEOUT_S = 600.0
#: Begins the child's lines; PyTorch may print others.
MARK = "peer "


@dataclass(frozen=True)
class PeerTime:
    """One backend's median on one problem; None where it did not run, and then ``reason`` says why."""

    problem: int
    """Index of the problem in the list asked for."""
    backend: str
    fused: bool
    median_us: float | None
    reason: str = ""


def torch_installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def torch_times(problems: Sequence[Problem], device: int, *, budget_ms: float = 200.0) -> Iterator[PeerTime]:
    """Times of every backend of scaled_dot_product_attention in the problem's dtype, problem by problem,
    measured as `flashgen bench` does; ``budget_ms`` is for each backend on each problem.

    A backend that does not serve a problem is an entry with the reason. A child process that dies ends the
    list early, with one last entry that carries its last words.
    """
    request = json.dumps(
        {"problems": [p.to_dict() for p in problems], "device": device, "budget_ms": budget_ms}
    )
    # As this interpreter imports, so does that one; nothing in the current folder gets in between.
    boot = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve(sys.argv[1])"
    # Warnings go to a file: a pipe that nobody empties would stop the child.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as told,
        subprocess.Popen(
            [sys.executable, "-c", boot, request],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
        ) as child,
    ):
        assert child.stdout is not None
        late = threading.Event()
        watchdog = threading.Timer(TIMEOUT_S, lambda: (late.set(), child.kill()))
        watchdog.daemon = True
        watchdog.start()
        last = -1
        try:
            for line in child.stdout:
                if not line.startswith(MARK):
                    continue
                entry = PeerTime(**json.loads(line.removeprefix(MARK)))
                last = entry.problem
                yield entry
            if child.wait():
                why = (
                    f"no end within {TIMEOUT_S:.0f} s"
                    if late.is_set()
                    else _last_words(told, child.returncode)
                )
                yield PeerTime(min(last + 1, len(problems) - 1), "torch", True, None, why)
        finally:
            watchdog.cancel()
            child.kill()


def _last_words(told: IO[str], returncode: int) -> str:
    """The last line that a child printed, or how it ended."""
    told.seek(0)
    words = told.read().strip().splitlines()
    ending = f"killed by signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    return words[-1] if words else ending


def serve(text: str) -> None:
    """The child: times the backends on every problem, in turns, and prints a marked JSON line for each."""
    request: dict[str, Any] = json.loads(text)
    import torch

    with torch.cuda.device(request["device"]), torch.no_grad():
        timer = EventTimer(torch)
        for index, data in enumerate(request["problems"]):
            problem = Problem.from_dict(data)
            torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"
            for name, (median_us, reason) in _times(timer, problem, request["budget_ms"]).items():
                entry = PeerTime(index, name, name != "math", median_us, reason)
                print(MARK + json.dumps(asdict(entry)), flush=True)


def _times(timer: EventTimer, problem: Problem, budget_ms: float) -> dict[str, tuple[float | None, str]]:
    """By backend, the median microseconds, failing that the reason."""
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
