"""Emitted modules of kernels for gradients under masks and changes of scores, without a GPU.

The driver is the stand-in of `test_module`; launches compute in float64 what the problem asks, of the arrays
and numbers that their arguments lead to.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module, emit_thin_module
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.gradients import gradients as in_float64

from tests.support.depth import sampled
from tests.support.modules import import_path
from tests.support.stand_in_driver import PRIMARY, D, Driver, host
from tests.templates.gradient_kernels import backward_kernel, computing, forward_kernel, load
from tests.templates.test_scored import SCORINGS, asked, drawn

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
Q, K = (2, 4, 21, D), (2, 2, 37, D)
#: The arrays of which there are gradients, as calls name them and as kernels do.
WANTED = {
    "alibi": {"alibi_slopes": "slopes"},
    "bias": {"bias": "bias"},
    "bias of bf16": {"bias": "bias"},
    "sinks": {"sinks": "sinks"},
    "all": {"sinks": "sinks", "bias": "bias", "alibi_slopes": "slopes"},
    "expressions": {"rel": "rel"},
}
SMALL = SimtBackward(br=32, bc=16, threads_per_block=64, lanes=8, vec=2)


class Case:
    """A pass under masks and changes of scores, and what its gradients are in float64."""

    def __init__(self, scoring: Scoring, causal: bool = False) -> None:
        drawn_arrays = (host(*shape, seed=seed) for seed, shape in enumerate((Q, K, K, Q)))
        q, k, v, dout = drawn_arrays
        self.values = drawn(scoring)
        self.told = {**asked(scoring, self.values), **dict(scoring.scalars)}
        if scoring.window:
            self.told["window"] = scoring.window
        problem = Problem(head_dim=D, scoring=scoring, causal=causal)
        # As they are passed: rounded, and with all that the reference draws once.
        passed = {"slopes": "alibi_slopes", "bias": "bias", "sinks": "sinks", "rel": "rel"}
        for name, keyword in passed.items():
            if name in self.values:
                self.values[name] = np.asarray(self.told[keyword], np.float64)
        asks = {"scale": 1 / math.sqrt(D), "scores": problem.scores, "values": self.values}
        made = reference.attention(q, k, v, **asks)
        self.given = {"q": q, "k": k, "v": v, "o": made.o.astype(np.float32), "dout": dout}
        self.given["lse"] = made.lse.astype(np.float32)
        self.exact = in_float64(q, k, v, dout, **asks)

    def check(self, found: Any, *more: str, bound: float = 1e-5) -> None:
        names = ("dq", "dk", "dv", *(f"d{name}" for name in more))
        for name, grad in zip(names, found, strict=True):
            exact = self.exact[name].summed_to(np.shape(grad)).value
            np.testing.assert_allclose(np.asarray(grad, np.float64), exact, rtol=bound, atol=4 * bound)


@pytest.mark.parametrize("name", sampled(list(SCORINGS), 3))
def test_what_is_said_reaches_the_kernel(name: str, driver: Driver, tmp_path: Path) -> None:
    kernel, case = backward_kernel(scoring=SCORINGS[name]), Case(SCORINGS[name], causal=True)
    module = load(tmp_path, kernel)
    with computing(driver, kernel):
        case.check(module.gradients(**case.given, **case.told, causal=True))
    # What makes gradients that nobody wants is not launched.
    assert len(driver.launches()) == 3 and driver.library.fake_num_allocated() == 0


@pytest.mark.parametrize("name", WANTED)
def test_gradients_of_what_scores_read(name: str, driver: Driver, tmp_path: Path) -> None:
    kernel, case = backward_kernel(scoring=SCORINGS[name]), Case(SCORINGS[name])
    module = load(tmp_path, kernel)
    with computing(driver, kernel):
        found = module.gradients(**case.given, **case.told, wanted=list(WANTED[name]))
    case.check(found, *WANTED[name].values())
    assert [x.dtype for x in found[3:]] == [np.float32] * len(WANTED[name])
    assert [x.shape for x in found[3:]] == [np.shape(case.told[each]) for each in WANTED[name]]
    assert len(driver.launches()) == 3 + len(WANTED[name]) and driver.library.fake_num_allocated() == 0


@pytest.mark.parametrize("shape", [(4, 1, 37), (1, 21, 37), (2, 1, 21, 1), (2, 4, 21, 37)])
def test_what_is_repeated_is_summed(shape: tuple[int, ...], driver: Driver, tmp_path: Path) -> None:
    scoring = Scoring(bias="f32")
    kernel, case = backward_kernel(scoring=scoring), Case(scoring)
    module = load(tmp_path, kernel)
    bias = host(*shape, seed=9)
    whole = np.broadcast_to(bias, (2, 4, 21, 37))
    scores = Problem(head_dim=D, scoring=scoring).scores
    asks = {"scale": 1 / math.sqrt(D), "scores": scores, "values": {"bias": whole}}
    case.exact = in_float64(*(case.given[name] for name in ("q", "k", "v", "dout")), **asks)
    with computing(driver, kernel):
        *_, dbias = module.gradients(**case.given, attn_mask=bias, wanted=["attn_mask"])
    assert dbias.shape == shape
    exact = case.exact["dbias"].summed_to((1,) * (4 - len(shape)) + shape).value.reshape(shape)
    np.testing.assert_allclose(dbias, exact, rtol=1e-5, atol=4e-5)


def test_of_what_lies_on_the_card(driver: Driver, tmp_path: Path, cupy: ModuleType) -> None:
    kernel, case = backward_kernel(scoring=SCORINGS["all"]), Case(SCORINGS["all"])
    module = load(tmp_path, kernel)
    wanted = WANTED["all"]

    def put(x: Any) -> Any:
        return cupy.ndarray(driver.own(np.ascontiguousarray(x)), 1) if isinstance(x, np.ndarray) else x

    with computing(driver, kernel):
        given, told = ({name: put(x) for name, x in each.items()} for each in (case.given, case.told))
        found = module.gradients(**given, **told, wanted=list(wanted))
    case.check([x.host for x in found], *wanted.values())


def test_what_is_wrong_is_told(driver: Driver, tmp_path: Path) -> None:
    kernel, case = backward_kernel(scoring=SCORINGS["expressions"]), Case(SCORINGS["expressions"])
    module = load(tmp_path, kernel)

    def refused(error: type[Exception], match: str, **others: Any) -> None:
        with pytest.raises(error, match=match):
            module.gradients(**{**case.given, **case.told, **others})

    refused(
        TypeError, "'doc' is wanted, of which .* takes no gradient; it takes those of rel", wanted=["doc"]
    )
    refused(TypeError, "name each once", wanted=["rel", "rel"])
    refused(TypeError, "window= is nothing that the kernels here read", window=(3, 3))
    refused(ValueError, "doc has the shape .* but must be", doc=case.told["doc"][:, :5])
    refused(RuntimeError, "of rel are read at computed places", wanted=["rel"], deterministic=True)
    with computing(driver, kernel):
        case.check(module.gradients(**case.given, **case.told, deterministic=True))


def test_several_kinds_of_one_module(driver: Driver, tmp_path: Path) -> None:
    """Those serve that compute just what is named; `use` and `explain` know them."""
    windows = [
        replace(backward_kernel(scoring=Scoring(window=(n, 0))), source=f"// {n}\n", entry=f"backward_{n}")
        for n in (4, 400)
    ]
    plain, softcap = backward_kernel(), backward_kernel(scoring=SCORINGS["softcap"])
    plain, softcap = (
        replace(each, source=f"// {name}\n", entry=name) for each, name in ((plain, "p"), (softcap, "s"))
    )
    kernels = [*windows, plain, softcap]
    module = load(tmp_path, *kernels)
    with computing(driver, *kernels) as cards:
        case = Case(Scoring(window=(9, 0)))
        case.check(module.gradients(**case.given, window=(9, 0)))
        assert [len(each.values) for each in cards] == [1, 0, 0, 0]
        case = Case(SCORINGS["softcap"])
        case.check(module.gradients(**case.given, softcap=2.0))
        case = Case(Scoring())
        case.check(module.gradients(**case.given))
        assert [len(each.values) for each in cards] == [1, 0, 1, 1]
        given = [case.given[name] for name in "qkv"]
        assert module.explain(*given, softcap=1.0).tuned.name == softcap.problem.name
        with pytest.raises(TypeError, match="no kernel here serves chunk="):
            module.gradients(**case.given, chunk=3)
        with pytest.raises(TypeError, match="gradients of bias are wanted, which the call does not name"):
            module.gradients(**case.given, wanted=["bias"])


def test_as_a_program(driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It draws what its kernels read, and looks at gradients in float64."""
    small = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 2, "seqlen_q": 9, "seqlen_k": 9}
    kernels = [make(**small, scoring=SCORINGS["all"]) for make in (forward_kernel, backward_kernel)]
    driver.library.fake_push(PRIMARY)
    module = load(tmp_path, kernels[1])
    module._CHECKED.update(seqlen_q=9, seqlen_k=13)
    with computing(driver, kernels[1]):
        assert module.run_scored_gradients_module(module._bound, module.__doc__) == 0
    assert "correct" in capsys.readouterr().out
    module = load(tmp_path, *kernels)
    module._CHECKED.update(seqlen_q=9, seqlen_k=13)
    with computing(driver, *kernels):
        assert module.run_differentiable_scored_module(module._bound, module.__doc__) == 0
    assert capsys.readouterr().out.count("correct") == 2


