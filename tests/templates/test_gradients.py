"""Emitted modules of kernels for gradients, on arrays of every library but torch, without a GPU."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module, emit_thin_module
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.launch import in_turn
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.scores import scores_of
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.gradients import gradients as in_float64

from tests.support.modules import import_path
from tests.support.stand_in_driver import PRIMARY, Array, D, Driver, Jax, Tensor, host
from tests.templates.gradient_kernels import backward_kernel, computing, forward_kernel, load, unordered

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
Q, K = (2, 4, 21, D), (2, 2, 37, D)
SMALL = SimtBackward(br=32, bc=16, threads_per_block=64, lanes=8, vec=2)


def case(causal: bool = False, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """What gradients are taken of."""
    q, k, v, dout = (host(*shape, seed=seed).astype(dtype) for seed, shape in enumerate((Q, K, K, Q)))
    passed = reference.attention(q, k, v, scale=1 / math.sqrt(D), scores=scores_of(causal=causal))
    lse = passed.lse.astype(np.float32)
    return {"q": q, "k": k, "v": v, "o": passed.o.astype(dtype), "lse": lse, "dout": dout}


def wanted(given: dict[str, np.ndarray], causal: bool = False, **told: Any) -> list[np.ndarray]:
    arrays = (given[name] for name in ("q", "k", "v", "dout"))
    scale = told.pop("scale", 1 / math.sqrt(D))
    found = in_float64(*arrays, scale=scale, scores=scores_of(causal=causal), **told)
    return [found[name].value for name in ("dq", "dk", "dv")]


def close(found: Any, expected: list[np.ndarray], bound: float = 1e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=bound, atol=4 * bound)


@pytest.mark.parametrize("causal", [False, True])
def test_of_numpy(driver: Driver, tmp_path: Path, causal: bool) -> None:
    kernel, given = backward_kernel(), case(causal)
    module = load(tmp_path, kernel)
    with computing(driver, kernel):
        close(module.gradients(**given, causal=causal), wanted(given, causal))
        dlse = host(*Q[:3], seed=9)
        found = module.gradients(**given, causal=causal, scale=0.3, dlse=dlse)
        close(found, wanted(given, causal, scale=0.3, dlse=dlse))
    assert driver.library.fake_num_allocated() == 0
    assert [(each.blocks, each.threads) for each in driver.launches()[:3]] == [
        (1 * 4 * 2, 256),
        (1 * 4 * 2, 96),
        (3 * 2 * 2, 64),
    ]


def test_launches_behind_the_first_may_begin_before_that_ends(driver: Driver, tmp_path: Path) -> None:
    kernel, given = backward_kernel(), case(False)
    kernel = replace(kernel, launches=in_turn(kernel.launches, 90))
    module = load(tmp_path, kernel)
    with computing(driver, kernel):
        for _ in range(2):
            close(module.gradients(**given), wanted(given))
    assert [each.dependent for each in driver.launches()] == [0, 1, 1] * 2


def test_of_rows_first_and_of_bfloat16(driver: Driver, tmp_path: Path) -> None:
    kernel, given = backward_kernel(dtype="bf16"), case(dtype=ml_dtypes.bfloat16)
    module = load(tmp_path, kernel)
    told = {name: x if name == "lse" else np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in given.items()}
    with computing(driver, kernel):
        found = module.gradients(**told, layout="bshd")
    assert {x.dtype for x in found} == {np.dtype(ml_dtypes.bfloat16)}
    close([x.swapaxes(1, 2) for x in found], wanted(given), 2**-7)


def test_of_what_lies_on_the_card(
    driver: Driver, tmp_path: Path, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, given = backward_kernel(), case()
    module = load(tmp_path, kernel)
    placed = {name: cupy.ndarray(driver.own(x), 1) for name, x in given.items()}
    with computing(driver, kernel):
        found = module.gradients(**placed)
        close([x.host for x in found], wanted(given))
        assert {type(x) for x in found} == {cupy.ndarray}

        def reader(x: Any) -> Any:
            return cupy.ndarray(driver.own(x.host), 1)

        monkeypatch.setattr(cupy, "from_dlpack", reader, raising=False)
        found = module.gradients(**{name: Jax(x) for name, x in given.items()})
    assert {type(x) for x in found} == {Jax}
    close([x.host for x in found], wanted(given))


def test_what_is_wrong_is_told(driver: Driver, tmp_path: Path, cupy: ModuleType) -> None:
    kernel, given = backward_kernel(), case()
    module = load(tmp_path, kernel)

    def refused(error: type[Exception], match: str, **others: Any) -> None:
        with pytest.raises(error, match=match):
            module.gradients(**{**given, **others})

    refused(
        ValueError, r"dout has \(batch, heads, seqlen\) \(2, 4, 20\), q has", dout=given["dout"][:, :, :20]
    )
    refused(ValueError, r"lse has the shape \(2, 4, 20\), but must be", lse=given["lse"][:, :, :20].copy())
    refused(TypeError, "lse is float64, not float32", lse=given["lse"].astype(np.float64))
    refused(TypeError, "o is float16, not float32", o=given["o"].astype(np.float16))
    refused(ValueError, "layout is 'sbhd'", layout="sbhd")
    placed = {name: cupy.ndarray(driver.own(x), 1) for name, x in given.items()}
    with pytest.raises(TypeError, match=r"q is a .*Array, of which this module cannot make gradients"):
        module.gradients(**{name: Array(x.host) for name, x in placed.items()})
    placed["k"] = cupy.ndarray(driver.own(np.zeros((*K[:3], D + 1), np.float32))[..., :D], 1)
    with pytest.raises(ValueError, match=r"k starts at .* pass k\.contiguous\(\)"):
        module.gradients(**placed)


def test_nothing_to_do_is_done(driver: Driver, tmp_path: Path) -> None:
    """Without rows, gradients of keys are zeros, which a launch writes; without heads there is none."""
    kernel, given = backward_kernel(), case()
    module = load(tmp_path, kernel)
    rows = {name: x[:, :, :0] if x.shape[2] == 21 else x for name, x in given.items()}
    with computing(driver, kernel):
        dq, dk, dv = module.gradients(**rows)
        assert dq.shape == (2, 4, 0, D) and not dk.any() and not dv.any()
        assert len(driver.launches()) == 1
        module.gradients(**{name: x[:0] for name, x in given.items()})
    assert len(driver.launches()) == 1


def test_deterministic_kernels_serve_where_asked(driver: Driver, tmp_path: Path) -> None:
    kernel, given = backward_kernel(), case()
    module = load(tmp_path, kernel)
    assert module.GRADIENTS[0].deterministic
    with computing(driver, kernel):
        close(module.gradients(**given, deterministic=True), wanted(given))
    module = load(tmp_path, unordered(kernel), name="other")
    with computing(driver, kernel):
        close(module.gradients(**given), wanted(given))
        with pytest.raises(RuntimeError, match="none of the kernels for gradients of float32, head dim 32"):
            module.gradients(**given, deterministic=True)


def test_several(driver: Driver, tmp_path: Path) -> None:
    """Of kernels for gradients that one serves whose shape is nearest; `use` and `explain` know them."""
    kernels = [
        replace(backward_kernel(seqlen_q=n, seqlen_k=n), source=f"// {n}\n", entry=f"backward_{n}")
        for n in (32, 2048)
    ]
    given, module = case(), load(tmp_path, *kernels)
    with computing(driver, *kernels) as (small, large):
        close(module.gradients(**given), wanted(given))
        assert len(small.values) == 1 and not large.values
        assert module.explain(given["q"], given["k"], given["v"]).tuned.name == "f32_d32_backward_n32"
        module.use("f32_d32_backward_n2048")
        close(module.gradients(**given), wanted(given))
        assert len(large.values) == 1


def test_as_a_program(driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 2, "seqlen_q": 9, "seqlen_k": 9}
    kernels = forward_kernel(**small), backward_kernel(**small)
    driver.library.fake_push(PRIMARY)
    module = load(tmp_path, kernels[1])
    module._CHECKED.update(seqlen_q=9, seqlen_k=13)
    with computing(driver, kernels[1]):
        assert module.run_gradients_module(module._bound, module.__doc__) == 0
    assert "correct" in capsys.readouterr().out
    module = load(tmp_path, *kernels)
    module._CHECKED.update(seqlen_q=9, seqlen_k=13)
    with computing(driver, *kernels):
        assert module.run_differentiable_module(module._bound, module.__doc__) == 0
    assert capsys.readouterr().out.count("correct") == 2


def test_tensors(driver: Driver, torch: ModuleType, tmp_path: Path) -> None:
    """Of torch's stand-in: gradients and the workspace are torch's."""
    kernel, given = backward_kernel(), case()
    module = load(tmp_path, kernel)
    with computing(driver, kernel):
        found = module.gradients(**{name: Tensor(driver.own(x)) for name, x in given.items()})
        assert {type(x) for x in found} == {Tensor}
        close([x.host for x in found], wanted(given))


def test_texts_read_as_written_by_hand(tmp_path: Path) -> None:
    """Modules of kernels as they are rendered: of gradients alone, beside the .cu and both ways."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    limits = PRESETS["gtx-1080"]
    backward = render(SMALL, Problem(backward=True, head_dim=D), limits)
    forward = render(steps(D)["4.2.10"], Problem(head_dim=D), limits)
    both = emit_many([Made(forward, "GTX 1080"), Made(backward, "GTX 1080")], name="both", command=())
    (tmp_path / "alone.py").write_text(emit_module(backward, device="GTX 1080"))
    (tmp_path / "both.py").write_text(both)
    (tmp_path / "thin.py").write_text(emit_thin_module(backward, device="GTX 1080"))
    (tmp_path / "thin.cu").write_text(backward.source)
    command = [ruff, "format", "--check", "--line-length", "110", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    thin = import_path(tmp_path / "thin.py")
    assert thin.GRADIENTS[0].source == backward.source and thin.PROBLEM["backward"]
    assert [words(2, 4, 2, 100, 70) for words in thin.GRADIENTS[0].workspace] == [800, 800]
    module = import_path(tmp_path / "both.py")
    assert set(module.__all__) > {"GRADIENTS", "KERNELS", "attention", "gradients", "sdpa"}
    assert "Forward only" not in module.__doc__


@pytest.mark.thorough
def test_a_strict_type_checker_passes_modules_of_gradients(tmp_path: Path) -> None:
    mypy = shutil.which("mypy", path=str(Path(sys.executable).parent)) or shutil.which("mypy")
    if mypy is None:
        pytest.skip("mypy is not installed")
    load(tmp_path, backward_kernel(), name="alone")
    load(tmp_path, forward_kernel(), backward_kernel(), name="both")
    (tmp_path / "user.py").write_text(
        "import numpy as np\nfrom both import attention, gradients\n\n"
        "x: np.ndarray = np.zeros((1, 2, 9, 32), np.float32)\n"
        "o, lse = attention(x, x, x, return_lse=True)\n"
        "dq, dk, dv = gradients(x, x, x, o, lse, x, deterministic=True, dlse=lse)\n"
        "print(dq.shape, dk.shape, dv.shape)\n"
    )
    command = [mypy, "--strict", "--no-error-summary", "alone.py", "both.py", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
def test_kernels_compute_what_modules_tell_them(driver: Driver, tmp_path: Path) -> None:
    """On an emulated card: pointers, strides, sizes and the workspace are where the kernels look for them."""
    card = SimDevice("gtx-1080", PRESETS["gtx-1080"])
    kernel = render(SMALL, Problem(backward=True, head_dim=D), card.limits)
    driver.library.fake_reset(D, 6, 1, 98304)
    module = load(tmp_path, kernel)
    for causal in (False, True):
        given = case(causal)
        turned = {n: x if n == "lse" else np.ascontiguousarray(x.swapaxes(1, 2)) for n, x in given.items()}
        with computing(driver, kernel, card=card):
            found = module.gradients(**turned, causal=causal, layout="bshd", dlse=np.ones(Q[:3], np.float32))
        dlse = np.ones(Q[:3])
        close([x.swapaxes(1, 2) for x in found], wanted(given, causal, dlse=dlse), 1e-5)
