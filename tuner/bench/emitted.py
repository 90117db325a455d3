"""Emitted modules as a benchmark uses them: imported from their files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from ...gen.scoring import BOOLEAN
from .inputs import Inputs

#: What `attention` of an emitted module calls the arrays of named masks and changes.
_KEYWORDS = {"slopes": "alibi_slopes"}


def load(path: Path) -> ModuleType:
    """Imports the emitted module in a file."""
    spec = importlib.util.spec_from_file_location(f"flashgen_bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked_of(inputs: Inputs) -> dict[str, Any]:
    """Returns what a call of an emitted module tells of masks and changes of scores, by keyword."""
    scoring, arrays = inputs.problem.scoring, dict(inputs.arrays)
    asked: dict[str, Any] = dict(scoring.scalars)
    for name in ("window", "always", "chunk", "dilation", "softcap"):
        if (value := getattr(scoring, name)) not in (None, 0):
            asked[name] = value
    if scoring.documents:
        asked["documents"] = (arrays.pop("document_begin"), arrays.pop("document_end"))
    if scoring.bias == BOOLEAN:
        asked["attn_mask"] = arrays.pop("bias").view(inputs.torch.bool)
    return asked | {_KEYWORDS.get(name, name): array for name, array in arrays.items()}


def compile_module(module: ModuleType, arch: int, causal: bool) -> bytes:
    """Returns what the module's first call under that mask would compile."""
    return module._bound.compile(_only_kernel(module), arch, causal)


def give_cubin(module: ModuleType, causal: bool, cubin: bytes) -> None:
    """Lets the module load what was compiled before, instead of compiling it."""
    module._bound.carry(_only_kernel(module), causal, cubin)


def _only_kernel(module: ModuleType) -> str:
    (tuned,) = module.KERNELS
    return tuned.name
