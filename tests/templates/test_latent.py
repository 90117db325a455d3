"""Emitted modules of latent attention, without a GPU: the driver is the stand-in of `test_paged`."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.arguments import struct_of
from flashgen.gen.emit.module import emit_module, emit_thin_module
from flashgen.gen.kernel import Kernel
from flashgen.gen.problem import Problem
from flashgen.tuner.evaluate import reference
from flashgen.tuner.shelf.module_text import read_module

from tests.support.formatting import assert_ruff_is_content
from tests.support.modules import import_path
from tests.support.stand_in_driver import D, Driver, host
from tests.templates import test_paged
from tests.templates.scored_kernels import LAUNCHED, _read
from tests.templates.test_paged import BATCH, HEADS, K_LENGTHS, NUM_PAGES, PAGE_SIZE, ROWS, TABLE, close, used

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

DV = D - 8


def kernel_of() -> Kernel:
    return test_paged.kernel_of(latent=True, head_dim_v=DV)


@pytest.fixture
def module(tmp_path: Path) -> Any:
    (tmp_path / "best.py").write_text(emit_module(kernel_of(), device="H200", name="best"))
    return import_path(tmp_path / "best.py")


def cache() -> np.ndarray:
    """Of (pages, page_size, head_dim)."""
    return host(NUM_PAGES, PAGE_SIZE, D, seed=1)


def queries() -> np.ndarray:
    return host(BATCH, ROWS, HEADS, D)


def wanted(q: np.ndarray, causal: bool, scale: float = D**-0.5) -> tuple[np.ndarray, np.ndarray]:
    """What each sequence comes to by itself, and its log-sum-exp."""
    o, lse = np.zeros((BATCH, ROWS, HEADS, DV), np.float32), np.zeros((BATCH, HEADS, ROWS), np.float32)
    scores = replace(kernel_of().problem, causal=causal).scores
    for i, length in enumerate(K_LENGTHS):
        keys = cache()[TABLE[i, : -(-length // PAGE_SIZE)]].reshape(1, 1, -1, D)[:, :, :length]
        rows = q[i].swapaxes(0, 1)[None]
        found = reference.attention(rows, keys, keys[..., :DV], scale=scale, scores=scores)
        o[i], lse[i] = found.o[0].swapaxes(0, 1), found.lse[0]
    return o, lse


class Dense:
    """A card that computes latent attention of arrays without pages."""

    def __init__(self, driver: Driver, problem: Problem) -> None:
        self.problem, self.library = problem, driver.library
        self.callback = LAUNCHED(self.launch)

    def __enter__(self) -> None:
        self.library.fake_on_launch(self.callback)

    def __exit__(self, *raised: object) -> None:
        self.library.fake_on_launch(None)

    def launch(self, address: int, causal: int) -> None:
        struct = struct_of(self.problem)
        told = struct.unpack(ctypes.string_at(address, struct.num_bytes))

        def array(name: str, heads: str, rows: str, columns: int) -> np.ndarray:
            shape = (int(told["batch"]), int(told[heads]), int(told[rows]), columns)
            strides = (*(int(told[f"{name}_stride_{axis}"]) for axis in ("batch", "head", "row")), 1)
            return _read(int(told[name]), shape, strides, np.float32)

        k = array("k", "num_kv_heads", "seqlen_k", D)
        found = reference.attention(
            array("q", "num_q_heads", "seqlen_q", D),
            k,
            k[..., :DV],
            scale=told["scale"],
            scores=replace(self.problem, causal=bool(causal)).scores,
        )
        array("o", "num_q_heads", "seqlen_q", DV)[...] = found.o
        shape = found.lse.shape
        strides = (shape[1] * shape[2], shape[2], 1)
        _read(int(told["lse"]), shape, strides, np.float32)[...] = found.lse


@pytest.mark.parametrize("causal", [False, True])
def test_values_are_a_caches_first_columns(driver: Driver, module: Any, causal: bool) -> None:
    q = queries()
    with test_paged.computing(driver, kernel_of().problem) as card:
        o, lse = module.attention_latent(q, cache(), TABLE, used(), causal=causal, return_lse=True)
        four = module.attention_latent(q, cache()[:, :, None], TABLE, used(), causal=causal, scale=0.1)
    expected = wanted(q, causal)
    close(o, expected[0])
    close(lse, expected[1])
    close(four, wanted(q, causal, 0.1)[0])
    assert "v" not in card.told[0] and "v_stride_page" not in card.told[0]


def test_a_module_tells_what_it_takes(module: Any) -> None:
    assert "attention_latent(q, cache, page_table, seqused_k)" in module.__doc__
    assert "sdpa" not in module.__doc__ and "v_cache" not in module.__doc__
    assert set(module.__all__) >= {"attention_latent", "explain", "register_torch", "use"}
    assert not hasattr(module, "attention_paged")
    assert module.explain(queries(), cache()).tuned.name == kernel_of().problem.name


def test_wrong_arrays_are_refused(driver: Driver, module: Any) -> None:
    with pytest.raises(ValueError, match="page_table has page 99"):
        module.attention_latent(queries(), cache(), np.full((BATCH, 6), 99, np.int32), used())
    with pytest.raises(ValueError, match="head dim"):
        module.attention_latent(queries()[..., :8], cache(), TABLE, used())
    with pytest.raises(ValueError, match="pages of"):
        module.attention_latent(queries(), cache()[:, :4], TABLE, used())


def test_keys_may_lie_one_behind_the_other(driver: Driver, tmp_path: Path) -> None:
    """Without pages."""
    problem = replace(kernel_of().problem, page_size=0)
    kernel = replace(kernel_of(), problem=problem, entry=f"attention_{problem.stem}")
    (tmp_path / "best.py").write_text(emit_module(kernel, device="H200", name="best"))
    module = import_path(tmp_path / "best.py")
    q, keys = queries(), host(BATCH, 37, D, seed=1)
    assert "attention_latent(q, cache)" in module.__doc__
    assert "attention" not in module.__all__ and "sdpa" not in module.__all__
    assert module.explain(q, keys).tuned.name == problem.name
    with Dense(driver, problem):
        o, lse = module.attention_latent(q, keys, causal=True, return_lse=True)
    scores = replace(problem, causal=True).scores
    k, rows = keys[:, None], q.swapaxes(1, 2)
    found = reference.attention(rows, k, k[..., :DV], scale=D**-0.5, scores=scores)
    close(o, found.o.swapaxes(1, 2))
    close(lse, found.lse)


def test_it_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    kernel = kernel_of()
    for text in (emit_module(kernel, device="H200", name="best"), emit_thin_module(kernel, device="H200")):
        (tmp_path / "best.py").write_text(text)
        assert_ruff_is_content(tmp_path / "best.py")
    ((read, device, _),) = read_module(tmp_path / "best.py", emit_module(kernel, device="H200", name="best"))
    assert read.problem == kernel.problem and device == "H200"
