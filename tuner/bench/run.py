"""Tuned kernels against what a user would pick instead, in one process and one run.

The contenders run in a process of their own, which may crash or hang: it is then ended, who was at work gets
an empty cell with the reason, and another process goes on with what is left. Kernels are compiled before, on
all cores, so that the card does not wait for nvcc.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...gen.emit.module import emit_module
from ...gen.families.ladder.family import STEPS, steps
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Illegal
from ..cards.device import Device
from ..cards.lock import CardLock
from ..errors import FlashgenError
from ..shelf import library
from ..suites import SUITES, Workload
from ..version import flashgen_version
from . import ceilings
from .ceilings import Ceilings
from .contenders import CONTENDERS, LADDER, LADDER_TURN
from .figures import OURS, BenchRun, Cell, KernelErrors, Row, row_of
from .peers import torch_installed
from .serve import MARK, START_S, load

#: Milliseconds of launches for one workload's turns, after warming up.
BUDGET_MS = 400.0
#: Longest that one contender may take for its first call, compiling included.
CONTENDER_S = 90.0
#: Processes that may die in one run.
MAX_DEATHS = 12
POLL_S = 0.2
LADDER_SUITE = "report"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to time where. ``contenders``: their names, None for all; ``minutes``: after which nothing more is
    begun; ``errors_alone``: errors on inputs of two kinds instead of times."""

    device: Device
    workloads: tuple[Workload, ...]
    out: Path = Path("out")
    contenders: tuple[str, ...] | None = None
    minutes: float | None = None
    errors_alone: bool = False
    jobs: int = 1
    budget_ms: float = BUDGET_MS
    contender_s: float = CONTENDER_S


@dataclass
class _Plan:
    """The rows under way, and what the serving process needs to know of each."""

    rows: list[Row]
    modules: list[str | None]
    contenders: list[dict[str, int]]
    steps: list[dict[str, str]]
    cubins: dict[str, dict[str, str]] = field(default_factory=dict)
    """Files of what was compiled ahead, by module and by mask ("True", "False")."""
    skip: dict[int, dict[str, str]] = field(default_factory=dict)

    def leave_out(self, index: int, name: str, reason: str) -> None:
        self.skip.setdefault(index, {})[name] = reason

    def tasks(self, errors_alone: bool) -> list[tuple[int, int]]:
        """(turn, row): the cheap contenders of all rows first."""
        indices = range(len(self.rows))
        if errors_alone:
            seen: dict[str, int] = {}
            for i in indices:
                module = self.modules[i]
                if module is not None:
                    seen.setdefault(module, i)
            return [(0, i) for i in seen.values()]
        last = max((turn for row in self.contenders for turn in row.values()), default=0)
        return [
            (turn, i)
            for turn in range(last + 1)
            for i in indices
            if not turn or turn in self.contenders[i].values()
        ]


def contender_names() -> list[str]:
    """All there are, the report's steps last."""
    return [*CONTENDERS, *(LADDER + name for name in STEPS)]


