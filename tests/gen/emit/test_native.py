"""A kernel as a program and as a library: run on the emulated card, built by the real compilers."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.append import HALVES, INTERLEAVED, Append
from flashgen.gen.arguments import struct_of
from flashgen.gen.emit.cuda import emit_cuda
from flashgen.gen.emit.native import library, program
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Variant
from flashgen.tuner.build.toolchain import find_nvcc
from flashgen.tuner.cards.names import resolve
from flashgen.tuner.cli import app
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.shelf.emitted_kernels import read_emitted
from typer.testing import CliRunner

from tests.gen.families.test_packed import SIMT
from tests.support.depth import sampled

H200 = preset("h200")

KINDS: dict[str, dict[str, Any]] = {
    "f32": {"head_dim": 32},
    "bf16": {"head_dim": 40, "head_dim_v": 24, "dtype": "bf16", "causal": True},
}


def kernel_of(kind: str) -> Kernel:
    problem = Problem(**KINDS[kind])
    variant = steps(32)["4.2.10"] if kind == "f32" else Mma(br=64, bc=32, rows_per_warp=16, stages=1)
    return render(variant, problem, H200)


@pytest.fixture(scope="module", params=list(KINDS))
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return kernel_of(request.param)


def emulated(sources: list[Path], target: Path) -> None:
    """Builds programs whose kernels run on the host."""
    toolchain = resolve("sim:h200").toolchain()
    command = [part for part in toolchain._command() if part != "-DFLASHGEN_LIBRARY"]  # type: ignore[attr-defined]
    command = [*command, "-x", "c++", *map(str, sources), "-x", "none", str(toolchain._runtime())]  # type: ignore[attr-defined]
    subprocess.run([*command, "-o", str(target)], check=True)


def run(*words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)


# ---- the program -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    source = folder / "best.cu"
    source.write_text(emit_cuda(kernel, device="H200") + program(kernel))
    emulated([source], folder / "best")
    return folder / "best"


def write_input(path: Path, batch: int, rows: int, head_dim: int, arrays: list[np.ndarray]) -> None:
    """As the report writes it: sizes, then Q, K and V of each batch."""
    with path.open("wb") as file:
        np.array([batch, rows, head_dim], np.int32).tofile(file)
        for b in range(batch):
            for array in arrays:
                array[b].tofile(file)


def test_the_program_reads_and_writes_the_reports_format(kernel: Kernel, built: Path, tmp_path: Path) -> None:
    problem, batch, rows = kernel.problem, 3, 75
    rng = np.random.default_rng(0)
    columns = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    arrays = [rng.uniform(-3, 3, (batch, rows, n)).astype(np.float32) for n in columns]
    if problem.dtype == "bf16":
        arrays = [(x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in arrays]
    write_input(tmp_path / "input", batch, rows, problem.head_dim, arrays)
    done = run(built, tmp_path / "input", tmp_path / "output")
    assert done.returncode == 0, done.stderr
    o = np.fromfile(tmp_path / "output", np.float32).reshape(batch, rows, problem.head_dim_v)
    q, k, v = (x[:, None].astype(np.float64) for x in arrays)
    wanted = reference.attention(q, k, v, scale=problem.head_dim**-0.5, scores=problem.scores).o[:, 0]
    distance = np.linalg.norm(o - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))
    assert (distance <= problem.tolerance).all(), distance
    seconds = {name: float(s) for name, s in re.findall(r"^(\w+) +([\d.]+) s", done.stdout, re.MULTILINE)}
    assert list(seconds) == ["total", "input", "computing", "output"]
    assert seconds["total"] >= seconds["input"] + seconds["computing"] + seconds["output"] - 1e-5


def test_the_program_takes_nothing_and_says_what_is_wrong(
    kernel: Kernel, built: Path, tmp_path: Path
) -> None:
    d = kernel.problem.head_dim
    write_input(tmp_path / "none", 0, 9, d, [])
    assert run(built, tmp_path / "none", tmp_path / "output").returncode == 0
    assert (tmp_path / "output").read_bytes() == b""
    write_input(tmp_path / "other", 1, 2, d + 1, [np.zeros((1, 2, d + 1), np.float32)] * 3)
    write_input(tmp_path / "cut", 1, 2, d, [np.zeros((1, 2, d), np.float32)])
    (tmp_path / "tiny").write_bytes(b"1234")
    wrong = f"has the head dim {d + 1}, this serves {d}; make another: flashgen emit best.cu --main "
    wrong += "" if kernel.problem.dtype == "f32" else "--dtype bf16 "
    for words, code, message in (
        ((), 2, "usage: "),
        ((tmp_path / "other", "o"), 1, f"{wrong}--d {d + 1}"),
        ((tmp_path / "cut", "o"), 1, "cut ends "),
        ((tmp_path / "tiny", "o"), 1, "is shorter than its three sizes"),
        ((tmp_path / "missing", "o"), 1, "cannot be read: No such file"),
        ((tmp_path / "none", tmp_path / "no" / "folder"), 1, "cannot be written: No such file"),
    ):
        done = run(built, *words)
        assert done.returncode == code and message in done.stderr, (words, done.stderr)


def test_a_program_is_proved_as_its_kernel(kernel: Kernel, built: Path) -> None:
    """Its own main is in nobody's way."""
    read = read_emitted(built.with_suffix(".cu")).kernel
    assert (read.problem.stem, read.variant) == (kernel.problem.stem, kernel.variant)
    if kernel.problem.dtype == "f32":  # one will do
        assert replace(resolve("sim:h200"), sanitize=True).toolchain().build(read).artifact.exists()