def write_modules(path: Path) -> None:
    """Modules of kernels as they are rendered: of gradients alone, beside the .cu and both ways."""
    limits = PRESETS["gtx-1080"]
    scorings = SCORINGS["all"], SCORINGS["expressions"]
    backward = [render(SMALL, Problem(backward=True, head_dim=D, scoring=each), limits) for each in scorings]
    (path / "alone.py").write_text(emit_module(backward[0], device="GTX 1080"))
    made = [Made(each, "GTX 1080") for each in backward]
    made += [Made(forward_kernel(scoring=scorings[0]), "GTX 1080")]
    (path / "both.py").write_text(emit_many(made, name="both", command=()))
    (path / "thin.py").write_text(emit_thin_module(backward[1], device="GTX 1080"))
    (path / "thin.cu").write_text(backward[1].source)


def test_texts_read_as_written_by_hand(tmp_path: Path) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    write_modules(tmp_path)
    command = [ruff, "format", "--check", "--line-length", "110", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    thin = import_path(tmp_path / "thin.py")
    assert thin.GRADIENTS[0].scattered == ("rel",)
    assert [each.makes for each in thin.GRADIENTS[0].launches] == ["", "", "", "drel"]
    both = import_path(tmp_path / "both.py")
    assert both.KERNELS[0].change is both.GRADIENTS[0].change is not both.GRADIENTS[1].change
    assert "gradients(..., wanted=[" in both.__doc__ and "Forward only" not in both.__doc__


@pytest.mark.thorough
def test_a_strict_type_checker_passes(tmp_path: Path) -> None:
    mypy = shutil.which("mypy", path=str(Path(sys.executable).parent)) or shutil.which("mypy")
    if mypy is None:
        pytest.skip("mypy is not installed")
    write_modules(tmp_path)
    command = [mypy, "--strict", "--no-error-summary", "alone.py", "both.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["all", "expressions"])
def test_kernels_compute_what_modules_tell_them(name: str, driver: Driver, tmp_path: Path) -> None:
    """On an emulated card: what is read, and what is made of it, is where the kernels look for it."""
    card = SimDevice("gtx-1080", PRESETS["gtx-1080"])
    scoring, wanted = SCORINGS[name], WANTED[name]
    kernel = render(SMALL, Problem(backward=True, head_dim=D, scoring=scoring), card.limits)
    driver.library.fake_reset(D, 6, 1, 98304)
    module, case = load(tmp_path, kernel), Case(scoring, causal=True)
    with computing(driver, kernel, card=card):
        told = {**case.told, "causal": True}
        case.check(module.gradients(**case.given, **told, wanted=list(wanted)), *wanted.values())
        case.check(module.gradients(**case.given, **told))
