"""Emitted modules of kernels of e4m3 keys: what they pass, run on the emulated card."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.evaluate import reference

from tests.support.modules import import_path
from tests.support.stand_in_driver import Driver
from tests.templates.scored_kernels import LAUNCHED
from tests.templates.test_packed_torch import for_tensors
from tests.templates.test_paged import kernel_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

H200 = PRESETS["h200"]
CACHED = Problem(dtype="bf16", kv_dtype="e4m3", head_dim=32, num_q_heads=4, num_kv_heads=2, batch=2)
CACHED = replace(CACHED, seqlen_q=3, seqlen_k=40)
VARIANT = Mma(br=16, bc=32, rows_per_warp=16, pack_heads=True)


@contextmanager
def emulated(driver: Driver, kernel: Kernel) -> Iterator[None]:
    """Launches run the kernel itself, built for the host, on the arguments that the module made."""
    build = SimDevice("h200", H200).toolchain().build(kernel)
    library = ctypes.cdll.LoadLibrary(str(build.artifact))  # whatever CDLL is here
    library.emulation_configure(ctypes.byref(SimRunner(H200)._config()))

    def launch(address: int, causal: int) -> None:
        assert library[kernel.entry](ctypes.c_void_p(address), None) == 0

    callback = LAUNCHED(launch)
    driver.library.fake_on_launch(callback)
    try:
        yield
    finally:
        driver.library.fake_on_launch(None)


def load(path: Path, kernel: Kernel) -> Any:
    (path / "best.py").write_text(emit_module(kernel, device="H200", name="best"))
    return import_path(path / "best.py")


def drawn(problem: Problem) -> tuple[np.ndarray, ...]:
    """q, k, v and scales of both."""
    rng = np.random.default_rng(0)
    q, k, v = reference.random_inputs(
        "normal",
        (problem.batch, problem.num_q_heads, problem.seqlen_q, 32),
        (problem.batch, problem.num_kv_heads, problem.seqlen_k, 32),
        scale=1.0,
        rng=rng,
        dtype="bf16",
        key_dtype="e4m3",
        one_sign=True,
    )
    scales = rng.uniform(0.5, 2.0, (2, problem.batch, problem.num_kv_heads)).astype(np.float32)
    return q, k, v, scales[0], scales[1]


def expected(problem: Problem, arrays: tuple[np.ndarray, ...], **values: Any) -> np.ndarray:
    q, k, v, k_scale, v_scale = arrays
    k, v = (x.astype(np.float64) * s[..., None, None] for x, s in ((k, k_scale), (v, v_scale)))
    return reference.attention(q, k, v, scale=32**-0.5, scores=problem.scores, values=values).o


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == ml_dtypes.bfloat16
    assert np.abs(found.astype(np.float64) - wanted).max() < 2e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(softcap=20.0)], ids=["plain", "soft cap"])
def test_attention_takes_scales_of_each_head(tmp_path: Path, driver: Driver, scoring: Scoring) -> None:
    problem = replace(CACHED, scoring=scoring)
    kernel = render(VARIANT, problem, H200)
    module, arrays = load(tmp_path, kernel), drawn(problem)
    q, k, v, k_scale, v_scale = arrays
    assert module.__all__ and not hasattr(module, "sdpa")
    with emulated(driver, kernel):
        close(
            module.attention(q, k, v, k_scale=k_scale, v_scale=v_scale),
            expected(problem, arrays, softcap=20.0),
        )
        same = (q, k, v, np.broadcast_to(k_scale[:1], (2, 2)), np.full((2, 2), 3.0, np.float32))
        o = module.attention(q, k, v, k_scale=k_scale[0], v_scale=np.full(1, 3.0, np.float32))
        close(o, expected(problem, same, softcap=20.0))


def test_scales_stand_beside_pages(tmp_path: Path, driver: Driver) -> None:
    problem = replace(CACHED, page_size=8)
    kernel = render(VARIANT, problem, H200)
    module, arrays = load(tmp_path, kernel), drawn(problem)
    q, k, v, k_scale, v_scale = arrays
    table = np.random.default_rng(1).permutation(10).astype(np.int32).reshape(2, 5)
    caches = [np.zeros((10, 8, 2, 32), k.dtype) for _ in range(2)]
    for cache, array in zip(caches, (k, v), strict=True):
        cache[table.reshape(-1)] = array.swapaxes(1, 2).reshape(10, 8, 2, 32)
    used = np.full(2, 40, np.int32)
    with emulated(driver, kernel):
        o = module.attention_paged(q, *caches, table, used, k_scale=k_scale, v_scale=v_scale)
        close(o, expected(problem, arrays))
        told = {"cache_seqlens": used, "block_table": table, "k_descale": k_scale, "v_descale": v_scale}
        o = module.flash_attn_with_kvcache(q.swapaxes(1, 2), *caches, **told)
        close(o.swapaxes(1, 2), expected(problem, arrays))
    with pytest.raises(TypeError, match="of which no scales are made: pass k_descale and v_descale"):
        module.flash_attn_with_kvcache(q.swapaxes(1, 2), *caches, **{**told, "v_descale": None})
    with pytest.raises(TypeError, match="q_descale= is of queries of eight bits, which"):
        module.flash_attn_with_kvcache(q.swapaxes(1, 2), *caches, **told, q_descale=k_scale)


def test_scales_stand_beside_packed_sequences(tmp_path: Path, driver: Driver) -> None:
    problem = replace(CACHED, varlen="same")
    kernel = render(VARIANT, problem, H200)
    module, arrays = load(tmp_path, kernel), drawn(problem)
    q, k, v, k_scale, v_scale = arrays
    packed = [x.swapaxes(1, 2).reshape(-1, x.shape[1], 32) for x in (q, k, v)]
    starts = [np.array([0, n, 2 * n], np.int32) for n in (3, 40)]
    with emulated(driver, kernel):
        o = module.attention_varlen(
            *packed, *starts, max_seqlen_q=3, max_seqlen_k=40, k_scale=k_scale, v_scale=v_scale
        )
        found = module.flash_attn_varlen_func(*packed, *starts, 3, 40, k_descale=k_scale, v_descale=v_scale)
    for each in (o, found):
        close(each.reshape(2, 3, 4, 32).swapaxes(1, 2), expected(problem, arrays))


def test_tensors_without_scales_are_what_is_meant(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = render(VARIANT, replace(CACHED, page_size=8, kv_dtype="", dtype="f16"), H200)
    torch, module = for_tensors(kernel, library, tmp_path, monkeypatch)
    q = torch.zeros(1, dtype=torch.float16)
    assert module._bound._scales_of_flash(q, (None, None, None)) == {}
    with pytest.raises(TypeError, match="k_descale= is of keys and values of eight bits, which"):
        module._bound._scales_of_flash(q, (None, q, None))
    kernel = render(VARIANT, replace(CACHED, page_size=8), H200)
    torch, module = for_tensors(kernel, library, tmp_path, monkeypatch)
    told = module._bound._scales_of_flash(q, (None, None, q))
    assert told["k_scale"].tolist() == [1.0] and told["v_scale"] is q


def test_queries_of_eight_bits_have_one_scale_for_all_heads(tmp_path: Path, driver: Driver) -> None:
    module = load(tmp_path, kernel_of("same", dtype="e4m3"))
    assert module._bound._scales_of_flash(None, (0.5, None, 2)) == {"scales": (0.5, 1.0, 2.0)}
    with pytest.raises(TypeError, match=r"k_descale is a numpy.ndarray, and .* takes one number"):
        module._bound._scales_of_flash(None, (0.5, np.ones((2, 2), np.float32), None))


def test_what_does_not_suit_is_told(tmp_path: Path, driver: Driver) -> None:
    kernel = render(VARIANT, CACHED, H200)
    module, (q, k, v, k_scale, v_scale) = load(tmp_path, kernel), drawn(CACHED)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    with pytest.raises(TypeError, match="v_scale= is missing"):
        module.attention(q, k, v, k_scale=k_scale)
    with pytest.raises(TypeError, match="k is bfloat16, not float8_e4m3fn"):
        module.attention(q, q[:, :2], v, **scales)
    with pytest.raises(TypeError, match="q is float8_e4m3fn, not bfloat16"):
        module.attention(k, k, v, **scales)
    with pytest.raises(ValueError, match=r"k_scale has the shape \(2, 3\)"):
        module.attention(q, k, v, k_scale=np.ones((2, 3), np.float32), v_scale=v_scale)
    with pytest.raises(TypeError, match="v_scale is float64"):
        module.attention(q, k, v, k_scale=k_scale, v_scale=v_scale.astype(np.float64))
    assert "--kv-dtype e4m3" in module.KERNELS[0].command
    with pytest.raises(ValueError, match="takes scales of keys"):
        emit_many([Made(kernel, "H200"), Made(kernel, "H200")], name="many", command=[])
