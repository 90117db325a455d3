"""`flashgen.attention` where neither PyCUDA nor a CUDA toolkit is installed."""

from __future__ import annotations

from pathlib import Path

from tests.support.bare import told_by_digests


def test_an_emulated_card_needs_neither_pycuda_nor_a_toolkit(tmp_path: Path) -> None:
    bare = told_by_digests(tmp_path / "bare", "sim:h200", bare=True)
    full = told_by_digests(tmp_path / "full", "sim:h200", bare=False)
    assert bare == full and not bare["pycuda"] and len(set(bare["digests"].values())) == 2
