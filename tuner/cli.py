"""The command line: the program, its commands in order, and what becomes of errors.

Exit codes: 0 done, 1 failed, 2 wrong usage. What a command needs is imported when it is called: the program
itself answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup

from .errors import FlashgenError, UsageError
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
    "export": "studies",
    "import": "studies",
    "report": "studies",
    "record": "studies",
    "replay": "studies",
    "devices": "kernels",
    "validate": "kernels",
    "accuracy": "accuracy",
    "ladder": "tuning",
    "bench": "bench",
}


class _Commands(Mapping[str, Any]):
    """The commands by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        module = importlib.import_module(f".commands.{MODULES[name]}", __package__)
        function = getattr(module, f"{name}_command")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        alone.command(name, cls=getattr(function, "command_class", None))(reports_errors(function))
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class _Program(TyperGroup):
    """The group of all commands, none of which is imported before it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]


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
    app()


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Makes what the user can mend end a command with one message and exit code 1 or 2, without a
    traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("json_"))
        try:
            command(*args, **kwargs)
        except FlashgenError as error:
            _fail(str(error), 2 if isinstance(error, UsageError) else 1, as_json)
        except KeyboardInterrupt:
            _fail("interrupted", 1, as_json)
        except BrokenPipeError:
            # The reader has gone; without this, closing stdout at exit complains once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            from .build.cache import DISK_ERRORS

            if error.errno not in DISK_ERRORS:
                raise
            where = f"{error.filename}: " if error.filename else ""
            _fail(f"{where}{error.strerror}; free some space or mend the permissions", 1, as_json)

    return run


def _fail(message: str, code: int, as_json: bool) -> None:
    from rich.console import Console

    from .commands.terminal import print_json

    if as_json:
        with contextlib.suppress(OSError):
            print_json({"error": message, "exit_code": code})
    Console(stderr=True).print(
        f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    raise typer.Exit(code)


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
