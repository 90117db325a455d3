"""PyTorch's own attention, timed as a yardstick: in a process of its own, which may fail or be absent.

PyTorch lives in the device's primary context and may claim all of its memory; neither must touch our runs.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from ..gen.problem import Problem
from .contenders import Inputs, refusal, unserved

MIN_REPEATS, MAX_REPEATS = 5, 100
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
    """Times of every backend of scaled_dot_product_attention in the problem's dtype, as they come.

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
    """The child: times every backend on every problem and prints a marked JSON line for each."""
    request: dict[str, Any] = json.loads(text)
    import torch
    from torch.nn.attention import SDPBackend

    backends = [
        ("flash", getattr(SDPBackend, "FLASH_ATTENTION", None), True),
        ("memory-efficient", SDPBackend.EFFICIENT_ATTENTION, True),
        ("cudnn", getattr(SDPBackend, "CUDNN_ATTENTION", None), True),
        ("math", SDPBackend.MATH, False),
    ]
    with torch.cuda.device(request["device"]):
        for index, data in enumerate(request["problems"]):
            problem = Problem.from_dict(data)
            torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"
            for name, backend, fused in backends:
                if backend is None or (name == "flash" and problem.dtype == "f32"):
                    continue
                median, reason = None, unserved(problem)
                if not reason:
                    with warnings.catch_warnings(record=True) as told:
                        warnings.simplefilter("always")
                        try:
                            median = _time(problem, backend, request["budget_ms"])
                        except (RuntimeError, TypeError) as error:  # unsupported there, or out of memory
                            reason = refusal(error, [str(each.message) for each in told])
                            torch.cuda.empty_cache()
                print(MARK + json.dumps(asdict(PeerTime(index, name, fused, median, reason))), flush=True)


def _time(problem: Problem, backend: Any, budget_ms: float) -> float:
    """Median microseconds of one call, L2 flushed before each."""
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    inputs = Inputs.draw(torch, problem)
    q, k, v = inputs.q, inputs.k, inputs.v
    # PyTorch before 2.5 does not know the option; where heads are not grouped it is not needed.
    grouped = {"enable_gqa": True} if inputs.grouped else {}
    l2_bytes = getattr(torch.cuda.get_device_properties(q.device), "L2_cache_size", 64 * 2**20)
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda")

    def call() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        scaled_dot_product_attention(q, k, v, is_causal=problem.causal, **grouped)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    with sdpa_kernel(backend), torch.inference_mode():
        call()
        first_ms = call()
        repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(budget_ms / max(first_ms, 1e-3))))
        return 1000 * statistics.median(call() for _ in range(repeats))
