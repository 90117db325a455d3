"""Emitted files proved again: read as data, run on an emulated card, and refused when they are wrong."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.cuda import as_rendered, emit_cuda
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.handover.statistics import statistics_regions
from flashgen.gen.handover.workspace import Workspace
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS, preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.adversarial_inputs import adversarial_cases
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.processes import run_program
from flashgen.tuner.prove import sanitizers
from flashgen.tuner.prove.module_device import ModuleDevice
from flashgen.tuner.prove.proof import prove
from flashgen.tuner.prove.sanitizers import find_compute_sanitizer, run_quick_suite, sanitize_on_card
from flashgen.tuner.prove.target import check_fits, default_device
from flashgen.tuner.shelf.emitted_kernels import EmittedKernel, read_emitted

from tests.support.covering import parts_of
from tests.support.depth import sampled

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
FIGURES: dict[str, Any] = {"median_us": 10.0, "tflops": 1.0, "error": 3e-7, "predicted": False}


def make(step: str = "4.2.10", **problem: Any) -> Kernel:
    wanted = Problem(**{"head_dim": 16, **problem})
    return render(steps(wanted.head_dim)[step], wanted, preset("gtx-1080"))


def write(folder: Path, kernel: Kernel, suffix: str, edit: tuple[str, str] | None = None) -> Path:
    path = folder / f"best{suffix}"
    text = (emit_cuda if suffix == ".cu" else emit_module)(kernel, device="GTX 1080", measurement=FIGURES)
    if edit is not None:
        assert edit[0] in text
        text = text.replace(*edit)
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.tuner.prove.target.cards", lambda: ([], "no CUDA device"))


@pytest.mark.parametrize("step", ["4.2.2", "4.2.10"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_module_is_read_without_being_run(tmp_path: Path, step: str, causal: bool) -> None:
    kernel = make(step, causal=causal, batch=3, seqlen_k=77)
    path = write(tmp_path, kernel, ".py", ("import numpy as np\n", "import numpy as np\nraise SystemExit\n"))
    assert read_emitted(path) == EmittedKernel(path, kernel, "GTX 1080")


@pytest.mark.parametrize("step", ["4.2.2", "4.2.10"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_cuda_file_is_read(tmp_path: Path, step: str, causal: bool) -> None:
    kernel = make(step, causal=causal, batch=3, seqlen_k=77)
    path = write(tmp_path, kernel, ".cu")
    assert read_emitted(path) == EmittedKernel(path, replace(kernel, source=path.read_text()), "GTX 1080")
    assert as_rendered(read_emitted(path).kernel) == kernel
    # What was edited since is what is proved.
    path.write_text(f"// mine\n{path.read_text()}")
    found = read_emitted(path).kernel
    assert found.source.startswith("// mine") and as_rendered(found) == found
    path.write_text(kernel.source)
    with pytest.raises(FlashgenError, match="has no line that begins with '// flashgen:'"):
        read_emitted(path)


CLASSES: list[dict[str, Any]] = [
    {"dtype": "bf16", "head_dim": 192, "head_dim_v": 128},
    {"dtype": "f16", "causal": True},
    {"precision": "tf32"},
    {"precision": "3xtf32", "head_dim": 80, "head_dim_v": 96},
    {"precision": "3xf16"},
    {"precision": "ieee"},
]


def of_another_class(heads_per_block: int = 1, **problem: Any) -> Kernel:
    """A kernel under the names of another dtype, precision or head dims, of which its code knows nothing."""
    kernel, wanted = make(causal=problem.get("causal", False)), Problem(**{"head_dim": 16, **problem})
    entry = f"attention_{wanted.stem}"
    return replace(
        kernel,
        problem=wanted,
        source=kernel.source.replace(kernel.entry, entry),
        entry=entry,
        launches=(replace(kernel.launch, heads_per_block=heads_per_block),),
    )


def test_launches_in_front_are_read(tmp_path: Path) -> None:
    """Which take tiles of rows, or of keys."""
    asked = Problem(dtype="bf16", head_dim=64, causal=True, scoring=Scoring(alibi=True))
    kernel = render(Wgmma(far_keys="left_out"), asked, PRESETS["h200"])
    assert [each.of_keys for each in kernel.launches] == [True, False, False]
    assert read_emitted(write(tmp_path, kernel, ".py")).kernel == kernel


@pytest.mark.parametrize("problem", CLASSES, ids=lambda problem: Problem(**problem).name)
def test_dtype_precision_and_head_dims_are_read(tmp_path: Path, problem: dict[str, Any]) -> None:
    kernel = of_another_class(heads_per_block=3, **problem)
    assert read_emitted(write(tmp_path, kernel, ".py")).kernel == kernel
    kernel = of_another_class(**problem)
    path = write(tmp_path, kernel, ".cu")
    assert read_emitted(path).kernel == replace(kernel, source=path.read_text())
    path.write_text(path.read_text().replace('"dtype": ', '"dtype": "f8", "was": '))
    with pytest.raises(FlashgenError, match=r"does not read as a kernel of this flashgen .*was"):
        read_emitted(path)


@pytest.mark.parametrize("suffix", [".py", ".cu"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("cluster", "over"), [(1, "rows"), (2, "rows"), (2, "heads")])
def test_maps_clusters_and_blocks_that_stay_are_read(
    tmp_path: Path, suffix: str, persistent: bool, cluster: int, over: str
) -> None:
    problem = Problem(dtype="bf16", head_dim=40, head_dim_v=72)
    variant = Wgmma(br=64, bc=80, persistent=persistent, cluster_over=over, cluster=cluster)
    kernel = render(variant, problem, preset("h200"))
    path = write(tmp_path, kernel, suffix)
    found = read_emitted(path).kernel
    assert found.launch == kernel.launch and found.sm == "sm_90a"
    assert found == replace(kernel, source=path.read_text() if suffix == ".cu" else kernel.source)


@pytest.mark.parametrize("suffix", [".py", ".cu"])
def test_packed_heads_and_shared_keys_are_read(tmp_path: Path, suffix: str) -> None:
    kernel = render(Mma(pack_heads=True, br=16, splits=4), Problem(dtype="bf16"), preset("h200"))
    path = write(tmp_path, kernel, suffix)
    found = read_emitted(path).kernel
    assert found == replace(kernel, source=path.read_text() if suffix == ".cu" else kernel.source)
    assert found.launch.pack_heads and found.launch.splits == 4


def test_a_module_of_older_days_is_read(tmp_path: Path) -> None:
    """Its problem has neither a precision nor a head dim of the values."""
    kernel = make()
    path = write(tmp_path, kernel, ".py", ('    "head_dim_v": 16,\n', ""))
    path.write_text(path.read_text().replace('    "precision": "auto",\n', ""))
    assert '"precision": ' not in path.read_text()
    assert read_emitted(path).kernel == kernel


def test_a_card_that_cannot_compute_it_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, of_another_class(dtype="bf16"), ".py")
    words = r"best\.py does not run on GTX 1080: family ladder computes f32, this problem is bf16"
    with pytest.raises(FlashgenError, match=words):
        prove(path)


@needs_compiler
@pytest.mark.parametrize("suffix", sampled([".py", ".cu"], 1))
def test_both_masks_are_proved_on_the_card_of_the_file(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, make(), suffix)
    proof = prove(path, seed=3)
    assert proof.device == "GTX 1080" and proof.how == "emulated, from its source" and not proof.sanitized
    assert set(proof.errors) == {"full", "causal"} and proof.cases > 50
    assert proof.adversarial == 2 * len(adversarial_cases("f32"))
    assert 0 < proof.worst <= proof.bound == 2e-6
    assert proof.to_dict()["worst"] == proof.worst
    assert prove(path, device="sim:v100", seed=3).device == PRESETS["v100"].name


@needs_compiler
@pytest.mark.parametrize(
    "problem",
    sampled(
        [
            {"dtype": "f16", "head_dim_v": 24},
            {"dtype": "bf16"},
            {"precision": "tf32"},
            {"precision": "3xtf32"},
            {"precision": "3xf16"},
        ],
        2,
    ),
    ids=lambda problem: Problem(**problem).stem,
)
def test_tensor_core_kernels_are_held_to_their_class(tmp_path: Path, problem: dict[str, Any]) -> None:
    wanted = Problem(**{"head_dim": 16, **problem})
    kernel = render(Mma(parts=parts_of(wanted.precision), br=16, bc=16), wanted, preset("a100"))
    path = tmp_path / "best.py"
    path.write_text(emit_module(kernel, device=PRESETS["a100"].name))
    proof = prove(path)
    assert proof.device == PRESETS["a100"].name
    assert 0 < proof.worst <= proof.bound == wanted.tolerance
    if wanted.dtype == "bf16":
        with pytest.raises(FlashgenError, match="tensor cores multiply bf16 from sm_80 on, this is sm_75"):
            prove(path, device="sim:t4")


@needs_compiler
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("true", r"best\.py, full mask: wrong result: .* queries, .* head \d+ of batch"),
        ("false", r"best\.py, causal mask: wrong result: .* queries"),
    ],
)
def test_a_wrong_kernel_is_refused_with_the_case(tmp_path: Path, mask: str, message: str) -> None:
    path = write(tmp_path, make(), ".py", ("kCausal = FLASHGEN_CAUSAL;", f"kCausal = {mask};"))
    with pytest.raises(FlashgenError, match=message):
        prove(path)


@needs_compiler
def test_the_sanitizer_finds_what_a_result_does_not_show(tmp_path: Path) -> None:
    kernel = make()
    assert prove(write(tmp_path, kernel, ".py"), sanitize=True).sanitized
    first = re.search(r"\) \{\n  extern __shared__.*\n.*SharedStorage& smem.*\n", kernel.source)
    assert first is not None
    # Reads far past the keys, and makes nothing of it.
    reads = "  if (args.k[64LL * args.seqlen_k * args.batch * args.num_kv_heads * kD] == 7) return;\n"
    path = write(tmp_path, kernel, ".py", (first[0], first[0] + reads))
    with pytest.raises(FlashgenError, match=r"(?s)best\.py, full mask: .*line \d+: if \(args\.k"):
        prove(path, sanitize=True)


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    for name, text, message in (
        ("best.txt", "", "neither a .py nor a .cu file"),
        ("gone.py", None, "gone.py cannot be read: No such file"),
        (
            "other.py",
            "import os\n",
            "does not read as a kernel of this flashgen .it has no KERNELS or GRADIENTS",
        ),
        ("other.cu", "int main() {}\n", "has no line that begins with '// flashgen:'"),
        ("bad.py", "def\n", "does not read as a kernel.*line 1: "),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(FlashgenError, match=message):
            read_emitted(path)
    (tmp_path / "binary.cu").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FlashgenError, match="cannot be read"):
        read_emitted(tmp_path / "binary.cu")
    path = write(tmp_path, make(), ".py", ('"bc": ', '"bd": '))
    with pytest.raises(FlashgenError, match=r"no parameter 'bd'.*emit it again"):
        read_emitted(path)


def test_a_card_that_is_too_small_or_unknown(tmp_path: Path) -> None:
    path = write(tmp_path, make(), ".py")
    emitted = read_emitted(path)
    big = replace(emitted.kernel, launches=(replace(emitted.kernel.launch, smem_bytes=70000),))
    with pytest.raises(FlashgenError, match=r"needs 70000 bytes.*T4 allows 65536.*made for GTX 1080"):
        check_fits(replace(emitted, kernel=big), preset("t4"))
    strange = replace(emitted, device="Riva 128", kernel=replace(emitted.kernel, arch=35))
    with pytest.raises(FlashgenError, match="Riva 128 resembles no preset"):
        default_device(strange)
    # Another card of the same architecture stands in.
    strange = replace(emitted, device="Quadro GV100", kernel=replace(emitted.kernel, arch=70))
    assert default_device(strange).limits == PRESETS["v100"]
    with pytest.raises(FlashgenError, match="unknown device"):
        prove(path, device="sum:gtx-1080")


# ---- compute-sanitizer, by a stand-in ----------------------------------------------------------------------


def fake_sanitizer(folder: Path, script: str) -> Path:
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!{sys.executable}\nimport subprocess, sys\n{script}")
    tool.chmod(0o755)
    return tool


class Card:
    """Sent to the sanitized process: runs attention by numpy."""

    limits = preset("h200")

    def toolchain(self) -> Card:
        return self

    def build(self, kernel: Kernel) -> Any:
        from tests.support.fakes import fake_build

        return replace(fake_build(problem=kernel.problem))

    def open(self) -> Any:
        from tests.support.fakes import FakeRunner

        class Runner(FakeRunner):
            def close(self) -> None:
                pass

        return Runner()


def test_every_tool_of_compute_sanitizer_runs_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    run = f"open({str(log)!r}, 'a').write(sys.argv[2] + '\\n')\n"
    passes = run + "sys.exit(subprocess.run(sys.argv[sys.argv.index(sys.executable):]).returncode)\n"
    tool = fake_sanitizer(tmp_path, passes)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_compute_sanitizer() == tool
    monkeypatch.setattr("flashgen.tuner.prove.sanitizers._pickled", lambda *_: b"")
    monkeypatch.setattr(
        sanitizers, "run_program", _replacing(run_program, "import sys; print('largest error 3e-07')")
    )
    error = sanitize_on_card(make(), Card(), 0)  # pyright: ignore[reportArgumentType]
    assert error == 3e-7
    assert log.read_text().split() == ["memcheck", "racecheck", "initcheck", "synccheck"]
    fails = run + "print('========= Invalid __global__ read of size 4'); sys.exit(86)\n"
    fake_sanitizer(tmp_path, fails)
    with pytest.raises(FlashgenError, match=r"(?s)memcheck \(out-of-bounds.*Invalid __global__ read"):
        sanitize_on_card(make(), Card(), 0)  # pyright: ignore[reportArgumentType]


def _replacing(run: Any, script: str) -> Any:
    """run_program with another script for the sanitized interpreter."""

    def replaced(command: list[str], **options: Any) -> Any:
        return run([*command[:-1], script], **options)

    return replaced


def test_no_compute_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(FlashgenError, match="compute-sanitizer was not found"):
        find_compute_sanitizer()


def test_the_quick_suite_reports_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    import io
    import pickle

    from tests.support.fakes import Fault, fake_build

    run_quick_suite(io.BytesIO(pickle.dumps((Card(), fake_build(), 1))))
    assert float(capsys.readouterr().out.split()[-1]) < 2e-6
    with pytest.raises(SystemExit):
        run_quick_suite(io.BytesIO(pickle.dumps((Card(), fake_build(Fault.ONE_ELEMENT), 1))))
    assert "wrong result" in capsys.readouterr().out


# ---- a module on a card, by stand-ins for PyCUDA and for the driver alone ----------------------------------

MODULE = """
import numpy as np
from tests.support import fake_cuda
from tests.support.fakes import attend
from flashgen.tuner.cards.dtypes import bits_dtype, unwritten_bits
from pycuda.gpuarray import GPUArray

