"""Calls like the newest that was told the same, with the real PyTorch, where it is installed: they are known
by PyTorch's own test of tensors, and others are looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashgen
import pytest
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.front import alike

from tests.support.entered import functions_entered
from tests.support.host_tensors import Graphs
from tests.support.stand_in_driver import Driver
from tests.templates import gradient_kernels
from tests.tuner.front.test_again import (
    KINDS,
    ROWS,
    SHAPE,
    D,
    anywhere,
    assert_right,
    attended,
    by_the_usual_way,
    fewer_keys,
    fewer_rows,
    kept,
    keys_apart,
    launching,
    one_head_of_keys,
    qkv,
    rows_apart,
    values_apart,
    wanted,
)
from tests.tuner.front.test_gradients_torch import kernels_of, real, torch

__all__ = ["real", "torch"]


def is_known_at_once(*arrays: Any, **told: Any) -> bool:
    """Tells whether a call is made without a look at those before the newest."""
    entered = functions_entered(lambda: flashgen.attention(*arrays, **told), [alike.__file__])
    return "_looked_up" not in entered


@pytest.mark.parametrize("kind", KINDS)
def test_the_third_call_of_a_kind_is_known_at_once(torch: Any, driver: Driver, card: Any, kind: str) -> None:
    make, scoring = KINDS[kind]
    told, arrays = make(torch), qkv(torch)
    if told.get("layout") == "bshd":
        arrays = [x.transpose(1, 2).contiguous() for x in arrays]
    with launching(driver, scoring):
        known = [is_known_at_once(*arrays, **told) for _ in range(4)]
        assert_right(torch, flashgen.attention(*arrays, **told), arrays, **told)
    assert known == [False, False, True, True] and kept() == 1


@pytest.mark.parametrize(
    "change",
    [rows_apart, keys_apart, values_apart, fewer_rows, fewer_keys, one_head_of_keys, anywhere],
    ids=lambda each: each.__name__,
)
def test_tensors_that_lie_otherwise_are_not_known(
    torch: Any, driver: Driver, card: Any, change: Callable[..., Any]
) -> None:
    arrays = qkv(torch)
    changed = change(torch, arrays)
    with launching(driver):
        for each in (arrays, arrays, arrays, changed, changed, changed, arrays, changed):
            assert_right(torch, flashgen.attention(*each, causal=True), each, causal=True)


def test_types_and_outputs_are_told_apart_once_they_are_known(torch: Any, driver: Driver, card: Any) -> None:
    for _ in range(2):
        for name, dtype in (("f32", torch.float32), ("f16", torch.float16)):
            arrays, out = qkv(torch, dtype=dtype), torch.empty(SHAPE, dtype=dtype)
            apart = torch.empty(SHAPE[0], ROWS, SHAPE[1], D, dtype=dtype).transpose(1, 2)
            with launching(driver, dtype=name):
                for each in (out, apart):
                    for _ in range(3):
                        assert flashgen.attention(*arrays, out=each.zero_()) is each
                        assert_right(torch, each, arrays)
                with pytest.raises(ValueError, match="out is the memory of q, k or v"):
                    flashgen.attention(*arrays, out=arrays[0])


def test_gradients_are_taken_though_a_call_without_is_known(torch: Any, driver: Driver, card: Any) -> None:
    arrays = qkv(torch)
    with gradient_kernels.computing(driver, *kernels_of(Scoring())):
        for _ in range(2):
            for _ in range(3):
                assert not flashgen.attention(*arrays).requires_grad
            for leaf in arrays:
                leaf.requires_grad_()
                for _ in range(3):
                    assert flashgen.attention(*arrays).requires_grad
                    with torch.no_grad():
                        assert not flashgen.attention(*arrays).requires_grad
                    with torch.inference_mode():
                        assert flashgen.attention(*arrays).is_inference()
                assert is_known_at_once(*arrays)
                leaf.requires_grad_(False)


def test_autocast_casts_though_a_call_without_is_known(torch: Any, driver: Driver, card: Any) -> None:
    narrow = qkv(torch, dtype=torch.bfloat16)
    before = torch.get_autocast_dtype("cuda")
    try:
        with launching(driver, dtype="bf16"):
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            for _ in range(3):
                flashgen.attention(*narrow)
            torch.set_autocast_enabled("cuda", True)
            assert is_known_at_once(*narrow), "which nothing is cast of"
        with launching(driver, dtype="f16"):
            torch.set_autocast_dtype("cuda", torch.float16)
            assert flashgen.attention(*narrow).dtype is torch.float16
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_a_tensor_that_is_keys_and_values_is_served_as_before(torch: Any, driver: Driver, card: Any) -> None:
    """Which PyTorch's test takes for another call."""
    q, k, v = qkv(torch)
    with launching(driver):
        for _ in range(2):
            for keys, values in ((k, v), (k, k), (k, k), (k, v), (k, v)):
                assert_right(torch, flashgen.attention(q, keys, values), [q, keys, values])
        assert not by_the_usual_way(q, k, k) and kept() == 1


@pytest.mark.parametrize("told", ["chunk", "scale", "a side of a window"])
def test_numbers_of_tensors_are_read_anew(torch: Any, driver: Driver, card: Any, told: str) -> None:
    arrays = qkv(torch)
    for turn in range(4):
        number = torch.tensor(2 + turn % 2)
        if told == "chunk":
            with launching(driver, Scoring(chunk=2)):
                assert by_the_usual_way(*arrays, chunk=number)
        elif told == "scale":
            with launching(driver):
                assert_right(torch, flashgen.attention(*arrays, scale=number), arrays, scale=float(number))
        else:
            with launching(driver, Scoring(window=(2, 1))):
                made, usual = attended(*arrays, window=(number, 1))
                assert_right(torch, made, arrays, window=(int(number), 1))
                assert usual
    assert kept() == 0


def test_calls_are_told_apart_by_any_pytorch(torch: Any, driver: Driver, card: Any, monkeypatch: Any) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    arrays = qkv(torch)
    with launching(driver):
        for given in (arrays, rows_apart(torch, arrays)) * 3:
            assert_right(torch, flashgen.attention(*given), given)
        assert not by_the_usual_way(*arrays) and kept() == 2


@pytest.mark.parametrize("kind", ["causal", "attn_mask"])
def test_the_function_itself_may_be_compiled(torch: Any, driver: Driver, card: Any, kind: str) -> None:
    torch._dynamo.reset()
    make, scoring = KINDS[kind]
    arrays, told, graphs = qkv(torch), make(torch), Graphs()
    with launching(driver, scoring):
        for _ in range(3):
            flashgen.attention(*arrays, **told)
        compiled = torch.compile(flashgen.attention, backend=graphs, fullgraph=True)
        made = compiled(*arrays, **told)
    assert torch.allclose(made, wanted(torch, *arrays, **told)[0], atol=1e-4)
    assert "flashgen.attention" in graphs.targets()
