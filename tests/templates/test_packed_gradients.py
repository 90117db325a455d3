"""Emitted modules of kernels for gradients of packed sequences, without a GPU.

Launches compute in float64 what the problem asks of each sequence, or run a kernel's own text on an emulated
card.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flashgen.gen.arguments import describe_maps, make_arguments, struct_of
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module, emit_thin_module
from flashgen.gen.families.mma_backward.family import MmaBackward
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.handover.plan import Plan
from flashgen.gen.handover.statistics import statistics_launch, statistics_regions
from flashgen.gen.handover.workspace import Workspace
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import QUERIES_ROLE, TensorMap
from flashgen.gen.launch import Launch as GridOf
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.buffer_gradients import buffer_gradients
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.gradients import gradients as in_float64

from tests.support.host_tensors import Graphs, fresh_driver, real_torch, take_host_tensors
from tests.support.modules import import_path
from tests.support.stand_in_driver import PRIMARY, D, Driver, Wide, host
from tests.templates.gradient_kernels import Emulated
from tests.templates.scored_kernels import LAUNCHED, _read
from tests.templates.test_gradients_torch import close, grads_of
from tests.templates.test_packed import HEADS, K_LENGTHS, Q_LENGTHS, SAID, Card, arrays, kernel_of, lengths

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SINKS = Scoring(sinks=True, softcap=2.0)
MAIN, QUERIES = GridOf(64, 2048, 16, packed=True, of_keys=True), GridOf(96, 1024, 32, packed=True)
SMALL = SimtBackward(br=32, bc=16, threads_per_block=64, lanes=8, vec=2)


def backward_kernel(**problem: Any) -> Kernel:
    """A kernel of all the launches that families of gradients have."""
    made = kernel_of(MAIN, backward=True, **problem)
    queries = replace(QUERIES, role=QUERIES_ROLE)
    plan = Plan.of_launches((queries, MAIN))
    assert plan is not None
    of_buffers = (each.launch for each in buffer_gradients(made.problem.scores))
    launches = (plan.launch, statistics_launch(packed=True), queries, MAIN, *of_buffers)
    workspace = Workspace(statistics_regions(packed=True))
    return replace(made, source="// backward\n", launches=launches, workspace=workspace, variant=Wide())


class Gradients(Card):
    """What launches of the backward pass were told, and what they computed."""

    def launch(self, address: int, causal: int) -> None:
        struct = struct_of(self.problem)
        told = struct.unpack(ctypes.string_at(address, struct.num_bytes))
        self.told.append(told)
        problem = replace(self.problem, causal=bool(causal))
        heads, total = int(told["num_q_heads"]), int(told["total_q"])
        names = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
        q, k, v, o, dout, *grads = (self._array(told, name) for name in names)
        assert told["workspace"] % 16 == 0 < told["plan"]
        assert all(not grad.any() for grad in grads)
        dlse = _read(int(told["dlse"]), (heads, total), (total, 1), np.float32) if told["dlse"] else None
        for each in buffer_gradients(problem.scores):
            if told[each.name]:
                assert not _read(int(told[each.name]), (heads,), (1,), np.float32).any()
        for rows, keys in self.slots(told):
            views = [x[part].swapaxes(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
            if not views[0].shape[2]:
                continue
            assert not np.isnan(o[rows]).any()
            asks = {"scale": told["scale"], "scores": problem.scores, "values": self.values(told)}
            asks["dlse"] = None if dlse is None else dlse[None, :, rows]
            found = in_float64(*views, dout[rows].swapaxes(0, 1)[None], **asks)
            for name, grad, part in zip(("dq", "dk", "dv"), grads, (rows, keys, keys), strict=True):
                grad[part] = found[name].value[0].swapaxes(0, 1)
            for each in buffer_gradients(problem.scores):
                if told[each.name]:
                    _read(int(told[each.name]), (heads,), (1,), np.float32)[...] += found[each.name].value


def _card(kernel: Kernel, card: SimDevice | None) -> Any:
    if card is not None:
        return Emulated(kernel, card)
    return Gradients(kernel.problem) if kernel.problem.backward else Card(kernel.problem)


@contextmanager
def computing(driver: Driver, *kernels: Kernel, card: SimDevice | None = None) -> Iterator[list[Any]]:
    """The main launch of each kernel computes all that its launches do."""
    cards: list[Any] = [_card(kernel, card) for kernel in kernels]
    by_name = {kernel.symbol: each for kernel, each in zip(kernels, cards, strict=True)}

    def launched(address: int, causal: int) -> None:
        name = driver.library.fake_launched_name().decode()
        if name in by_name:
            by_name[name].launch(address, causal)

    callback = LAUNCHED(launched)
    driver.library.fake_on_launch(callback)
    try:
        yield cards
    finally:
        driver.library.fake_on_launch(None)


def load(path: Path, *kernels: Kernel, name: str = "best", for_good: bool = False) -> Any:
    made = [Made(kernel, "H200") for kernel in kernels]
    one = len(made) == 1
    text = emit_module(kernels[0], device="H200") if one else emit_many(made, name=name, command=())
    (path / f"{name}.py").write_text(text)
    return import_path(path / f"{name}.py", for_good=for_good)


class Case:
    """Packed sequences, and what their gradients are by themselves."""

    def __init__(self, scoring: Scoring = SINKS, causal: bool = True) -> None:
        self.told = {"sinks": host(HEADS, seed=7)} if scoring.sinks else {}
        problem = Problem(head_dim=D, scoring=scoring, causal=causal)
        values = {**self.told, **({"softcap": scoring.softcap} if scoring.softcap else {})}
        asks: dict[str, Any] = {"scale": D**-0.5, "scores": problem.scores, "values": values}
        q, k, v = arrays()
        o, dout = np.zeros_like(q), host(*q.shape, seed=8)
        lse, dlse = np.full((HEADS, len(q)), -np.inf, np.float32), host(HEADS, len(q), seed=9)
        self.exact = {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
        self.exact["dsinks"] = np.zeros(HEADS)
        for first, count, first_key, keys in zip(
            np.cumsum((0, *Q_LENGTHS)), Q_LENGTHS, np.cumsum((0, *K_LENGTHS)), K_LENGTHS, strict=False
        ):
            rows, of_keys = slice(first, first + count), slice(first_key, first_key + keys)
            if not count:
                continue
            views = [x[part].swapaxes(0, 1)[None] for x, part in ((q, rows), (k, of_keys), (v, of_keys))]
            made = reference.attention(*views, **asks)
            o[rows], lse[:, rows] = made.o[0].swapaxes(0, 1), made.lse[0]
            found = in_float64(*views, dout[rows].swapaxes(0, 1)[None], dlse=dlse[None, :, rows], **asks)
            for name, part in (("dq", rows), ("dk", of_keys), ("dv", of_keys)):
                self.exact[name][part] = found[name].value[0].swapaxes(0, 1)
            if scoring.sinks:
                self.exact["dsinks"] += found["dsinks"].value
        cu = lengths()
        self.given = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "dout": dout, "dlse": dlse}
        self.given |= {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}

    def check(self, found: Any, *more: str, bound: float = 1e-5) -> None:
        for name, grad in zip(("dq", "dk", "dv", *more), found, strict=True):
            np.testing.assert_allclose(grad, self.exact[name], rtol=bound, atol=4 * bound)


def test_of_numpy(driver: Driver, tmp_path: Path) -> None:
    kernel, case = backward_kernel(scoring=SINKS), Case()
    module = load(tmp_path, kernel)
    with computing(driver, kernel):
        told = {**case.given, **case.told, **SAID, "causal": True}
        case.check(module.gradients_varlen(**told, wanted=["sinks"]), "dsinks")
        assert len(driver.launches()) == 5
        case.check(module.gradients_varlen(**told))
        assert len(driver.launches()) == 5 + 4
        with pytest.raises(ValueError, match="max_seqlen_q is 20, but the longest sequence has 21"):
            module.gradients_varlen(**{**told, "max_seqlen_q": 20})
        with pytest.raises(ValueError, match=r"lse has the shape \(4, 28\), but must be \(heads, total_q\)"):
            module.gradients_varlen(**{**told, "lse": case.given["lse"][:, :28].copy()})
        with pytest.raises(TypeError, match=r"'bias' is wanted, of which .* it takes those of sinks"):
            module.gradients_varlen(**told, wanted=["bias"])
    assert driver.library.fake_num_allocated() == 0


def test_plans_are_kept(driver: Driver, tmp_path: Path, cupy: ModuleType) -> None:
    kernel, case = backward_kernel(), Case(Scoring())
    module = load(tmp_path, kernel)
    placed = {name: cupy.ndarray(driver.own(x), 1) for name, x in case.given.items()}
    plan = module.SequencePlan()
    with computing(driver, kernel):
        for _ in range(2):
            found = module.gradients_varlen(**placed, **SAID, causal=True, plan=plan)
            case.check([x.host for x in found])
    names = [each.threads for each in driver.launches()]
    assert len(names) == 4 + 3
    assert plan.memory.host.size == kernel.num_plan_ints(
        {"batch": 4, "num_q_heads": 4, "num_kv_heads": 2, "total_q": 29, "total_k": 54}
    )


def test_as_a_program(driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 9, "seqlen_k": 9, "scoring": SINKS}
    forward, backward = kernel_of(**small), backward_kernel(**small)
    driver.library.fake_push(PRIMARY)
    module = load(tmp_path, backward)
    module._CHECKED_ROWS, module._CHECKED_KEYS = (9, 0, 1, 4), (13, 7, 1, 0)
    with computing(driver, backward):
        assert module.run_packed_gradients_module(module._bound, module.__doc__) == 0
    assert "correct" in capsys.readouterr().out
    module = load(tmp_path, forward, backward)
    module._CHECKED_ROWS, module._CHECKED_KEYS = (9, 0, 1, 4), (13, 7, 1, 0)
    with computing(driver, forward, backward):
        assert module.run_differentiable_packed_module(module._bound, module.__doc__) == 0
    assert capsys.readouterr().out.count("correct") == 2


def test_modules_of_two_are_of_the_same_attention(tmp_path: Path) -> None:
    forward, backward = kernel_of(scoring=SINKS), backward_kernel(scoring=SINKS)
    with pytest.raises(ValueError, match="takes packed sequences, as calls of several kernels do not"):
        load(tmp_path, kernel_of(), backward)
    with pytest.raises(ValueError, match="takes packed sequences, as calls of several kernels do not"):
        load(tmp_path, forward, backward, backward_kernel())
    (tmp_path / "thin.py").write_text(emit_thin_module(backward, device="H200"))
    (tmp_path / "thin.cu").write_text(backward.source)
    thin, module = import_path(tmp_path / "thin.py"), load(tmp_path, forward, backward)
    sizes = (4, 4, 2, 21, 37, 29, 54)
    assert thin.GRADIENTS[0].plan_ints(*sizes) == module.GRADIENTS[0].plan_ints(*sizes)
    assert {"attention_varlen", "gradients_varlen", "SequencePlan", "GRADIENTS"} < set(module.__all__)


def test_maps_clip_where_sequences_end(driver: Driver, tmp_path: Path, cupy: ModuleType) -> None:
    """Those of a module are those that the launcher of the same kernel makes."""
    maps = tuple(TensorMap(name, 32, D, 128, 256) for name in ("q", "dout", "k", "v"))
    kernel = backward_kernel()
    planned, *others = kernel.launches
    kernel = replace(kernel, launches=(planned, *(replace(each, tensor_maps=maps) for each in others)))
    case, module = Case(Scoring()), load(tmp_path, kernel)
    given = {name: cupy.ndarray(driver.own(x)) for name, x in case.given.items()}
    plan = module.SequencePlan()
    with computing(driver, kernel) as (card,):
        module.gradients_varlen(**given, **SAID, causal=True, plan=plan)
        driver.library.fake_maps(len(maps))  # of all launches, as the plan stands
        module.gradients_varlen(**given, **SAID, causal=True, plan=plan)
    main = driver.launches()[-1]
    problem, told = kernel.problem, card.told[-1]
    arguments = make_arguments(
        problem,
        {each.name: int(told[each.name]) for each in problem.operation.arrays},
        {
            each.name: (0, int(told[f"{each.name}_stride_head"]), int(told[f"{each.name}_stride_row"]))
            for each in problem.operation.strided
        },
        scale=1.0,
        sizes={name: int(told[name]) for name in problem.layout.sizes},
    )
    described = describe_maps(kernel.launch, problem, arguments)
    assert len(main.maps) == len(described) == len(maps)
    for made, each in zip(main.maps, described, strict=True):
        sizes, strides = (*made.sizes, made.outer_size), (*made.stride_bytes, made.outer_stride_bytes)
        assert (made.address, sizes, strides) == (each.address, each.sizes, each.strides)


@pytest.fixture
def torch(library: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    torch = real_torch()
    fresh_driver(torch, library, monkeypatch)
    return torch


def for_tensors(path: Path, library: Any, *kernels: Kernel) -> Any:
    """The module of kernels for tensors in the host's memory."""
    module = load(path, *kernels, name=f"packed_{kernels[0].problem.stem}", for_good=True)
    return take_host_tensors(module, library)


