"""What emitted modules compile by where there is no nvcc: NVRTC, wherever pip or a toolkit has put it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.templates.runtime import compilers, kept, nvrtc

from tests.support import ROOT

LIBRARIES = [path for path in nvrtc._nvrtc_paths() if nvrtc._nvrtc_archs(path)]
needs_nvrtc = pytest.mark.skipif(not LIBRARIES, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilers, "_find_nvcc", lambda: None)
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@needs_nvrtc
def test_nvrtc_compiles_where_there_is_no_nvcc(no_nvcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = min(nvrtc._nvrtc_archs(LIBRARIES[0]))
    source = render(steps(32)["4.2.10"], Problem(head_dim=32), preset("h200")).source

    def compiled(causal: int) -> bytes:
        return compilers._compile_source(source, f"sm_{arch}", arch, (f"-DFLASHGEN_CAUSAL={causal}",))

    made = [compiled(causal) for causal in (0, 1)]
    assert made[0] != made[1] and all(cubin.startswith(b"\x7fELF") for cubin in made)
    monkeypatch.setattr(compilers, "_run_nvrtc", lambda *_: pytest.fail("it was kept"))
    assert [compiled(causal) for causal in (0, 1)] == made


@needs_nvrtc
@pytest.mark.skipif(not any(map(nvrtc._cuda_includes, LIBRARIES)), reason="needs the CUDA headers")
def test_nvrtc_compiles_for_tensor_cores(no_nvcc: None) -> None:
    source = (ROOT / "out" / "nvidia_h200" / "bf16_d128_causal.cu").read_text()
    cubin = compilers._compile_source(source, "sm_90a", 90, ("-DFLASHGEN_CAUSAL=1",))
    assert cubin.startswith(b"\x7fELF") and b"attention_bf16_d128_kernel" in cubin


@needs_nvrtc
def test_a_source_that_it_refuses_is_told_with_its_log(no_nvcc: None) -> None:
    arch = min(nvrtc._nvrtc_archs(LIBRARIES[0]))
    with pytest.raises(RuntimeError, match=r'libnvrtc.* failed(?s:.*)identifier "nothing" is undefined'):
        compilers._compile_source("__global__ void f() { nothing(); }", f"sm_{arch}", arch, ())
    assert not [*kept._cache_folder().rglob("*.cubin")]


@pytest.mark.parametrize(
    ("library", "headers", "libcuxx"),
    [
        ("nvidia/cu13/lib", "nvidia/cu13/include", "nvidia/cu13/include/cccl"),
        ("nvidia/cuda_nvrtc/lib", "nvidia/cuda_runtime/include", None),
        ("nvidia/cuda_nvrtc/lib", "nvidia/cuda_runtime/include", "nvidia/cuda_cccl/include"),
        ("nvidia/cuda_nvrtc/lib", "triton/backends/nvidia/include", None),
    ],
)
def test_headers_are_found_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, headers: str, libcuxx: str | None
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(nvrtc, "_cuda_homes", lambda: [tmp_path / "no toolkit"])
    path = tmp_path / library / "libnvrtc.so.13"
    touch(path)
    assert nvrtc._cuda_includes(str(path)) == []
    touch(*(tmp_path / headers / name for name in nvrtc._CUDA_HEADERS))
    if libcuxx:
        touch(tmp_path / libcuxx / "nv" / "target")
    found = [tmp_path / folder for folder in (headers, libcuxx) if folder]
    assert nvrtc._cuda_includes(str(path)) == [*map(str, found)]


def test_the_newest_library_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(nvrtc, "_cuda_homes", lambda: [tmp_path / "cuda-11.8"])
    names = (
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "cuda-11.8/lib64/libnvrtc.so.11",
    )
    touch(*(tmp_path / name for name in reversed(names)))
    touch(tmp_path / "nvidia/cu13/lib/libnvrtc-builtins.so.13.0")
    found = [str(tmp_path / name) for name in names]
    assert nvrtc._nvrtc_paths() == [*found, "libnvrtc.so.13", "libnvrtc.so.12"]