def run_bench(
    options: BenchOptions,
    *,
    note: Callable[[str], None] = lambda text: None,
    on_row: Callable[[Row], None] = lambda row: None,
    save: Callable[[BenchRun], None] = lambda run: None,
    stop: threading.Event | None = None,
) -> BenchRun:
    """Times everything. ``save`` is given what there is after every workload; setting ``stop`` ends the run.

    Raises:
        FlashgenError: PyTorch or the card is not there, or nothing at all could be timed.
    """
    if options.device.predicted:
        raise FlashgenError(
            f"{options.device.spec} is an emulated card, whose times are predicted; PyTorch needs a real one"
        )
    if not torch_installed():
        raise FlashgenError("PyTorch, which kernels are timed beside, is not installed: `pip install torch`")
    began = time.monotonic()
    until = time.time() + 60 * (options.minutes or 1e6)
    limits = options.device.limits
    run = BenchRun(
        device=limits.name,
        arch=limits.arch,
        driver=options.device.driver,
        toolkit=options.device.toolchain().version,
        flashgen=flashgen_version(),
        began=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    lock = CardLock(options.device.lock_key or "bench")
    with tempfile.TemporaryDirectory(prefix="flashgen-bench-") as folder:
        plan = make_plan(options, Path(folder))
        rates = compile_ahead(plan, limits, options, Path(folder), note)
        lock.open()
        try:
            with lock.held(tell=lambda holder: note(f"waiting for the card, which {holder} uses")):
                bench = _Bench(options, plan, run, rates, Path(folder), until, lock.inherited)
                bench.run(note, on_row, save, stop or threading.Event())
        finally:
            lock.close()
    found = replace(bench.result, seconds=round(time.monotonic() - began, 1))
    if not any(cell.ms for row in found.rows for cell in row.cells.values()) and not found.errors:
        told = "; ".join(found.notes) or "every contender refused: --json tells why"
        raise FlashgenError(f"nothing could be timed: {told}")
    save(found)
    return found


# -- what to time --------------------------------------------------------------------------------------------


def make_plan(options: BenchOptions, folder: Path) -> _Plan:
    """The rows with the kernel that serves each, the nearest where none was tuned for just that."""
    limits = options.device.limits
    known = [e for e in library.entries(library.folders(options.out)) if not e.predicted]
    plan = _Plan([], [], [], [])
    for index, workload in enumerate(options.workloads):
        row, module = row_of(workload), None
        match = library.find(known, workload.problem, limits)
        if match is None:
            plan.leave_out(
                index, OURS, f"no kernel is known for {workload.problem.stem}; `flashgen tune` makes one"
            )
        else:
            assert match.entry.json_path is not None
            path = match.entry.json_path.with_suffix(".py")
            module = str(path.resolve())
            if not path.exists():
                module = None
                plan.leave_out(index, OURS, f"{path} is missing")
            kernel = match.entry.kernel
            row = replace(
                row,
                kernel=kernel.problem.name,
                family=kernel.variant.family,
                exact=kernel.problem == workload.problem,
                how=match.how,
            )
        plan.rows.append(row)
        plan.modules.append(module)
        plan.contenders.append(_contenders(workload, options.contenders))
        plan.steps.append(_steps(plan, index, limits, folder))
    return plan


def _contenders(workload: Workload, wanted: Sequence[str] | None) -> dict[str, int]:
    """The turns of the contenders for a workload: all of its dtype, and the ladder on the report's cases."""
    dtype = workload.problem.dtype
    found = {c.name: c.turn for c in CONTENDERS.values() if dtype in c.dtypes}
    if SUITES[LADDER_SUITE].problems.get(workload.name) == workload.problem:
        found |= {LADDER + name: LADDER_TURN for name in STEPS}
    return {name: turn for name, turn in found.items() if wanted is None or name in wanted}


def _steps(plan: _Plan, index: int, limits: DeviceLimits, folder: Path) -> dict[str, str]:
    """The report's steps as modules in ``folder``, by contender."""
    problem, found = plan.rows[index].problem, {}
    if not any(name.startswith(LADDER) for name in plan.contenders[index]):
        return {}
    for step, variant in steps(problem.head_dim).items():
        name = LADDER + step
        if name not in plan.contenders[index]:
            continue
        path = folder / f"{name.replace('-', '_').replace('.', '_')}_{problem.stem}.py"
        try:
            if not path.exists():
                path.write_text(
                    emit_module(render(variant, problem, limits), device=limits.name), encoding="utf-8"
                )
        except Illegal as error:
            plan.leave_out(index, name, str(error))
            continue
        found[name] = str(path)
    return found


def compile_ahead(
    plan: _Plan, limits: DeviceLimits, options: BenchOptions, folder: Path, note: Callable[[str], None]
) -> Path | None:
    """Compiles every module on all cores, into ``folder``, and the ceilings' kernels, whose cubin it returns.
    What does not compile is left out with the reason.

    PyCUDA has a cache, but starts nvcc even for what is in it, to find what a source includes: with the card
    waiting, modules are given their cubins."""
    wanted: dict[tuple[str, bool], list[tuple[int, str]]] = {}
    for index, row in enumerate(plan.rows):
        modules = {OURS: plan.modules[index], **plan.steps[index]}
        masks = (False, True) if options.errors_alone else (row.problem.causal,)
        for name, path in modules.items():
            if path is not None:
                for causal in masks:
                    wanted.setdefault((path, causal), []).append((index, name))
    note(f"compiling {len(wanted)} kernels on {options.jobs} cores")
    started = time.monotonic()
    cubin = None
    with ThreadPoolExecutor(options.jobs) as pool:
        rates = pool.submit(ceilings.build, limits.arch)
        futures = {key: pool.submit(_compile_module, *key, limits.arch) for key in wanted}
        for number, (key, future) in enumerate(futures.items()):
            path = folder / f"{number}.cubin"
            try:
                path.write_bytes(future.result())
                plan.cubins.setdefault(key[0], {})[str(key[1])] = str(path)
            except Exception as error:  # of a module from anywhere: a reason, not the end
                for index, name in wanted[key]:
                    plan.leave_out(index, name, f"does not compile: {_first_line(error)}")
        try:
            cubin = rates.result()
        except FlashgenError as error:
            note(f"no ceilings of instructions alone: {_first_line(error)}")
    note(f"compiled in {time.monotonic() - started:.0f} s")
    return cubin


def _compile_module(path: str, causal: bool, arch: int) -> bytes:
    """What the module's first call under that mask would do."""
    return load(Path(path))._compile(arch, causal, True)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# -- timing --------------------------------------------------------------------------------------------------


@dataclass
class _Bench:
    """The run under way."""

    options: BenchOptions
    plan: _Plan
    result: BenchRun
    cubin: Path | None
    folder: Path
    until: float
    inherited: tuple[int, ...]

    def run(
        self,
        note: Callable[[str], None],
        on_row: Callable[[Row], None],
        save: Callable[[BenchRun], None],
        stop: threading.Event,
    ) -> None:
        tasks = self.plan.tasks(self.options.errors_alone)
        deaths, over = 0, ""
        # What is measured once, beside the workloads.
        pending = set() if self.options.errors_alone else {"ceilings", "host"}
        while tasks and not over:
            at: dict[str, Any] = {"row": None, "contender": None}
            child = _Child(self._request(tasks, pending), self.folder, self.inherited)
            try:
                for event in child.events(stop):
                    match event["event"]:
                        case "begin":
                            at = event
                            pending.discard(event["contender"])
                        case "over":
                            over = f"the {self.options.minutes:g} minutes were over"
                        case "cells":
                            index = event["row"]
                            tasks.remove((event["turn"], index))
                            self._add(index, event)
                            self._publish(save)
                            on_row(self.plan.rows[index])
                        case _:
                            self._learn(event)
            finally:
                child.close()
            if child.ended or over:
                break
            if stop.is_set():
                over = "stopped before its turn"
                break
            deaths += 1
            reason = child.reason
            started = at["row"] is not None or at["contender"] is not None
            if not started and deaths == 1:
                raise FlashgenError(f"PyTorch could not be started on the card: {reason}")
            if not started or deaths > MAX_DEATHS:
                over = f"the process that times ended: {reason}"
                break
            where = "" if at["row"] is None else f"{self.plan.rows[at['row']].name}: "
            told = f"{where}{at['contender'] or 'timing in turns'}: {reason}"
            note(told)
            self.result = replace(self.result, notes=(*self.result.notes, told))
            if at["row"] is not None:
                self._blame(tasks, at, reason)
        for turn, index in tasks:
            self._give_up(turn, index, over)
        if over:
            note(over)
            self.result = replace(self.result, notes=(*self.result.notes, over))
        self._publish(save)

    def _publish(self, save: Callable[[BenchRun], None]) -> None:
        self.result = replace(self.result, rows=tuple(self.plan.rows))
        save(self.result)

    def _request(self, tasks: Sequence[tuple[int, int]], pending: Container[str]) -> dict[str, Any]:
        plan, options = self.plan, self.options
        limits = options.device.limits
        return {
            "device": int(options.device.spec),
            "pci_bus_id": options.device.lock_key,
            "rows": [
                {
                    "problem": row.problem.to_dict(),
                    "module": plan.modules[i],
                    "contenders": plan.contenders[i],
                    "steps": plan.steps[i],
                }
                for i, row in enumerate(plan.rows)
            ],
            "cubins": plan.cubins,
            "tasks": tasks,
            "skip": {str(index): names for index, names in plan.skip.items()},
            "until": self.until,
            "budget_ms": options.budget_ms,
            "contender_s": options.contender_s,
            "errors_alone": options.errors_alone,
            "host": "host" in pending,
            "ceilings": {"cubin": None if self.cubin is None else str(self.cubin), "limits": asdict(limits)}
            if "ceilings" in pending
            else None,
        }

    def _learn(self, event: dict[str, Any]) -> None:
        """What is told besides times."""
        run = self.result
        match event["event"]:
            case "about":
                self.result = replace(run, libraries=event["libraries"])
            case "ceilings":
                self.result = replace(run, ceilings=Ceilings.from_dict(event))
            case "condition":
                self.result = replace(run, clocks={**run.clocks, event["when"]: event["condition"]})
            case "host":
                self.result = replace(run, host_us={**run.host_us, event["dtype"]: event["microseconds"]})
            case "errors":
                problem = Problem.from_dict(event["problem"])
                found = KernelErrors(
                    kernel=event["kernel"], problem=problem, inputs=event["inputs"], errors=event["errors"]
                )
                self.result = replace(run, errors=(*run.errors, found))

    def _add(self, index: int, event: dict[str, Any]) -> None:
        """The cells of one turn. flashgen's own are the first turn's."""
        row = self.plan.rows[index]
        cells = {name: Cell(**cell) for name, cell in event["cells"].items()} | row.cells
        order = [OURS, *self.plan.contenders[index]]
        told = (event["disturbance"],) if event["disturbance"] else ()
        self.plan.rows[index] = replace(
            row,
            cells={name: cells[name] for name in order if name in cells},
            disturbances=tuple(dict.fromkeys((*row.disturbances, *told))),
        )

    def _blame(self, tasks: list[tuple[int, int]], at: dict[str, Any], reason: str) -> None:
        """Who was at work is left out from now on; where nobody is to blame, that workload's turn."""
        index, name = at["row"], at["contender"]
        if name is not None and name not in self.plan.skip.get(index, {}):
            self.plan.leave_out(index, name, reason)
            return
        turn, index = next(task for task in tasks if task[1] == index)
        tasks.remove((turn, index))
        self._give_up(turn, index, reason)

    def _give_up(self, turn: int, index: int, reason: str) -> None:
        names = [name for name, its in self.plan.contenders[index].items() if its == turn]
        cells = {name: asdict(Cell(reason=reason)) for name in (OURS, *names)}
        self._add(index, {"cells": cells, "disturbance": ""})


class _Child:
    """The process that serves one request. ``ended``: it did all; else ``reason`` says what became of it."""

    def __init__(self, request: dict[str, Any], folder: Path, inherited: tuple[int, ...]) -> None:
        path = folder / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        # As this interpreter imports, so does that one; nothing in the current folder gets in between.
        how = f"sys.path[:] = {sys.path!r}; from {serve_module()} import serve"
        boot = f"import sys; {how}; serve(sys.argv[1])"
        # Warnings go to a file: a pipe that nobody empties would stop the child.
        self._told = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._told,
            text=True,
            pass_fds=inherited,
            # Ctrl-C in the terminal does not reach it: what it has done so far is kept.
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.ended = False
        self.reason = ""

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def events(self, stop: threading.Event) -> Iterator[dict[str, Any]]:
        """What it tells, until it ends, is told to stop, or takes longer than it said it would."""
        allowed = START_S
        due = time.monotonic() + allowed
        while not stop.is_set():
            try:
                line = self._lines.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() > due:
                    self.reason = f"took longer than {allowed:.0f} s"
                    return
                continue
            if line is None:
                self.reason = self._last_words()
                return
            if not line.startswith(MARK):
                continue
            event = json.loads(line.removeprefix(MARK))
            if event["event"] == "end":
                self.ended = True
                return
            allowed = event["seconds"] if event["event"] == "begin" else START_S
            due = time.monotonic() + allowed
            yield event
        self.reason = "stopped"

    def _last_words(self) -> str:
        """The last line that it printed, or how it ended."""
        code = self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        self._told.seek(0)
        words = self._told.read().strip().splitlines()
        return words[-1] if words else f"exit code {code}"

    def close(self) -> None:
        """Ends it with all it started."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._told.close()


def serve_module() -> str:
    """The name by which the serving process imports what it runs."""
    return load.__module__
