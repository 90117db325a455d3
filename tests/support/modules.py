"""Python files imported by their path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def import_path(path: Path, *, for_good: bool = False) -> Any:
    """Imports a file as a fresh module, which others can import by its stem when it is ``for_good``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if for_good:
        sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
