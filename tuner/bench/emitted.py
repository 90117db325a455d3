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


def compile_module(module: ModuleType, arch: int, causal: bool) -> bytes:
    """Returns what the module's first call under that mask would compile."""
    return module._bound.compile(_only_kernel(module), arch, causal)


def give_cubin(module: ModuleType, causal: bool, cubin: bytes) -> None:
    """Lets the module load what was compiled before, instead of compiling it."""
    module._bound.carry(_only_kernel(module), causal, cubin)


def _only_kernel(module: ModuleType) -> str:
    (tuned,) = module.KERNELS
    return tuned.name
