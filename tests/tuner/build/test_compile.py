"""Compilers found, driven and survived."""

import os
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.variant import Illegal
from flashgen.tuner.build import toolchain
from flashgen.tuner.build.compile import (
    CompilePool,
    NvccToolchain,
    NvrtcToolchain,
    cuda_toolchain,
    parse_remarks,
    parse_resources,
    run_compiler,
    shorten,
)
from flashgen.tuner.errors import BuildError, FlashgenError

PLAIN = """\
extern "C" __global__ void attention_f32_d64_kernel(float* x) {
  constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
  x[threadIdx.x] = exp2f(x[threadIdx.x] - kInfinity);
}
"""
SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024, 2) attention_f32_d64_kernel(float* x) {
  float sums[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] = x[i * 1024 + threadIdx.x];
  for (int step = 0; step < 100; ++step) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = fmaf(sums[i], sums[(i + 7) % 64], x[step]);
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = sums[i];
}
"""
#: A warpgroup's accumulators are multiplied before the product that writes them is waited for.
SERIALIZED = """\
#define FENCE "wgmma.fence.sync.aligned;"
#define COMMIT "wgmma.commit_group.sync.aligned;"
#define WAIT "wgmma.wait_group.sync.aligned 0;"
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
extern "C" __global__ void __launch_bounds__(128) attention_f32_d64_kernel(float* x, unsigned long long a) {
  float d[4] = {x[0], x[1], x[2], x[3]};
  asm volatile(FENCE ::: "memory");
  for (int i = 0; i < 4; ++i) {
    asm volatile(PRODUCT : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));
    asm volatile(COMMIT ::: "memory");
    d[0] *= 2;
  }
  asm volatile(WAIT ::: "memory");
  for (int i = 0; i < 4; ++i) x[threadIdx.x * 4 + i] = d[i];
}
"""
UNBOUNDED = """\
extern "C" __global__ void attention_f32_d64_kernel(float* x) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  x[threadIdx.x] = 1;
}
"""
MAPS = """\
#include <cuda.h>
struct TensorMaps {
  CUtensorMap q, k;
};
extern "C" __global__ void attention_f32_d64_kernel(float* x, const __grid_constant__ TensorMaps maps) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&maps.k) : "memory");
  if (sizeof(maps) == 256) x[threadIdx.x] = 1;
}
"""

NVCC_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Compiling entry function 'mine' for 'sm_90'
ptxas info    : Function properties for mine
    96 bytes stack frame, 88 bytes spill stores, 120 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 96 bytes cumulative stack size
ptxas info    : Compile time = 64.235 ms
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class OfOneArch(Simt):
    """A variant with instructions of one architecture alone."""

    arch_suffix: ClassVar[str] = "a"


def kernel(source=PLAIN, arch=90, variant=Simt()):  # noqa: B008
    """A kernel of that source; of the variant only which architecture it needs matters here."""
    launch = Launch(threads=128, smem_bytes=0, rows_per_block=64)
    return Kernel(Problem(), variant, arch, source, "attention_f32_d64", (launch,))


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


#: What begins an object file, for scripts that stand in for a compiler.
WRITES_OBJECT = "writes_object() { { printf '\\177ELF\\002\\001\\001'; head -c 57 /dev/zero; } > \"$1\"; }"


def fake_toolchain(tmp_path, text: str, timeout_s: float = 10.0) -> NvccToolchain:
    nvcc = toolchain.Nvcc(script(tmp_path / "nvcc", f"{WRITES_OBJECT}\n{text}"), "13.0.0", (90,))
    return NvccToolchain(nvcc, toolchain.HostCompiler(Path("/bin/true"), "1"), timeout_s)


# -- what ptxas says ----------------------------------------------------------------------------------


def test_resources_are_those_of_the_symbol():
    mine = parse_resources(NVCC_LOG, "mine")
    assert (mine.registers, mine.spill_bytes, mine.stack_bytes) == (255, 208, 96)
    assert parse_resources(NVCC_LOG, "other").registers == 12
    with pytest.raises(BuildError, match="no resources for absent"):
        parse_resources(NVCC_LOG, "absent")


def test_errors_are_what_is_shown():
    noise = "\n".join(f"warning {i}" for i in range(50))
    assert shorten(f'{noise}\nk.cu(3): error: identifier "x" is undefined\n1 error detected').startswith(
        "k.cu(3)"
    )
    assert len(shorten(noise).splitlines()) == 12
    assert shorten("") == "(no output)"


def test_remarks_on_asynchronous_products_are_told_once_and_worst_first():
    """As ptxas of CUDA 13.0 prints them."""
    log = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 47 by compiler to allow use of registers in GMMA in function 'mine'
ptxas info    : (C7519) warpgroup.arrive is injected in around line 55 by compiler to allow use of registers in GMMA in function 'mine'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function 'mine'
"""  # noqa: E501
    assert parse_remarks(log + NVCC_LOG) == [
        "ptxas C7508: Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count "
        "at entry.",
        "ptxas C7511: Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline",
        "ptxas C7519: warpgroup.arrive is injected by compiler to allow use of registers in GMMA",
    ]
    assert parse_remarks(NVCC_LOG) == []


