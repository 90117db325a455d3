"""What a tuning run works with while it lasts: the trials' storage, compilers, cards and a clock of each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optuna.storages import BaseStorage

from ..build.compile import CompilePool
from ..cards.device import Device
from ..evaluate.team import Evaluator, Team
from ..evaluate.worker import Worker
from ..shelf import library
from ..store.liveness import Pulse
from ..store.storage_file import StorageFile
from ..store.studies import open_storage
from .events import Doing, Notice, Report
from .options import TuneOptions
from .wall_time import Stopwatch

#: What stands in for the worker process of a card, in tests.
MakeEvaluator = Callable[[Device], Evaluator]


@dataclass(frozen=True)
class Workshop:
    """What a run works with while it lasts. ``report`` hears of its events, ``stop`` ends it when set."""

    storage: BaseStorage
    file: StorageFile
    toolkit: str
    pool: CompilePool
    team: Team
    pulse: Pulse
    watch: Stopwatch
    report: Report
    stop: threading.Event


@contextlib.contextmanager
def workshop(
    options: TuneOptions, report: Report, stop: threading.Event, make_evaluator: MakeEvaluator | None
) -> Iterator[Workshop]:
    """Opens what the run works with; on leaving, compilers and cards are released.

    Raises:
        FlashgenError: a tool or folder is missing, or the storage cannot be opened.
    """

    def notify(text: str) -> None:
        report(Notice(text))

    def doing(text: str) -> None:
        report(Doing(text))

    def worker(device: Device) -> Evaluator:
        return Worker(device, seed=options.seed, notify=notify, doing=doing, stop=stop)

    library.check_writable(options.out)
    storage = open_storage(options.storage)
    file = StorageFile(options.storage)
    toolchain = options.device.toolchain()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(CompilePool(toolchain, options.jobs))
        watch = Stopwatch(len(options.devices), pool.size)
        make = make_evaluator or worker
        team = stack.enter_context(Team([make(device) for device in options.devices], stop))
        pulse = Pulse()
        stack.callback(pulse.close)
        yield Workshop(storage, file, toolchain.version, pool, team, pulse, watch, report, stop)