# ---- the library -------------------------------------------------------------------------------------------


def write_library(kernel: Kernel, folder: Path) -> None:
    (folder / "best.cu").write_text(emit_cuda(kernel, device="H200"))
    for name, text in library(kernel, "best").items():
        (folder / name).write_text(text)
        assert "\n\n\n" not in text and not re.search(r"[ \t]\n", text)


def assert_example_is_right(kernel: Kernel, folder: Path) -> None:
    """Builds the library's example, which calls the kernel, and has it check what that makes."""
    emulated([folder / "best.cu", folder / "example.cpp"], folder / "example")
    done = run(folder / "example")
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.fullmatch(r"error against float64: (\S+), (\S+) allowed\n", done.stdout)
    assert told is not None and 0 < float(told[1]) <= float(told[2]) == kernel.problem.tolerance


def test_the_library_is_called_by_its_example(kernel: Kernel, tmp_path: Path) -> None:
    write_library(kernel, tmp_path)
    assert_example_is_right(kernel, tmp_path)


def nvcc_or_skip() -> Path:
    try:
        return Path(find_nvcc(90).path)
    except FlashgenError as error:
        pytest.skip(str(error))


@pytest.mark.thorough
@pytest.mark.nvcc
def test_the_program_builds_as_it_says(tmp_path: Path) -> None:
    nvcc, kernel = nvcc_or_skip(), kernel_of("f32")
    text = program(kernel)
    build = re.search(r"^// +nvcc (.* (\w+\.cu)) -o attention$", text, re.MULTILINE)
    assert build is not None
    (tmp_path / build[2]).write_text(emit_cuda(kernel, device="H200") + text)
    command = [
        str(nvcc),
        *build[1].replace("-O3", "-O1").split(),
        "-Werror",
        "all-warnings",
        "-o",
        "attention",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "attention").stderr.startswith("usage: ")


