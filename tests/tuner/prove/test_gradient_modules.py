"""Emitted modules of gradients, proved through their own functions, in guarded memory of the host that the
stand-in driver takes for a card's: what they launch is computed in float64, or by the kernel itself on an
emulated card."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module
from flashgen.gen.families import family_named
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards import cuda
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.prove.gpu_arrays import PlainArray
from flashgen.tuner.prove.module_device import ModuleDevice
from flashgen.tuner.shelf.emitted_kernels import read_each, read_emitted

from tests.gen.test_golden import CASES
from tests.support.stand_in_driver import D, Driver
from tests.templates import gradient_kernels as dense
from tests.templates import test_packed_gradients as packed
from tests.templates.conftest import driver, library

__all__ = ["driver", "library"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SMALL = SimtBackward(br=32, bc=16, threads_per_block=64, lanes=8, vec=4)
READ = Scoring(bias="f16", sinks=True, window=(20, 3))


class Allocated(int):
    """The address of memory of the host, which lives as long."""

    memory: Any


@pytest.fixture(params=["pycuda", "driver"])
def host(request: pytest.FixtureRequest, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """What serves runners in place of a card, with PyCUDA's arrays or without."""

    def allocate(num_bytes: int) -> Allocated:
        memory = np.full(num_bytes // 4 + 65, np.nan, np.float32)
        made = Allocated(memory.ctypes.data + -memory.ctypes.data % 256)
        made.memory = driver.own(memory)
        return made

    def begin(self: Any, card: Any) -> None:
        self._cuda = SimpleNamespace(
            Error=ArithmeticError,
            MemoryError=MemoryError,
            mem_get_info=lambda: (1, 1),
            mem_alloc=allocate,
            memcpy_htod=lambda at, host: ctypes.memmove(at, host.ctypes.data, host.nbytes),
            memcpy_dtoh=lambda host, at: ctypes.memmove(host.ctypes.data, at, host.nbytes),
            Context=SimpleNamespace(synchronize=lambda: None),
        )
        self._broken, self._arena, self._arena_floats = False, None, 0

    monkeypatch.setattr(cuda.CudaRunner, "__init__", begin)
    if request.param == "pycuda":
        # As PyCUDA has it: of nothing there is no memory.
        class GPUArray(PlainArray):
            def __init__(self, shape: Any, dtype: Any, allocator: Any = None, **where: Any) -> None:
                none = 0 in tuple(shape) and not where.get("gpudata")
                super().__init__(shape, dtype, allocator, **{**where, **({"gpudata": 0} if none else {})})

        GPUArray.__module__ = "pycuda.gpuarray"
        monkeypatch.setattr(sys.modules["pycuda.gpuarray"], "GPUArray", GPUArray)
    else:
        monkeypatch.setitem(sys.modules, "pycuda", None)
        monkeypatch.delitem(sys.modules, "pycuda.gpuarray")
    yield driver
    sys.modules.pop("pycuda.gpuarray", None)  # which a runner may have put there


def proved(path: Path, kernel: Kernel, name: str = "") -> float:
    """The largest error of a module's kernel, of cases as other kernels of gradients have them."""
    build = Build(replace(kernel, variant=SMALL), path, registers=0, spill_bytes=0, seconds=0.0)
    card: Any = None
    return validate(ModuleDevice(card, path, name).open(), build, seed=0)


@pytest.mark.parametrize(
    "problem", [{}, {"scoring": READ, "causal": True}], ids=["plain", "what scores read"]
)
def test_gradients_are_held_to_float64(host: Driver, tmp_path: Path, problem: dict[str, Any]) -> None:
    kernel, path = dense.backward_kernel(**problem), tmp_path / "best.py"
    path.write_text(emit_module(kernel, device="H200"))
    with dense.computing(host, kernel):
        assert 0 < proved(path, kernel) < 1e-6


def test_those_of_packed_sequences(host: Driver, tmp_path: Path) -> None:
    kernel, path = packed.backward_kernel(scoring=packed.SINKS), tmp_path / "best.py"
    path.write_text(emit_module(kernel, device="H200"))
    with packed.computing(host, kernel):
        assert 0 < proved(path, kernel) < 1e-6


def test_those_of_a_module_that_differentiates(host: Driver, tmp_path: Path) -> None:
    kernels, path = (dense.forward_kernel(), dense.backward_kernel()), tmp_path / "both.py"
    path.write_text(emit_many([Made(each, "H200") for each in kernels], name="both", command=()))
    with dense.computing(host, kernels[1]):
        assert 0 < proved(path, kernels[1], kernels[1].problem.name) < 1e-6


@pytest.mark.thorough
def test_a_kernel_computes_what_its_module_is_told(host: Driver, tmp_path: Path) -> None:
    """On an emulated card, and read from the module as `flashgen validate` does."""
    card, path = SimDevice("gtx-1080", PRESETS["gtx-1080"]), tmp_path / "best.py"
    host.library.fake_reset(D, 6, 1, 98304)
    kernel = render(SMALL, Problem(backward=True, head_dim=D, scoring=READ), card.limits)
    path.write_text(emit_module(kernel, device="GTX 1080"))
    (read,) = read_each(path)
    with dense.computing(host, kernel, card=card):
        assert 0 < proved(path, read.kernel) < kernel.problem.tolerance


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ctypes.c_float.from_address(grads[0].gpudata).value += 1", "wrong gradient: dq"),
        ("grads = (grads[0], grads[2], grads[1])", "returned another array for dk than it allocated"),
        ("q.allocator(12)", r"gradients\(\) allocated 12 bytes that nothing asked for"),
        ("raise ValueError('q is odd')", r"gradients\(\) refused: q is odd"),
    ],
)
def test_what_is_wrong_is_found(host: Driver, tmp_path: Path, fault: str, message: str) -> None:
    kernel, path = dense.backward_kernel(), tmp_path / "best.py"
    text = emit_module(kernel, device="H200").partition('if __name__ == "__main__":')[0]
    path.write_text(
        text
        + f"""
_right = gradients


def gradients(q, *arrays, **told):
    grads = _right(q, *arrays, **told)
    {fault}
    return grads
"""
    )
    with dense.computing(host, kernel), pytest.raises(FlashgenError, match=message):
        proved(path, kernel)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["problem"].get("backward")])
def test_modules_are_read_as_they_were_written(tmp_path: Path, name: str) -> None:
    case, path = CASES[name], tmp_path / "best.py"
    variant = family_named(case["family"])(**case["variant"])
    problem = Problem.from_dict(case["problem"])
    if case["family"] != "wgmma-backward":
        problem = replace(problem, scoring=READ)
    kernel = render(variant, problem, PRESETS[case["card"]])
    path.write_text(emit_module(kernel, device="GTX 1080"))
    assert read_emitted(path).kernel == kernel


def test_of_a_module_that_differentiates_both_are_read(tmp_path: Path) -> None:
    limits, path = PRESETS["gtx-1080"], tmp_path / "both.py"
    forward = render(steps(D)["4.2.10"], Problem(head_dim=D), limits)
    kernels = [forward, render(SMALL, Problem(head_dim=D, backward=True), limits)]
    path.write_text(emit_many([Made(each, "GTX 1080") for each in kernels], name="both", command=()))
    assert [each.kernel for each in read_each(path)] == kernels
