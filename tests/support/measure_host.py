"""Microseconds of Python for a warm call of `flashgen.attention`, and of emitted modules, without a card.

    python -m tests.support.measure_host [CALL...]

Tensors are PyTorch's own, of the host; what is launched is a stand-in driver's, which computes while kernels
are proved and does nothing while calls are timed. A card adds the launch itself, what its memory takes
longer to be handed out, and that PyTorch takes gradients in another thread. `training` is forward and
backward, `autograd` the same of a function that computes nothing: what autograd takes for itself. Times are
the least of many short turns: what else is at work on the machine lengthens the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import flashgen
import pytest
from flashgen.gen.limits import preset
from flashgen.gen.scoring.asked import Scoring
from flashgen.templates.runtime import driver as of_runtime
from flashgen.templates.runtime import gradient_plans, scored_values, table, tensors
from flashgen.tuner.front import bound, candidates
from flashgen.tuner.front import table as made_tables

from tests.support.host_tensors import take_host_tensors
from tests.support.stand_in_driver import FAKE, PRIMARY, D, Driver, loaded
from tests.templates import gradient_kernels, scored_kernels
from tests.tuner.front.conftest import StandInCard, StandInToolchain, _first_of_each
from tests.tuner.front.test_gradients_torch import kernels_of

#: Calls of a turn, and turns; of these so large a part is left out at the lower end.
COUNT, TURNS, LEFT_OUT = 40, 400, 0.02
#: Where the stand-in's launches begin, and what they do where nothing is to be done.
_LAUNCH = "int cuLaunchKernelEx(const Config* config, int64_t kernel, void** parameters, void** extra) {\n"
_NOTHING = "  if (num_maps < 0) return 0;\n"


#: A call, the masks and changes of scores of kernels that must be proved first, if any, and whether gradients
#: are taken of it.
_Call = tuple[Callable[[], Any], Scoring | None, bool]


def calls_of(torch: Any) -> dict[str, _Call]:
    """Returns calls by name."""
    q, k, v = (torch.randn(1, 4, 64, D) for _ in "qkv")
    few = [torch.randn(1, 2, 64, D) for _ in "kv"]
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    derived, out = q.clone().requires_grad_(), torch.empty_like(q)
    trained, grad = [x.clone().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    nothing = function_of_nothing(torch)
    sinks, bias = torch.zeros(4), torch.zeros(64, 64)
    window, attention = {"window": (31, 0)}, flashgen.attention
    plain, wide = Scoring(), Scoring(window=(31, 0))
    return {
        "plain": (lambda: attention(q, k, v), plain, False),
        "causal": (lambda: attention(q, k, v, causal=True), plain, False),
        "scale": (lambda: attention(q, k, v, scale=0.2), plain, False),
        "fewer heads of keys": (lambda: attention(q, *few), plain, False),
        "bshd": (lambda: attention(*rows_first, layout="bshd"), plain, False),
        "out=": (lambda: attention(q, k, v, out=out), plain, False),
        "return_lse": (lambda: attention(q, k, v, return_lse=True), plain, False),
        "window": (lambda: attention(q, k, v, **window), wide, False),
        "dilation": (lambda: attention(q, k, v, dilation=2), Scoring(dilation=3), False),
        "softcap": (lambda: attention(q, k, v, softcap=20.0), Scoring(softcap=30.0), False),
        "sinks": (lambda: attention(q, k, v, sinks=sinks), Scoring(sinks=True), False),
        "bias": (lambda: attention(q, k, v, bias=bias), Scoring(bias="f32"), False),
        "gradients": (lambda: attention(derived, k, v), plain, True),
        "gradients, window": (lambda: attention(derived, k, v, **window), wide, True),
        "autograd": (lambda: torch.autograd.grad(nothing.apply(*trained), trained, grad), None, True),
        "training": (lambda: torch.autograd.grad(attention(*trained), trained, grad), plain, True),
        "training, window": (
            lambda: torch.autograd.grad(attention(*trained, **window), trained, grad),
            wide,
            True,
        ),
    }


def function_of_nothing(torch: Any) -> Any:
    """Returns a function of autograd that keeps and returns as many tensors as attention, and computes
    nothing."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            return q.detach()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return ctx.saved_tensors

    return Nothing


#: What modules are emitted for to be called, whose names begin so, and what is told in each call.
EMITTED = "emitted, "
_OF_MODULES: dict[str, tuple[Scoring, Callable[[Any], dict[str, Any]]]] = {
    "plain": (Scoring(), lambda torch: {}),
    "window": (Scoring(window=(9, 2)), lambda torch: {"window": (31, 0)}),
    "softcap": (Scoring(softcap=30.0), lambda torch: {"softcap": 20.0}),
    "sinks": (Scoring(sinks=True), lambda torch: {"sinks": torch.zeros(4)}),
    "bias": (Scoring(bias="f32"), lambda torch: {"bias": torch.zeros(64, 64)}),
    "dilation": (Scoring(dilation=3), lambda torch: {"dilation": 2}),
}