# -- compilers that misbehave -------------------------------------------------------------------------


def test_refusal_is_the_compilers_own_words(tmp_path):
    chain = fake_toolchain(tmp_path, "echo 'k.cu(7): error: expected a \";\"' >&2; exit 2")
    with pytest.raises(BuildError, match=r"k\.cu\(7\): error: expected"):
        chain.build(kernel())


def test_crash_names_the_signal(tmp_path):
    with pytest.raises(BuildError, match="nvcc was killed by SIGSEGV"):
        fake_toolchain(tmp_path, "kill -SEGV $$").build(kernel())


def test_hang_is_killed_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    chain = fake_toolchain(tmp_path, f"sleep 600 & echo $! > {pid_file}; wait", timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(BuildError, match=r"nvcc did not finish within \d s"):
        chain.build(kernel())
    assert time.monotonic() - started < 5
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_child_that_outlives_its_compiler_is_killed_too(tmp_path):
    compiler = fake_toolchain(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; kill -9 $$", timeout_s=0.5)
    with pytest.raises(BuildError, match=r"did not finish within"):
        compiler.build(kernel())
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(child)


def test_flags_in_the_environment_belong_to_the_key(tmp_path, monkeypatch):
    text = 'while [ "$1" != -o ]; do shift; done; writes_object $2; echo "$NVCC_APPEND_FLAGS" >> $2\n'
    text += f"echo \"Compiling entry function '{kernel().symbol}'\"\n"
    text += 'echo "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"; echo "Used 40 registers"'
    compiler = fake_toolchain(tmp_path, text)
    for flags, cached in (("", False), ("--maxrregcount=64", False), ("", True)):
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flags)
        build = compiler.build(kernel())
        assert build.artifact.read_bytes()[64:].decode().strip() == flags and build.cached is cached


REMARK = "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized"
RESOURCES = """\
Compiling entry function 'attention_f32_d64_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers"""


def test_a_kernel_whose_products_wait_is_refused_each_time_and_compiled_once(tmp_path):
    runs = tmp_path / "runs"
    # nvcc ... -o CUBIN SOURCE
    prints = f'echo x >> {runs}; while [ "$1" != -o ]; do shift; done; writes_object "$2"; cat <<END\n'
    chain = fake_toolchain(tmp_path, f"{prints}{REMARK}\n{RESOURCES}\nEND")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"^ptxas C7514: Potential Performance Loss: wgmma\.mma_async"):
            chain.build(kernel())
    assert runs.read_text() == "x\n"
    build = fake_toolchain(tmp_path, f"{prints}{RESOURCES}\nEND").build(kernel(PLAIN + "// another"))
    assert build.registers == 10


def test_architectures_with_a_suffix_are_told_apart(tmp_path):
    chain = fake_toolchain(tmp_path, 'echo "error: $*" >&2; exit 1')
    for variant, arch in ((Simt(), "sm_90"), (OfOneArch(), "sm_90a")):
        with pytest.raises(BuildError, match=rf"-arch={arch} "):
            chain.build(kernel(variant=variant))