def view(array):
    strides = [s // array.dtype.itemsize for s in array.strides]
    extent = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides))
    flat = fake_cuda.state.at(array.gpudata, extent, array.dtype)
    return np.lib.stride_tricks.as_strided(flat, array.shape, array.strides)

def attention(q, k, v, causal=None, scale=None, out=None, stream=None, return_lse=False):
    o, lse = attend(*(view(x) for x in (q, k, v)), scale, causal, "ARITHMETIC")
    view(out)[...] = o
    FAULT
    if return_lse:
        rows = GPUArray(q.shape[:3], np.float32, allocator=q.allocator)
        view(rows)[...] = lse
        return out, rows
    return out
"""


@pytest.fixture(params=["pycuda", "driver"])
def fake_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A card with PyCUDA, or where it is not installed."""
    import flashgen.tuner.cards as cards
    from flashgen.tuner.cards import cuda, nvml, plain_driver

    assert plain_driver is cards.plain_driver
    from tests.support import fake_cuda

    class GPUArray:
        def __init__(
            self, shape: Any, dtype: Any, allocator: Any = None, gpudata: Any = None, strides: Any = None
        ) -> None:
            self.shape, self.dtype, self.allocator = tuple(shape), np.dtype(dtype), allocator
            self.strides = strides or np.empty(shape, dtype).strides
            size = self.dtype.itemsize * math.prod(shape)
            self.gpudata = allocator(size) if gpudata is None else gpudata

    fake_cuda.state.__init__()
    package, gpuarray = ModuleType("pycuda"), ModuleType("pycuda.gpuarray")
    gpuarray.GPUArray = GPUArray  # type: ignore[attr-defined]
    package.driver = fake_cuda  # type: ignore[attr-defined]
    known = {"pycuda": package, "pycuda.driver": fake_cuda, "pycuda.gpuarray": gpuarray}
    for name, module in known.items():
        monkeypatch.setitem(sys.modules, name, module)
    if request.param == "driver":
        monkeypatch.setattr(cards, "plain_driver", fake_cuda)
        monkeypatch.setitem(sys.modules, "pycuda", None)
        for name in ("pycuda.driver", "pycuda.gpuarray"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(nvml, "_library", lambda: None)
    cuda._driver.cache_clear()
    yield cuda.find_device(0)
    cuda._driver.cache_clear()
    sys.modules.pop("pycuda.gpuarray", None)  # which a runner may have put there


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("pass", None),
        ("view(out)[0, 0, 0, 0] += 1", "wrong result"),
        ("fake_cuda.state.at(out.gpudata - 4, 1)[:] = 0", "outside the outputs were written"),
        (
            "view(out).view(bits_dtype(out.dtype))[0, 0, 0, 0] = unwritten_bits(out.dtype)",
            "of o were not written",
        ),
        ("raise ValueError('q is odd')", r"attention\(\) refused: q is odd"),
        ("q.allocator(8)", "allocated 8 bytes that nothing asked for"),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [{}, {"causal": True}, {"dtype": "f16", "head_dim_v": 48}, {"dtype": "bf16"}, {"precision": "tf32"}],
    ids=lambda kind: Problem(**kind).name,
)
def test_a_module_is_run_in_guarded_memory(
    tmp_path: Path, fake_card: Any, kind: dict[str, Any], fault: str, message: str | None
) -> None:
    from tests.support.fakes import arithmetic_of, fake_build

    path = tmp_path / "best.py"
    shape = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 1, "seqlen_q": 50, "head_dim": 32}
    problem = Problem(**(shape | kind))
    path.write_text(MODULE.replace("FAULT", fault).replace("ARITHMETIC", arithmetic_of(problem)))
    runner = ModuleDevice(fake_card, path).open()
    try:
        if message is None:
            assert 0 < validate(runner, fake_build(problem=problem), seed=0) < problem.tolerance
        else:
            with pytest.raises(FlashgenError, match=message):
                validate(runner, fake_build(problem=problem), seed=0)
    finally:
        runner.close()


