"""Kernels with masks and changes of scores for the stand-in driver: launches read what was packed, as kernels
do, and are computed in float64 by the problem's scores."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flashgen.gen.arguments import struct_of
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module
from flashgen.gen.launch import LISTS_ROLE
from flashgen.gen.launch import Launch as GridOf
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import Scores
from flashgen.tuner.evaluate import reference

from tests.support.modules import import_path
from tests.support.stand_in_driver import Driver, make_kernel

#: What the stand-in driver calls with the address of a launch's arguments and whether the mask is causal.
LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
}


def problem_of(scoring: Scoring, **others: Any) -> Problem:
    return make_kernel(GridOf(128, 4096, 64), scoring=scoring, **others).problem


def load_scored(
    path: Path, *scorings: Scoring, name: str = "best", for_good: bool = False, **others: Any
) -> Any:
    """The module of a kernel for each."""
    kernels = [
        make_kernel(GridOf(32 * (i + 1), 4096, 64), f"// {scoring}\n", scoring=scoring, **others)
        for i, scoring in enumerate(scorings)
    ]
    made = [Made(kernel, "H200", None) for kernel in kernels]
    text = (
        emit_module(kernels[0], device="H200") if len(made) == 1 else emit_many(made, name=name, command=())
    )
    (path / f"{name}.py").write_text(text)
    return import_path(path / f"{name}.py", for_good=for_good)


def load_with_lists(path: Path, scoring: Scoring, *, name: str = "listed", for_good: bool = False) -> Any:
    """The module of a kernel whose launch is preceded by one that lists tiles of 16 keys, for 8 rows each."""
    kernel = make_kernel(GridOf(128, 4096, 64), scoring=scoring)
    by_batch = kernel.problem.scores.pairs_vary_by_batch
    lists = GridOf(64, 32, 8, role=LISTS_ROLE, alike_heads=True, alike_batches=not by_batch)
    kernel = replace(kernel, launches=(lists, *kernel.launches), variant=replace(kernel.variant, bc=16))
    (path / f"{name}.py").write_text(emit_module(kernel, device="H200"))
    return import_path(path / f"{name}.py", for_good=for_good)


class Card:
    """What launches read and computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values: list[dict[str, Any]] = []
        self.list_addresses: list[int] = []
        """Where launches find lists of tiles, or are to write them, where the problem has some."""

    def launch(self, address: int, causal: int) -> None:
        struct = struct_of(self.problem)
        packed = struct.unpack(ctypes.string_at(address, struct.num_bytes))
        if "tile_lists" in packed:
            self.list_addresses.append(int(packed["tile_lists"]))
        scores = Problem(**{**self._fields(), "causal": bool(causal)}).scores
        sizes = {each: int(packed[each]) for each in ("batch", "num_q_heads", "seqlen_q", "seqlen_k")}
        wide = self.read(scores, packed)
        q, k, v, o = (self._array(packed, name, causal) for name in "qkvo")
        found = reference.attention(q, k, v, scale=packed["scale"], scores=scores, values=wide)
        o[...] = found.o
        if packed["lse"]:
            shape = (sizes["batch"], sizes["num_q_heads"], sizes["seqlen_q"])
            _read(int(packed["lse"]), shape, (shape[1] * shape[2], shape[2], 1), np.float32)[...] = found.lse

    def read(self, scores: Scores, packed: dict[str, Any]) -> dict[str, Any]:
        """What a launch reads for masks and changes of scores, kept in `values`."""
        sizes = {each: int(packed[each]) for each in ("batch", "num_q_heads", "seqlen_q", "seqlen_k")}
        values: dict[str, Any] = {each.name: packed[each.name] for each in scores.scalars}
        for each in scores.buffers:
            told = dict(each.sizes)
            shape = tuple(
                max(sizes[name] for name in names) if names else int(packed[told[axis]])
                for axis, names in enumerate(each.axes)
            )
            strides = (*(int(packed[name]) for name in each.strides), 1)
            values[each.name] = _read(int(packed[each.name]), shape, strides, DTYPES[each.dtype])
        self.values.append(values)
        return {
            name: np.asarray(x, np.float64) if np.ndim(x) and x.dtype == DTYPES["bf16"] else x
            for name, x in values.items()
        }

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self.problem, name) for name in self.problem.__dataclass_fields__}

    def _array(self, packed: dict[str, float], name: str, causal: int) -> np.ndarray:
        rows, heads = ("seqlen_k", "num_kv_heads") if name in "kv" else ("seqlen_q", "num_q_heads")
        columns = self.problem.head_dim_v if name in "vo" else self.problem.head_dim
        shape = (int(packed["batch"]), int(packed[heads]), int(packed[rows]), columns)
        strides = (*(int(packed[f"{name}_stride_{each}"]) for each in ("batch", "head", "row")), 1)
        return _read(int(packed[name]), shape, strides, DTYPES[self.problem.dtype])


def _read(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory at an address, which is the host's."""
    if 0 in shape:
        return np.zeros(shape, dtype)
    items = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    size = np.dtype(dtype).itemsize
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * (size * items)).from_address(address)).view(dtype)
    return np.lib.stride_tricks.as_strided(memory, shape, [size * step for step in strides])


@contextmanager
def computing(driver: Driver, problem: Problem) -> Iterator[Card]:
    """Launches compute what the problem asks."""
    card = Card(problem)
    callback = LAUNCHED(card.launch)
    driver.library.fake_on_launch(callback)
    try:
        yield card
    finally:
        driver.library.fake_on_launch(None)
