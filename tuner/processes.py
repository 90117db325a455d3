"""Processes: which of this host are gone, and programs that are run to their end and no further.

A program that is run here has a deadline and dies with all that it started: when the deadline is past, when
`stop_programs` is called, and when this process dies, however it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
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


#: The guards of the programs under way; each is added as it starts, under the lock, so that none escapes
#: `stop_programs`.
_guards: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()


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
    with _lock:
        guard = subprocess.Popen(
            GUARD,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if given else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                # The guard's group from before its first instruction: it starts nothing that outlives us.
                process_group=guard.pid,
            )
        except BaseException:
            _dismiss(guard)
            raise
        _guards.add(guard)
    if niceness:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
    try:
        output, _ = process.communicate(given or None, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TookTooLong from None
    finally:
        with _lock:
            _guards.discard(guard)
        # What it left running goes with the guard.
        _dismiss(guard)
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILLED_S)
    return Done(process.returncode, output.decode(errors="replace"))


def stop_programs() -> None:
    """Kills every program that `run_program` has under way, with all that it started."""
    with _lock:
        for guard in _guards:
            _kill_group(guard)


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Kills the guard's group, itself in it, and takes note of its end."""
    _kill_group(guard)
    if guard.stdin is not None:
        guard.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(timeout=KILLED_S)


def _kill_group(guard: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(guard.pid, signal.SIGKILL)
