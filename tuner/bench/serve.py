"""The process that times contenders: PyTorch, the emitted modules and all others on one card, in one run.

It tells what it finds, and what it is about to do: the parent ends it where something hangs, and starts
another for what is left.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from ...gen.layout import DENSE
from ...gen.problem import Problem
from ..cards.nvml import CardMonitor
from ..evaluate.measure import median, spread
from .ceilings import measure
from .contenders import CONTENDERS, LADDER
from .emitted import call_of, give_cubin, load
from .event_timer import EventTimer
from .figures import OURS, OURS_16_BITS, OURS_SAME_BITS, SAME_BITS, Cell, KernelErrors
from .inputs import Inputs
from .sample import SEED, GradientSample, Sample
from .torch_attention import sdpa
from .unserved import tried

#: What starting and a round of all timings may take at most, in seconds.
START_S, TURNS_S = 180.0, 120.0
#: Calls in a row for the host's share, taken so many times.
HOST_CALLS, HOST_TIMES = 100, 7
#: Whose error against float64 is larger computes something else. Rounding normal numbers to eight bits alone
#: makes errors of 0.05, with straight lines for weights 0.06.
MAX_ERROR, MAX_ERROR_8_BITS = 0.05, 0.15
#: Calls whose gradients are compared with the first's, of who promises the same bits every run.
SAME_BITS_CALLS = 3
#: A launch expected to take longer is not made; lengths up to `SAFE_LENGTH` are, longer ones in such steps.
LIMIT_MS, SAFE_LENGTH, LENGTH_FACTOR = 400.0, 512, 4
#: The problems that errors alone are taken on: (batch, query heads, key heads) and the longest sequences.
ERROR_SHAPE, ERROR_LENGTH = (2, 4, 4), 4096


def serve(pipe: Connection) -> None:
    """Does what the request on the pipe asks and sends what it finds; `bench.run` has both sides' terms."""
    _Server(pipe, pipe.recv()).run()


