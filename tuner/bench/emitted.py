"""Emitted modules as a benchmark uses them: imported from their files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load(path: Path) -> ModuleType:
    """Imports the emitted module in a file."""
    spec = importlib.util.spec_from_file_location(f"flashgen_bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
