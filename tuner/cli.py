"""The command line: the program, its commands in order, and what becomes of errors.

Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer
from rich.console import Console
from typer.core import TyperCommand

from .build.cache import DISK_ERRORS
from .commands.bench import bench_command
from .commands.emit import emit_command
from .commands.flags import ManyCommand
from .commands.kernels import devices_command, diff_command, list_command, validate_command
from .commands.studies import export_command, import_command, record_command, replay_command, report_command
from .commands.terminal import print_json
from .commands.tuning import ladder_command, space_command, tune_command
from .errors import FlashgenError, UsageError
from .version import flashgen_version

P = ParamSpec("P")

app = typer.Typer(
    name="flashgen",
    help="Generates and tunes flash-attention kernels for one GPU and one kind of problem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """The entry point of the ``flashgen`` program."""
    app()


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """What the user can mend ends a command with one message and exit code 1 or 2, without a traceback."""

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
            if error.errno not in DISK_ERRORS:
                raise
            where = f"{error.filename}: " if error.filename else ""
            _fail(f"{where}{error.strerror}; free some space or mend the permissions", 1, as_json)

    return run


def _fail(message: str, code: int, as_json: bool) -> None:
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


def _add(name: str, command: Callable[..., None], cls: type[TyperCommand] = TyperCommand) -> None:
    app.command(name, cls=cls)(reports_errors(command))


# In this order `flashgen --help` lists them.
_add("tune", tune_command, ManyCommand)
_add("space", space_command)
_add("emit", emit_command, ManyCommand)
_add("list", list_command, ManyCommand)
_add("diff", diff_command)
_add("export", export_command)
_add("import", import_command)
_add("report", report_command)
_add("record", record_command)
_add("replay", replay_command)
_add("devices", devices_command)
_add("validate", validate_command)
_add("ladder", ladder_command)
_add("bench", bench_command)
