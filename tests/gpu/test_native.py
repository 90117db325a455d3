"""A kernel as a program and as a library, built as they say and run on a real card."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.cuda import emit_cuda
from flashgen.gen.emit.native import library, program
from flashgen.gen.families import family_named
from flashgen.gen.kernel import Kernel
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.build.toolchain import find_nvcc
from flashgen.tuner.cards.cuda import CudaDevice
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.evaluate import reference
from flashgen.tuner.predict.catalogue import build_catalogue

KINDS: list[dict[str, Any]] = [
    {"family": "simt", "head_dim": 64},
    {"family": "mma", "dtype": "f16", "head_dim": 40, "head_dim_v": 72},
    {"family": "wgmma", "dtype": "bf16", "head_dim": 128, "causal": True},
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind["family"])
def kernel(request: pytest.FixtureRequest, device: CudaDevice) -> Kernel:
    kind = dict(request.param)
    family = family_named(kind.pop("family"))
    problem = Problem(**kind)
    catalogue = build_catalogue(family, problem, device.limits, {})
    row = catalogue.nearest(family())
    if row is None:
        pytest.skip(f"{device.limits.name} runs nothing of {family.family} for {problem.stem}")
    return render(catalogue.variant(row), problem, device.limits)


def test_the_program(kernel: Kernel, device: CudaDevice, tmp_path: Path) -> None:
    """On ten batches of 2048 rows, as the report's case T10."""
    problem, batch, rows = kernel.problem, 10, 2048
    text = program(problem, kernel.sm)
    (tmp_path / f"{kernel.entry}.cu").write_text(emit_cuda(kernel, device="this card") + text)
    build = re.search(r"^// +nvcc (.*)$", text, re.MULTILINE)
    assert build is not None
    nvcc = str(find_nvcc(device.limits.arch).path)
    subprocess.run([nvcc, *build[1].split()], cwd=tmp_path, check=True)

    rng = np.random.default_rng(0)
    columns = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    arrays = [rng.uniform(-3, 3, (batch, rows, n)).astype(np.float32) for n in columns]
    with (tmp_path / "input").open("wb") as file:
        np.array([batch, rows, problem.head_dim], np.int32).tofile(file)
        for b in range(batch):
            for array in arrays:
                array[b].tofile(file)
    command = ["./attention", "input", "output"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(f"{problem.name} by {kernel.variant.family}:\n{done.stdout}")
    o = np.fromfile(tmp_path / "output", np.float32).reshape(batch, rows, problem.head_dim_v)
    # The program rounds its input to the kernel's type.
    q, k, v = (x[:2, None].astype(numpy_dtype(problem.dtype)).astype(np.float64) for x in arrays)
    wanted = reference.attention(q, k, v, scale=problem.head_dim**-0.5, scores=problem.scores).o[:, 0]
    distance = np.linalg.norm(o[:2] - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))
    assert (distance <= problem.tolerance).all(), distance
    assert np.isfinite(o).all()
    names = re.findall(r"^(\w+) +[\d.]+ s", done.stdout, re.MULTILINE)
    assert names == ["total", "input", "computing", "output"]


def test_the_library_by_cmake(kernel: Kernel, device: CudaDevice, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("CMake is not installed")
    (tmp_path / "best.cu").write_text(emit_cuda(kernel, device="this card"))
    for name, text in library(kernel.problem, kernel.variant, kernel.sm, "best").items():
        (tmp_path / name).write_text(text)
    nvcc = find_nvcc(device.limits.arch).path
    for command in (
        ["cmake", "-B", "build", f"-DCMAKE_CUDA_COMPILER={nvcc}"],
        ["cmake", "--build", "build"],
        ["build/example"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
