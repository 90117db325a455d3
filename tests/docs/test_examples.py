"""The examples run as they are shown, and leave what they say to look at."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from flashgen.gen.limits import PRESETS

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
#: What needs one.
ON_A_CARD = ("decode_step", "train_models")
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


def test_a_decode_step_says_what_it_lacks_and_tells_of_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its times are a card's: `tests/gpu/test_decode_step.py` takes some."""
    monkeypatch.setattr(sys, "argv", ["decode_step.py"])
    monkeypatch.setitem(sys.modules, "torch", None)
    path = str(EXAMPLES / "decode_step.py")
    with pytest.raises(SystemExit, match="PyTorch is not installed"):
        runpy.run_path(path, run_name="__main__")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    step = importlib.import_module("decode_step")
    shape = step.Shape(batch=3, keys="20-70")
    assert len(shape.lengths) == 3 and all(20 <= length <= 70 for length in shape.lengths)
    found = {
        step.OURS: step.Timed(2.0, 0.0),
        "mask, cudnn": step.Timed(5.0, 0.01),
        "packed": step.Timed(3.0, 0.01),
        "flex": step.Timed(reason="is not for you"),
        step.NO_ATTENTION: step.Timed(1.0, 1.0),
    }
    step.tell(shape, "a card", "9.9", found, as_json=False)
    said = capsys.readouterr().out
    assert "1.50 times as fast as PyTorch's best" in said and "flex  is not for you" in said
    step.tell(shape, "a card", "9.9", found, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["over_best"] == 1.5 and told["ways"]["packed"]["ms"] == 3.0
    assert told["keys"] == sum(shape.lengths)


def test_every_example_is_run_and_told_of() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == {*WRITTEN, *ON_A_CARD}
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({name}.py)" in text for name in programs)
    for name in programs:
        assert f"python docs/examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text()


def test_curves_that_part_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What models learn by a card's kernels is compared with what they learn by PyTorch's attention."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("train_models")
    monkeypatch.setattr(sys, "argv", ["train_models.py"])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="torch is not installed"):
        example.main()
    theirs = example.Curve([4.0 - 0.01 * step for step in range(200)])
    assert example.part(example.Curve([x + 0.01 for x in theirs.losses]), theirs) is None
    assert "last losses" in example.part(example.Curve([4.0] * 200), theirs)
    assert "first losses" in example.part(example.Curve([5.0, *theirs.losses[1:]]), theirs)
    assert "last losses" in example.part(example.Curve([*theirs.losses[:-1], float("nan")]), theirs)
    problem = example.problem_of("vit", example.SIZES["small"], "bf16")
    assert problem.seqlen_q == 257 and not problem.causal
    forward, backward = example.kernels_of(problem, PRESETS["a100"])
    assert not forward.problem.backward and backward.problem.backward
    example.draw({"vit": {"tuned": theirs, "sdpa": theirs}}, "bf16", tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().count("vit") >= 1


@needs_compiler
@pytest.mark.thorough
def test_models_train_on_an_emulated_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("torch._C", reason="needs PyTorch")
    words = ("--device", "sim:gtx-1080", "--steps", "2", "--size", "tiny", "--models", "gpt2")
    monkeypatch.setattr(sys, "argv", ["train_models.py", str(tmp_path), *words])
    runpy.run_path(str(EXAMPLES / "train_models.py"), run_name="__main__")
    told = json.loads((tmp_path / "train_tiny_f32.json").read_text())
    ours, theirs = (told["curves"]["gpt2"][way]["losses"] for way in ("tuned", "sdpa"))
    assert told["emulated"] and len(ours) == 2
    assert ours == pytest.approx(theirs, rel=1e-4) and ours[1] != ours[0]
