"""What tests of several rooms of the tuner share."""

from __future__ import annotations

import inspect

import pytest
from flashgen.tuner.cli import app
from flashgen.tuner.shelf import library
from typer.testing import CliRunner


@pytest.fixture
def flashgen(tmp_path, monkeypatch):
    """Runs a command in an empty folder without shipped kernels; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(library, "shipped_folder", lambda: tmp_path / "shipped")
    apart = "mix_stderr" in inspect.signature(CliRunner.__init__).parameters
    runner = CliRunner(mix_stderr=False) if apart else CliRunner()  # pyright: ignore[reportCallIssue]

    def run(*arguments: str, code: int = 0):
        result = runner.invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run
