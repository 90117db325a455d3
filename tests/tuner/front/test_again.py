"""Calls like one before, with the real PyTorch, where it is installed: what is kept of the first serves those
alone that it is true of, and the work in Python that is left does not grow.

Tensors lie in host memory, on which the stand-in driver computes what launches are told.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import flashgen
import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import PLAIN, Scoring
from flashgen.templates.runtime import scored_values
from flashgen.tuner.front import again, bound, call, candidates

from tests.support.entered import functions_entered
from tests.support.host_tensors import Graphs
from tests.support.stand_in_driver import OTHER_DEVICE, PRIMARY, Driver
from tests.templates import gradient_kernels, scored_kernels
from tests.templates.scored_kernels import Card, computing
from tests.templates.test_met_arrays import STAGED
from tests.tuner.front.test_gradients_torch import kernels_of, real, torch

__all__ = ["real", "torch"]

D, ROWS, KEYS = 32, 9, 12
SHAPE, OF_KEYS = (2, 4, ROWS, D), (2, 2, KEYS, D)


def drawn(torch: Any, *shape: int, seed: int = 0, dtype: Any = None) -> Any:
    return torch.randn(*shape, generator=torch.manual_seed(seed + sum(shape))).to(dtype or torch.float32)


def qkv(torch: Any, seed: int = 0, dtype: Any = None) -> list[Any]:
    return [
        drawn(torch, *shape, seed=seed + i, dtype=dtype) for i, shape in enumerate((SHAPE, OF_KEYS, OF_KEYS))
    ]


def wanted(torch: Any, q: Any, k: Any, v: Any, **told: Any) -> tuple[Any, Any]:
    """o and the log-sum-exp, in float32."""
    if told.get("layout") == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale, softcap = told.get("scale") or D**-0.5, told.get("softcap")
    scores = scale * (q @ k.transpose(2, 3))
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    far = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    slopes = told.get("alibi_slopes")
    scores = scores if slopes is None else scores - slopes[:, None, None] * far.abs()
    scores = scores + told.get("bias", told.get("attn_mask", torch.zeros(1)))
    hidden = (far > 0) if told.get("causal") else torch.zeros_like(far, dtype=torch.bool)
    left, right = (-1 if side is None else side for side in told.get("window", (-1, -1)))
    hidden = hidden | ((far < -left) if left >= 0 else hidden) | ((far > right) if right >= 0 else hidden)
    hidden = hidden | (far % told.get("dilation", 1) != 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if "sinks" in told:
        scores = torch.cat([scores, told["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    lse = scores.logsumexp(3)
    o = torch.exp(scores - lse[..., None])[..., : k.shape[2]] @ v
    return (o.transpose(1, 2) if told.get("layout") == "bshd" else o), lse


def assert_right(torch: Any, made: Any, arrays: list[Any], **told: Any) -> None:
    o, lse = wanted(torch, *arrays, **told)
    made_o, made_lse = made if told.get("return_lse") else (made, lse)
    atol = 1e-4 if made_o.dtype is torch.float32 else 2e-2
    assert torch.allclose(made_o.float(), o, atol=atol, rtol=1e-3)
    assert torch.allclose(made_lse, lse, atol=1e-4, rtol=1e-4)


def kept() -> int:
    return len(bound.bound_of(None).again)


def by_the_usual_way(*arrays: Any, **told: Any) -> bool:
    """Tells whether a call is found out about anew."""
    return attended(*arrays, **told)[1]


def attended(*arrays: Any, **told: Any) -> tuple[Any, bool]:
    """What a call makes, and whether it is found out about anew."""
    made: list[Any] = []
    entered = functions_entered(lambda: made.append(flashgen.attention(*arrays, **told)), [call.__file__])
    return made[0], "_found_out" in entered


#: Calls of all kinds, what each is told and its kernel's masks and changes of scores.
KINDS: dict[str, tuple[Callable[[Any], dict[str, Any]], Scoring]] = {
    "plain": (lambda torch: {}, Scoring()),
    "causal": (lambda torch: {"causal": True}, Scoring()),
    "scale": (lambda torch: {"scale": 0.3, "causal": True}, Scoring()),
    "return_lse": (lambda torch: {"return_lse": True}, Scoring()),
    "bshd": (lambda torch: {"layout": "bshd", "causal": True, "return_lse": True}, Scoring()),
    "window": (lambda torch: {"window": (3, 2)}, Scoring(window=(3, 2))),
    "a side of a window": (lambda torch: {"window": (3, None), "causal": True}, Scoring(window=(3, -1))),
    "dilation": (lambda torch: {"dilation": 3, "causal": True}, Scoring(dilation=2)),
    "softcap": (lambda torch: {"softcap": 2.0, "causal": True}, Scoring(softcap=30.0)),
    "sinks": (lambda torch: {"sinks": drawn(torch, 4)}, Scoring(sinks=True)),
    "slopes": (lambda torch: {"alibi_slopes": drawn(torch, 4)}, Scoring(alibi=True)),
    "bias": (lambda torch: {"bias": drawn(torch, 2, 1, ROWS, KEYS)}, Scoring(bias="f32")),
    "attn_mask": (lambda torch: {"attn_mask": drawn(torch, KEYS)}, Scoring(bias="f32")),
    "all of them": (
        lambda torch: {
            "alibi_slopes": drawn(torch, 4, seed=3),
            "sinks": drawn(torch, 4),
            "bias": drawn(torch, ROWS, KEYS),
            "window": (5, 0),
            "softcap": 3.0,
            "causal": True,
            "return_lse": True,
        },
        Scoring(window=(5, 0), softcap=30.0, alibi=True, bias="f32", sinks=True),
    ),
}


@contextlib.contextmanager
def launching(driver: Driver, scoring: Scoring = PLAIN, dtype: str = "f32") -> Iterator[None]:
    with computing(driver, Problem(dtype=dtype, head_dim=D, scoring=scoring)):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_serves_other_tensors_and_arrays(
    torch: Any, driver: Driver, card: Any, kind: str
) -> None:
    make, scoring = KINDS[kind]
    first, second = make(torch), make(torch)
    arrays_of = {name: x for name, x in second.items() if isinstance(x, torch.Tensor)}
    second |= {name: x.flip(0) * 0.5 for name, x in arrays_of.items()}
    of_first, of_second = qkv(torch), qkv(torch, seed=9)
    if first.get("layout") == "bshd":
        of_first, of_second = ([x.transpose(1, 2).contiguous() for x in of] for of in (of_first, of_second))
    with launching(driver, scoring):
        assert_right(torch, flashgen.attention(*of_first, **first), of_first, **first)
        assert kept() == 1
        for arrays, told in ((of_second, second), (of_first, first), (of_second, second)):
            made, usual = attended(*arrays, **told)
            assert_right(torch, made, arrays, **told)
            assert not usual and kept() == 1


def test_where_it_goes_may_be_passed(torch: Any, driver: Driver, card: Any) -> None:
    arrays, out = qkv(torch), [torch.empty(SHAPE) for _ in range(3)]
    with launching(driver):
        for each in out:
            assert flashgen.attention(*arrays, out=each) is each
            assert_right(torch, each, arrays)
        assert kept() == 1
        assert not by_the_usual_way(*arrays, out=out[0])
        flashgen.attention(arrays[0], *arrays[1:])
        assert kept() == 2, "a call that makes its output is another"
        with pytest.raises(ValueError, match="out is the memory of q, k or v"):
            flashgen.attention(*arrays, out=arrays[0])
        with pytest.raises(RuntimeError, match="no gradient is taken through out"):
            flashgen.attention(*arrays, out=out[0].requires_grad_())


# ---- kernels of several launches, and of maps


def choosing(monkeypatch: Any, variant: Any) -> None:
    """Has calls take that variant."""
    chosen = candidates.Candidate(variant, 1e-6, 1e-6, "issue")
    monkeypatch.setattr(candidates, "_untuned", lambda *of: [chosen])


class Noting(Card):
    """What launches are told, by a struct of their own."""

    def __init__(self, problem: Problem, struct: Any, monkeypatch: Any) -> None:
        super().__init__(problem)
        self.struct, self.told = struct, list[dict[str, Any]]()
        monkeypatch.setattr(scored_kernels, "struct_of", lambda problem: struct)

    def launch(self, address: int, causal: int) -> None:
        self.told.append(self.struct.unpack(ctypes.string_at(address, self.struct.num_bytes)))
        super().launch(address, causal)


@pytest.mark.parametrize("return_lse", [False, True])
def test_launches_that_meet_in_a_workspace_are_told_as_at_first(
    torch: Any, driver: Driver, card: Any, monkeypatch: Any, return_lse: bool
) -> None:
    variant = Simt(br=16, bc=16, threads_per_block=32, workspace_splits=8)
    problem = Problem(head_dim=D)
    choosing(monkeypatch, variant)
    arrays = qkv(torch)
    noting = Noting(problem, render(variant, problem, preset("gtx-1080")).arguments, monkeypatch)
    monkeypatch.setattr(scored_kernels, "Card", lambda problem: noting)
    with launching(driver):
        made = flashgen.attention(*arrays, return_lse=return_lse)
        blocks = [each.blocks for each in driver.launches()[-2:]]
        for _ in range(2):
            again, usual = attended(*arrays, return_lse=return_lse)
            assert not usual
            assert_right(torch, again, arrays, return_lse=return_lse)
            assert [each.blocks for each in driver.launches()[-2:]] == blocks
    apart = {"o": 0, "lse": 0, "workspace": 0}
    of_first, of_again = noting.told[-6:-4], noting.told[-2:]
    assert [each | apart for each in of_again] == [each | apart for each in of_first]
    assert of_again[0]["workspace"] == of_again[1]["workspace"] != 0
    assert of_again[0]["workspace"] not in (of_again[0][name] for name in ("q", "k", "v", "o", "lse"))
    assert_right(torch, made, arrays, return_lse=return_lse)


def test_maps_are_of_each_calls_own_bias(torch: Any, driver: Driver, card: Any, monkeypatch: Any) -> None:
    scoring = Scoring(bias="f16")
    problem = Problem(dtype="f16", head_dim=D, num_q_heads=4, num_kv_heads=2, scoring=scoring)
    choosing(monkeypatch, STAGED)
    driver.library.fake_maps(len(render(STAGED, problem, preset("h200")).launch.tensor_maps))
    arrays = qkv(torch, dtype=torch.float16)
    biases = [drawn(torch, 2, 4, ROWS, 16, seed=seed, dtype=torch.float16) for seed in range(3)]
    keys = [drawn(torch, 2, 2, 16, D, seed=seed, dtype=torch.float16) for seed in (5, 6)]
    with launching(driver, scoring, "f16"):
        for turn, bias in enumerate((*biases, *biases)):
            made, usual = attended(arrays[0], *keys, bias=bias)
            assert_right(torch, made, [arrays[0], *keys], bias=bias.float())
            assert driver.launches()[-1].met.address == bias.data_ptr() and usual == (turn == 0)


def test_memory_is_made_on_the_device_of_the_tensors(
    torch: Any, driver: Driver, card: Any, monkeypatch: Any
) -> None:
    """What makes it fastest does so on the device in use, of which there may be several."""
    in_use, arrays = [0], qkv(torch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: in_use[-1], raising=False)
    values = drawn(torch, 2, 2, KEYS, 64)
    with launching(driver):
        flashgen.attention(*arrays, return_lse=True)
    with computing(driver, Problem(head_dim=D, head_dim_v=64)):
        flashgen.attention(*arrays[:2], values, return_lse=True)
    for device, makes in ((0, {"_empty_strided_cpu": 2}), (1, {"empty_like": 1, "new_empty_strided": 1})):
        in_use.append(device)
        with launching(driver):
            assert_right(torch, flashgen.attention(*arrays, return_lse=True), arrays, return_lse=True)
        work = Work(lambda: flashgen.attention(*arrays, return_lse=True))
        assert {name: n for name, n in work.items() if "empty" in name} == makes
        with computing(driver, Problem(head_dim=D, head_dim_v=64)):
            made = flashgen.attention(*arrays[:2], values, return_lse=True)
        assert_right(torch, made, [*arrays[:2], values], return_lse=True)
    assert kept() == 2


def test_memory_is_made_by_any_pytorch(torch: Any, driver: Driver, card: Any, monkeypatch: Any) -> None:
    arrays = qkv(torch)
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    with launching(driver):
        for _ in range(3):
            assert_right(torch, flashgen.attention(*arrays, return_lse=True), arrays, return_lse=True)
    work = Work(lambda: flashgen.attention(*arrays, return_lse=True))
    assert work["again"] == work["empty_like"] == work["new_empty_strided"] == 1


# ---- what a call is known by


def as_they_are(torch: Any, arrays: list[Any]) -> list[Any]:
    return arrays


def rows_apart(torch: Any, arrays: list[Any]) -> list[Any]:
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays]


def keys_apart(torch: Any, arrays: list[Any]) -> list[Any]:
    return [arrays[0], *rows_apart(torch, arrays[1:])]


def values_apart(torch: Any, arrays: list[Any]) -> list[Any]:
    return [*arrays[:2], *rows_apart(torch, arrays[2:])]


def fewer_rows(torch: Any, arrays: list[Any]) -> list[Any]:
    return [arrays[0][:, :, :5], *arrays[1:]]


def fewer_keys(torch: Any, arrays: list[Any]) -> list[Any]:
    return [arrays[0], *(x[:, :, :10] for x in arrays[1:])]


def one_head_of_keys(torch: Any, arrays: list[Any]) -> list[Any]:
    return [arrays[0], *(x[:, :1] for x in arrays[1:])]


def anywhere(torch: Any, arrays: list[Any]) -> list[Any]:
    """At addresses that suit no access but of single elements."""
    moved = [torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in arrays]
    assert all(x.data_ptr() % 16 for x in moved)
    return moved


@pytest.mark.parametrize(
    "change",
    [rows_apart, keys_apart, values_apart, fewer_rows, fewer_keys, one_head_of_keys, anywhere],
    ids=lambda each: each.__name__,
)
def test_tensors_that_lie_otherwise_are_served_as_they_lie(
    torch: Any, driver: Driver, card: Any, change: Callable[..., Any]
) -> None:
    arrays = qkv(torch)
    with launching(driver):
        for each in (as_they_are, change, as_they_are, change):
            given = each(torch, arrays)
            assert_right(torch, flashgen.attention(*given, causal=True), given, causal=True)


@pytest.mark.parametrize(
    "others", [{"causal": True}, {"scale": 0.7}, {"return_lse": True}, {"window": (2, 0)}, {"window": (4, 1)}]
)
def test_what_a_call_is_told_tells_it_apart(
    torch: Any, driver: Driver, card: Any, others: dict[str, Any]
) -> None:
    arrays = qkv(torch)
    for told in ({}, {"window": (2, 1)}):
        scoring = Scoring(window=(2, 1)) if "window" in {**told, **others} else Scoring()
        for each in (told, {**told, **others}) * 2:
            with launching(driver, scoring if "window" in each else Scoring()):
                assert_right(torch, flashgen.attention(*arrays, **each), arrays, **each)


def test_types_are_told_apart(torch: Any, driver: Driver, card: Any) -> None:
    for _ in range(3):
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
            arrays = qkv(torch, dtype=dtype)
            with launching(driver, dtype=name):
                o = flashgen.attention(*arrays)
            assert o.dtype is dtype
            assert_right(torch, o, arrays)
    mixed = [*qkv(torch)[:2], qkv(torch, dtype=torch.float16)[2]]
    for out in (None, torch.empty(SHAPE)):
        with pytest.raises(TypeError, match="they must be of one type"):
            flashgen.attention(*mixed, out=out)


def test_arrays_beside_tell_calls_apart(torch: Any, driver: Driver, card: Any) -> None:
    """By shape, type and strides: a bias of all heads after one for all of them, and the other way round."""
    arrays = qkv(torch)
    biases = [drawn(torch, ROWS, KEYS), drawn(torch, 4, ROWS, KEYS), drawn(torch, 2, 1, ROWS, KEYS)]
    biases += [drawn(torch, 4, ROWS, 2 * KEYS)[..., :KEYS], drawn(torch, ROWS, 4, KEYS).transpose(0, 1)]
    biases += [drawn(torch, 4, KEYS, ROWS).transpose(1, 2)]
    with launching(driver, Scoring(bias="f32")):
        for bias in biases * 2:
            assert_right(torch, flashgen.attention(*arrays, bias=bias), arrays, bias=bias)
        assert by_the_usual_way(*arrays, bias=biases[-1]), "which is copied"
    half = biases[0].half()
    with launching(driver, Scoring(bias="f16")):
        for _ in range(2):
            made = flashgen.attention(*arrays, bias=half)
            assert_right(torch, made, arrays, bias=half.float())


def test_numbers_that_may_change_are_read_anew(torch: Any, driver: Driver, card: Any) -> None:
    arrays, scale, window = qkv(torch), torch.tensor(0.5), [2, 1]
    with launching(driver):
        for number in (0.5, 0.25):
            scale.fill_(number)
            assert_right(torch, flashgen.attention(*arrays, scale=scale), arrays, scale=number)
    with launching(driver, Scoring(window=(2, 1))):
        for left in (2, 4):
            window[0] = left
            assert_right(torch, flashgen.attention(*arrays, window=window), arrays, window=(left, 1))
    assert kept() == 0


def test_the_stream_in_use_is_the_calls(torch: Any, driver: Driver, card: Any, monkeypatch: Any) -> None:
    handles = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: handles[-1], raising=False)
    arrays = qkv(torch)
    with launching(driver):
        flashgen.attention(*arrays)
        for handle in (0, 7, 9, 7, 0):
            handles.append(handle)
            assert_right(torch, flashgen.attention(*arrays), arrays)
            assert driver.launches()[-1].stream == handle
        assert kept() == 1
        assert by_the_usual_way(*arrays, stream=0)


def test_lists_of_tiles_are_those_that_calls_on_the_stream_have_made(
    torch: Any, driver: Driver, card: Any, monkeypatch: Any
) -> None:
    handles = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: handles[-1], raising=False)
    arrays, told = qkv(torch), {"dilation": 3}
    with launching(driver, KINDS["dilation"][1]):
        flashgen.attention(*arrays, **told)
        for handle, is_first in ((0, False), (7, True), (7, False), (0, False)):
            handles.append(handle)
            before = len(driver.launches())
            made, usual = attended(*arrays, **told)
            assert_right(torch, made, arrays, **told)
            assert usual == is_first and len(driver.launches()) - before == 1 + is_first
        forgotten = scored_values._RememberedLists()
        for module in (scored_values, again):
            monkeypatch.setattr(module, "_LISTS", forgotten)
        assert [by_the_usual_way(*arrays, **told) for _ in range(2)] == [True, False]
        told["dilation"] = 4
        assert_right(torch, flashgen.attention(*arrays, **told), arrays, **told)
    assert kept() == 2


def test_a_call_runs_in_the_primary_context_whatever_is_current(
    torch: Any, driver: Driver, card: Any
) -> None:
    arrays, others = qkv(torch), qkv(torch, seed=5)
    with launching(driver):
        for _ in range(2):
            flashgen.attention(*arrays)
        driver.library.fake_push(OTHER_DEVICE)
        assert_right(torch, flashgen.attention(*others), others)
        assert driver.launches()[-1].context == PRIMARY
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(flashgen.attention(*others)))
        thread.start()  # in which no context is current
        thread.join()
        assert_right(torch, found[0], others)
        assert driver.launches()[-1].context == PRIMARY


def test_threads_do_not_write_each_others_arguments(torch: Any, driver: Driver, card: Any) -> None:
    calls = [qkv(torch, seed=10 * i) for i in range(4)]
    results: list[list[Any]] = [[] for _ in calls]
    with launching(driver):
        flashgen.attention(*calls[0])

        def work(index: int) -> None:
            driver.library.fake_push(PRIMARY)
            results[index] += (flashgen.attention(*calls[index]) for _ in range(20))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert kept() == 1 and [len(each) for each in results] == [20] * len(calls)
    for arrays, made in zip(calls, results, strict=True):
        for each in made:
            assert_right(torch, each, arrays)


def test_a_launch_that_fails_is_told_of_and_the_next_goes_on(torch: Any, driver: Driver, card: Any) -> None:
    arrays = qkv(torch)
    with launching(driver):
        for _ in range(2):
            flashgen.attention(*arrays)
        driver.library.fake_fail_launch(700)
        with pytest.raises(RuntimeError, match="launching on stream 0x0"):
            flashgen.attention(*arrays)
        driver.library.fake_fail_launch(0)
        assert_right(torch, flashgen.attention(*arrays), arrays)


# ---- gradients, and what PyTorch does around a call


@pytest.mark.parametrize(
    ("told", "scoring"),
    [
        ({}, Scoring()),
        ({"causal": True, "scale": 0.3}, Scoring()),
        ({"window": (3, 2), "softcap": 2.0}, Scoring(window=(3, 2), softcap=30.0)),
        ({"sinks": 4, "bias": (ROWS, KEYS), "causal": True}, Scoring(bias="f32", sinks=True)),
    ],
)
@pytest.mark.parametrize("of", ["o", "o and lse"])
def test_gradients_are_those_of_each_calls_own_tensors(
    torch: Any, driver: Driver, card: Any, told: dict[str, Any], scoring: Scoring, of: str
) -> None:
    def given(seed: int) -> tuple[list[Any], dict[str, Any]]:
        shapes = {
            name: n if isinstance(n, tuple) else (n,) for name, n in told.items() if name in ("sinks", "bias")
        }
        beside = {name: drawn(torch, *n, seed=seed).requires_grad_() for name, n in shapes.items()}
        return [x.requires_grad_() for x in qkv(torch, seed)], {**told, **beside}

    with_lse = of != "o"
    with gradient_kernels.computing(driver, *kernels_of(scoring)):
        for turn, seed in enumerate((0, 20, 40)):
            arrays, asked = given(seed)
            made, usual = attended(*arrays, **asked, return_lse=with_lse)
            assert usual == (turn == 0) and kept() == 1
            exact = wanted(torch, *arrays, **asked)
            pairs = list(zip(made if with_lse else [made], exact, strict=False))
            leaves = [*arrays, *(x for x in asked.values() if isinstance(x, torch.Tensor))]
            weights = [drawn(torch, *x.shape, seed=7) for x, _ in pairs]
            found, expected = (
                torch.autograd.grad([pair[i] for pair in pairs], leaves, weights) for i in range(2)
            )
            for each, other in zip(found, expected, strict=True):
                assert each.shape == other.shape and torch.allclose(each, other, atol=2e-4, rtol=1e-3)


def test_gradients_are_taken_where_they_are_wanted_alone(torch: Any, driver: Driver, card: Any) -> None:
    arrays, sinks = qkv(torch), drawn(torch, 4)
    scoring = Scoring(sinks=True)
    with gradient_kernels.computing(driver, *kernels_of(scoring)):
        for _ in range(2):
            assert not flashgen.attention(*arrays, sinks=sinks).requires_grad
            for leaf in (*arrays, sinks):
                leaf.requires_grad_()
                assert flashgen.attention(*arrays, sinks=sinks).requires_grad
                with torch.no_grad():
                    assert not flashgen.attention(*arrays, sinks=sinks).requires_grad
                with torch.inference_mode():
                    assert flashgen.attention(*arrays, sinks=sinks).is_inference()
                leaf.requires_grad_(False)
            parameter = torch.nn.Parameter(sinks)
            flashgen.attention(*arrays, sinks=parameter).sum().backward()
            assert parameter.grad is not None
    assert kept() == 4, "of nothing, q, k and v, and the sinks, apart: with gradients and without"


def test_deterministic_gradients_are_asked_for_as_the_backward_pass_begins(
    torch: Any, driver: Driver, card: Any, monkeypatch: Any
) -> None:
    arrays = [x.requires_grad_() for x in qkv(torch)]
    asked: list[bool] = []
    tensors = bound.bound_of(None).gradients()._tensors
    planned = type(tensors).planned

    def noted(self: Any, torch: Any, repeats: bool, *others: Any) -> Any:
        asked.append(repeats)
        return planned(self, torch, repeats, *others)

    monkeypatch.setattr(type(tensors), "planned", noted)
    with gradient_kernels.computing(driver, *kernels_of(Scoring())):
        for wants in (False, True, False, True, False):
            o = flashgen.attention(*arrays)
            torch.use_deterministic_algorithms(wants)
            try:
                o.sum().backward()
            finally:
                torch.use_deterministic_algorithms(False)
    assert asked[-3:] == [False, True, False], "behind those of proofs, of which either may have its own"


def test_autocast_casts_what_is_of_another_type(torch: Any, driver: Driver, card: Any) -> None:
    wide, narrow = qkv(torch), qkv(torch, dtype=torch.bfloat16)
    with launching(driver):
        for _ in range(2):
            assert flashgen.attention(*wide).dtype is torch.float32
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    with launching(driver, dtype="bf16"):
        flashgen.attention(*narrow)
        torch.set_autocast_enabled("cuda", True)
        try:
            for _ in range(2):
                o = flashgen.attention(*wide)
                assert o.dtype is torch.bfloat16
                assert_right(torch, o, [x.bfloat16() for x in wide])
            assert not by_the_usual_way(*narrow), "which nothing is cast of"
        finally:
            torch.set_autocast_enabled("cuda", False)
    with launching(driver):
        assert flashgen.attention(*wide).dtype is torch.float32


@pytest.mark.parametrize("requires_grad", [False, True])
def test_graphs_hold_the_operator_of_calls_that_are_kept(
    torch: Any, driver: Driver, card: Any, requires_grad: bool
) -> None:
    torch._dynamo.reset()
    arrays = [x.requires_grad_(requires_grad) for x in qkv(torch)]
    graphs = Graphs()
    with gradient_kernels.computing(driver, *kernels_of(Scoring())):
        for _ in range(2):
            flashgen.attention(*arrays, causal=True)
        step = torch.compile(
            lambda *x: flashgen.attention(*x, causal=True) * 2, backend=graphs, fullgraph=True
        )
        step(*arrays)
        flashgen.attention(*arrays, causal=True, scale=0.5)  # of what is kept beside graphs know nothing
        made = step(*arrays)
    assert "flashgen.attention" in graphs.targets()
    assert torch.allclose(made, 2 * wanted(torch, *arrays, causal=True)[0], atol=1e-4)


def test_modes_and_transformations_of_pytorch_see_the_operator(torch: Any, driver: Driver, card: Any) -> None:
    """What is counted of operators is so of calls that are kept, too, as far as gradients are taken."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    arrays = [x.requires_grad_() for x in qkv(torch)]
    with gradient_kernels.computing(driver, *kernels_of(Scoring())):
        for _ in range(2):
            flashgen.attention(*arrays)
        with Noting():
            flashgen.attention(*arrays)
    assert any(each.startswith("flashgen.attention_lse") for each in seen)