#: Those of them that are emitted with a kernel of gradients, too.
_TRAINED = ("plain", "window", "bias")


def emitted_calls(torch: Any, driver: Driver, folder: Path) -> dict[str, _Call]:
    """Returns calls of modules that are emitted to a folder, by name. A launch in front of that with
    dilations lists which tiles of keys rows see."""
    arrays, out = [torch.randn(1, 4, 64, D) for _ in "qkv"], torch.empty(1, 4, 64, D)
    found: dict[str, _Call] = {}
    for name, (scoring, told) in _OF_MODULES.items():
        load = scored_kernels.load_with_lists if scoring.dilation else scored_kernels.load_scored
        module = take_host_tensors(load(folder, scoring, name=f"of_{name}", for_good=True), driver.library)
        attend = functools.partial(module.attention, *arrays, out=out, **told(torch))
        found[EMITTED + name] = attend, None, False
    trained, grad = [x.clone().requires_grad_() for x in arrays], torch.randn_like(out)
    for name in _TRAINED:
        scoring, told = _OF_MODULES[name]
        kernels = (gradient_kernels.forward_kernel, gradient_kernels.backward_kernel)
        made = [make(scoring=scoring) for make in kernels]
        made = [replace(each, source=f"// {each.entry}\n") for each in made]
        module = gradient_kernels.load(folder, *made, name=f"trained_{name}", for_good=True)
        module, of = take_host_tensors(module, driver.library), "" if name == "plain" else f", {name}"
        attend = functools.partial(module.attention, *trained, **told(torch))
        found[f"{EMITTED}gradients{of}"] = attend, None, True
        found[f"{EMITTED}training{of}"] = functools.partial(_step, torch, attend, trained, grad), None, True
    return found


def _step(torch: Any, attend: Callable[[], Any], inputs: list[Any], grad: Any) -> Any:
    return torch.autograd.grad(attend(), inputs, grad)


def us_of(call: Callable[[], Any], count: int = COUNT, turns: int = TURNS) -> float:
    """Returns the microseconds of a call."""
    found = []
    for _ in range(turns):
        began = time.perf_counter_ns()
        for _ in range(count):
            call()
        found.append((time.perf_counter_ns() - began) / count / 1e3)
    return sorted(found)[int(LEFT_OUT * turns)]


@contextlib.contextmanager
def card_of_host(torch: Any, folder: Path) -> Iterator[Driver]:
    """Has tensors of the host be those of a card, whose driver is a stand-in."""
    source = FAKE.read_text()
    assert source.count(_LAUNCH) == 1
    (folder / "driver.cpp").write_text(source.replace(_LAUNCH, _LAUNCH + _NOTHING))
    library = folder / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(folder / "driver.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    built = loaded(library)
    built.fake_reset(D, 9, 0, 232448)
    built.fake_push(PRIMARY)
    card = StandInCard(0, preset("h200"), "stand-in", StandInToolchain(folder, {}, []))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda name: built)
        of_runtime._driver.cache_clear()
        of_runtime._driver()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FLASHGEN_CACHE", "FLASHGEN_HOME"):
            patch.setitem(os.environ, name, str(folder / name))
        for module in (gradient_plans, scored_values, table, tensors):
            if hasattr(module, "_TORCH_DEVICES"):
                patch.setattr(module, "_TORCH_DEVICES", ("cpu", "meta"))
            if hasattr(module, "_ordinal"):
                patch.setattr(module, "_ordinal", lambda device: 0)
        patch.setattr(made_tables, "cuda_card", lambda ordinal: card)
        patch.setattr(bound, "_WORKSHOPS", {})
        patch.setattr(candidates, "_untuned", _first_of_each)
        # A function of C, as PyTorch's is.
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", {0: 0}.__getitem__, raising=False)
        yield Driver(built)


def measured(torch: Any, names: list[str], count: int = COUNT, turns: int = TURNS) -> dict[str, float]:
    """Returns the microseconds of calls by name; no names: of all."""
    calls = calls_of(torch)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, card_of_host(torch, Path(folder)) as driver:
        emitted = emitted_calls(torch, driver, Path(folder))
        for name in names or [*calls, *emitted]:
            call, scoring, derived = calls[name] if name in calls else emitted[name]
            if scoring is not None:
                driver.library.fake_maps(0)
                with gradient_kernels.computing(driver, *kernels_of(scoring)):
                    call()
            driver.library.fake_maps(-1)  # from here on launches do nothing
            with contextlib.nullcontext() if derived else torch.no_grad():
                call()
                found[name] = round(us_of(call, count, turns), 2)
    return found


if __name__ == "__main__":
    import torch

    print(json.dumps(measured(torch, sys.argv[1:]), indent=1))
