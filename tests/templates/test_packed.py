"""Emitted modules of kernels of packed sequences, without a GPU.

The driver is the stand-in of `test_module`; a launch computes in float64 what the problem asks of each
sequence, of the arrays and lengths that its arguments lead to.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.arguments import describe_maps, make_arguments, struct_of
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module
from flashgen.gen.handover.plan import Plan
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch as GridOf
from flashgen.gen.launch import TensorMap
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.evaluate import reference
from flashgen.tuner.shelf.module_text import read_module

from tests.support.modules import import_path
from tests.support.stand_in_driver import D, Driver, Jax, Tensor, Wide, host
from tests.templates.scored_kernels import LAUNCHED, _read

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

#: Lengths of sequences: of Nq unlike Nk, of one row, of none, without keys.
Q_LENGTHS, K_LENGTHS = (21, 1, 0, 7), (37, 12, 5, 0)
HEADS, KV_HEADS = 4, 2
MAIN = GridOf(64, 4096, 32, packed=True)


def kernel_of(main: GridOf = MAIN, **problem: Any) -> Kernel:
    usual = {"head_dim": D, "varlen": "same", "batch": 4, "seqlen_q": 21, "seqlen_k": 37}
    wanted = Problem(**{**usual, **problem})
    launches = (Plan(main).launch, main)
    return Kernel(wanted, Wide(), 90, "// by hand\n", f"attention_{wanted.stem}", launches)


def load(path: Path, main: GridOf = MAIN, **problem: Any) -> Any:
    (path / "best.py").write_text(emit_module(kernel_of(main, **problem), device="H200", name="best"))
    return import_path(path / "best.py")


class Card:
    """What launches were told, and what they computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.told: list[dict[str, float]] = []

    def launch(self, address: int, causal: int) -> None:
        struct = struct_of(self.problem)
        told = struct.unpack(ctypes.string_at(address, struct.num_bytes))
        self.told.append(told)
        problem = replace(self.problem, causal=bool(causal))
        q, k, v, o = (self._array(told, name) for name in "qkvo")
        lse = None
        if told["lse"]:
            shape = (int(told["num_q_heads"]), int(told["total_q"]))
            lse = _read(int(told["lse"]), shape, (shape[1], 1), np.float32)
        values = self.values(told)
        for rows, keys in self.slots(told):
            views = [x[part].swapaxes(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
            if not views[0].shape[2]:
                continue
            found = reference.attention(*views, scale=told["scale"], scores=problem.scores, values=values)
            o[rows] = found.o[0].swapaxes(0, 1)
            if lse is not None:
                lse[:, rows] = found.lse[0]

    def values(self, told: dict[str, float]) -> dict[str, Any]:
        """What is read for masks and changes of scores: numbers, and arrays of heads."""
        scores, heads = self.problem.scores, int(told["num_q_heads"])
        arrays = {
            each.name: _read(int(told[each.name]), (heads,), (1,), np.float32) for each in scores.buffers
        }
        return {each.name: told[each.name] for each in scores.scalars} | arrays

    def slots(self, told: dict[str, float]) -> Iterator[tuple[slice, slice]]:
        """The rows and keys of each sequence."""
        batch = int(told["batch"])
        starts = {x: self._ints(told[f"cu_seqlens_{x}"], batch + 1) for x in "qk"}
        used = {x: self._ints(told[f"seqused_{x}"], batch) for x in "qk"}
        for i in range(batch):
            yield tuple(
                slice(starts[x][i], starts[x][i] + used[x][i] if told[f"seqused_{x}"] else starts[x][i + 1])
                for x in "qk"
            )

    def _ints(self, address: float, count: int) -> np.ndarray:
        return _read(int(address), (count,), (1,), np.int32) if address else np.zeros(count, np.int32)

    def _array(self, told: dict[str, float], name: str) -> np.ndarray:
        total, heads = (
            ("total_k", "num_kv_heads") if name in ("k", "v", "dk", "dv") else ("total_q", "num_q_heads")
        )
        strides = (int(told[f"{name}_stride_row"]), int(told[f"{name}_stride_head"]), 1)
        return _read(int(told[name]), (int(told[total]), int(told[heads]), D), strides, np.float32)


@contextmanager
def computing(driver: Driver, problem: Problem) -> Iterator[Card]:
    card = Card(problem)
    callback = LAUNCHED(card.launch)
    driver.library.fake_on_launch(callback)
    try:
        yield card
    finally:
        driver.library.fake_on_launch(None)


def offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def arrays() -> list[np.ndarray]:
    totals = (sum(Q_LENGTHS), sum(K_LENGTHS))
    return [
        host(total, heads, D, seed=i)
        for i, (total, heads) in enumerate(((totals[0], HEADS), (totals[1], KV_HEADS), (totals[1], KV_HEADS)))
    ]


SAID: dict[str, Any] = {"max_seqlen_q": 21, "max_seqlen_k": 37}


def lengths() -> list[np.ndarray]:
    return [offsets(Q_LENGTHS), offsets(K_LENGTHS)]


def wanted(
    problem: Problem, given: list[np.ndarray], causal: bool = False, scale: float = D**-0.5, used: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """What each sequence comes to by itself, and its log-sum-exp (heads, total)."""
    q, k, v = given
    o, lse = np.zeros_like(q), np.zeros((HEADS, len(q)), np.float32)
    values = {each.name: problem.scoring.softcap for each in problem.scores.scalars}
    for i, (first, first_key) in enumerate(zip(offsets(Q_LENGTHS), offsets(K_LENGTHS), strict=True)):
        if i == len(Q_LENGTHS) or not Q_LENGTHS[i]:
            continue
        count = K_LENGTHS[i] if used is None else used[i]
        views = [q[first : first + Q_LENGTHS[i]], *(x[first_key : first_key + count] for x in (k, v))]
        found = reference.attention(
            *(x.swapaxes(0, 1)[None] for x in views),
            scale=scale,
            scores=replace(problem, causal=causal).scores,
            values=values,
        )
        o[first : first + Q_LENGTHS[i]] = found.o[0].swapaxes(0, 1)
        lse[:, first : first + Q_LENGTHS[i]] = found.lse[0]
    return o, lse


def close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(softcap=2.0)])
def test_numpy_arrays(driver: Driver, tmp_path: Path, scoring: Scoring, causal: bool) -> None:
    module, given = load(tmp_path, scoring=scoring), arrays()
    problem = kernel_of(scoring=scoring).problem
    said = {} if scoring.is_plain else {"softcap": 2.0}
    with computing(driver, problem):
        o, lse = module.attention_varlen(*given, *lengths(), **SAID, causal=causal, return_lse=True, **said)
    expected = wanted(problem, given, causal)
    close(o, expected[0])
    close(lse, expected[1])
    assert driver.library.fake_num_allocated() == 0


def test_what_kernels_are_told(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module, given = load(tmp_path), arrays()
    tensors = [Tensor(driver.own(x)) for x in (*given, *lengths())]
    used = Tensor(driver.own(np.array([30, 12, 5, 0], np.int32)))
    with computing(driver, kernel_of().problem) as card:
        o, lse = module.attention_varlen(*tensors, **SAID, seqused_k=used, scale=0.3, return_lse=True)
    expected = wanted(kernel_of().problem, given, scale=0.3, used=(30, 12, 5, 0))
    close(o.host, expected[0])
    close(lse.host, expected[1])
    plan, main = driver.launches()
    total, batch = sum(Q_LENGTHS), len(Q_LENGTHS)
    assert (plan.blocks, plan.threads) == (1, 128)
    assert (main.blocks, main.threads) == ((total // 32 + batch) * HEADS, 64)
    told = card.told[-1]
    assert (told["batch"], told["seqlen_q"], told["seqlen_k"]) == (4, 21, 37)
    assert (told["total_q"], told["total_k"]) == (total, sum(K_LENGTHS))
    assert told["seqused_q"] == 0 and told["plan"] % 16 == 0 and told["plan_made"] == 0


def test_a_plan_is_made_once_for_all_layers(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path)
    given = [Tensor(driver.own(x)) for x in (*arrays(), *lengths())]
    out, plan = Tensor(driver.own(np.zeros_like(given[0].host))), module.SequencePlan()
    with computing(driver, kernel_of().problem) as card:
        module.attention_varlen(*given, **SAID, plan=plan, out=out)
        ints = kernel_of().num_plan_ints(
            {"batch": 4, "total_q": sum(Q_LENGTHS), "num_q_heads": HEADS, "num_kv_heads": KV_HEADS}
        )
        assert plan.memory.host.shape == (ints,) and plan.memory.host.dtype == np.int32
        memory = plan.memory
        for causal in (False, True):
            module.attention_varlen(*given, **SAID, causal=causal, plan=plan, out=out, stream=7)
        plan.forget()
        module.attention_varlen(*given, **SAID, plan=plan, out=out, stream=7)
        assert plan.memory is memory
    assert [launch.threads for launch in driver.launches()] == [128, 64, 64, 64, 128, 64]
    assert [told["plan_made"] for told in card.told] == [0, 0, 1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"no memory is made for the plan of 4 sequences, 40 int"):
        module.attention_varlen(*given, **SAID, out=out, stream=7)


def test_only_what_follows_a_launch_of_its_call_may_begin_before_that_ends(
    driver: Driver, tmp_path: Path, torch: Any
) -> None:
    module = load(tmp_path, replace(MAIN, dependent=True))
    assert [launch.dependent for launch in module.KERNELS[0].launches] == [False, True]
    given = [Tensor(driver.own(x)) for x in (*arrays(), *lengths())]
    plan = module.SequencePlan()
    with computing(driver, kernel_of().problem):
        for _ in range(2):  # the second time without the plan's launch: others' kernels stand in front
            module.attention_varlen(*given, **SAID, plan=plan)
    assert [(each.threads, each.dependent) for each in driver.launches()] == [(128, 0), (64, 1), (64, 0)]


def test_arrays_of_other_libraries(driver: Driver, tmp_path: Path, cupy: Any) -> None:
    module, given = load(tmp_path), arrays()
    placed = [cupy.ndarray(driver.own(x)) for x in (*given, *lengths())]
    with computing(driver, kernel_of().problem):
        o, lse = module.attention_varlen(*placed, **SAID, return_lse=True)
    close(o.host, wanted(kernel_of().problem, given)[0])
    assert lse.host.shape == (HEADS, sum(Q_LENGTHS))

    class Shaped(Jax):
        shape = property(lambda self: self.host.shape)

    cupy.from_dlpack = lambda array: cupy.ndarray(driver.own(array.host)) if isinstance(array, Jax) else array
    with computing(driver, kernel_of().problem):
        o = module.attention_varlen(*(Shaped(x) for x in (*given, *lengths())), **SAID)
    close(o.host, wanted(kernel_of().problem, given)[0])


def test_maps_clip_where_sequences_end(driver: Driver, tmp_path: Path, torch: Any) -> None:
    maps = tuple(TensorMap(name, 32, D, 128, 256) for name in "qkvo")
    module = load(tmp_path, replace(MAIN, tensor_maps=maps))
    given = [Tensor(driver.own(x)) for x in (*arrays(), *lengths())]
    plan = module.SequencePlan()
    with computing(driver, kernel_of().problem) as card:
        module.attention_varlen(*given, **SAID, plan=plan)
        driver.library.fake_maps(4)  # of the main launch alone, as the plan stands
        module.attention_varlen(*given, **SAID, plan=plan)
    main, told = driver.launches()[-1], card.told[-1]
    problem = kernel_of().problem
    names = [each.name for each in problem.operation.strided]
    described = describe_maps(
        replace(MAIN, tensor_maps=maps),
        problem,
        make_arguments(
            problem,
            {name: int(told[name]) for name in names},
            {name: (0, int(told[f"{name}_stride_head"]), int(told[f"{name}_stride_row"])) for name in names},
            scale=1.0,
            sizes={name: int(told[name]) for name in problem.layout.sizes},
        ),
    )
    for made, each in zip(main.maps, described, strict=True):
        sizes, strides = (*made.sizes, made.outer_size), (*made.stride_bytes, made.outer_stride_bytes)
        assert (made.address, sizes, strides) == (each.address, each.sizes, each.strides)


def test_sequences_without_rows_or_keys(driver: Driver, tmp_path: Path) -> None:
    module, (q, k, v) = load(tmp_path), arrays()
    none = np.zeros(2, np.int32)
    with computing(driver, kernel_of().problem):
        o = module.attention_varlen(q[:0], k, v, none, none, max_seqlen_q=0, max_seqlen_k=0)
        assert o.shape == (0, HEADS, D) and not driver.launches()
        told = offsets((28, 1))
        o, lse = module.attention_varlen(
            q, k[:0], v[:0], told, np.zeros(3, np.int32), max_seqlen_q=28, max_seqlen_k=0, return_lse=True
        )
    assert not o.any() and np.isneginf(lse).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_q": [0, 21, 20, 28, 29]}, ValueError, "cu_seqlens_q falls from 21 to 20 at sequence 1"),
        (
            {"cu_seqlens_k": [0, 37, 49, 54, 55]},
            ValueError,
            "reaches from 0 to 55, and there are 54",
        ),
        (
            {"cu_seqlens_k": [0, 54]},
            ValueError,
            "cu_seqlens_q of 4, cu_seqlens_k of 1",
        ),
        ({"seqused_k": [38, 12, 5, 0]}, ValueError, r"seqused_k is 38 at sequence 0, which has 37 rows"),
        ({"seqused_q": [[1]]}, ValueError, r"seqused_q has the shape \(1, 1\), but must be \(batch\)"),
        ({"max_seqlen_k": 36}, ValueError, r"max_seqlen_k is 36, but the longest sequence has 37 rows"),
        ({"max_seqlen_q": 21.0}, TypeError, r"max_seqlen_q is a builtins.float; pass an int"),
        ({"max_seqlen_q": -1}, ValueError, r"max_seqlen_q is -1; it must lie in 0\.\."),
        ({"window": (3, 0)}, TypeError, r"window= is nothing that this kernel reads"),
        (
            {"q": np.zeros((1, 29, 4, D), np.float32)},
            ValueError,
            r"q has 4 .*; 3 are needed, \(total",
        ),
    ],
)
def test_what_a_call_may_not_say(
    driver: Driver, tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    module, (q, k, v) = load(tmp_path), arrays()
    said = {"q": q, "k": k, "v": v, "cu_seqlens_q": lengths()[0], "cu_seqlens_k": lengths()[1], **SAID}
    said |= {
        name: np.asarray(value, np.int32) if isinstance(value, list) else value
        for name, value in change.items()
    }
    with pytest.raises(error, match=message):
        module.attention_varlen(**said)
    assert not driver.launches() and driver.library.fake_num_allocated() == 0


def test_lengths_of_another_type(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path)
    wide = [x.astype(np.int64) for x in lengths()]
    with pytest.raises(TypeError, match=r"cu_seqlens_q is int64, and kernels read int32: pass"):
        module.attention_varlen(*arrays(), *wide, **SAID)
    tensors = [Tensor(driver.own(x)) for x in (*arrays(), *wide)]
    with pytest.raises(TypeError, match=r"is int64, and .* reads int32: pass cu_seqlens_q\.to\("):
        module.attention_varlen(*tensors, **SAID)
    assert not driver.launches()


def test_as_flash_attn_has_it(driver: Driver, tmp_path: Path, torch: Any) -> None:
    given = arrays()
    tensors = [Tensor(driver.own(x)) for x in (*given, *lengths())]
    problem = kernel_of(scoring=Scoring(softcap=2.0)).problem
    module = load(tmp_path, scoring=Scoring(softcap=2.0))
    with computing(driver, problem):
        out, lse, _ = module.flash_attn_varlen_func(
            *tensors, 21, 37, 0.0, 0.2, True, softcap=2.0, return_attn_probs=True
        )
    expected = wanted(problem, given, True, 0.2)
    close(out.host, expected[0])
    close(lse.host, expected[1])
    with pytest.raises(ValueError, match=r"dropout_p is 0\.1, and kernels here drop nothing: pass 0"):
        module.flash_attn_varlen_func(*tensors, 21, 37, 0.1, softcap=2.0)
    with pytest.raises(TypeError, match="window= is nothing that the kernels here read"):
        module.flash_attn_varlen_func(*tensors, 21, 37, window_size=(4, 0), softcap=2.0)


def test_it_checks_itself_when_it_is_run(driver: Driver, tmp_path: Path, capsys: Any) -> None:
    few: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "batch": 2, "seqlen_q": 3}
    for scoring in (Scoring(), Scoring(softcap=2.0)):
        module = load(tmp_path, scoring=scoring, **few)
        with computing(driver, kernel_of(scoring=scoring).problem):
            assert module.run_packed_module(module._bound, module.__doc__) == 0
        assert ": correct" in capsys.readouterr().out


def test_a_module_is_read_back(tmp_path: Path) -> None:
    kernel = kernel_of()
    text = emit_module(kernel, device="H200", name="best")
    ((read, device, _),) = read_module(tmp_path / "best.py", text)
    assert (read.problem, read.launches, device) == (kernel.problem, kernel.launches, "H200")
    made = [Made(kernel, "H200", None), Made(kernel_of(causal=True), "H200", None)]
    with pytest.raises(ValueError, match="takes packed sequences, as calls of several kernels do not"):
        emit_many(made, name="both", command=())