def test_what_is_no_call_of_tensors_in_memory_is_refused_as_before(
    torch: Any, driver: Driver, card: Any
) -> None:
    """Transformations' tensors have no addresses."""
    arrays = qkv(torch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda *x: flashgen.attention(*x).sum())(*arrays)
        with gradient_kernels.computing(driver, *kernels_of(Scoring())):
            flashgen.attention(*(x.clone().requires_grad_() for x in arrays))


# ---- how long it is kept


def test_kernels_are_chosen_anew_where_more_is_known(torch: Any, driver: Driver, card: Any) -> None:
    arrays = qkv(torch)
    with launching(driver):
        flashgen.attention(*arrays)
        assert kept() == 1
        bound.forget_choices()
        assert kept() == 0
        assert by_the_usual_way(*arrays) and kept() == 1


def test_who_notes_calls_hears_of_those_that_were_kept(torch: Any, driver: Driver, card: Any) -> None:
    arrays, heard = qkv(torch), Counter[int]()
    with launching(driver):
        flashgen.attention(*arrays)
        with bound.noting(lambda problem, card: heard.update([problem.seqlen_q])):
            for _ in range(3):
                flashgen.attention(*arrays)
            assert kept() == 0
        assert heard[ROWS] >= 3
        flashgen.attention(*arrays)
        assert kept() == 1