@pytest.mark.nvcc
def test_the_header_is_c(kernel: Kernel, tmp_path: Path) -> None:
    """And has the layout that the kernel reads."""
    nvcc = nvcc_or_skip()
    files = library(kernel, "best")
    (tmp_path / "best.h").write_text(files["best.h"])
    (tmp_path / "use.c").write_text(
        '#include <stddef.h>\n#include "best.h"\n#include "best.h"\n'
        '_Static_assert(sizeof(AttentionArgs) == 160 && offsetof(AttentionArgs, scale) == 156, "layout");\n'
        f"int use(const AttentionArgs* args) {{ return {kernel.entry}(args, 0); }}\n"
    )
    command = [str(nvcc), "-Xcompiler=-std=c11,-Wall,-Werror", "-c", "use.c", "-o", "use.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.nvcc
def test_cmake_builds_the_library(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("CMake is not installed")
    nvcc, kernel = nvcc_or_skip(), kernel_of("f32")
    (tmp_path / "best.cu").write_text(emit_cuda(kernel, device="H200") + program(kernel))
    for name, text in library(kernel, "best").items():
        (tmp_path / name).write_text(text)
    configure = ["cmake", "-B", "build", f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_COMPILER_WORKS=1"]
    for command in (configure, ["cmake", "--build", "build"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build" / "libbest.a").exists() and (tmp_path / "build" / "example").exists()


# ---- masks and changes of scores ---------------------------------------------------------------------------


SCORINGS: dict[str, dict[str, Any]] = {
    "window": {"head_dim": 32, "scoring": Scoring(window=(30, 4), softcap=3.0, sinks=True)},
    "lists": {
        "head_dim": 32,
        "causal": True,
        "scoring": Scoring(
            mask="doc[b, q] == doc[b, k] or k % n == 0",
            score="score + rel[h, k - q]",
            alibi=True,
            bias="f16",
            lengths=True,
            scalars=(("n", 3),),
        ),
    },
    "half": {
        "head_dim": 40,
        "head_dim_v": 24,
        "dtype": "bf16",
        "scoring": Scoring(documents=4, bias="u8", prefix=20, score="score * t", scalars=(("t", 0.5),)),
    },
}


#: Kernels whose launches in front leave something for them: rows' reach, and float32 in parts.
IN_FRONT: dict[str, tuple[Variant, dict[str, Any]]] = {
    "reach": (Simt(br=64, bc=32, far_keys="left_out"), {"scoring": Scoring(alibi=True), "causal": True}),
    "parts": (Wgmma(split="in_front", br=64, bc=16, k_stages=1, v_stages=1), {"precision": "3xf16"}),
}


@pytest.mark.parametrize("kind", IN_FRONT)
def test_callers_bring_the_workspace_of_launches_in_front(kind: str, tmp_path: Path) -> None:
    variant, asked = IN_FRONT[kind]
    kernel = render(variant, Problem(head_dim=32, num_q_heads=2, num_kv_heads=2, **asked), H200)
    assert kernel.workspace is not None and "cudaMalloc(&args.workspace, " in program(kernel)
    write_library(kernel, tmp_path)
    assert_example_is_right(kernel, tmp_path)


#: Parameters that may be anything that fits.
FREE = ("lanes", "vec", "threads_per_block", "min_blocks")


@pytest.fixture(scope="module", params=list(SCORINGS))
def scored(request: pytest.FixtureRequest) -> Kernel:
    problem = Problem(**SCORINGS[request.param])
    if problem.dtype == "bf16":
        return render(Mma(br=64, bc=32, rows_per_warp=16, stages=1), problem, H200)
    held = {p.name: p.default for p in Simt.parameters() if p.name not in FREE} | {"br": 32, "bc": 32}
    return render(enumerate_space(Simt, problem, H200, held).legal[0], problem, H200)


def test_a_library_with_masks_is_called_by_its_example(scored: Kernel, tmp_path: Path) -> None:
    write_library(scored, tmp_path)
    assert_example_is_right(scored, tmp_path)


def test_a_program_reads_what_masks_read(tmp_path: Path) -> None:
    problem = Problem(**SCORINGS["lists"])
    held = {p.name: p.default for p in Simt.parameters() if p.name not in FREE} | {"br": 32, "bc": 32}
    kernel = render(enumerate_space(Simt, problem, H200, held).legal[0], problem, H200)
    source = tmp_path / "best.cu"
    source.write_text(emit_cuda(kernel, device="H200") + program(kernel))
    emulated([source], tmp_path / "best")
    rng, batch, rows = np.random.default_rng(0), 2, 75
    arrays = [rng.uniform(-3, 3, (batch, rows, 32)).astype(np.float32) for _ in range(3)]
    drawn: dict[str, Any] = {
        "doc": np.sort(rng.integers(0, 4, (batch, rows))).astype(np.int32),
        "rel": rng.standard_normal((1, 50)).astype(np.float32),
        "slopes": np.full((batch, 1), 0.25, np.float32),
        "bias": rng.standard_normal((batch, 1, rows, rows)).astype(np.float16),
        "lengths": np.array([70, 75], np.int32),
    }
    write_input(tmp_path / "input", batch, rows, 32, arrays)
    with (tmp_path / "input").open("ab") as file:
        for each in problem.scores.buffers:
            for axis, _ in each.sizes:
                np.array([drawn[each.name].shape[axis]], np.int32).tofile(file)
            drawn[each.name].tofile(file)
    done = run(tmp_path / "best", tmp_path / "input", tmp_path / "output")
    assert done.returncode == 0, done.stderr
    o = np.fromfile(tmp_path / "output", np.float32).reshape(batch, 1, rows, 32)
    q, k, v = (x[:, None] for x in arrays)
    values = {**drawn, "n": 3}
    wanted = reference.attention(q, k, v, scale=32**-0.5, scores=problem.scores, values=values).o
    distance = np.linalg.norm(o - wanted, axis=(2, 3)) / np.linalg.norm(wanted, axis=(2, 3))
    assert (distance <= problem.tolerance).all(), distance
    short = (tmp_path / "input").read_bytes()[:-8]
    (tmp_path / "short").write_bytes(short)
    done = run(tmp_path / "best", tmp_path / "short", tmp_path / "output")
    assert done.returncode == 1 and "numbers of" in done.stderr


# ---- sequences of lengths of their own ---------------------------------------------------------------------


SEQUENCES: dict[str, dict[str, Any]] = {
    "packed": {"head_dim": 40, "head_dim_v": 24, "dtype": "bf16", "varlen": "same", "causal": True},
    "paged": {"head_dim": 32, "dtype": "f16", "page_size": 16, "causal": True},
    "packed paged": {
        "head_dim": 32,
        "dtype": "f16",
        "varlen": "same",
        "page_size": 7,
        "scoring": Scoring(window=(30, 4), softcap=3.0, sinks=True, alibi=True),
    },
    "packed lists": {
        "head_dim": 32,
        "dtype": "bf16",
        "varlen": "same",
        "scoring": Scoring(mask="doc[b, q] == doc[b, k] or k < 3", lengths=True),
    },
}


#: Kernels of caches that grow, that are of e4m3, and of latent attention.
SERVING: dict[str, dict[str, Any]] = {
    "dense append": {"head_dim": 32, "dtype": "f16", "append": Append(HALVES, 16), "causal": True},
    "paged append": {
        "head_dim": 32,
        "dtype": "bf16",
        "append": Append(INTERLEAVED, 32),
        "page_size": 16,
        "scoring": Scoring(window=(30, 4)),
    },
    "packed append": {
        "head_dim": 32,
        "dtype": "f16",
        "append": Append(HALVES, 16),
        "page_size": 7,
        "varlen": "same",
        "causal": True,
    },
    "append": {"head_dim": 40, "head_dim_v": 24, "dtype": "f16", "append": Append(), "page_size": 8},
    "e4m3": {"head_dim": 32, "dtype": "bf16", "kv_dtype": "e4m3", "causal": True},
    "paged e4m3": {
        "head_dim": 32,
        "dtype": "f16",
        "kv_dtype": "e4m3",
        "page_size": 16,
        "scoring": Scoring(softcap=3.0, sinks=True),
    },
    "packed e4m3": {"head_dim": 40, "head_dim_v": 24, "dtype": "f16", "kv_dtype": "e4m3", "varlen": "same"},
    "latent": {"head_dim": 32, "latent": True, "head_dim_v": 16, "num_q_heads": 16, "causal": True},
    "paged latent": {"head_dim": 32, "latent": True, "head_dim_v": 16, "num_q_heads": 16, "page_size": 16},
}


def sequences_kernel(kind: str) -> Kernel:
    problem = Problem(**{**SEQUENCES, **SERVING}[kind])
    if not problem.latent:
        return render(Mma(br=64, bc=32, rows_per_warp=16, stages=1), problem, H200)
    return render(SIMT, problem, H200)


@pytest.mark.parametrize("kind", sampled([*SEQUENCES, *SERVING], 3, thorough=6))
def test_a_library_of_sequences_is_called_by_its_example(kind: str, tmp_path: Path) -> None:
    kernel = sequences_kernel(kind)
    write_library(kernel, tmp_path)
    assert_example_is_right(kernel, tmp_path)


@pytest.mark.nvcc
@pytest.mark.thorough
@pytest.mark.parametrize("kind", [*SEQUENCES, "packed append", "paged e4m3"])
def test_headers_and_examples_of_sequences_build(kind: str, tmp_path: Path) -> None:
    nvcc, kernel = nvcc_or_skip(), sequences_kernel(kind)
    write_library(kernel, tmp_path)
    size = struct_of(kernel.problem).num_bytes
    (tmp_path / "use.c").write_text(
        f'#include "best.h"\n_Static_assert(sizeof(AttentionArgs) == {size}, "layout");\n'
        f"int use(const AttentionArgs* args) {{ return {kernel.entry}(args, 0); }}\n"
        + (
            f"long long need(const AttentionArgs* args) {{ return {kernel.entry}_plan_ints(args); }}\n"
            if kernel.problem.layout.is_packed
            else ""
        )
    )
    example = [
        "-std=c++17",
        "-DFLASHGEN_LIBRARY",
        "-arch=sm_90",
        "-Werror",
        "all-warnings",
        "best.cu",
        "example.cpp",
    ]
    for words in (
        ["-Xcompiler=-std=c11,-Wall,-Werror", "-c", "use.c", "-o", "use.o"],
        [*example, "-o", "example"],
    ):
        done = subprocess.run([str(nvcc), *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=sampled(["packed paged", "packed", "paged"], 1))
def sequences(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Kernel, Path]:
    kernel, folder = sequences_kernel(request.param), tmp_path_factory.mktemp("sequences")
    text = program(kernel)
    assert not re.search(r"[ \t]\n", text)
    (folder / "best.cu").write_text(emit_cuda(kernel, device="H200") + text)
    emulated([folder / "best.cu"], folder / "best")
    return kernel, folder / "best"


ROWS_OF, KEYS_OF, PAGES, MOST_PAGES = (21, 0, 1, 7), (70, 12, 0, 37), 40, 12


def test_a_program_reads_sequences(sequences: tuple[Kernel, Path], tmp_path: Path) -> None:
    (kernel, built), rng = sequences, np.random.default_rng(0)
    problem = kernel.problem
    packed, size = problem.layout.is_packed, problem.page_size
    rows_of = ROWS_OF if packed else (5,) * len(KEYS_OF)
    starts = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (rows_of, KEYS_OF)]
    table = rng.permutation(len(KEYS_OF) * PAGES)[: len(KEYS_OF) * MOST_PAGES].astype(np.int32)
    pages = len(KEYS_OF) * PAGES
    if size:
        sizes = [len(KEYS_OF), problem.head_dim, *([] if packed else [5]), pages, size, MOST_PAGES]
        told = [*([starts[0]] if packed else []), np.array(KEYS_OF, np.int32), table]
        num_keys = pages * size
        places = [
            table.reshape(len(KEYS_OF), -1)[i, np.arange(n) // size] * size + np.arange(n) % size
            for i, n in enumerate(KEYS_OF)
        ]
    else:
        sizes, told, num_keys = [len(KEYS_OF), problem.head_dim], starts, int(starts[1][-1])
        places = [np.arange(first, first + n) for first, n in zip(starts[1], KEYS_OF, strict=False)]
    shapes = ((sum(rows_of), problem.head_dim), (num_keys, problem.head_dim), (num_keys, problem.head_dim_v))
    arrays = [(rng.integers(-24, 25, shape) / 8).astype(np.float32) for shape in shapes]
    drawn = {"slopes": np.full((len(KEYS_OF), 1), 0.25, np.float32), "sinks": np.full(1, 0.5, np.float32)}
    read = [drawn[each.name] for each in problem.scores.buffers]

    def write(name: str, lengths: list[np.ndarray]) -> Path:
        path = tmp_path / name
        parts = [np.array(sizes, np.int32), *lengths, *arrays, *read]
        path.write_bytes(b"".join(each.tobytes() for each in parts))
        return path

    done = run(built, write("input", told), tmp_path / "output")
    assert done.returncode == 0, done.stderr
    o = np.fromfile(tmp_path / "output", np.float32).reshape(-1, problem.head_dim_v)
    values = {**drawn, "window_left": 30, "window_right": 4, "softcap": 3.0}
    for i, place in enumerate(places):
        part = slice(starts[0][i], starts[0][i + 1])
        if part.stop == part.start:
            continue
        q, k, v = (x[None, None] for x in (arrays[0][part], arrays[1][place], arrays[2][place]))
        found = reference.attention(
            q, k, v, scale=problem.head_dim**-0.5, scores=problem.scores, values=values, first=(i, 0)
        )
        apart = np.linalg.norm(o[part] - found.o[0, 0])
        assert apart <= problem.tolerance * np.linalg.norm(found.o), (i, apart)

    wrong = told.copy()
    if packed:
        wrong[0] = wrong[0][::-1].copy()
        done = run(built, write("falls", wrong), tmp_path / "output")
        assert done.returncode == 1 and "cu_seqlens_q begins at 29; it must begin at 0" in done.stderr
    if size:
        wrong = [*told[:-1], told[-1] + pages]
        done = run(built, write("beyond", wrong), tmp_path / "output")
        assert done.returncode == 1
        assert re.search(rf"page_table has page \d+ at sequence 0, place 0, .* {pages} pages", done.stderr)
        wrong = [*told[:-2], told[-2] + 1000, told[-1]]
        done = run(built, write("short", wrong), tmp_path / "output")
        assert "sequence 0 has 1070 keys, and page_table has room for" in done.stderr


def turned(rows: np.ndarray, positions: np.ndarray, append: Append, cos: np.ndarray, sin: np.ndarray) -> Any:
    """Rows whose first columns are rotated."""
    made, n = rows.copy(), append.rotary_dim
    halves = append.rotary == HALVES
    first, second = (slice(0, n // 2), slice(n // 2, n)) if halves else (slice(0, n, 2), slice(1, n, 2))
    made[:, first] = rows[:, first] * cos[positions] - rows[:, second] * sin[positions]
    made[:, second] = rows[:, second] * cos[positions] + rows[:, first] * sin[positions]
    return made


@pytest.mark.parametrize("kind", sampled(list(SERVING), 1, thorough=4))
def test_a_program_reads_what_serves(kind: str, tmp_path: Path) -> None:
    """Caches that grow, of e4m3 with scales, and latent ones."""
    kernel, rng = sequences_kernel(kind), np.random.default_rng(0)
    problem, append = kernel.problem, kernel.problem.append
    packed, size, d, dv = (
        problem.layout.is_packed,
        problem.page_size,
        problem.head_dim,
        problem.head_dim_v,
    )
    text = program(kernel)
    assert "\n\n\n" not in text and not re.search(r"[ \t]\n", text)
    (tmp_path / "best.cu").write_text(emit_cuda(kernel, device="H200") + text)
    emulated([tmp_path / "best.cu"], tmp_path / "best")
    rows_of, cached = ((5, 0, 1, 7), (30, 12, 0, 20)) if packed else ((5, 5, 5), (30, 0, 14))
    if not packed and not size:
        cached = (30, 30, 30)
    new_of = rows_of if append is not None else (0,) * len(rows_of)
    keys_of = [int(n + new) for n, new in zip(cached, new_of, strict=True)]
    batch, most, positions = len(rows_of), 12, 40
    starts = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (rows_of, keys_of)]
    total_q, rotates = sum(rows_of), append is not None and append.rotary
    if size:
        table = rng.permutation(batch * most).astype(np.int32).reshape(batch, most)
        sizes = [batch, d, *([] if packed else [5]), batch * most, size, most, *[positions] * bool(rotates)]
        told = [*([starts[0]] if packed else []), np.array(cached, np.int32), table]
        places = [table[i, np.arange(n) // size] * size + np.arange(n) % size for i, n in enumerate(keys_of)]
        num_keys = batch * most * size
    elif packed:
        sizes, told, num_keys = [batch, d], starts, sum(keys_of)
        places = [np.arange(*starts[1][i : i + 2]) for i in range(batch)]
    else:
        sizes = [batch, 5, keys_of[0], *[positions] * bool(rotates), d]
        told, num_keys = [], sum(keys_of)
        places = [np.arange(*starts[1][i : i + 2]) for i in range(batch)]
    shapes = [(total_q, d), (num_keys, d), (num_keys, dv)][: 2 if problem.latent else 3]
    shapes += [(total_q, d), (total_q, dv)] if append is not None else []
    arrays = [(rng.integers(-24, 25, shape) / 8).astype(np.float32) for shape in shapes]
    if append is not None and append.rotary:
        angles = rng.uniform(0, 6, (positions, append.rotary_dim // 2))
        tables = [np.round(f(angles) * 64).astype(np.float32) / 64 for f in (np.cos, np.sin)]
        arrays += tables
    scales = rng.uniform(0.5, 2, (2, batch)).astype(np.float32)
    arrays += list(scales) if problem.kv_dtype else []
    drawn = {"sinks": np.full(1, 0.5, np.float32)}
    parts = [
        np.array(sizes, np.int32),
        *told,
        *arrays,
        *(drawn[each.name] for each in problem.scores.buffers),
    ]
    (tmp_path / "input").write_bytes(b"".join(each.tobytes() for each in parts))
    done = run(tmp_path / "best", tmp_path / "input", tmp_path / "output")
    assert done.returncode == 0, done.stderr
    o = np.fromfile(tmp_path / "output", np.float32).reshape(-1, dv)
    q, k = (each.astype(np.float64) for each in arrays[:2])
    v = k[:, :dv] if problem.latent else arrays[2].astype(np.float64)
    if problem.kv_dtype:
        k, v = (x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) for x in (k, v))
    values = {**drawn, "window_left": 30, "window_right": 4, "softcap": 3.0}
    for i, place in enumerate(places):
        part = slice(starts[0][i], starts[0][i + 1])
        if part.stop == part.start:
            continue
        rows = q[part]
        if append is not None:
            at, new = cached[i] + np.arange(new_of[i]), place[cached[i] :]
            k[new], v[new] = arrays[3][part], arrays[4][part]
            if append.rotary:
                k[new] = turned(k[new], at, append, *tables)
                has_places = problem.causal or problem.scoring.window is not None
                rows = turned(rows, at if has_places else 0 * at + cached[i], append, *tables)
        keys, columns = (x[place][None, None] for x in (k, v))
        if problem.kv_dtype:
            keys, columns = keys * scales[0, i], columns * scales[1, i]
        found = reference.attention(
            rows[None, None], keys, columns, scale=d**-0.5, scores=problem.scores, values=values, first=(i, 0)
        )
        apart = np.linalg.norm(o[part] - found.o[0, 0])
        assert apart <= problem.tolerance * np.linalg.norm(found.o), (i, apart)


# ---- the command line --------------------------------------------------------------------------------------


EIGHT = ("--preset", "h200", "--d", "64", "--dtype", "e4m3", "--family", "wgmma")


def emit(*words: str) -> Any:
    ladder = () if EIGHT[0] in words else ("--preset", "h200", "--d", "32", "--family", "ladder")
    return CliRunner().invoke(app, ["emit", *words, *ladder])


def test_emit_writes_programs_and_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert emit("plain.cu").exit_code == 0
    assert emit("best.cu", "--main").exit_code == 0
    assert "-c plain.cu" in Path("plain.cu").read_text()
    main = Path("best.cu").read_text()
    assert emit("best.cu").exit_code == 0
    plain = Path("best.cu").read_text()
    assert main.startswith(plain) and "int main(int count, char** words)" in main.removeprefix(plain)
    assert " best.cu -o attention" in main
    result = emit("lib/best.cu", "--cmake")
    assert result.exit_code == 0 and "beside it best.h, CMakeLists.txt, example.cpp" in result.stdout
    assert Path("lib/best.cu").read_text() == plain
    assert "add_library(best best.cu)" in Path("lib/CMakeLists.txt").read_text()
    assert emit("lib/best.cu", "--cmake", "--json").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("best.py", "--main"), "--main and --cmake are of CUDA C++, not of best.py"),
        (("best.py", "--cmake"), "name a .cu file"),
        (("lib/best.cu", "--cmake"), "CMakeLists.txt is another's; emit into an empty folder"),
        (("my-best.cu", "--cmake"), "'my-best.cu' cannot name a library"),
        (("test.cu", "--cmake"), "'test.cu' cannot name a library"),
        (("best.cu", "--main", *EIGHT), "tensors of e4m3 come with scales"),
        (("best.cu", "--cmake", *EIGHT), "--main and --cmake serve f32, f16 and bf16"),
    ],
)
def test_emit_refuses(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lib").mkdir()
    Path("lib/CMakeLists.txt").write_text("project(mine)\n")
    result = emit(*words)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    assert Path("lib/CMakeLists.txt").read_text() == "project(mine)\n"
    assert [path.name for path in tmp_path.rglob("*.*")] == ["CMakeLists.txt"]


@pytest.mark.parametrize("problem", [Problem(backward=True, head_dim=16, head_dim_v=8, causal=True)], ids=str)
def test_a_program_of_gradients_checks_itself(problem: Problem, tmp_path: Path) -> None:
    kernel = render(SimtBackward(br=16, bc=16, threads_per_block=64, lanes=8, vec=1), problem, H200)
    text = emit_cuda(kernel, device="H200") + program(kernel)
    (tmp_path / "best.cu").write_text(text)
    emulated([tmp_path / "best.cu"], tmp_path / "best")
    done = run(tmp_path / "best", 1, 2, 1, 30, 17)  # whose first rows see nothing
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"dq (\S+), dk (\S+), dv (\S+), (\S+) allowed", done.stdout)
    assert told is not None and all(0 < float(each) <= float(told[4]) for each in told.groups()[:3])
    assert run(tmp_path / "best", 1, 3).returncode == run(tmp_path / "best", 1, 3, 2, 4, 4).returncode == 2
    # What is wrong is told of: weights of every other key are left out.
    wrong = text.replace("key < seen.end", "key < seen.end && key % 2 == 0")
    assert wrong != text
    (tmp_path / "wrong.cu").write_text(wrong)
    emulated([tmp_path / "wrong.cu"], tmp_path / "wrong")
    assert run(tmp_path / "wrong").returncode == 1