def test_compiler_that_vanished_is_named(tmp_path):
    chain = fake_toolchain(tmp_path, "true")
    chain.nvcc.path.unlink()
    with pytest.raises(FlashgenError, match=r"nvcc cannot be run: No such file"):
        chain.build(kernel())


def test_full_disk_is_not_the_kernels_fault(tmp_path):
    chain = fake_toolchain(tmp_path, "echo 'fatal error: /tmp/x: No space left on device' >&2; exit 1")
    with pytest.raises(FlashgenError, match="FLASHGEN_CACHE") as caught:
        chain.build(kernel())
    assert not isinstance(caught.value, BuildError)
    with CompilePool(chain, 1) as pool, pytest.raises(FlashgenError, match="cannot be written"):
        pool.submit(kernel()).result()


def test_temporary_files_stay_in_the_scratch_folder(tmp_path):
    assert run_compiler(["sh", "-c", "echo $TMPDIR"], tmp_path).strip() == str(tmp_path)


# -- the pool -----------------------------------------------------------------------------------------


def test_pool_returns_errors_as_values_and_goes_on(tmp_path):
    text = 'for a; do last=$a; done; grep -q broken $last && { echo "error: bad" >&2; exit 1; }\n'
    text += 'while [ "$1" != -o ]; do shift; done; writes_object $2\n'
    symbol = kernel().symbol
    text += f"echo \"Compiling entry function '{symbol}'\"\n"
    text += 'echo "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"; echo "Used 40 registers"'
    with CompilePool(fake_toolchain(tmp_path, text), 2) as pool:
        bad, good = pool.submit(kernel("broken")), pool.submit(kernel())
        assert isinstance(bad.result(), BuildError)
        build = good.result()
        assert not isinstance(build, BuildError)
        assert (
            build.registers == 40 and build.artifact.read_bytes().startswith(b"\x7fELF") and not build.cached
        )
        again = pool.submit(kernel()).result()
        assert not isinstance(again, BuildError) and again.cached


def test_closing_the_pool_kills_what_runs_and_drops_what_waits(tmp_path):
    pool = CompilePool(fake_toolchain(tmp_path, "sleep 600"), 1)
    futures: list[Future] = [pool.submit(kernel()), pool.submit(kernel("another"))]
    while not futures[0].running():
        time.sleep(0.01)
    time.sleep(0.1)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5
    assert isinstance(futures[0].result(), BuildError) and futures[1].cancelled()


# -- finding them -------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with no compiler at all."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr(toolchain, "_nvcc_paths", lambda: iter(()))
    monkeypatch.setattr(toolchain, "_site_folders", list)


def test_absent_compilers_say_how_to_get_one(bare):
    with pytest.raises(
        FlashgenError, match=r"nvcc.*not found.*pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
    ):
        toolchain.find_nvcc()
    with pytest.raises(FlashgenError, match=r"pip install nvidia-cuda-nvcc"):
        cuda_toolchain(90)
    with pytest.raises(FlashgenError, match=r"pip install nvidia-cuda-nvrtc-cu12"):
        toolchain.find_nvrtc(61)
    with pytest.raises(FlashgenError, match=r"no C\+\+ compiler.*apt install g\+\+"):
        toolchain.find_host_compiler()


def test_emptied_path_finds_no_compiler(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FlashgenError, match="apt install"):
        toolchain.find_host_compiler()
    assert shutil.which("nvcc") is None


def test_nvcc_is_found_by_cuda_home_and_asked_what_it_serves(tmp_path, monkeypatch):
    folder = tmp_path / "toolkit" / "bin"
    folder.mkdir(parents=True)
    answers = (
        'case $1 in --version) echo "release 12.8, V12.8.93";; *) echo compute_50; echo compute_61;; esac'
    )
    script(folder / "nvcc", answers)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    found = toolchain.find_nvcc(61)
    assert (found.path, found.version, found.archs) == (folder / "nvcc", "12.8.93", (50, 61))