def test_a_module_takes_the_workspace_of_its_kernel_last(tmp_path: Path, fake_card: Any) -> None:
    """As much as the kernel says, behind the log-sum-exp."""
    from tests.support.fakes import arithmetic_of, fake_build

    problem = Problem(batch=1, num_q_heads=2, num_kv_heads=1, seqlen_q=50, head_dim=32)
    build = fake_build(problem=problem)
    build = replace(build, kernel=replace(build.kernel, workspace=Workspace(statistics_regions())))
    text = MODULE.replace("FAULT", "pass").replace("ARITHMETIC", arithmetic_of(problem))
    text += """
alone = attention

def attention(q, *arrays, **told):
    made = alone(q, *arrays, **told)
    q.allocator(2 * 4 * 64 * -(-q.shape[0] * q.shape[1] * q.shape[2] // 64))
    return made
"""
    (tmp_path / "best.py").write_text(text)
    runner = ModuleDevice(fake_card, tmp_path / "best.py").open()
    try:
        assert 0 < validate(runner, build, seed=0) < problem.tolerance
    finally:
        runner.close()


SEQUENCES = (
    MODULE[: MODULE.index("def attention(")]
    + """
def sequences(q, k, v, table, used, starts, scale, causal, kept):
    # Each sequence by itself: its rows, keys and values as (1, heads, rows, columns).
    for i in range(len(used) if starts is None else len(starts) - 1):
        rows = q[i : i + 1] if starts is None else q[starts[i] : starts[i + 1]].swapaxes(0, 1)[None]
        if table is None:
            keys = [x[kept[i] : kept[i + 1]].swapaxes(0, 1)[None] for x in (k, v)]
        else:
            at = np.arange(used[i])
            pages = table[i, at // k.shape[2]]
            keys = [x[pages, :, at % k.shape[2]].swapaxes(0, 1)[None] for x in (k, v)]
        if used is not None:
            keys = [x[:, :, : used[i]] for x in keys]
        if rows.shape[2]:
            yield i, attend(rows, *keys, scale, causal, "ARITHMETIC")

def call(q, k, v, out, return_lse, scale, causal, page_table=None, seqused_k=None, cu_seqlens_q=None,
         cu_seqlens_k=None, seqused_q=None, max_seqlen_q=None, max_seqlen_k=None, kv_layout=None):
    given = (page_table, seqused_k, cu_seqlens_q, cu_seqlens_k)
    table, used, starts, kept = (None if each is None else view(each) for each in given)
    assert (kv_layout == "HND") == (table is not None) and max_seqlen_k is not None
    o, rows = view(out), None
    if return_lse:
        shape = q.shape[:3] if starts is None else q.shape[1::-1]
        rows = GPUArray(shape, np.float32, allocator=q.allocator)
    if starts is not None:
        assert max_seqlen_q == np.diff(starts).max()
        q.allocator(4 * (len(starts) - 1 + len(o) // 16 + 1) * 8)
    ends = None if seqused_q is None else view(seqused_q)
    for i, (found, lse) in sequences(*map(view, (q, k, v)), table, used, starts, scale, causal, kept):
        if starts is None:
            o[i] = found[0]
        else:
            part = slice(starts[i], starts[i + 1] if ends is None else starts[i] + ends[i])
            o[part] = found[0].swapaxes(0, 1)[: part.stop - part.start]
        if rows is not None and starts is None:
            view(rows)[i] = lse[0]
        elif rows is not None:
            view(rows)[:, part] = lse[0][:, : part.stop - part.start]
    FAULT
    return (out, rows) if return_lse else out

def attention_varlen(q, k, v, causal, scale, out, return_lse, **told):
    return call(q, k, v, out, return_lse, scale, causal, **told)

attention_paged = attention_varlen
"""
)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("pass", None),
        ("np.add(o, 1, out=o, where=np.isfinite(o))", "wrong result"),
        ("q.allocator(8)", r"attention_\w+\(\) allocated 8 bytes"),
    ],
)
@pytest.mark.parametrize(
    "kind", [{"varlen": "same"}, {"page_size": 16}, {"varlen": "same", "page_size": 16}], ids=str
)
def test_a_module_of_sequences_is_run_in_guarded_memory(
    tmp_path: Path, fake_card: Any, kind: dict[str, Any], fault: str, message: str | None
) -> None:
    from tests.support.fakes import arithmetic_of, fake_build

    path = tmp_path / "best.py"
    shape = {"batch": 2, "num_q_heads": 2, "num_kv_heads": 1, "seqlen_q": 40, "seqlen_k": 50, "head_dim": 32}
    problem = Problem(**(shape | kind))
    path.write_text(SEQUENCES.replace("FAULT", fault).replace("ARITHMETIC", arithmetic_of(problem)))
    build = fake_build(problem=problem)
    launch = replace(build.kernel.launch, packed=problem.layout.is_packed)
    build = replace(build, kernel=replace(build.kernel, launches=(launch,)))
    runner = ModuleDevice(fake_card, path).open()
    try:
        if message is None:
            assert 0 < validate(runner, build, seed=0) < problem.tolerance
        else:
            with pytest.raises(FlashgenError, match=message):
                validate(runner, build, seed=0)
    finally:
        runner.close()


def test_a_module_that_does_not_import(tmp_path: Path, fake_card: Any) -> None:
    path = tmp_path / "best.py"
    path.write_text("import nothing_called_so\n")
    with pytest.raises(FlashgenError, match=r"best\.py cannot be imported: ModuleNotFoundError"):
        ModuleDevice(fake_card, path).open()
