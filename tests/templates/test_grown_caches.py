"""Emitted modules of kernels that append to dense caches: run on the emulated card, for tensors of a stand-in
of PyTorch and for those of PyTorch itself."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.append import HALVES, Append
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module, emit_thin_module
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.evaluate import reference
from flashgen.tuner.shelf.module_text import read_module

from tests.gen.families.test_packed import SIMT
from tests.support.formatting import assert_ruff_is_content
from tests.support.modules import import_path
from tests.support.stand_in_driver import D, Driver, Tensor, host
from tests.templates.scored_kernels import LAUNCHED
from tests.templates.test_packed_torch import for_tensors

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

H200 = PRESETS["h200"]
BATCH, HEADS, KV_HEADS, ROWS, NEW, CACHED, ROOM = 2, 4, 2, 3, 4, 13, 24
ROTATING = Append(HALVES, 4)


def kernel_of(append: Append = ROTATING, **problem: Any) -> Kernel:
    usual = {"head_dim": D, "batch": BATCH, "num_q_heads": HEADS, "num_kv_heads": KV_HEADS}
    wanted = Problem(**{**usual, "seqlen_q": ROWS, "seqlen_k": 32, "append": append, **problem})
    return render(SIMT, wanted, H200)


def load(path: Path, kernel: Kernel) -> Any:
    (path / "best.py").write_text(emit_module(kernel, device="H200", name="best"))
    return import_path(path / "best.py")


@contextmanager
def emulated(driver: Driver, kernel: Kernel) -> Iterator[list[int]]:
    """The first of a call's launches runs the kernel, built for the host, on the arguments that the module
    made; whose addresses are told."""
    launched: list[int] = []
    dlopen = ctypes.cdll  # whatever CDLL is then

    @functools.cache
    def built(causal: bool) -> Any:
        build = SimDevice("h200", H200).toolchain().build(kernel.with_mask(causal))
        library = dlopen.LoadLibrary(str(build.artifact))
        library.emulation_configure(ctypes.byref(SimRunner(H200)._config()))
        return library

    def launch(address: int, causal: int) -> None:
        launched.append(address)
        if len(launched) % len(kernel.launches) == 1:
            assert built(bool(causal))[kernel.entry](ctypes.c_void_p(address), None) == 0

    callback = LAUNCHED(launch)
    driver.library.fake_on_launch(callback)
    try:
        yield launched
    finally:
        driver.library.fake_on_launch(None)


def drawn() -> list[np.ndarray]:
    """q, both caches, new keys and values, (batch, heads, rows, columns), and tables."""
    shapes = [(HEADS, ROWS), (KV_HEADS, ROOM), (KV_HEADS, ROOM), (KV_HEADS, NEW), (KV_HEADS, NEW)]
    arrays = [host(BATCH, *shape, D, seed=seed) for seed, shape in enumerate(shapes)]
    angles = np.linspace(0, 6, 2 * ROOM, dtype=np.float32).reshape(ROOM, 2)
    return [*arrays, np.cos(angles), np.sin(angles)]


def turned(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rows whose first four columns are rotated, in halves."""
    cos, sin = (each[positions] for each in drawn()[5:])
    first, second = rows[..., :2], rows[..., 2:4]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rows[..., 4:]], axis=-1)


