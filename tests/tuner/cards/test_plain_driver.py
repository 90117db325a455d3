"""Cards without PyCUDA: the runner through ctypes, on a stand-in for libcuda whose memory is the host's."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flashgen.gen.launch import Launch
from flashgen.gen.problem import Problem
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards import cuda, driver, nvml, plain_driver
from flashgen.tuner.errors import FlashgenError, LaunchError

from tests.support.fakes import fake_build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SOURCE = Path(__file__).parents[2] / "support" / "fake_libcuda.cpp"
PROBLEM = Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=50, seqlen_k=60, head_dim=32)
Q_BYTES = 4 * 2 * 50 * 32


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", SOURCE, "-o", path], check=True)
    library = ctypes.CDLL(str(path))
    library.fake_calls.restype = ctypes.c_char_p
    library.fake_live_bytes.restype = library.fake_retained.restype = ctypes.c_int64
    library.fake_reset.argtypes = [ctypes.c_int64]
    return library


@pytest.fixture
def libcuda(built: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch):
    """A machine with a driver, and without PyCUDA."""
    gc.collect()  # what other tests left is freed in their context
    built.fake_reset(Q_BYTES)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: built)
    monkeypatch.setattr(nvml, "_library", lambda: None)
    monkeypatch.setattr(cuda, "MIN_FLUSH_BYTES", 2**20)
    for each in (driver.library, cuda._driver):
        each.cache_clear()
    yield built
    for each in (driver.library, cuda._driver):
        each.cache_clear()


@pytest.fixture
def runner(libcuda: ctypes.CDLL):
    device = cuda.find_device(0)
    small = replace(device, limits=replace(device.limits, l2_bytes=2**20))
    runner = small.open()
    yield runner
    runner.close()


@pytest.fixture
def build(tmp_path: Path) -> Build:
    cubin = tmp_path / "copy.cubin"
    cubin.write_bytes(b"\x7fELF")
    plain = fake_build(problem=PROBLEM)
    launch = Launch(threads=128, smem_bytes=65536, rows_per_block=16)
    return replace(plain, kernel=replace(plain.kernel, entry="copy", launches=(launch,)), artifact=cubin)


def calls(libcuda: ctypes.CDLL) -> list[str]:
    return libcuda.fake_calls().decode().split()


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, rows, 32), dtype=np.float32) for rows in (50, 60, 60)]


def test_limits_are_read_from_the_driver(libcuda: ctypes.CDLL) -> None:
    device = cuda.find_device(0)
    limits = device.limits
    assert cuda._driver() is plain_driver and cuda.count_devices() == 1
    assert (limits.name, limits.arch, limits.num_sms) == ("NVIDIA A100-SXM4-80GB", 80, 108)
    assert (limits.smem_per_block, limits.smem_per_sm, limits.l2_bytes) == (166912, 167936, 41943040)
    assert (limits.clock_mhz, limits.dram_gbps, limits.max_blocks_per_sm) == (1410, 2039, 32)
    assert (device.pci_bus_id, device.driver) == ("0000:3B:00.0", "CUDA 12.8")
    assert device.memory_bytes == 2**26


def test_a_kernel_runs(runner: cuda.CudaRunner, build: Build, libcuda: ctypes.CDLL) -> None:
    q, k, v = arrays()
    o, lse = runner.attend(build, q, k, v, scale=0.5)
    assert lse is None and np.array_equal(o, q)
    made = calls(libcuda)
    assert made.index("cuCtxPushCurrent_v2") < made.index("cuMemAlloc_v2") < made.index("cuLaunchKernel")
    assert made.index("cuLaunchKernel") < made.index("cuStreamSynchronize") < made.index("cuMemcpyDtoH_v2")


def test_a_kernel_is_timed(runner: cuda.CudaRunner, build: Build, libcuda: ctypes.CDLL) -> None:
    timing = runner.measure(build, PROBLEM)
    assert set(timing.times_us) == {500.0} and len(timing.times_us) >= cuda.MIN_REPEATS
    assert runner.occupancy(build) > 0
    assert calls(libcuda).count("cuMemsetD8Async") >= len(timing.times_us)


def test_all_is_given_back(libcuda: ctypes.CDLL, build: Build) -> None:
    runner = cuda.find_device(0).open()
    runner.attend(build, *arrays(), scale=0.5)
    assert libcuda.fake_live_bytes() > 0 and libcuda.fake_retained() == 1
    runner.close()
    gc.collect()
    assert libcuda.fake_live_bytes() == 0 and libcuda.fake_retained() == 0
    made = calls(libcuda)
    for kind in ("Stream", "Event"):
        assert made.count(f"cu{kind}Create") == made.count(f"cu{kind}Destroy_v2")
    assert made.count("cuModuleLoadData") == made.count("cuModuleUnload")
    assert made.index("cuMemFree_v2") < made.index("cuCtxPopCurrent_v2")


def test_memory_that_is_not_there_names_both_numbers(runner: cuda.CudaRunner, build: Build) -> None:
    large = replace(PROBLEM, num_q_heads=64, num_kv_heads=64, seqlen_q=4096, seqlen_k=4096)
    words = r"take 0\.12 GiB, device 0 has 0\.06 GiB free of 0\.06; choose a smaller batch"
    with pytest.raises(FlashgenError, match=words):
        runner.measure(build, large)


def test_a_launch_that_fails_is_told_by_its_function(
    runner: cuda.CudaRunner, build: Build, libcuda: ctypes.CDLL
) -> None:
    libcuda.fake_fail(b"cuLaunchKernel", 700)
    with pytest.raises(LaunchError, match="cuLaunchKernel failed: an illegal memory access"):
        runner.attend(build, *arrays(), scale=0.5)
    assert runner.alive
    libcuda.fake_fail(b"cuCtxSynchronize", 700)
    with pytest.raises(LaunchError, match="an illegal memory access"):
        runner.attend(build, *arrays(), scale=0.5)
    assert not runner.alive


def test_a_driver_without_a_card(libcuda: ctypes.CDLL) -> None:
    libcuda.fake_fail(b"cuInit", 100)
    with pytest.raises(FlashgenError, match=r"no CUDA device was found \(cuInit failed: no device\)"):
        cuda.find_device(0)


def test_no_driver(libcuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(FlashgenError, match=r"no CUDA device was found \(libcuda\.so\.1: cannot open"):
        cuda.find_device(0)
