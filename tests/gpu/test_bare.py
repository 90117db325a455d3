"""`flashgen.attention` on a card where neither PyCUDA nor a CUDA toolkit is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.bare import told_by_digests


def test_without_pycuda_and_nvcc_results_have_the_same_bits(torch: Any, tmp_path: Path) -> None:
    bare = told_by_digests(tmp_path / "bare", bare=True)
    full = told_by_digests(tmp_path / "full", bare=False)
    assert bare["digests"] == full["digests"]
    assert bare["compiler"].startswith("NVRTC") and not bare["pycuda"]
