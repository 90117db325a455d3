"""The examples run as they are shown, and leave what they say to look at."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.emulated import needs_compiler

EXAMPLES = ROOT / "docs" / "examples"
#: What each writes. Those that build kernels, or search, are left to the thorough run.
WRITTEN = {
    "walk_through_a_kernel": ("kernel.cu", "walk.png"),
    "roofline": ("roofline.png",),
    "missing_barrier": ("missing_barrier.png",),
    "replay_a_space": ("space.png", "replay.png"),
    "masks": ("window.svg", "function_tree.svg", "function_alibi.svg"),
    "generate_text": ("cache.png",),
    "tune_emit_call": ("best.cu", "best.py", "error_by_row.png"),
}
MARKS = {
    "missing_barrier": [needs_compiler, pytest.mark.thorough],
    "replay_a_space": [pytest.mark.thorough],
    "generate_text": [needs_compiler, pytest.mark.thorough],
    "tune_emit_call": [needs_compiler, pytest.mark.thorough],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in WRITTEN])
def test_an_example_ends_in_something_to_look_at(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(folder)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    for file in WRITTEN[name]:
        assert (folder / file).stat().st_size > 1000, file
        if file.endswith(".png"):
            assert (folder / file).read_bytes().startswith(b"\x89PNG")
    assert str(folder / WRITTEN[name][-1]) in said
    if name == "missing_barrier":
        right, wrong = (float(line.split(": ")[1].split()[0]) for line in said.splitlines()[:2])
        assert right < 2e-6 < 1e-2 < wrong
    if name == "generate_text":
        assert "the same as by" in said and float(said.split("of a logit ")[1].split(";")[0]) < 1e-4
        texts = (folder / "text.txt").read_text().split("\n---\n")
        assert len(texts) == 3 and texts[0].startswith("once upon a time there was")
    if name == "tune_emit_call":
        assert float(said.split("largest error of a row ")[1].split(";")[0]) < 2e-3


def test_every_example_is_run_and_told_of() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == set(WRITTEN)
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({name}.py)" in text for name in programs)
    for name in programs:
        assert f"python docs/examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text()
