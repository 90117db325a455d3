"""Emitted Python as ruff wants it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def assert_ruff_is_content(path: Path) -> None:
    """Fails where ruff would say or change something of a file; skips where it is not installed."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    for command in (["check"], ["format", "--diff", "--line-length", "110"]):
        result = subprocess.run([ruff, *command, "--isolated", path], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout
