"""A module of several kernels on a real card: it carries them compiled, and each is correct."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many
from flashgen.gen.families import family_named
from flashgen.gen.kernel import Kernel
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.scores import scores_of
from flashgen.tuner.cards.cuda import CudaDevice
from flashgen.tuner.evaluate import reference
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.prove.proof import prove_emitted
from flashgen.tuner.shelf.bundle import build_cubins
from flashgen.tuner.shelf.emitted_kernels import read_each

from tests.support.modules import import_path

SHORT: dict[str, Any] = {"batch": 8, "num_q_heads": 4, "num_kv_heads": 4, "seqlen_q": 128, "seqlen_k": 128}
LONG: dict[str, Any] = {"batch": 1, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 1024, "seqlen_k": 1024}


def made(device: CudaDevice, family: str, **problem: Any) -> Kernel:
    """The legal variant nearest to the family's default."""
    kind, wanted = family_named(family), Problem(**problem)
    catalogue = build_catalogue(kind, wanted, device.limits)
    row = catalogue.nearest(kind())
    assert row is not None
    return render(catalogue.variant(row), wanted, device.limits)


@pytest.fixture(scope="module")
def kernels(device: CudaDevice) -> list[Kernel]:
    found = [made(device, "simt", **SHORT), made(device, "simt", causal=True, **LONG)]
    if device.limits.arch >= 75:
        found.append(made(device, "mma", dtype="f16", head_dim=80, **SHORT))
    if device.limits.arch == 90:
        found.append(made(device, "wgmma", dtype="f16", head_dim=80, causal=True, **LONG))
    return found


@pytest.fixture(scope="module")
def path(device: CudaDevice, kernels: list[Kernel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("module") / "several.py"
    entries = [Made(kernel, "this card") for kernel in kernels]
    cubins = build_cubins(kernels, jobs=4)
    path.write_text(emit_many(entries, name="several", command=(), cubins=cubins))
    return path


@pytest.fixture
def module(path: Path) -> Any:
    return import_path(path, for_good=True)


def arrays_of(problem: Problem, rows: int = 0) -> list[np.ndarray]:
    p = problem
    random = np.random.default_rng(0)
    q = (p.batch, p.num_q_heads, rows or p.seqlen_q, p.head_dim)
    kv = (p.batch, p.num_kv_heads, p.seqlen_k, p.head_dim)
    kind = np.float32 if p.dtype == "f32" else np.float16
    return [random.uniform(-3, 3, shape).astype(kind) for shape in (q, kv, kv)]


def check(problem: Problem, found: np.ndarray, arrays: list[np.ndarray], causal: bool) -> None:
    wide = [x.astype(np.float64) for x in arrays]
    wanted = reference.attention(*wide, scale=problem.head_dim**-0.5, scores=scores_of(causal=causal)).o
    error = np.linalg.norm(found - wanted, axis=(2, 3)) / np.linalg.norm(wanted, axis=(2, 3))
    assert error.max() <= problem.tolerance


def refuse(*_: Any) -> Any:
    raise AssertionError("a kernel that the module carries was compiled")


def test_each_serves_what_it_was_tuned_for_uncompiled(
    module: Any, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_compile", refuse)
    for kernel, tuned in zip(kernels, module.KERNELS, strict=True):
        problem = kernel.problem
        arrays = arrays_of(problem)
        choice = module.explain(*arrays, problem.causal)
        assert choice.exact and choice.tuned is tuned
        check(problem, module.attention(*arrays, problem.causal, strict=True), arrays, problem.causal)
        ragged = arrays_of(problem, rows=77)
        check(problem, module.attention(*ragged, not problem.causal), ragged, not problem.causal)


def test_tensors_are_served_where_they_lie(module: Any, kernels: list[Kernel]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    for kernel in kernels:
        arrays = arrays_of(kernel.problem)
        q, k, v = (torch.from_numpy(x).cuda() for x in arrays)
        for causal in (False, True):
            o = module.attention(q, k, v, causal)
            check(kernel.problem, o.float().cpu().numpy(), arrays, causal)
            assert o.dtype == q.dtype and module.explain(q, k, v, causal).tuned.dtype in str(q.dtype)
        square = replace(kernel.problem, num_kv_heads=4)
        q, k, v = (torch.from_numpy(x).cuda() for x in arrays_of(square))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=True
        )
        difference = module.sdpa(q, k, v, is_causal=True).double() - wanted
        assert (difference.norm() / wanted.norm()).item() <= kernel.problem.tolerance


def test_without_what_it_carries_it_compiles(
    module: Any, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_built", lambda *_: None)
    arrays = arrays_of(kernels[0].problem)
    check(kernels[0].problem, module.attention(*arrays), arrays, False)


def test_each_is_proved_through_its_attention(path: Path, kernels: list[Kernel]) -> None:
    proofs = [prove_emitted(each, device="0") for each in read_each(path)]
    assert [proof.kernel for proof in proofs] == [kernel.problem.name for kernel in kernels]
    for proof in proofs:
        assert proof.how == "through its attention()" and 0 < proof.worst <= proof.bound
