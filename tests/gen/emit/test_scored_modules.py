"""Modules of kernels with masks and changes of scores as texts: clean, typed, read back, and telling what
they take."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.arguments import struct_of
from flashgen.gen.emit.cuda import emit_cuda, read_cuda
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module, emit_thin_module
from flashgen.gen.emit.numpy_text import changed_text, seen_text
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.values import draw_values
from flashgen.gen.space import enumerate_space
from flashgen.tuner.shelf.emitted_kernels import read_each

from tests.support.formatting import assert_ruff_is_content

H200 = preset("h200")
ALL = Scoring(
    window=(127, 0),
    documents=4,
    softcap=30.0,
    bias="f16",
    mask="doc[b, q] == doc[b, k] or not (k % n == 0 and k > 2)",
    score="where(score > 0, score, exp(min(score, 1.0)) / 2) + rel[h, k - q]",
    scalars=(("n", 4),),
)


def kernel_of(scoring: Scoring, **others: Any) -> Kernel:
    problem = Problem(head_dim=32, scoring=scoring, **others)
    free = ("lanes", "vec", "threads_per_block", "min_blocks")
    held = {p.name: p.default for p in Simt.parameters() if p.name not in free} | {"br": 32, "bc": 32}
    return render(enumerate_space(Simt, problem, H200, held).legal[0], problem, H200)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return kernel_of(ALL)


def text_of(kind: str, kernel: Kernel) -> str:
    if kind == "thin":
        return emit_thin_module(kernel, device="H200")
    if kind == "alone":
        return emit_module(kernel, device="H200")
    kernels = [kernel_of(Scoring()), kernel_of(Scoring(window=(127, 0))), kernel]
    return emit_many([Made(each, "H200") for each in kernels], name="several", command=())


@pytest.mark.parametrize("kind", ["alone", "thin", "several"])
def test_a_module_is_clean_and_read_back(kind: str, kernel: Kernel, tmp_path: Path) -> None:
    text = text_of(kind, kernel)
    path = tmp_path / "best.py"
    path.write_text(text)
    path.with_suffix(".cu").write_text(emit_cuda(kernel, device="H200"))
    assert not re.search(r"[ \t]\n", text.replace(kernel.source, "")) and text.endswith(")\n")
    assert_ruff_is_content(path)
    found = read_each(path)[-1].kernel
    assert (found.problem, found.variant, found.launches) == (kernel.problem, kernel.variant, kernel.launches)


@pytest.mark.thorough
def test_a_module_passes_a_strict_type_checker(kernel: Kernel, tmp_path: Path) -> None:
    mypy = shutil.which("mypy", path=str(Path(sys.executable).parent)) or shutil.which("mypy")
    if mypy is None:
        pytest.skip("mypy is not installed")
    (tmp_path / "best.py").write_text(emit_module(kernel, device="H200"))
    (tmp_path / "user.py").write_text(
        "import numpy as np\n"
        "from numpy.typing import NDArray\n\n"
        "from best import attention, document_bounds, sdpa\n\n"
        "x: NDArray[np.float32] = np.zeros((1, 1, 4, 32), np.float32)\n"
        "bounds = document_bounds(np.zeros((1, 4), np.int32))\n"
        "o: NDArray[np.float32] = attention(x, x, x, window=(3, None), documents=bounds, bias=x, n=3)\n"
        "as_asked: int = attention(x, x, x, bias=x)  # type: ignore[assignment]\n"
        "attention(x, x, x, window=3)  # type: ignore[call-overload]\n"
        "like: NDArray[np.float32] = sdpa(x, x, x, is_causal=True)\n"
    )
    command = [mypy, "--strict", "--no-error-summary", "best.py", "user.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_a_module_tells_what_it_takes(kernel: Kernel) -> None:
    text = emit_module(kernel, device="H200")
    told = "window=(127, 0), softcap=30, documents=documents, bias=bias, doc=doc, rel=rel, n=4)"
    assert f"    attention(q, k, v, {told}\n" in text
    assert "with window of 127 keys before and 0 after, 4 documents, soft cap 30" in " ".join(text.split())
    assert "flashgen emit" in text and "--window 127,0" in text and "--scalar n=4" in text
    arguments = re.search(r"ARGUMENTS = \(\n(.*?)\n\)", text, re.DOTALL)
    assert arguments is not None
    fields = re.findall(r'\("(\w+)", "(\w)"\)', arguments[1])
    assert fields == [(field.name, field.code) for field in struct_of(kernel.problem).fields]
    plain = emit_module(kernel_of(Scoring()), device="H200")
    assert "Scored" not in plain and "TileLists" not in plain and "import Scored" not in plain


def test_what_a_source_says_of_masks(kernel: Kernel) -> None:
    text = emit_cuda(kernel, device="H200")
    assert "Tuned with window of 127 keys before and 0 after, 4 documents" in " ".join(
        text.replace("//", "").split()
    )
    assert "const unsigned short* bias;  // (batch, num_q_heads, seqlen_q, seqlen_k) of f16" in text
    assert "int window_left;  // keys before a row's place that it sees; negative: all" in text
    assert read_cuda(text)[0].problem == kernel.problem


def test_masks_and_changes_in_numpy_are_those_of_the_problem() -> None:
    """As a module checks itself by them."""
    problem = Problem(
        batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=21, seqlen_k=37, causal=True, scoring=ALL
    )
    scores = problem.scores
    values = dict(draw_values(ALL, scores, problem, np.random.default_rng(0)))

    class At:
        def __getattr__(self, name: str) -> Any:
            found = values[name]
            return Clamped(found) if isinstance(found, np.ndarray) else found

    class Clamped:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __getitem__(self, indices: Any) -> np.ndarray:
            places = [np.where(i < 0, i + n, i) for i, n in zip(indices, self.array.shape, strict=True)]
            kept = [np.clip(i, 0, n - 1) for i, n in zip(places, self.array.shape, strict=True)]
            return self.array[tuple(kept)].astype(np.float64 if self.array.dtype.kind == "f" else np.int64)

    rows, keys = np.arange(21), np.arange(37)
    score = np.random.default_rng(1).standard_normal((21, 37))
    names = {"np": np, "at": At(), "causal": True, "q": rows[:, None], "k": keys[None, :]}
    names |= {"score": score, "seqlen_q": 21, "seqlen_k": 37}
    for b, h in ((0, 0), (1, 3)):
        scope = {**names, "b": b, "h": h}
        seen = np.ones((21, 37), bool)
        for condition in seen_text(problem):
            seen = seen & eval(condition, scope)
        np.testing.assert_array_equal(seen, scores.visible(values, b, h, rows, keys, 21, 37))
        changed = eval(changed_text(problem), scope)
        np.testing.assert_allclose(changed, scores.changed(values, score, b, h, rows, keys, 21, 37))
