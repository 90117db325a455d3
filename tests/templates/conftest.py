"""Fixtures of the stand-ins that emitted modules run on."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.stand_in_driver import FAKE, D, Driver, fake_cupy, fake_pycuda, fake_torch, loaded


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", FAKE, "-o", path], check=True)
    return loaded(path)


@pytest.fixture
def driver(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    """An H200 with everything installed."""
    library.fake_reset(D, 9, 0, 232448)
    fake = Driver(library)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    for name, module in fake_pycuda(fake).items():
        monkeypatch.setitem(sys.modules, name, module)
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    monkeypatch.setattr(subprocess, "run", fake.run_nvcc)
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    return fake


@pytest.fixture
def torch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = fake_torch(driver)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def cupy(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = fake_cupy(driver)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module