class _Server:
    def __init__(self, pipe: Connection, request: dict[str, Any]) -> None:
        self._pipe = pipe
        self._tell("begin", row=None, contender=None, seconds=START_S)
        import torch  # pyright: ignore[reportMissingImports]

        self._torch: Any = torch
        self._request = request
        self._rows: list[dict[str, Any]] = request["rows"]
        self._problems: list[Problem] = [row["problem"] for row in self._rows]
        self._skip: dict[int, dict[str, str]] = request["skip"]
        self._modules: dict[str, ModuleType] = {}
        self._monitor = CardMonitor(request["pci_bus_id"])

    def _tell(self, event: str, **content: Any) -> None:
        self._pipe.send({"event": event, **content})

    def run(self) -> None:
        """Does all of the request."""
        with self._torch.cuda.device(self._request["device"]), self._torch.no_grad():
            self._timer = EventTimer(self._torch)
            self._serve()
        self._tell("end")

    def _serve(self) -> None:
        torch, request = self._torch, self._request
        self._tell("about", libraries=_versions(torch))
        if request["ceilings"] is not None:
            self._tell("begin", row=None, contender="ceilings", seconds=START_S)
            self._tell("condition", when="before", condition=str(self._monitor.condition()))
            found = measure(torch, request["ceilings"]["limits"], request["ceilings"]["cubin"])
            self._tell("ceilings", ceilings=found)
        if request["host"]:
            self._tell("begin", row=None, contender="host", seconds=START_S)
            self._host_times()
        for turn, index in request["tasks"]:
            if time.time() > request["until"]:
                self._tell("over")
                break
            if request["errors_alone"]:
                self._errors(index)
            else:
                self._times(turn, index)
            torch.cuda.empty_cache()
        self._tell("condition", when="after", condition=str(self._monitor.condition()))

    # -- times -----------------------------------------------------------------------------------------------

    def _times(self, turn: int, index: int) -> None:
        """All contenders of one turn on one workload, beside flashgen."""
        torch, problem = self._torch, self._problems[index]
        torch.manual_seed(SEED)
        torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"
        self._begin(index, None)
        inputs = Inputs.draw(torch, problem)
        sample = GradientSample(inputs) if problem.backward else Sample(inputs, problem)
        names = [n for n in self._rows[index]["contenders"] if self._rows[index]["contenders"][n] == turn]
        cells: dict[str, Cell] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for name in (OURS, *names):
            self._begin(index, name)
            if name in self._skip.get(index, {}):
                cells[name] = Cell(reason=self._skip[index][name])
                continue
            make, scaled = self._maker(index, name, inputs), None
            if name.startswith(LADDER):
                scaled = self._scaled(index, name, inputs)
            if scaled is not None:
                cells[name] = scaled
                continue
            call, o, reason = tried(make)
            if call is not None:
                # What a launch did wrong shows here, or it would be blamed on who comes next.
                torch.cuda.synchronize()
                error = sample.error(o)
                most = MAX_ERROR_8_BITS if name == OURS and problem.has_scales else MAX_ERROR
                if error > most or isnan(error):
                    cells[name] = Cell(error=error, reason=f"is wrong: its error is {error:.1e}")
                elif name.endswith(SAME_BITS) and not self._repeats(call, o):
                    cells[name] = Cell(error=error, reason="its bits differ from run to run")
                else:
                    calls[name] = call
                    cells[name] = Cell(error=error)
            else:
                cells[name] = Cell(reason=reason)
                torch.cuda.empty_cache()
            del o
        self._tell("begin", row=index, contender=None, seconds=TURNS_S)
        interval = self._monitor.begin()
        if calls and (turn == 0 or set(calls) - {OURS}):
            clocks: dict[str, list[int]] = {name: [] for name in calls}

            def watch(name: str) -> None:
                if (clock_mhz := self._monitor.clock_mhz()) is not None:
                    clocks[name].append(clock_mhz)

            times = self._timer.in_turns(calls, self._request["budget_ms"], watch)
            ours_ms = median(times[OURS]) if OURS in times else None
            for name, values in times.items():
                cells[name] = replace(
                    cells[name],
                    ms=median(values),
                    spread=spread(values),
                    repeats=len(values),
                    ours_ms=None if name == OURS else ours_ms,
                    clock_mhz=median(tuple(clocks[name])) if clocks[name] else None,
                )
        self._tell("cells", turn=turn, row=index, cells=cells, disturbance=interval.disturbance())

    def _begin(self, index: int, name: str | None) -> None:
        """``name``: the contender that is to blame for what happens now; None: nobody is."""
        seconds = self._request["contender_s"]
        contender = CONTENDERS.get(name or "")
        if contender is not None and self._problems[index].backward:
            seconds *= contender.patience
        self._tell("begin", row=index, contender=name, seconds=seconds)

    def _maker(self, index: int, name: str, inputs: Inputs) -> Callable[[], Callable[[], Any]]:
        """What makes the contender's call."""
        if name != OURS and name not in self._rows[index]["steps"]:
            return lambda: CONTENDERS[name].call(inputs.beside)
        path = self._rows[index]["module"] if name == OURS else self._rows[index]["steps"][name]
        given = inputs.beside if name == OURS_16_BITS else inputs

        def make() -> Callable[[], Any]:
            # NaN where nobody writes.
            out = given.output(float("nan"))
            return call_of(self._module(path), given, out, same_bits=name == OURS_SAME_BITS)

        return make

    def _repeats(self, call: Callable[[], Any], found: Any) -> bool:
        """Whether further calls find the very same gradients."""
        return all(
            self._torch.equal(a, b)
            for _ in range(SAME_BITS_CALLS)
            for a, b in zip(found, call(), strict=True)
        )

    def _scaled(self, index: int, name: str, inputs: Inputs) -> Cell | None:
        """A cell scaled from a shorter length where one call at full length would take too long, and the
        reason where the contender refuses; None where it can be timed as it is."""
        full = inputs.problem.seqlen_q
        length = min(SAFE_LENGTH, full)
        while length < full:
            call, _, reason = tried(self._maker(index, name, inputs.first(length)))
            if call is None:
                return Cell(reason=reason)
            ms = self._timer.once(call)
            following = min(full, length * LENGTH_FACTOR)
            if ms * (following / length) ** 2 > LIMIT_MS:
                return Cell(ms=ms * (full / length) ** 2, repeats=1, scaled_from=length)
            length = following
        return None

    def _module(self, path: str) -> ModuleType:
        if path not in self._modules:
            module = self._modules[path] = load(Path(path))
            for causal, made in self._request["cubins"].get(path, {}).items():
                give_cubin(module, causal == str(True), Path(made).read_bytes())
        return self._modules[path]

    # -- the host's share ------------------------------------------------------------------------------------

    def _host_times(self) -> None:
        """The caller's microseconds per call on a tiny problem: each dtype's first kernel, and PyTorch."""
        done: set[str] = set()
        for index, (row, problem) in enumerate(zip(self._rows, self._problems, strict=True)):
            skipped = problem.layout is not DENSE or problem.backward or OURS in self._skip.get(index, {})
            if problem.dtype in done or row["module"] is None or skipped:
                continue
            done.add(problem.dtype)
            # Under the mask that was compiled ahead.
            tiny = replace(problem, batch=1, num_q_heads=1, num_kv_heads=1, seqlen_q=16, seqlen_k=16)
            inputs = Inputs.draw(self._torch, tiny)
            ours = self._maker(index, OURS, inputs)
            backends = {"sdpa": None, "sdpa, cudnn forced": "CUDNN_ATTENTION"}
            makers = {OURS: ours, f"{OURS}, out made": lambda i=inputs, n=index: self._without_out(n, i)}
            makers |= {
                name: lambda i=inputs.beside, b=backend: sdpa(i, b) for name, backend in backends.items()
            }
            found: dict[str, float] = {}
            for name, make in makers.items():
                call, _, _ = tried(make)
                if call is not None:
                    found[name] = self._host_us(call)
            self._tell("host", dtype=problem.dtype, microseconds=found)

    def _without_out(self, index: int, inputs: Inputs) -> Callable[[], Any]:
        return call_of(self._module(self._rows[index]["module"]), inputs)

    def _host_us(self, call: Callable[[], Any]) -> float:
        """The least of some means: what interrupts the caller is not the call's."""
        means = []
        for _ in range(HOST_TIMES):
            self._torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            means.append(1e6 * (time.perf_counter() - began) / HOST_CALLS)
        self._torch.cuda.synchronize()
        return min(means)

    # -- errors alone ----------------------------------------------------------------------------------------

    def _errors(self, index: int) -> None:
        """A kernel's errors beside PyTorch's, on inputs of two kinds under both masks."""
        torch, tuned, row = self._torch, self._problems[index], self._rows[index]
        torch.manual_seed(SEED)
        torch.backends.cuda.matmul.allow_tf32 = tuned.precision == "tf32"
        batch, heads, kv_heads = ERROR_SHAPE
        length = min(ERROR_LENGTH, max(tuned.seqlen_q, tuned.seqlen_k))
        shape = {"batch": batch, "num_q_heads": heads, "num_kv_heads": kv_heads}
        for inputs_kind in ("normal", "uniform"):
            for causal in (False, True):
                problem = replace(tuned, **shape, seqlen_q=length, seqlen_k=length, causal=causal)
                inputs = Inputs.draw(torch, problem, inputs_kind)
                sample = Sample(inputs, problem)
                errors: dict[str, float] = {}
                for name in (OURS, *(n for n, turn in row["contenders"].items() if turn < 2)):
                    self._begin(index, name)
                    if name.startswith(LADDER) or name in self._skip.get(index, {}):
                        continue
                    call, o, _ = tried(self._maker(index, name, inputs))
                    if call is not None:
                        errors[name] = sample.error(o)
                kernel = Path(row["module"]).stem
                found = KernelErrors(kernel=kernel, problem=problem, inputs=inputs_kind, errors=errors)
                self._tell("errors", row=index, errors=found)
        self._tell("cells", turn=0, row=index, cells={}, disturbance="")


#: Packages whose versions a run tells of, where they are installed.
_LIBRARIES = (
    *("triton", "xformers", "cupy-cuda12x", "cupy-cuda13x", "cupy", "pycuda"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl"),
)


def _versions(torch: Any) -> dict[str, str]:
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    with contextlib.suppress(Exception):
        found["cudnn"] = str(torch.backends.cudnn.version())
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