def test_card_too_old_or_too_new_for_nvcc(tmp_path, monkeypatch, bare):
    answers = 'case $1 in --version) echo "V13.0.88";; *) echo compute_75; echo compute_121;; esac'
    path = script(tmp_path / "nvcc", answers)
    monkeypatch.setattr(toolchain, "_nvcc_paths", lambda: iter([path]))
    with pytest.raises(
        FlashgenError, match=r"sm_75 to sm_121, not for sm_61; `pip install nvidia-cuda-nvrtc-cu12`"
    ):
        toolchain.find_nvcc(61)
    with pytest.raises(FlashgenError, match=r"not for sm_200; a newer one is needed"):
        toolchain.find_nvcc(200)


def _real_nvcc(arch=None):
    try:
        return NvccToolchain(toolchain.find_nvcc(arch), toolchain.find_host_compiler())
    except FlashgenError as error:
        pytest.skip(str(error))


def _real_nvrtc(arch):
    try:
        return NvrtcToolchain(toolchain.find_nvrtc(arch))
    except FlashgenError as error:
        pytest.skip(str(error))


@pytest.mark.nvcc
def test_nvcc_builds_a_cubin_once():
    chain = _real_nvcc(90)
    first, second = chain.build(kernel()), chain.build(kernel())
    assert first.artifact.read_bytes()[:4] == b"\x7fELF"
    assert 0 < first.registers <= 255 and first.spill_bytes == 0
    assert not first.cached and second.cached and second.registers == first.registers


@pytest.mark.nvcc
def test_nvcc_reports_spills():
    build = _real_nvcc(90).build(kernel(SPILLING))
    assert build.spill_bytes > 0 and build.registers <= 32


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("source", "remark"),
    [
        (SERIALIZED, "C751[14]: .*wgmma.mma_async instructions are serialized"),
        (UNBOUNDED, "C7508: .*setmaxnreg"),
    ],
    ids=["wgmma", "setmaxnreg"],
)
def test_a_kernel_that_would_not_run_as_written_is_refused(source, remark):
    chain = _real_nvcc(90)
    with pytest.raises(BuildError, match=rf"^ptxas {remark}"):
        chain.build(kernel(source, variant=OfOneArch()))
    with pytest.raises(BuildError, match=r"not supported on \.target 'sm_90'"):
        chain.build(kernel(source))


@pytest.mark.nvcc
def test_kernels_with_tensor_maps_build_by_either_compiler():
    assert _real_nvcc(90).build(kernel(MAPS, variant=OfOneArch())).registers > 0
    assert _real_nvrtc(90).build(kernel(MAPS, variant=OfOneArch())).registers > 0


@pytest.mark.nvcc
def test_nvcc_refusal_names_the_line():
    with pytest.raises(BuildError, match=r"error.*undefined"):
        _real_nvcc(90).build(kernel(PLAIN + "\nint x = undefined_name;\n"))


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", [61, 70])
def test_nvrtc_builds_for_cards_before_turing(arch):
    chain = _real_nvrtc(arch)
    build = chain.build(kernel(arch=arch))
    assert build.artifact.read_bytes()[:4] == b"\x7fELF" and build.registers > 0
    with pytest.raises(BuildError, match=r"error.*undefined_name"):
        chain.build(kernel("int x = undefined_name;", arch))


@pytest.mark.nvcc
@pytest.mark.parametrize("card", ["gtx-1080", "v100"])
def test_nvrtc_builds_rendered_kernels_without_headers(card):
    limits = preset(card)
    for settings in product((16, 32, 64), (32, 64), (64, 128), (1, 2)):
        variant = Simt(**dict(zip(("br", "bc", "threads_per_block", "min_blocks"), settings, strict=True)))
        try:
            each = render(variant, Problem(), limits)
        except Illegal:
            continue
        assert _real_nvrtc(each.arch).build(each).registers > 16
        return
    pytest.fail(f"no legal variant among the small ones for {card}")


def test_nvrtc_script_refuses_without_a_library(tmp_path):
    source = tmp_path / "k.cu"
    source.write_text("")
    path = Path(toolchain.__file__).with_name("nvrtc.py")
    done = subprocess.run(
        [sys.executable, str(path), "/nonexistent.so", str(source), str(tmp_path / "k.cubin")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 1 and "cannot open shared object" in done.stderr