@pytest.mark.parametrize("scoring", [Scoring(), SINKS])
def test_tensors_differentiate(scoring: Scoring, torch: Any, library: Any, tmp_path: Path) -> None:
    """At once, in a compiled step, and by the operators' own checks."""
    plain = kernel_of(scoring=scoring), backward_kernel(scoring=scoring)
    kernels = [replace(each, source=f"// {each.entry}\n") for each in plain]
    module, driver = for_tensors(tmp_path, library, *kernels), Driver(library)
    told = [torch.from_numpy(x).requires_grad_() for x in arrays()]
    sinks = [torch.from_numpy(host(HEADS, seed=7)).requires_grad_()] if scoring.sinks else []
    cu = [torch.from_numpy(x) for x in lengths()]
    inputs = [*told, *sinks]

    def by_torch() -> Any:
        made, q_at, k_at = [], 0, 0
        for rows, keys in zip(Q_LENGTHS, K_LENGTHS, strict=True):
            q, k, v = (x.transpose(0, 1) for x in (told[0][q_at : q_at + rows], *(
                x[k_at : k_at + keys] for x in told[1:]
            )))  # fmt: skip
            q_at, k_at = q_at + rows, k_at + keys
            k, v = (x.repeat_interleave(2, 0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * D**-0.5
            if scoring.softcap:
                scores = 2 * (scores / 2).tanh()
            scores = scores.masked_fill(~torch.ones(rows, keys).tril(keys - rows).bool(), -torch.inf)
            if sinks:
                scores = torch.cat([scores, sinks[0][:, None, None].expand(HEADS, rows, 1)], 2)
            weights = torch.nan_to_num(scores.softmax(2)) if keys else torch.zeros(HEADS, rows, 0)
            made.append((weights[..., :keys] @ v).transpose(0, 1))
        return torch.cat(made)

    def attend(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        more = {"sinks": sinks[0]} if sinks else {}
        return module.attention_varlen(q, k, v, *cu, **SAID, causal=True, **more)

    with computing(driver, *kernels):
        exact = grads_of(torch, by_torch(), inputs)
        close(torch, grads_of(torch, attend(*inputs), inputs), exact)
        assert len(driver.launches()) == 2 + 4 + len(sinks)
        compiled = torch.compile(attend, backend=Graphs(), fullgraph=True)
        close(torch, grads_of(torch, compiled(*inputs), inputs), exact)
        name, operators = module.register_torch(), torch.ops.flashgen
        settings = (True, None, [21, 37], *cu, None, None, sinks, [2.0] if sinks else [])
        torch.library.opcheck(getattr(operators, f"{name}_lse").default, (*told, *settings))
        q, k, v, *sinks = (x.detach() for x in inputs)
        settings = (*settings[:-2], sinks, settings[-1])
        o, lse = (x.detach() for x in getattr(operators, f"{name}_lse")(q, k, v, *settings))
        given = (q, k, v, o, lse, torch.ones_like(o), None, *settings[:3], True, *settings[3:])
        torch.library.opcheck(getattr(operators, f"{name}_gradients").default, (*given, [True] * len(sinks)))
        q.requires_grad_()
        if sinks:
            made = attend(q, k, v, *sinks)
        else:
            made = module.flash_attn_varlen_func(q, k, v, *cu, 21, 37, causal=True)
        close(torch, grads_of(torch, made, [q]), exact[:1])


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["simt", "mma", "wgmma"])
def test_kernels_compute_what_modules_tell_them(way: str, driver: Driver, tmp_path: Path) -> None:
    """On emulated cards: where sequences are, what is read, and what is made of it, is where kernels look."""
    slug = {"simt": "gtx-1080", "mma": "a100", "wgmma": "h200"}[way]
    card = SimDevice(slug, PRESETS[slug])
    variants = {"simt": SMALL, "mma": MmaBackward(), "wgmma": WgmmaBackward(bc=64, dq_path="bulk")}
    variant: Any = variants[way]
    dtype = "f32" if way == "simt" else "f16"
    problem = Problem(dtype=dtype, head_dim=D, varlen="same", scoring=SINKS, backward=True)
    kernel = render(variant, problem, card.limits)
    driver.library.fake_reset(D, card.limits.arch // 10, card.limits.arch % 10, 98304 + 65536)
    module, case = load(tmp_path, kernel), Case()
    given = {
        name: x.astype(np.float16) if dtype == "f16" and name in ("q", "k", "v", "o", "dout") else x
        for name, x in case.given.items()
    }
    with computing(driver, kernel, card=card):
        found = module.gradients_varlen(**given, **case.told, **SAID, causal=True, wanted=["sinks"])
    case.check(found, "dsinks", bound=1e-5 if way == "simt" else 2e-2)