def expected(causal: bool, cached: int = CACHED, **scoring: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a call comes to, and the caches then."""
    q, k, v, k_new, v_new, *_ = drawn()
    end = cached + NEW
    k[:, :, cached:end], v[:, :, cached:end] = turned(k_new, np.arange(cached, end)), v_new
    q = turned(q, cached + (np.arange(ROWS) if causal else np.zeros(ROWS, int)))
    scores = kernel_of(causal=causal, **scoring).problem.scores
    values = {each.name: 2.0 for each in scores.scalars}
    found = reference.attention(q, k[:, :, :end], v[:, :, :end], scale=D**-0.5, scores=scores, values=values)
    return found.o, [k, v]


def owned(driver: Driver, *arrays: np.ndarray) -> list[Tensor]:
    return [Tensor(driver.own(array)) for array in arrays]


def by_rows(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """With rows before heads, but tables."""
    return [np.ascontiguousarray(x.swapaxes(1, 2)) if x.ndim == 4 else x for x in arrays]


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_new_rows_are_written_and_attended_to(
    driver: Driver, tmp_path: Path, torch: Any, causal: bool
) -> None:
    kernel = kernel_of()
    module = load(tmp_path, kernel)
    *given, cos, sin = owned(driver, *drawn())
    told: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin, "causal": causal}
    wanted, filled = expected(causal)
    with emulated(driver, kernel) as launched:
        o = module.attention_append(*given, cache_seqlens=CACHED, **told)
        assert len(launched) == 2
    close(o.host, wanted)
    for found, cache in zip(given[1:3], filled, strict=True):
        close(found.host, cache)
    given = owned(driver, *by_rows(drawn()))
    with emulated(driver, kernel):
        out, lse = module.flash_attn_with_kvcache(
            *given, CACHED, causal=causal, rotary_interleaved=False, return_softmax_lse=True
        )
        close(out.host.swapaxes(1, 2), wanted)
        assert lse.shape == (BATCH, HEADS, ROWS)
        *given, cos, sin = owned(driver, *by_rows(drawn()))
        o = module.attention_append(*given, **told, layout="bshd")
    close(o.host.swapaxes(1, 2), expected(causal, ROOM - NEW)[0])


def test_scores_are_changed_and_nothing_may_be_new(driver: Driver, tmp_path: Path, torch: Any) -> None:
    scoring = Scoring(softcap=2.0)
    kernel = kernel_of(Append(), scoring=scoring)
    module = load(tmp_path, kernel)
    q, k, v, *_ = drawn()
    scores = kernel.problem.scores
    wanted = reference.attention(
        q, k[:, :, :7], v[:, :, :7], scale=D**-0.5, scores=scores, values={"softcap": 2.0}
    )
    with emulated(driver, kernel):
        o = module.attention_append(*owned(driver, q, k, v), cache_seqlens=7, softcap=2.0)
    close(o.host, wanted.o)


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"cache_seqlens": 21}, ValueError, "have 25 keys with the new ones, and k_cache has room for 24"),
        ({"cache_seqlens": 2.0}, TypeError, "cache_seqlens is a builtins.float; pass an int"),
        ({"v": None}, TypeError, "k= and v= are appended together"),
        ({"rotary_cos": None}, TypeError, "rotary_cos= is missing"),
        ({"k": np.zeros((BATCH, 3, NEW, D), np.float32)}, ValueError, r"must be \(2, 2, rows"),
    ],
)
def test_what_no_cache_takes(
    driver: Driver, tmp_path: Path, torch: Any, wrong: dict[str, Any], error: type[Exception], told: str
) -> None:
    module = load(tmp_path, kernel_of())
    *given, k, v, cos, sin = owned(driver, *drawn())
    usual: dict[str, Any] = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": CACHED}
    usual |= {name: Tensor(driver.own(x)) if isinstance(x, np.ndarray) else x for name, x in wrong.items()}
    with pytest.raises(error, match=told):
        module.attention_append(*given, **usual)
    assert not driver.launches()


def test_what_pages_alone_serve_is_told(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path, kernel_of())
    given = owned(driver, *by_rows(drawn()))
    lengths = Tensor(driver.own(np.full(BATCH, 5, np.int32)))
    for name in ("cache_seqlens", "cache_batch_idx", "block_table"):
        with pytest.raises(ValueError, match=f"{name}= is read on the card by kernels of pages"):
            module.flash_attn_with_kvcache(*given, **{name: lengths}, rotary_interleaved=False)
    with pytest.raises(ValueError, match="cache_seqlens= is missing"):
        module.flash_attn_with_kvcache(*given, rotary_interleaved=False)
    with pytest.raises(ValueError, match="cache_leftpad= is nothing"):
        module.flash_attn_with_kvcache(*given, 5, cache_leftpad=lengths, rotary_interleaved=False)
    *given, cos, sin = drawn()
    with pytest.raises(TypeError, match="those of numpy are copied to the card"):
        module.attention_append(*given, rotary_cos=cos, rotary_sin=sin)


def test_it_checks_itself_when_it_is_run(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = kernel_of()
    module = load(tmp_path, kernel)
    with emulated(driver, kernel):
        assert module.run_cache_module(module._bound, module.__doc__) == 0
    assert "correct" in capsys.readouterr().out


def test_modules_are_read_back_and_stand_alone(tmp_path: Path) -> None:
    kernel = kernel_of()
    text = emit_module(kernel, device="H200", name="best")
    ((found, *_),) = read_module(tmp_path / "best.py", text)
    assert found.problem == kernel.problem and found.launches == kernel.launches
    thin = emit_thin_module(kernel, device="H200")
    for name, written in (("best", text), ("thin", thin)):
        (tmp_path / f"{name}.py").write_text(written)
        assert_ruff_is_content(tmp_path / f"{name}.py")
    with pytest.raises(ValueError, match="writes to caches, as calls of others do not"):
        emit_many([Made(kernel, "H200", None)] * 2, name="both", command=())


def test_graphs_hold_what_writes_to_caches(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(causal=True)
    torch, module = for_tensors(kernel, library, tmp_path, monkeypatch)
    q, _, _, *new = map(torch.from_numpy, drawn())
    attend = module.attention_append

    def call(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
        o = attend(q, k_cache, v_cache, k, v, cache_seqlens=CACHED, rotary_cos=cos, rotary_sin=sin)
        return o, k_cache + 0

    wanted, filled = expected(True)
    with emulated(Driver(library), kernel):
        for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            caches = list(map(torch.from_numpy, drawn()[1:3]))
            o, keys = function(q, *caches, *new)
            close(o.numpy(), wanted)
            for found, cache in zip((*caches, keys), (*filled, filled[0]), strict=True):
                close(found.numpy(), cache)
        operator = module.register_torch()
        settings = (True, None, "bhsd", CACHED + NEW, [], [], *new, None)
        for name in (operator, f"{operator}_lse"):
            arrays = (q, *map(torch.from_numpy, drawn()[1:3]))
            torch.library.opcheck(getattr(torch.ops.flashgen, name), (*arrays, *settings))


@pytest.mark.thorough
def test_a_strict_type_checker_is_content(tmp_path: Path) -> None:
    mypy = shutil.which("mypy", path=str(Path(sys.executable).parent)) or shutil.which("mypy")
    if mypy is None:
        pytest.skip("mypy is not installed")
    text = emit_module(kernel_of(scoring=Scoring(softcap=2.0)), device="H200", name="best")
    (tmp_path / "best.py").write_text(text)
    command = [mypy, "--strict", "--no-error-summary", "best.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == ""
