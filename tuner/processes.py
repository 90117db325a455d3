"""Processes: which of this host are gone, and programs that are run to their end and no further.

A program that is run here has a deadline and dies with all that it started: when the deadline is past, when
the `Programs` that it belongs to are stopped, and when this process dies, however it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

#: The last word of a guard: kills the process group that it leads. It waits for the end of its input, which
#: comes when whoever started it lets go of it or dies.
GUARD = ("/bin/sh", "-c", "read _; kill -KILL 0")
#: Until a program that was killed is gone; one that is stuck in the kernel is left behind.
KILLED_S = 10.0


# -- which are gone ------------------------------------------------------------------------------------------


def process_name() -> str:
    """Returns a name of this process that no other bears: host, process number, when it started (numbers are
    reused) and in which container, joined by slashes."""
    pid = os.getpid()
    return "/".join((socket.gethostname(), str(pid), started(pid), namespace()))


def is_gone(name: str) -> bool:
    """Tells whether the process of that name is sure to be no more: of another host or container nothing is
    known."""
    host, pid, began, where, *_ = [*name.split("/"), "", "", "", ""]
    if (
        host != socket.gethostname()
        or not (pid.isascii() and pid.isdigit())
        or where not in ("", namespace())
    ):
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return started(int(pid)) != began


def started(pid: int) -> str:
    """Returns when a process of this host started, in ticks of its clock; empty where that is not known."""
    try:
        # Field 22 counted from the program's name, which is in parentheses and may hold spaces.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def namespace() -> str:
    """Returns where process numbers mean something: two containers may bear one host's name."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return ""


# -- programs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """How a program ended: its status, minus the signal where one killed it, and all that it printed."""

    status: int
    output: str

    def ending(self) -> str:
        """Says how the program ended, to follow its name in a sentence."""
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"exited with status {self.status}"


class TookTooLong(Exception):
    """A program did not end within its deadline and was killed with all that it had started."""


class Programs:
    """Programs that are stopped, or stand still, together: those that `run_program` runs inside `own`."""

    def __init__(self) -> None:
        # Each guard is added as it starts, under the lock, so that none escapes `stop` or `still`.
        self._guards: set[subprocess.Popen[bytes]] = set()
        self._changed = threading.Condition()
        self._stand_still_since: float | None = None
        self._stood_s = 0.0

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Takes what this thread runs inside for one of them."""
        token = _whose.set(self)
        try:
            yield
        finally:
            _whose.reset(token)

    def stop(self) -> None:
        """Kills those that are under way, with all that they started."""
        with self._changed:
            for guard in self._guards:
                _signal_group(guard, signal.SIGKILL)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Has them take no time of any core inside: those under way stand still, those to come wait.

        It counts towards no deadline of theirs. For one thread at a time.
        """
        with self._changed:
            self._stand_still_since = time.monotonic()
            for guard in self._guards:
                _signal_group(guard, signal.SIGSTOP)
                # A guard that stands still would not see this process die.
                with contextlib.suppress(OSError):
                    guard.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            with self._changed:
                self._stood_s = self.stood_s()
                self._stand_still_since = None
                for guard in self._guards:
                    _signal_group(guard, signal.SIGCONT)
                self._changed.notify_all()

    def stood_s(self) -> float:
        """Returns for how long they have stood still so far."""
        with self._changed:
            since = self._stand_still_since
            return self._stood_s + (0.0 if since is None else time.monotonic() - since)

    def start(
        self, command: Sequence[str], *, stdin: int, environment: Mapping[str, str] | None
    ) -> tuple[subprocess.Popen[bytes], Guard]:
        """Starts a program and its guard, once they do not stand still. Raises OSError where it cannot be."""
        with self._changed:
            self._changed.wait_for(lambda: self._stand_still_since is None)
            guard = subprocess.Popen(
                GUARD,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            try:
                # The guard's group from before its first instruction: it starts nothing that outlives us.
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=None if environment is None else dict(environment),
                    process_group=guard.pid,
                )
            except BaseException:
                _dismiss(guard)
                raise
            self._guards.add(guard)
        return process, guard

    def ended(self, guard: Guard) -> None:
        """Kills what a program that has ended left running, by its guard."""
        with self._changed:
            self._guards.discard(guard)
        _dismiss(guard)


Guard = subprocess.Popen[bytes]
#: Those that are run by nobody in particular.
_NOBODYS = Programs()
_whose: ContextVar[Programs] = ContextVar("programs", default=_NOBODYS)


def run_program(
    command: Sequence[str],
    *,
    timeout_s: float,
    given: bytes = b"",
    environment: Mapping[str, str] | None = None,
    niceness: int = 0,
) -> Done:
    """Runs a program to its end, ``given`` as its input; what it prints to stdout and to stderr is one text.

    It does not see the terminal's Ctrl-C, which is for this process to handle.

    Raises:
        TookTooLong: it ran past ``timeout_s``, or a process that it left behind kept its output open.
        OSError: it cannot be started.
    """
    programs = _whose.get()
    stdin = subprocess.PIPE if given else subprocess.DEVNULL
    process, guard = programs.start(command, stdin=stdin, environment=environment)
    if niceness:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
    try:
        output = _output_of(process, given, timeout_s, programs)
    finally:
        programs.ended(guard)
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILLED_S)
    return Done(process.returncode, output.decode(errors="replace"))


def _output_of(process: subprocess.Popen[bytes], given: bytes, timeout_s: float, programs: Programs) -> bytes:
    """All that the program prints until it ends. Raises TookTooLong."""
    stood_s, left_s = programs.stood_s(), timeout_s
    while True:
        try:
            return process.communicate(given or None, timeout=left_s)[0]
        except subprocess.TimeoutExpired:
            before, stood_s, given = stood_s, programs.stood_s(), b""
            left_s = stood_s - before
            if left_s <= 0:
                raise TookTooLong from None


def _dismiss(guard: Guard) -> None:
    """Kills the guard's group, itself in it, and takes note of its end."""
    _signal_group(guard, signal.SIGKILL)
    if guard.stdin is not None:
        guard.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(timeout=KILLED_S)


def _signal_group(guard: Guard, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.killpg(guard.pid, number)
