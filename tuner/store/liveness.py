"""Which coordinator a trial belongs to, and whether that coordinator still lives.

On its own host a coordinator whose process is gone is dead. Of another host nothing is known but what the
study says: each coordinator counts a heartbeat up on its trials in flight, and one that stands still for
`GRACE_SECONDS` of the onlooker's own clock belongs to the dead. No two hosts' clocks are compared, and every
kind of storage serves.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Hashable

from optuna.trial import FrozenTrial, Trial

from ..processes import is_gone, process_name

#: User attributes of a trial: who runs it, and how often it said so since.
OWNER, HEARTBEAT = "owner", "heartbeat"
#: Between two heartbeats, and how long one may stand still before its trials are given to others.
BEAT_SECONDS, GRACE_SECONDS = 10.0, 60.0


#: Slashes in an owner's name: those of the process's, and one before the number of the run.
OWNERS_SLASHES = 4
#: The runs of this process that go on; one process may make several, one after the other or at once.
_going_on: set[str] = set()
_run_numbers = itertools.count()


def owner() -> str:
    """Returns a name for one more run of this process: host, process number, when the process started
    (numbers are reused), in which container, and which run it is."""
    name = f"{process_name()}/{next(_run_numbers)}"
    _going_on.add(name)
    return name


def is_dead(name: str) -> bool:
    """Tells whether that owner is sure to be gone: a process of this host that is no more, or a run of this
    one."""
    process, number = name, ""
    if name.count("/") == OWNERS_SLASHES:
        process, _, number = name.rpartition("/")
    if process == process_name():
        return bool(number) and name not in _going_on
    return is_gone(process)


class Watch:
    """Tells living owners from dead ones, by what it has seen of their trials."""

    def __init__(self, grace_s: float | None = None) -> None:
        self._grace_s = GRACE_SECONDS if grace_s is None else grace_s
        self._seen: dict[int, tuple[Hashable, float]] = {}

    def lives(self, trial: FrozenTrial) -> bool:
        """Tells whether whoever runs the trial, which is RUNNING, still does."""
        name = str(trial.user_attrs.get(OWNER, ""))
        if is_dead(name):
            return False
        sign = (name, len(trial.params), trial.user_attrs.get(HEARTBEAT))
        now = time.monotonic()
        before, since = self._seen.get(trial.number, (None, now))
        if before != sign:
            self._seen[trial.number] = (sign, now)
            return True
        return now - since < self._grace_s


class Pulse:
    """Counts the heartbeat of one run's trials up, in a thread of its own: the coordinator may be busy with
    one kernel for minutes. After `close` the run's trials are a dead one's."""

    def __init__(self, beat_s: float | None = None) -> None:
        self.owner = owner()
        self._beat_s = BEAT_SECONDS if beat_s is None else beat_s
        self._trials: dict[int, Trial] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, trial: Trial) -> None:
        with self._lock:
            self._trials[trial.number] = trial
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
            self._thread.start()

    def remove(self, trial: Trial) -> None:
        with self._lock:
            self._trials.pop(trial.number, None)

    def close(self) -> None:
        _going_on.discard(self.owner)
        self._over.set()
        if self._thread is not None:
            # Not waited for longer than a storage that does not answer deserves; the thread is a daemon.
            self._thread.join(timeout=1.0)

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(self._beat_s):
            count += 1
            with self._lock:
                trials = list(self._trials.values())
            for trial in trials:
                # Told meanwhile, or the storage is gone, which the coordinator will notice itself.
                with contextlib.suppress(Exception):
                    trial.set_user_attr(HEARTBEAT, count)
