"""The decode step of the example on a real card, small: attention by pages agrees with PyTorch's."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
from flashgen.tuner.bench.peers import torch_installed

from tests.support import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch_installed(), reason="PyTorch is not installed"),
]
SMALL = {"layers": 2, "batch": 4, "keys": "100-1000", "width": 512, "hidden": 1024, "letters": 1000}


def test_a_step_is_timed_and_agrees(
    device: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["decode_step.py", "--json", *words])
    runpy.run_path(str(ROOT / "docs" / "examples" / "decode_step.py"), run_name="__main__")
    told = json.loads(capsys.readouterr().out)
    assert told["ways"]["flashgen"]["ms"] > told["ways"]["no attention"]["ms"] > 0
    timed = [each for each in told["ways"].values() if each["ms"]]
    assert len(timed) >= 3, told
