"""What a tuning run works with while it lasts: the trials' storage, compilers, cards and a clock of each.

Opening cards and storages takes a second or two: runs of a batch do it once, in `premises` that they share.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optuna.storages import BaseStorage

from ..build.protocol import Pool
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
class Premises:
    """What runs on the same cards share, one after the other. ``stop`` ends them all when set."""

    storage: BaseStorage
    file: StorageFile
    toolkit: str
    pool: Pool
    team: Team
    stop: threading.Event


@dataclass(frozen=True)
class Workshop:
    """What a run works with while it lasts. ``report`` hears of its events, ``stop`` ends it when set."""

    storage: BaseStorage
    file: StorageFile
    toolkit: str
    pool: Pool
    team: Team
    pulse: Pulse
    watch: Stopwatch
    report: Report
    stop: threading.Event


@contextlib.contextmanager
def premises(
    options: TuneOptions,
    report: Report,
    stop: threading.Event,
    make_evaluator: MakeEvaluator | None,
    pool: Pool,
) -> Iterator[Premises]:
    """Opens what runs with such options share, whatever their problem, beside the ``pool`` that builds for
    them; on leaving, cards are released.

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
    make = make_evaluator or worker
    with Team([make(device) for device in options.devices], stop) as team:
        yield Premises(storage, file, pool.toolchain.version, pool, team, stop)


@contextlib.contextmanager
def workshop(place: Premises, report: Report) -> Iterator[Workshop]:
    """Opens what one run works with; on leaving, nothing of it is built any more."""
    with contextlib.ExitStack() as stack:
        watch = Stopwatch(place.team.size, place.pool.size)
        stack.callback(place.pool.drop)
        pulse = Pulse()
        stack.callback(pulse.close)
        yield Workshop(**vars(place), pulse=pulse, watch=watch, report=report)
