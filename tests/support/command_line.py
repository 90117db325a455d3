"""The command line, called in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flashgen.tuner.cli import app
from typer.testing import CliRunner


def command_runner() -> Callable[..., Any]:
    """Runs a command and returns its exit code, which is checked, stdout and stderr, kept apart."""
    # Before click 8.2 the runner had to be told so.
    apart = "mix_stderr" in inspect.signature(CliRunner.__init__).parameters
    runner = CliRunner(mix_stderr=False) if apart else CliRunner()  # pyright: ignore[reportCallIssue]

    def run(*arguments: str, code: int = 0) -> Any:
        result = runner.invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run
