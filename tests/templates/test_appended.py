"""Emitted modules of kernels that append to caches in pages, without a GPU: what their launches are told, and
what these make of it as a card would."""

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
from flashgen.gen.append import HALVES, INTERLEAVED, Append
from flashgen.gen.arguments import struct_of
from flashgen.gen.emit.module import emit_module
from flashgen.gen.kernel import Kernel
from flashgen.tuner.evaluate import reference
from flashgen.tuner.shelf.module_text import read_module

from tests.support.modules import import_path
from tests.support.stand_in_driver import D, Driver, Tensor, host
from tests.templates.scored_kernels import LAUNCHED, _read
from tests.templates.test_paged import (
    BATCH,
    HEADS,
    KV_HEADS,
    MAX_PAGES,
    NUM_PAGES,
    PAGE_SIZE,
    ROWS,
    Card,
    caches,
    close,
    kernel_of,
    offsets,
    queries,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

#: Keys before the new ones, and each sequence's own pages.
CACHED, NEW = np.array([13, 5, 0, 8], np.int32), 4
PAGES = np.array([[3, 7, 1], [2, 0, 0], [6, 0, 0], [8, 4, 0]], np.int32)
TABLE = np.concatenate([PAGES, np.zeros((BATCH, MAX_PAGES - 3), np.int32)], axis=1)
ROTATING = Append(HALVES, 4)


def appending(varlen: str = "", append: Append = ROTATING, **problem: Any) -> Kernel:
    kernel = kernel_of(varlen, append=append, **problem)
    first = append.launch(kernel.launches[-1])
    return replace(kernel, launches=(first, *kernel.launches))


def load(path: Path, varlen: str = "", append: Append = ROTATING, **problem: Any) -> Any:
    text = emit_module(appending(varlen, append, **problem), device="H200", name="best")
    (path / "best.py").write_text(text)
    return import_path(path / "best.py")


def new_rows() -> tuple[np.ndarray, np.ndarray]:
    """Of (batch, kv_heads, rows, head_dim)."""
    return host(BATCH, KV_HEADS, NEW, D, seed=11), host(BATCH, KV_HEADS, NEW, D, seed=12)


def tables() -> tuple[np.ndarray, np.ndarray]:
    angles = np.linspace(0, 6, 40, dtype=np.float32).reshape(20, 2)
    return np.cos(angles), np.sin(angles)


def turned(rows: np.ndarray, position: int) -> np.ndarray:
    """Rows whose first four columns are rotated, in halves."""
    cos, sin = (each[position] for each in tables())
    first, second = rows[..., :2], rows[..., 2:4]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rows[..., 4:]], axis=-1)


