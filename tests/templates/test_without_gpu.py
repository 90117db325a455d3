"""What an emitted module says on a machine that has neither a GPU nor PyTorch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An emitted module, and no driver behind it."""
    path = tmp_path / "best.py"
    path.write_text(emit_module(render(Simt(), Problem(), preset("h200")), device="H200"))
    spec = importlib.util.spec_from_file_location("best", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "best", made)
    spec.loader.exec_module(made)

    def none() -> Any:
        raise RuntimeError("an NVIDIA GPU and its driver are needed")

    monkeypatch.setattr(made, "_driver", none)
    return made


def of(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            [of(2, 8, 64)] * 3,
            r"q has 3 dimensions, \(2, 8, 64\); 4 are needed.*add .* with q\[None\]",
        ),
        ([of(1, 2, 8, 64), of(2, 8, 64), of(2, 8, 64)], r"k has 3 dimensions, \(2, 8, 64\)"),
        ([of(1, 2, 8, 48)] * 3, r"head dim 48"),
        ([of(2, 2, 8, 64), of(1, 2, 8, 64), of(1, 2, 8, 64)], "q has the batch 2, k and v have 1"),
        ([of(1, 2, 8, 64), of(1, 2, 9, 64), of(1, 2, 8, 64)], "k and v differ"),
    ],
)
def test_what_is_wrong_with_arrays_comes_before_the_gpu(module, arrays, message):
    with pytest.raises(ValueError, match=message):
        module.attention(*arrays)
    with pytest.raises(RuntimeError, match="an NVIDIA GPU"):
        module.attention(*[of(1, 2, 8, 64)] * 3)


def test_without_pytorch_it_is_said_how_to_get_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"operators for PyTorch, 2\.7 or newer: `pip install torch`"):
        module.register_torch()
