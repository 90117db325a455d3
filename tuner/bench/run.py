"""Tuned kernels against what a user would pick instead, in one process and one run.

The contenders run in a process of their own, which may crash or hang: it is then ended, who was at work gets
an empty cell with the reason, and another process goes on with what is left.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..cards.lock import CardLock
from ..errors import FlashgenError
from ..evaluate.child_process import ChildProcess, Ended
from ..version import flashgen_version
from .ahead import compile_ahead
from .figures import OURS, TOOK_LONGER, BenchRun, Cell, Row
from .peers import torch_installed
from .plan import BenchOptions, Plan, make_plan
from .serve import START_S, serve

#: Processes that may die in one run.
MAX_DEATHS = 12
POLL_S = 0.2


def run_bench(
    options: BenchOptions,
    *,
    note: Callable[[str], None] = lambda text: None,
    on_row: Callable[[Row], None] = lambda row: None,
    save: Callable[[BenchRun], None] = lambda run: None,
    stop: threading.Event | None = None,
) -> BenchRun:
    """Times every contender on every workload. ``save`` is given what there is after each of them; setting
    ``stop`` ends the run.

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
                bench = _Bench(options, plan, run, rates, until, lock.inherited)
                bench.run(note, on_row, save, stop or threading.Event())
        finally:
            lock.close()
    found = replace(bench.result, seconds=round(time.monotonic() - began, 1))
    if not any(cell.ms for row in found.rows for cell in row.cells.values()) and not found.errors:
        told = "; ".join(found.notes) or "every contender refused: --json tells why"
        raise FlashgenError(f"nothing could be timed: {told}")
    save(found)
    return found


@dataclass
class _Bench:
    """The run under way."""

    options: BenchOptions
    plan: Plan
    result: BenchRun
    cubin: Path | None
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
            child = _Child(self._request(tasks, pending), self.inherited)
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
                    "problem": row.problem,
                    "module": plan.modules[i],
                    "contenders": plan.contenders[i],
                    "steps": plan.steps[i],
                }
                for i, row in enumerate(plan.rows)
            ],
            "cubins": plan.cubins,
            "tasks": tasks,
            "skip": plan.skip,
            "until": self.until,
            "budget_ms": options.budget_ms,
            "contender_s": options.contender_s,
            "errors_alone": options.errors_alone,
            "host": "host" in pending,
            "ceilings": {"cubin": self.cubin, "limits": limits} if "ceilings" in pending else None,
        }

    def _learn(self, event: dict[str, Any]) -> None:
        """What is told besides times."""
        run = self.result
        match event["event"]:
            case "about":
                self.result = replace(run, libraries=event["libraries"])
            case "ceilings":
                self.result = replace(run, ceilings=event["ceilings"])
            case "condition":
                self.result = replace(run, clocks={**run.clocks, event["when"]: event["condition"]})
            case "host":
                self.result = replace(run, host_us={**run.host_us, event["dtype"]: event["microseconds"]})
            case "errors":
                self.result = replace(run, errors=(*run.errors, event["errors"]))

    def _add(self, index: int, event: dict[str, Any]) -> None:
        """The cells of one turn. flashgen's own are the first turn's."""
        row = self.plan.rows[index]
        cells = event["cells"] | row.cells
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
        cells = {name: Cell(reason=reason) for name in (OURS, *names)}
        self._add(index, {"cells": cells, "disturbance": ""})


class _Child:
    """The process that serves one request. ``ended``: it did all; else ``reason`` says what became of it."""

    def __init__(self, request: dict[str, Any], inherited: tuple[int, ...]) -> None:
        self._process = ChildProcess(serve, inherited=inherited)
        self._request = request
        self.ended = False
        self.reason = ""

    def events(self, stop: threading.Event) -> Iterator[dict[str, Any]]:
        """Yields what the process tells, until it ends, is told to stop, or takes longer than it said it
        would."""
        allowed_s = START_S
        due = time.monotonic() + allowed_s
        try:
            self._process.send(self._request)
            while not stop.is_set():
                try:
                    event = self._process.receive(POLL_S)
                except TimeoutError:
                    if time.monotonic() > due:
                        self.reason = f"{TOOK_LONGER} {allowed_s:.0f} s"
                        return
                    continue
                if event["event"] == "end":
                    self.ended = True
                    return
                allowed_s = event["seconds"] if event["event"] == "begin" else START_S
                due = time.monotonic() + allowed_s
                yield event
            self.reason = "stopped"
        except Ended:
            self.reason = self._process.reason()

    def close(self) -> None:
        """Ends the process with all it started."""
        self._process.kill()
        self._process.close()
