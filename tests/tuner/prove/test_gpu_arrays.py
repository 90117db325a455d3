"""Arrays that stand in for PyCUDA's where it is not installed, taken by emitted modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashgen.tuner.prove import gpu_arrays

from tests.support.stand_in_driver import Driver
from tests.templates.conftest import driver, library
from tests.templates.test_packed import SAID, arrays, close, computing, kernel_of, lengths, load, wanted

__all__ = ["driver", "library"]


@pytest.fixture
def kind(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The type of arrays of a process without PyCUDA."""
    monkeypatch.setitem(sys.modules, "pycuda.gpuarray", None)
    monkeypatch.delitem(sys.modules, "pycuda.gpuarray")
    monkeypatch.setitem(sys.modules, "pycuda", None)
    yield gpu_arrays.array_kind()
    sys.modules.pop("pycuda.gpuarray")


def test_pycuda_stays_as_missing_as_it_was(kind: Any) -> None:
    assert kind is gpu_arrays.PlainArray and gpu_arrays.array_kind() is kind
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pycuda.driver")


def test_arrays_say_where_they_lie(kind: Any) -> None:
    asked: list[int] = []

    def allocate(num_bytes: int) -> int:
        asked.append(num_bytes)
        return 0x7000

    made = kind((3, 4), ml_dtypes.bfloat16, allocator=allocate)
    assert (asked, made.gpudata, made.strides, made.dtype.name) == ([24], 0x7000, (8, 2), "bfloat16")
    turned = made.reshape((2, 6))
    assert (turned.shape, turned.strides, turned.gpudata, len(asked)) == ((2, 6), (12, 2), 0x7000, 1)
    given = kind((3, 4), np.float32, gpudata=0x9000, strides=(64, 4))
    assert given.__cuda_array_interface__ == {
        "shape": (3, 4),
        "strides": (64, 4),
        "typestr": "<f4",
        "data": (0x9000, False),
        "stream": None,
        "version": 3,
    }
    with pytest.raises(ValueError, match="an array needs memory"):
        kind((3,), np.float32)


def test_emitted_modules_compute_them_and_make_more_by_their_allocator(
    kind: Any, driver: Driver, tmp_path: Path
) -> None:
    module, hosts = load(tmp_path), [driver.own(x) for x in (*arrays(), *lengths())]
    memory = [driver.own(np.zeros(4 * 29, np.float32)), driver.own(np.zeros(40, np.int32))]
    expected, asked = wanted(kernel_of().problem, hosts[:3]), iter(memory)
    allocated: list[int] = []

    def allocate(num_bytes: int) -> int:
        allocated.append(num_bytes)
        return int(next(asked).ctypes.data)

    given = [
        kind(x.shape, x.dtype, allocator=allocate, gpudata=x.ctypes.data, strides=x.strides) for x in hosts
    ]
    out = driver.own(np.zeros_like(hosts[0]))
    made = kind(out.shape, out.dtype, allocator=allocate, gpudata=out.ctypes.data)
    with computing(driver, kernel_of().problem):
        o, lse = module.attention_varlen(*given, **SAID, out=made, return_lse=True)
    assert o is made and isinstance(lse, kind) and lse.gpudata == memory[0].ctypes.data
    assert allocated == [4 * 4 * 29, 4 * 40], "the log-sum-exp, and the plan"
    close(out, expected[0])
    close(memory[0].reshape(4, 29), expected[1])