def test_a_choice_that_was_forgotten_meanwhile_is_not_kept(torch: Any, driver: Driver, card: Any) -> None:
    arrays, found = qkv(torch), call._found_out
    with launching(driver), pytest.MonkeyPatch.context() as patch:

        def forgotten(*told: Any) -> Any:
            made = found(*told)
            bound.forget_choices()  # as when a thread has built a better kernel
            return made

        patch.setattr(call, "_found_out", forgotten)
        flashgen.attention(*arrays)
    assert kept() == 0


def test_so_many_are_kept_and_no_more(torch: Any, driver: Driver, card: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(bound.bound_of(None), "most_again", 2)
    arrays = qkv(torch)
    with launching(driver):
        for scale in (0.1, 0.2, 0.3, 0.4, 0.3):
            assert_right(torch, flashgen.attention(*arrays, scale=scale), arrays, scale=scale)
            assert 1 <= kept() <= 2


# ---- what is left to do


class Work(Counter[str]):
    """The functions of Python and C that flashgen's own enter while a call is made, by name."""

    def __init__(self, made: Callable[[], Any]) -> None:
        super().__init__()
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            made()
        finally:
            sys.setprofile(before)

    def _note(self, frame: Any, event: str, function: Any) -> None:
        caller = frame if event == "c_call" else frame.f_back
        if event not in ("call", "c_call") or not caller.f_globals["__name__"].startswith("flashgen."):
            return
        self[frame.f_code.co_name if event == "call" else function.__name__] += 1


#: The most functions that are entered, by kind of call and whether gradients are taken of it: what it costs,
#: whatever the machine. Two look-ups, three questions of how PyTorch is set, its test of tensors, four
#: addresses, memory, the stream, and what is ready for it; two functions where something is told beside, nine
#: more where lists of tiles are looked up, which no graph that is captured may have. The driver's own
#: functions, which are looked up before, are entered beside.
LIMITS = {
    ("plain", False): 15,
    ("causal", False): 17,
    ("scale", False): 17,
    ("window", False): 17,
    ("dilation", False): 26,
    ("softcap", False): 17,
    ("return_lse", False): 19,
    ("bshd", False): 19,
    ("sinks", False): 19,
    ("bias", False): 19,
    ("plain", True): 23,
    ("window", True): 25,
    ("sinks", True): 28,
}


@pytest.mark.parametrize(("kind", "derived"), LIMITS)
def test_the_work_of_a_call_like_one_before_is_bounded(
    torch: Any, driver: Driver, card: Any, kind: str, derived: bool
) -> None:
    make, scoring = KINDS[kind]
    arrays, told = [x.requires_grad_(derived) for x in qkv(torch)], make(torch)
    if told.get("layout") == "bshd":
        arrays = [x.transpose(1, 2).contiguous() for x in arrays]
    with launching(driver, scoring):
        for _ in range(3):
            flashgen.attention(*arrays, **told)
    # Of memory at an address that was never seen the driver makes another map: that is the first time only.
    works = [Work(lambda: flashgen.attention(*arrays, **told)) for _ in range(9)]
    work = min(works, key=Work.total)
    assert work["again"] and work.total() <= LIMITS[kind, derived], work