class AppendingCard(Card):
    """Launches by turns: the first of a call appends, the last attends."""

    def launch(self, address: int, causal: int) -> None:
        struct = struct_of(self.problem)
        told = struct.unpack(ctypes.string_at(address, struct.num_bytes))
        if len(self.told) % 2 == 0:
            self.told.append(told)
            self.append(told, bool(causal))
        else:
            super().launch(address, causal)

    def _ints(self, address: float, count: int, otherwise: int) -> np.ndarray:
        found = super()._ints(address, count, otherwise)
        return found + int(self.told[-1]["seqlen_new"]) if address else found

    def append(self, told: dict[str, float], causal: bool) -> None:
        batch, count = int(told["batch"]), int(told["seqlen_new"])
        used = Card._ints(self, told["seqused_k"], batch, int(told["seqlen_k"]) - count)
        for name in "kv":
            if not count:
                continue
            strides = [int(told[f"{name}_new_stride_{axis}"]) for axis in ("batch", "head", "row")]
            shape = (batch, int(told["num_kv_heads"]), count, D)
            rows, cache = (
                _read(int(told[f"{name}_new"]), shape, (*strides, 1), np.float32),
                self._cache(told, name),
            )
            for b in range(batch):
                for row in range(count):
                    key = int(used[b]) + row
                    made = rows[b, :, row]
                    made = turned(made, key) if name == "k" and self.problem.append.rotary else made
                    cache[TABLE[b, key // PAGE_SIZE], :, key % PAGE_SIZE] = made
        if self.problem.append.rotary:
            q, heads, rows = self._queries(told, "q"), int(told["num_q_heads"]), int(told["seqlen_q"])
            strides = (rows * heads * D, heads * D, D, 1)
            rotated = _read(int(told["rotated_q"]), (batch, rows, heads, D), strides, np.float32)
            for b in range(batch):
                for row in range(rows):
                    position = int(used[b]) + (row if causal else 0)
                    rotated[b, row] = turned(q[b, :, row], position) if count else q[b, :, row]


@contextmanager
def computing(driver: Driver, problem: Any) -> Iterator[AppendingCard]:
    card = AppendingCard(problem)
    callback = LAUNCHED(card.launch)
    driver.library.fake_on_launch(callback)
    try:
        yield card
    finally:
        driver.library.fake_on_launch(None)


def expected(causal: bool, *, rotary: bool = True) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a call comes to, and the caches then."""
    q, (k_new, v_new) = queries(), new_rows()
    k, v = caches()
    o = np.zeros_like(q)
    scores = replace(kernel_of().problem, causal=causal).scores
    for b, length in enumerate(CACHED):
        for row in range(NEW):
            place = TABLE[b, (length + row) // PAGE_SIZE], (length + row) % PAGE_SIZE
            k[place] = turned(k_new[b, :, row], length + row) if rotary else k_new[b, :, row]
            v[place] = v_new[b, :, row]
        keys, values = (
            each[TABLE[b]].reshape(-1, KV_HEADS, D)[: length + NEW].swapaxes(0, 1)[None] for each in (k, v)
        )
        rows = q[b].copy()
        for row in range(ROWS if rotary else 0):
            rows[:, row] = turned(q[b, :, row], length + (row if causal else 0))
        o[b] = reference.attention(rows[None], keys, values, scale=D**-0.5, scores=scores).o[0]
    return o, [k, v]


def owned(driver: Driver, *arrays: np.ndarray) -> list[Tensor]:
    return [Tensor(driver.own(array)) for array in arrays]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("append", [Append(), ROTATING])
def test_new_rows_are_told_and_attended_to(
    driver: Driver, tmp_path: Path, torch: Any, append: Append, causal: bool
) -> None:
    module = load(tmp_path, append=append)
    q, k, v, table, used = owned(driver, queries(), *caches(), TABLE, CACHED)
    k_new, v_new, cos, sin = owned(driver, *new_rows(), *tables())
    told = {"rotary_cos": cos, "rotary_sin": sin} if append.rotary else {}
    with computing(driver, appending(append=append).problem) as card:
        o = module.attention_paged(q, k, v, table, used, k=k_new, v=v_new, causal=causal, **told)
    wanted, filled = expected(causal, rotary=bool(append.rotary))
    close(o.host, wanted)
    close(k.host, filled[0])
    close(v.host, filled[1])
    assert len(driver.launches()) == 2 and card.told[0]["seqlen_new"] == NEW
    assert (card.told[1]["q"] != card.told[0]["q"]) == bool(append.rotary)


def test_as_flash_attn_has_it(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path)
    q, k_new, v_new = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (queries(), *new_rows()))
    given = owned(driver, q, *caches(), k_new, v_new, *tables(), CACHED)
    table = Tensor(driver.own(TABLE))
    with computing(driver, appending().problem):
        o = module.flash_attn_with_kvcache(*given, block_table=table, causal=True, rotary_interleaved=False)
    wanted, filled = expected(True)
    close(o.host.swapaxes(1, 2), wanted)
    close(given[1].host, filled[0])
    with pytest.raises(ValueError, match=r"rotary_interleaved is True, .* by halves: pass False"):
        module.flash_attn_with_kvcache(*given, block_table=table)
    with computing(driver, appending().problem) as card:
        module.flash_attn_with_kvcache(*given[:7], 8, block_table=table, rotary_interleaved=False)
    assert card.told[0]["seqlen_k"] == 8 + NEW and card.told[0]["seqused_k"] == 0


def test_nothing_new_may_be_appended(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path, append=Append())
    given = owned(driver, queries(), *caches(), TABLE, CACHED)
    with computing(driver, appending(append=Append()).problem) as card:
        module.attention_paged(*given)
    assert [card.told[0][name] for name in ("k_new", "seqlen_new")] == [0, 0]


def test_beside_a_stream_rotated_queries_have_memory(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path)
    q, k, v, table, used = owned(driver, queries(), *caches(), TABLE, CACHED)
    k_new, v_new, cos, sin, rotated, out = owned(
        driver, *new_rows(), *tables(), np.zeros_like(queries()), np.zeros_like(queries())
    )
    told = {"k": k_new, "v": v_new, "rotary_cos": cos, "rotary_sin": sin, "out": out, "stream": 7}
    with pytest.raises(ValueError, match="no memory is made for rotated queries: pass rotated="):
        module.attention_paged(q, k, v, table, used, **told)
    with computing(driver, appending().problem) as card:
        module.attention_paged(q, k, v, table, used, rotated=rotated, **told)
    close(out.host, expected(False)[0])
    assert card.told[1]["q"] == rotated.data_ptr()


def test_packed_queries_have_new_rows_of_their_own(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path, "same")
    q, k, v, table, used = owned(driver, queries("same"), *caches(), TABLE, CACHED)
    k_new, v_new, cos, sin = owned(driver, host(9, KV_HEADS, D), host(9, KV_HEADS, D), *tables())
    starts, new_starts = owned(driver, offsets((21, 1, 0, 7)), offsets((2, 0, 3, 4)))
    with driver_records(driver, appending("same").problem) as told:
        module.attention_paged(
            *(q, k, v, table, used),
            cu_seqlens_q=starts,
            max_seqlen_q=21,
            k=k_new,
            v=v_new,
            cu_seqlens_new=new_starts,
            rotary_cos=cos,
            rotary_sin=sin,
        )
    assert len(told) == 3
    first, _, last = told
    assert (first["total_new"], first["rotary_rows"], first["rotary_cos_stride"]) == (9, 20, 2)
    assert (first["cu_seqlens_new"], first["k_new_stride_row"]) == (new_starts.data_ptr(), KV_HEADS * D)
    assert (last["q"], last["q_stride_row"], last["q_stride_head"]) == (first["rotated_q"], HEADS * D, D)


@contextmanager
def driver_records(driver: Driver, problem: Any) -> Iterator[list[dict[str, float]]]:
    found, struct = [], struct_of(problem)
    callback = LAUNCHED(
        lambda address, _: found.append(struct.unpack(ctypes.string_at(address, struct.num_bytes)))
    )
    driver.library.fake_on_launch(callback)
    try:
        yield found
    finally:
        driver.library.fake_on_launch(None)


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"v": None}, TypeError, "k= and v= are appended together"),
        ({"rotary_cos": None}, TypeError, "rotary_cos= is missing"),
        (
            {"k": np.zeros((BATCH, 3, NEW, D), np.float32)},
            ValueError,
            r"k_new has the shape .* must be \(4, 2, rows",
        ),
        ({"k": np.zeros((BATCH, KV_HEADS, NEW, D), np.float16)}, TypeError, "k_new is float16"),
        ({"rotary_sin": np.zeros((20, 3), np.float32)}, ValueError, "rotary_sin has 3 columns"),
        ({"rotated": np.zeros(5, np.float32)}, ValueError, "pass contiguous memory for"),
    ],
)
def test_new_rows_that_no_kernel_takes(
    driver: Driver, tmp_path: Path, torch: Any, wrong: dict[str, Any], error: type[Exception], told: str
) -> None:
    module = load(tmp_path)
    given = owned(driver, queries(), *caches(), TABLE, CACHED)
    names = ("k", "v", "rotary_cos", "rotary_sin")
    usual: dict[str, Any] = dict(zip(names, owned(driver, *new_rows(), *tables()), strict=True))
    usual |= {name: x if x is None else Tensor(driver.own(x)) for name, x in wrong.items()}
    with pytest.raises(error, match=told):
        module.attention_paged(*given, **usual)
    assert not driver.launches()


def test_arrays_of_the_host_are_refused(driver: Driver, tmp_path: Path) -> None:
    module = load(tmp_path, append=Append())
    with pytest.raises(TypeError, match="writes into its caches, and those of numpy are copied"):
        module.attention_paged(queries(), *caches(), TABLE, CACHED, k=new_rows()[0], v=new_rows()[1])


@pytest.mark.parametrize("append", [Append(), Append(INTERLEAVED, 8)])
@pytest.mark.parametrize("varlen", ["", "same"])
def test_modules_are_read_back(tmp_path: Path, append: Append, varlen: str) -> None:
    kernel = appending(varlen, append)
    text = emit_module(kernel, device="H200", name="best")
    ((found, *_),) = read_module(tmp_path / "best.py", text)
    assert found.problem == kernel.problem and found.launches == kernel.launches
    assert PAGES.max() < NUM_PAGES


@pytest.mark.parametrize("append", [Append(), ROTATING])
def test_it_checks_itself_when_it_is_run(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str], append: Append
) -> None:
    module = load(tmp_path, append=append)
    with computing(driver, appending(append=append).problem):
        assert module.run_paged_module(module._bound, module.__doc__) == 0
    assert "correct" in capsys.readouterr().out
