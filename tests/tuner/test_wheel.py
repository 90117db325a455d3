"""What someone has who installs the wheel: a clean environment, outside of any checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

#: Of a checkout, what a wheel is made of.
SOURCES = ("gen", "out", "templates", "tuner", "LICENSE", "README.md", "pyproject.toml")
#: Imports flashgen, which takes no time, and compares a call with numpy's.
CALL = """
import sys, time
began = time.perf_counter()
import flashgen
assert time.perf_counter() - began < 0.3, "importing flashgen takes long"
import numpy as np

q, k, v = (np.random.default_rng(n).standard_normal((1, 2, n, 32), dtype=np.float32) for n in (33, 65, 66))
k, v = k[:, :, :65], v[:, :, :65]
scores = q @ k.swapaxes(2, 3) / np.sqrt(np.float32(32))
weights = np.exp(np.where(np.arange(65) <= np.arange(33)[:, None] + 32, scores, -np.inf))
wanted = weights / weights.sum(-1, keepdims=True) @ v
error = abs(flashgen.attention(q, k, v, causal=True, device="sim:gtx-1080") - wanted).max()
assert error < 1e-5, error
assert "site-packages" in flashgen.__file__ and not {"optuna", "scipy", "sqlalchemy"} & set(sys.modules)
"""


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_all_but_tuning_works_from_the_wheel_alone(tmp_path: Path) -> None:
    home, checkout = tmp_path / "home", tmp_path / "checkout"
    home.mkdir()
    checkout.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FLASHGEN"))},
        "HOME": str(home),
        "FLASHGEN_CACHE": str(home / "cache"),
    }

    def run(*command: str | Path, code: int = 0) -> str:
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stderr if code else done.stdout

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "dist", checkout)
    (wheel,) = (tmp_path / "dist").glob("flashgen-*.whl")
    assert wheel.stat().st_size < 10 * 2**20
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python, flashgen = (tmp_path / "venv" / "bin" / name for name in ("python", "flashgen"))
    run(python, "-m", "pip", "install", "-q", wheel)
    shutil.rmtree(checkout)

    run(python, "-c", CALL)
    told = run(flashgen, "emit", "best.py", "--preset", "h200", "--dtype", "bf16", "--d", "128", "--causal")
    assert "bf16_d128_causal for NVIDIA H200, measured" in told
    assert "Flash attention for NVIDIA GPUs" in run(python, "best.py")
    assert "bf16_d128_causal" in run(flashgen, "list", "--dtype", "bf16")
    able = {each["does"]: each for each in json.loads(run(flashgen, "doctor", "--json"))["abilities"]}
    assert able["emulate cards"]["by"] and "optuna" in able["search (`flashgen tune`)"]["missing"]
    assert str(home / "cache") in able["keep what was built"]["by"]
    assert json.loads(run(flashgen, "cache", "--json"))["entries"] > 0
    assert "needs optuna" in run(flashgen, "tune", "--device", "sim:gtx-1080", "--d", "32", code=1)
