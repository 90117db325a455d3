"""A fresh interpreter that runs one function of ours and talks over a pipe: what kills it does not kill us.

It is started, not forked: it shares no CUDA state and none of its parent's imports, and the parent's main
module need not be importable. What it prints goes to a file that is quoted when it dies. It ignores Ctrl-C,
which is for the parent to handle, and ends when its parent does, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

#: How long a process may take to end when asked, and when killed: the driver then frees what it held.
GRACE_S, KILLED_S = 2.0, 30.0
#: Until the status of a process that closed its pipe is known.
ENDING_S = 5.0
#: From the parent's end to its child's, for one that hangs where it cannot be asked.
ORPHANED_S = 1.0
LAST_WORDS_BYTES = 2000
POLL_S = 0.1


class Ended(Exception):
    """The process closed its pipe or is gone."""


class ChildProcess:
    """A process that runs ``serve`` on its end of a pipe, which both sides send picklable objects through.

    ``serve`` is a function of a module, ``inherited`` are file descriptors that the process gets too, and
    ``environment`` is added to ours. Use it from one thread; any may call `kill`.
    """

    def __init__(
        self,
        serve: Callable[[Connection], None],
        *,
        inherited: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.pipe, theirs = Pipe()
        # PR_SET_PDEATHSIG would fire when the thread that started the process ends; a pipe ends with us.
        lifeline, self._lifeline = os.pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        entry = (serve.__module__, serve.__name__, theirs.fileno(), lifeline)
        # sys.path goes along, so that what this interpreter can import, that one can unpickle, and nothing
        # in the current folder gets in between.
        boot = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _enter; _enter{entry!r}"
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-u", "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), lifeline, *inherited),
                # A session of its own: the terminal's Ctrl-C does not reach it, and it is killed with all
                # that it started.
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        except BaseException:
            self._close_files()
            raise
        finally:
            theirs.close()
            os.close(lifeline)

    def send(self, message: Any) -> None:
        """Sends an object. Raises Ended where nobody is there to take it."""
        try:
            self.pipe.send(message)
        except OSError:
            raise Ended from None

    def receive(self, timeout_s: float) -> Any:
        """Returns the next object that the process sends.

        Raises:
            Ended: none will come.
            TimeoutError: none came within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self.pipe.poll(max(0.0, min(deadline - time.monotonic(), POLL_S))):
                    return self.pipe.recv()
                # What it started may hold its end of the pipe open.
                if self.popen.poll() is not None and not self.pipe.poll(0):
                    raise Ended
            except (EOFError, OSError):
                raise Ended from None
            if time.monotonic() >= deadline:
                raise TimeoutError

    def exit_status(self) -> int | None:
        """Returns the status of a process that has ended or is about to, minus the signal where one killed
        it; None where it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=ENDING_S)
        return self.popen.poll()

    def ending(self) -> str:
        """Says how the process ended, to follow its name in a sentence."""
        status = self.exit_status()
        if status is None:
            return "closed its pipe"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    def last_words(self) -> str:
        """Returns the end of what the process printed."""
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - LAST_WORDS_BYTES))
        return self._printed.read().decode(errors="replace").strip()

    def reason(self) -> str:
        """Says in a few words why the process ended: the signal that killed it or what it printed last."""
        status, lines = self.exit_status(), self.last_words().splitlines()
        killed = status is not None and status < 0
        return self.ending().removeprefix("was ") if killed or not lines else lines[-1]

    def kill(self) -> None:
        """Kills the process and all it started."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Asks the process to end, kills it where it does not, and frees what is held of it here."""
        if self._printed.closed:
            return
        # Closing both pipes asks it to go; a kernel that hangs needs more than asking.
        self._close_files()
        try:
            self.popen.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            # One that is stuck in the driver does not die even so; it is left behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=KILLED_S)

    def _close_files(self) -> None:
        self.pipe.close()
        os.close(self._lifeline)
        self._printed.close()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the process ------------------------------------------------------------------------------------------


def _enter(module: str, function: str, pipe: int, lifeline: int) -> None:
    """The process's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    getattr(importlib.import_module(module), function)(Connection(pipe))


def _end_with_parent(lifeline: int) -> None:
    """Blocks until the parent's end of the pipe closes, by its will or by its death."""
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
    # An orderly end is the main thread's; one that hangs in a kernel does not come to it.
    time.sleep(ORPHANED_S)
    # This process leads the group of all that it started.
    os.killpg(os.getpid(), signal.SIGKILL)
