"""The command line: the program, its commands in order, and what becomes of errors.

Exit codes: 0 done, 1 failed, 2 wrong usage. What a command needs is imported when it is called: the program
itself answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup

from . import interrupts
from .errors import FlashgenError, UsageError
from .extras import needing
from .printable import printable
from .version import flashgen_version

P = ParamSpec("P")
#: The module of `commands` where each command is, in the order in which `flashgen --help` lists them.
MODULES = {
    "tune": "tuning",
    "space": "tuning",
    "emit": "emit",
    "renew": "kernels",
    "list": "kernels",
    "diff": "kernels",
    "pack": "pack",
    "export": "studies",
    "import": "studies",
    "report": "studies",
    "watch": "watch",
    "record": "studies",
    "replay": "studies",
    "draw": "draw",
    "devices": "kernels",
    "doctor": "machine",
    "cache": "machine",
    "validate": "kernels",
    "accuracy": "accuracy",
    "ladder": "tuning",
    "bench": "bench",
}


class Commands(Mapping[str, Any]):
    """The commands by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        from .commands.parsing import Command

        module = importlib.import_module(f".commands.{MODULES[name]}", __package__)
        function = getattr(module, f"{name}_command")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        alone.command(name, cls=Command, help=_unbroken(function.__doc__))(reports_errors(function))
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


def _unbroken(doc: str | None) -> str:
    """A docstring with a line for each paragraph, which the terminal breaks where it ends. Python may have
    left docstrings out."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(doc or "").split("\n\n"))


class _Program(TyperGroup):
    """The group of all commands, none of which is imported before it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()  # type: ignore[assignment]

    def get_params(self, ctx: Any) -> Any:
        from .commands.parsing import plain

        return [plain(parameter) for parameter in super().get_params(ctx)]

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _printable_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _printable_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _printable_errors() -> Iterator[None]:
    """Keeps control characters of what was typed out of the messages that Typer prints itself."""
    try:
        yield
    except Exception as error:
        # Its own copy of click, or click: both keep the text under that name.
        message = getattr(error, "message", None)
        if isinstance(message, str):
            with contextlib.suppress(AttributeError):  # of other errors it may be what they work out
                error.message = printable(message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="flashgen",
    cls=_Program,
    help="Generates and tunes flash-attention kernels for one GPU and one kind of problem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Runs the ``flashgen`` program."""
    # A large study is a million objects that stay until the end: to look through them for garbage as often as
    # Python does takes a sixth of a command's time.
    gc.set_threshold(100_000, 50, 100)
    # However it was started: `python -m flashgen` is no other program.
    app(prog_name="flashgen")


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Makes what the user can mend end a command with one message and exit code 1 or 2, without a
    traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("json_"))
        try:
            with interrupts.raised(), notes_shown(), needing("this command"):
                command(*args, **kwargs)
        except FlashgenError as error:
            _fail(str(error), 2 if isinstance(error, UsageError) else 1, as_json)
        except KeyboardInterrupt:
            _fail(interrupts.WORD, interrupts.EXIT_CODE, as_json)
        except BrokenPipeError:
            _drop_stdout()
            raise typer.Exit(1) from None
        except OSError as error:
            from .build.cache import DISK_ERRORS

            disk = error.errno in DISK_ERRORS
            way_out = "free some space or mend the permissions" if disk else "name another, or mend this one"
            where = f"{error.filename}: " if error.filename else ""
            _fail(f"{where}{error.strerror or error}; {way_out}", 1, as_json)

    return run


@contextlib.contextmanager
def notes_shown() -> Iterator[None]:
    """Prints to stderr, each once, what is noted on the way: files and trials that were passed over."""
    log = logging.getLogger(__package__)
    told: set[str] = set()

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text not in told:
                told.add(text)
                _say(f"note: {text}", "yellow")

    handler = Shown(logging.WARNING)
    log.addHandler(handler)
    propagated, log.propagate = log.propagate, False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagated


def _fail(message: str, code: int, as_json: bool) -> None:
    from .commands.terminal import print_json

    if as_json:
        with contextlib.suppress(OSError):
            print_json({"error": message, "exit_code": code})
    _say(message if code == interrupts.EXIT_CODE else f"error: {message}", "red")
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()
    raise typer.Exit(code)


def _drop_stdout() -> None:
    """Nobody takes what is left; without this, closing stdout at exit would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str, style: str) -> None:
    """Prints a line to stderr, which may be closed or full: then there is nobody to tell."""
    from .view.console import SafeConsole

    with contextlib.suppress(OSError):
        SafeConsole(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashgen {flashgen_version()}")
        raise typer.Exit()


@app.callback()
def _flashgen(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
