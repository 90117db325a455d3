"""Emitted modules of kernels whose biases and masks the copy engine brings: their maps, without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring

from tests.support.stand_in_driver import D, Driver, Map, Tensor, host, load_kernel
from tests.templates.scored_kernels import DTYPES, computing
from tests.templates.test_scored import close, wanted

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

STAGED = Wgmma(br=128, bc=80, bias_stages=2)
#: The driver's types of elements, and columns of a box and what they are swizzled within: whole parts of 80.
TYPES = {"u8": (0, 16, 0), "f16": (6, 16, 1), "bf16": (9, 16, 1), "f32": (7, 8, 1)}
ROWS, KEYS = 21, 48


def staged(driver: Driver, tmp_path: Path, dtype: str = "f16") -> tuple[Any, Problem]:
    """A module of a kernel with a bias of that type, and its problem."""
    problem = Problem(dtype="f16", head_dim=D, num_q_heads=4, num_kv_heads=2, scoring=Scoring(bias=dtype))
    kernel = render(STAGED, problem, preset("h200"))
    driver.library.fake_maps(len(kernel.launch.tensor_maps))
    return load_kernel(tmp_path, kernel), problem


def arrays_of(keys: int = KEYS) -> list[np.ndarray]:
    shapes = ((2, 4, ROWS, D), (2, 2, keys, D), (2, 2, keys, D))
    return [host(*shape, seed=i, dtype=np.float16) for i, shape in enumerate(shapes)]


def bias_of(dtype: str, *shape: int) -> np.ndarray:
    return (host(*shape, seed=7) > 0).astype(np.uint8) if dtype == "u8" else host(*shape, dtype=DTYPES[dtype])


def described(each: Map) -> tuple[int, list[int], list[int]]:
    return each.address, list(each.sizes), list(each.stride_bytes)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_bias_has_a_map(dtype: str, driver: Driver, tmp_path: Path, torch: Any) -> None:
    module, problem = staged(driver, tmp_path, dtype)
    arrays, bias = arrays_of(), bias_of(dtype, 2, 4, ROWS, KEYS)
    q, k, v, given = (Tensor(driver.own(x)) for x in (*arrays, bias))
    with computing(driver, problem):
        o = module.attention(q, k, v, bias=given)
    close(o.host, wanted(problem.scoring, arrays, {"bias": bias.astype(np.float64)}).o, 2e-3)
    met = driver.launches()[-1].met
    code, columns, swizzle = TYPES[dtype]
    assert (met.type, met.swizzle, list(met.box)) == (code, swizzle, [columns, 128])
    assert described(met) == (bias.ctypes.data, [KEYS, ROWS, 4, 2], list(bias.strides[2::-1]))


def test_axes_that_repeat_a_bias_have_one_entry(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module, problem = staged(driver, tmp_path)
    q, k, v = (Tensor(driver.own(x)) for x in arrays_of())
    row = KEYS * 2
    for shape, sizes, strides in (
        ((2, 1, ROWS, KEYS), [KEYS, ROWS, 1, 2], [row, 16, ROWS * row]),
        ((4, ROWS, KEYS), [KEYS, ROWS, 4, 1], [row, ROWS * row, 16]),
        ((2, 4, 1, KEYS), [KEYS, 1, 4, 2], [16, row, 4 * row]),
        ((KEYS,), [KEYS, 1, 1, 1], [16, 16, 16]),
    ):
        bias = driver.own(bias_of("f16", *shape))
        with computing(driver, problem):
            o = module.attention(q, k, v, bias=Tensor(bias))
        values = {"bias": np.broadcast_to(bias, (2, 4, ROWS, KEYS)).astype(np.float64)}
        close(o.host, wanted(problem.scoring, (q.host, k.host, v.host), values).o, 2e-3)
        assert described(driver.launches()[-1].met) == (bias.ctypes.data, sizes, strides)


def test_maps_are_made_for_each_bias_once(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module, problem = staged(driver, tmp_path)
    q, k, v = (Tensor(driver.own(x)) for x in arrays_of())
    out = Tensor(driver.own(host(2, 4, ROWS, D, dtype=np.float16)))
    biases = [driver.own(bias_of("f16", 2, 4, ROWS, KEYS)) for _ in range(2)]
    with computing(driver, problem):
        for bias, encoded in ((biases[0], 5), (biases[0], 5), (biases[1], 6), (biases[0], 6)):
            module.attention(q, k, v, bias=Tensor(bias), out=out)
            assert driver.library.fake_calls(b"cuTensorMapEncodeTiled") == encoded
            assert driver.launches()[-1].met.address == bias.ctypes.data
        # The same memory by other strides.
        module.attention(q, k, v, bias=Tensor(np.broadcast_to(biases[0][:, :1], biases[0].shape)), out=out)
    assert list(driver.launches()[-1].met.sizes) == [KEYS, ROWS, 1, 2]


def test_of_what_the_copy_engine_does_not_take_nothing_is_read_by_maps(
    driver: Driver, tmp_path: Path, torch: Any
) -> None:
    module, problem = staged(driver, tmp_path)
    for keys, first in ((37, 0), (KEYS, 1), (0, 0)):
        arrays = arrays_of(keys)
        q, k, v = (Tensor(driver.own(x)) for x in arrays)
        memory = driver.own(bias_of("f16", 2, 4, ROWS, keys + first))
        with computing(driver, problem):
            o = module.attention(q, k, v, bias=Tensor(memory[..., first:]))
        values = {"bias": memory[..., first:].astype(np.float64)}
        close(o.host, wanted(problem.scoring, arrays, values).o, 2e-3)
        assert described(driver.launches()[-1].met) == (q.host.ctypes.data, [1] * 4, [16] * 3)


def test_numpy_s_biases_have_maps(driver: Driver, tmp_path: Path) -> None:
    module, problem = staged(driver, tmp_path, "u8")
    arrays, shown = arrays_of(), bias_of("u8", 1, 4, ROWS, KEYS)
    with computing(driver, problem):
        o = module.attention(*arrays, bias=shown.astype(bool))
    values = {"bias": np.broadcast_to(shown, (2, 4, ROWS, KEYS)).astype(np.float64)}
    close(o, wanted(problem.scoring, arrays, values).o, 2e-3)
    assert list(driver.launches()[-1].met.sizes) == [KEYS, ROWS, 4, 1]


def test_lists_with_bits_are_as_large_as_heads_need(driver: Driver, tmp_path: Path, torch: Any) -> None:
    """Once for all heads of a mask that is repeated along them, by whoever keeps them as well."""
    problem = Problem(dtype="f16", head_dim=D, num_q_heads=4, num_kv_heads=2, scoring=Scoring(bias="u8"))
    kernel = render(Wgmma(br=128, bc=80, seen_bits=True), problem, preset("h200"))
    driver.library.fake_maps(len(kernel.launch.tensor_maps))
    module = load_kernel(tmp_path, kernel)
    q, k, v = (Tensor(driver.own(x)) for x in arrays_of())
    lists = module.TileLists()
    of_head = 2 * (1 + 1 * (1 + 2 * 128 * 2))
    for heads in (1, 4):
        shown = driver.own(bias_of("u8", 2, heads, ROWS, KEYS))
        with computing(driver, problem) as card:
            o = module.attention(q, k, v, bias=Tensor(shown), lists=lists)
        values = {"bias": np.broadcast_to(shown, (2, 4, ROWS, KEYS)).astype(np.float64)}
        close(o.host, wanted(problem.scoring, (q.host, k.host, v.host), values).o, 2e-3)
        assert lists.memory.host.shape == (heads * of_head,)
        assert {lists.address} == set(card.list_addresses)
