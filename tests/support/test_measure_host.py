"""The measurement of the host's share runs, for every kind of call."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.support.host_tensors import real_torch

NAMES = (
    *("plain", "return_lse", "sinks", "gradients, window", "autograd", "training"),
    *("emitted, plain", "emitted, dilation", "emitted, gradients", "emitted, training, bias"),
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_calls_are_timed_in_a_process_of_their_own() -> None:
    real_torch()
    code = "import json, sys, torch; from tests.support.measure_host import measured; "
    code += "print(json.dumps(measured(torch, sys.argv[1:], count=2, turns=2)))"
    done = subprocess.run([sys.executable, "-c", code, *NAMES], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert tuple(found) == NAMES and all(0.5 < us < 1e5 for us in found.values())
    assert found["gradients, window"] > found["plain"]
    assert found["training"] > found["autograd"]
