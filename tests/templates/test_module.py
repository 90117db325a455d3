"""The emitted module without a GPU: every kind of array, stream and error.

The CUDA driver, PyCUDA, torch and CuPy are stand-ins; `fake_driver.cpp` runs plain attention on host memory.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.launch import Launch as GridOf
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.dtypes import numpy_dtype

from tests.support.entered import functions_entered
from tests.support.stand_in_driver import (
    DRIVER_TYPES,
    OTHER_DEVICE,
    PRIMARY,
    ROUNDING,
    Array,
    D,
    Driver,
    Jax,
    Tensor,
    Wide,
    close,
    expected,
    host,
    launch_of,
    load,
    load_kernel,
    make_kernel,
    qkv,
    run,
)
from tests.templates.scored_kernels import LAUNCHED

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def module(driver: Driver, tmp_path: Path) -> Any:
    return load(tmp_path)


# ---- kinds of arrays ---------------------------------------------------------------------------------------


def test_torch_tensors_run_where_they_lie_and_come_back_as_tensors(
    module: Any, driver: Driver, torch: Any
) -> None:
    q, k, v = qkv(driver, (2, 4, 9, D), (2, 2, 7, D))
    torch.current = 0x5000
    o, lse = module.attention(Tensor(q), Tensor(k), Tensor(v), return_lse=True)
    wanted = expected(q, k, v)
    assert isinstance(o, Tensor) and isinstance(lse, Tensor)
    close(o.host, wanted.o)
    close(lse.host, wanted.lse)
    (launch,) = driver.launches()
    args = launch.args
    assert (launch.stream, launch.context, launch.causal) == (0x5000, PRIMARY, 0)
    assert (args.q, args.k, args.v) == (q.ctypes.data, k.ctypes.data, v.ctypes.data)
    assert (args.o, args.lse) == (o.data_ptr(), lse.data_ptr())
    assert list(args.q_strides) == [4 * 9 * D, 9 * D, D]
    assert list(args.k_strides) == list(args.v_strides) == [2 * 7 * D, 7 * D, D]
    sizes = (args.batch, args.num_q_heads, args.num_kv_heads, args.seqlen_q, args.seqlen_k)
    assert sizes == (2, 4, 2, 9, 7)
    assert args.scale == pytest.approx(1 / math.sqrt(D))
    assert torch.allocated_on is None
    assert driver.library.fake_kernel_name() == b"attention_f32_d32_kernel"
    assert driver.library.fake_context_depth() == 0


def test_cupy_arrays_use_their_current_stream(module: Any, driver: Driver, cupy: Any) -> None:
    q, k, v = qkv(driver, (1, 2, 5, D), (1, 2, 5, D))
    cupy.current = 0x7000
    o, lse = module.attention(*(cupy.ndarray(x, 0x7000) for x in (q, k, v)), return_lse=True)
    assert isinstance(o, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    close(o.host, expected(q, k, v).o)
    close(lse.host, expected(q, k, v).lse)
    assert driver.launches()[0].stream == 0x7000
    assert driver.library.fake_waited(0) == -1


def test_pycuda_arrays_use_the_default_stream_and_their_allocator(module: Any, driver: Driver) -> None:
    GPUArray = sys.modules["pycuda.gpuarray"].GPUArray  # type: ignore[attr-defined]
    arrays = []
    for x in qkv(driver, (2, 2, 6, D), (2, 1, 8, D)):
        arrays.append(GPUArray(x.shape, np.float32, "pool", x.strides))
        arrays[-1].host[...] = x
    o = module.attention(*arrays)
    assert isinstance(o, GPUArray) and o.allocator == "pool"
    close(o.host, expected(*(a.host for a in arrays)).o)
    assert driver.launches()[0].stream == 0


def test_arrays_of_an_unknown_library_need_out(module: Any, driver: Driver) -> None:
    q, k, v = (Array(x) for x in qkv(driver, (1, 2, 5, D), (1, 2, 5, D)))
    with pytest.raises(TypeError, match="pass out="):
        module.attention(q, k, v)
    out = Array(driver.own(host(1, 2, 5, D)))
    assert module.attention(q, k, v, out=out) is out
    close(out.host, expected(q.host, k.host, v.host).o)


@pytest.mark.parametrize("through", ["torch", "cupy"])
def test_dlpack_goes_through_torch_or_cupy_and_back(
    module: Any, driver: Driver, through: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = request.getfixturevalue(through)
    kind = Tensor if through == "torch" else library.ndarray
    monkeypatch.setattr(library, "from_dlpack", lambda array: kind(array.host), raising=False)
    arrays = qkv(driver, (2, 4, 33, D), (2, 2, 20, D))
    o, lse = module.attention(*(Jax(x) for x in arrays), causal=True, scale=0.3, return_lse=True)
    wanted = expected(*arrays, causal=True, scale=0.3)
    assert isinstance(o, Jax) and isinstance(lse, Jax)
    close(o.host, wanted.o)
    close(lse.host, wanted.lse)
    assert isinstance(module.attention(*(Jax(x) for x in arrays)), Jax)
    with pytest.raises(ValueError, match=r"stream is taken with torch.*q is a .*\.Jax"):
        module.attention(*(Jax(x) for x in arrays), stream=7)


def test_dlpack_without_a_library_to_read_it(
    module: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TypeError, match=r"Jax, which is read through torch or CuPy: install"):
        module.attention(*(Jax(x) for x in good()))


def test_data_of_another_stream_is_waited_for(module: Any, driver: Driver) -> None:
    q, k, v = qkv(driver, (1, 2, 5, D), (1, 2, 5, D))
    out = Array(driver.own(host(1, 2, 5, D)))
    module.attention(Array(q, 1), Array(k, 0x900), Array(v, 1), out=out)
    assert driver.library.fake_waited(0) == 0x900 and driver.library.fake_waited(1) == -1
    module.attention(Array(q, 1), Array(k, 0x900), Array(v, 1), out=out, stream=0x800)
    assert driver.library.fake_waited(1) == -1  # with a stream of the caller's, order is the caller's


def test_numpy_goes_through_device_memory_and_leaves_none_behind(module: Any, driver: Driver) -> None:
    q, k, v = host(2, 4, 9, D), host(2, 2, 7, D, seed=1), host(2, 2, 7, D, seed=2)
    before = driver.library.fake_num_allocated()
    o, lse = module.attention(q, k, v, causal=True, scale=-0.3, return_lse=True)
    wanted = expected(q, k, v, causal=True, scale=-0.3)
    close(o, wanted.o)
    assert np.all(np.isneginf(lse[:, :, :2])) and np.all(o[:, :, :2] == 0)
    close(lse[:, :, 2:], wanted.lse[:, :, 2:])
    assert driver.library.fake_num_allocated() == before
    assert driver.library.fake_context_depth() == 0
    assert driver.launches()[0].context == PRIMARY


def test_numpy_of_any_layout_and_into_out(module: Any, driver: Driver) -> None:
    packed = host(2, 6, 3, 4, D)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    o = module.attention(q, k, v)
    assert o.strides == np.empty_like(q).strides
    close(o, expected(q, k, v).o)
    out = np.empty((2, 4, 6, 2 * D), np.float32)[..., ::2]
    assert module.attention(q, k, v, out=out, stream=SimpleNamespace(handle=0x60)) is out
    close(out, expected(q, k, v).o)
    assert driver.launches()[1].stream == 0x60


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_numpy_of_other_machines_bytes_is_refused(module: Any, driver: Driver, name: str) -> None:
    before = driver.library.fake_num_allocated()
    arrays = {each: host(2, 4, 9, D) for each in ("q", "k", "v", "out")}
    swapped = arrays[name].dtype.newbyteorder()
    arrays[name] = arrays[name].astype(swapped)
    with pytest.raises(TypeError, match=rf"is {swapped.str}, whose bytes .* pass x\.astype\('float32'\)"):
        module.attention(**arrays)
    assert driver.library.fake_num_allocated() == before


def test_numpy_memory_is_freed_when_the_gpu_is_full(
    module: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = driver.library.fake_num_allocated()
    q = host(1, 1, 4, D)
    k = np.lib.stride_tricks.as_strided(q, (1, 1, 2**34, D), (0, 0, 0, 4))
    monkeypatch.setattr(np, "ascontiguousarray", lambda array: array)
    with pytest.raises(RuntimeError, match=r"allocating \d+ bytes.*OUT_OF_MEMORY"):
        module.attention(q, k, k)
    assert driver.library.fake_num_allocated() == before


# ---- layouts -----------------------------------------------------------------------------------------------


def as_strides(array: np.ndarray) -> list[int]:
    return [s // 4 for s in array.strides[:3]]


@pytest.mark.parametrize("kind", ["torch", "cupy", "pycuda"])
def test_output_takes_the_layout_of_q(module: Any, driver: Driver, torch: Any, cupy: Any, kind: str) -> None:
    wrap: Any = {"torch": Tensor, "cupy": cupy.ndarray}.get(kind)
    if kind == "pycuda":
        GPUArray = sys.modules["pycuda.gpuarray"].GPUArray  # type: ignore[attr-defined]

        def wrap(x: np.ndarray) -> Any:
            array = GPUArray((1,), np.float32, None, (4,))
            array.host = x
            return array

    packed = driver.own(host(2, 6, 3, 4, D))
    rows_first = [packed[:, :, i] for i in range(3)]  # (batch, seqlen, heads, head_dim)
    heads_first = [x.transpose(0, 2, 1, 3) for x in rows_first]
    wanted = expected(*heads_first).o
    o = module.attention(*(wrap(x) for x in heads_first))
    assert as_strides(o.host) == [6 * 4 * D, D, 4 * D]
    close(o.host, wanted)
    o = module.attention(*(wrap(x) for x in rows_first), layout="bshd")
    assert o.host.shape == (2, 6, 4, D) and as_strides(o.host) == [6 * 4 * D, 4 * D, D]
    close(o.host.transpose(0, 2, 1, 3), wanted)
    first, second = driver.launches()
    for name in "qkvo":
        assert list(getattr(first.args, f"{name}_strides")) == list(getattr(second.args, f"{name}_strides"))
    assert list(first.args.q_strides) == [6 * 3 * 4 * D, D, 3 * 4 * D]
    assert list(first.args.o_strides) == [6 * 4 * D, D, 4 * D]


def test_out_is_honoured_whatever_its_strides(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = qkv(driver, (2, 4, 6, D), (2, 4, 6, D))
    memory = driver.own(np.full((2, 6, 3, 4, D), 7, np.float32))
    if memory.ctypes.data % 16:
        pytest.skip("numpy returned memory aligned to less than 16 bytes")
    out = Tensor(memory[:, :, 0].transpose(0, 2, 1, 3))
    assert module.attention(Tensor(q), Tensor(k), Tensor(v), out=out) is out
    close(out.host, expected(q, k, v).o)
    assert np.all(memory[:, :, 1:] == 7)


def test_a_broadcast_batch_is_read_in_place(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = qkv(driver, (1, 4, 6, D), (1, 2, 5, D))
    many = [np.broadcast_to(x, (3, *x.shape[1:])) for x in (q, k, v)]
    o = module.attention(*(Tensor(x) for x in many))
    close(o.host, expected(*many).o)
    args = driver.launches()[0].args
    assert (args.q_strides[0], args.k_strides[0], args.o_strides[0]) == (0, 0, 4 * 6 * D)


def test_a_stride_never_stepped_may_be_anything(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = qkv(driver, (1, 2, 5, D), (1, 2, 5, D))
    odd = np.lib.stride_tricks.as_strided(q, q.shape, (4 * 777, *q.strides[1:]))
    close(module.attention(Tensor(odd), Tensor(k), Tensor(v)).host, expected(q, k, v).o)
    assert driver.launches()[0].args.q_strides[0] == 0


def test_offsets_beyond_32_bits_are_packed_whole(module: Any, driver: Driver, torch: Any) -> None:
    driver.library.fake_reset(0, 9, 0, 232448)  # logged, not run
    q = driver.own(host(1, 1, 4, D))
    far = np.lib.stride_tricks.as_strided(q, (2, 1, 4, D), (2**36, 4 * D, 4 * D, 4))
    module.attention(Tensor(far), Tensor(far), Tensor(far))
    assert driver.launches()[0].args.q_strides[0] == 2**34


# ---- masks, scale, empty arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize("tuned", [False, True])
def test_either_mask_whichever_was_tuned(tuned: bool, driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path, causal=tuned)
    q, k, v = qkv(driver, (1, 2, 9, D), (1, 2, 7, D))
    tensors = [Tensor(x) for x in (q, k, v)]
    for causal, mask in ((None, tuned), (False, False), (True, True)):
        close(module.attention(*tensors, causal=causal).host, expected(q, k, v, causal=mask).o)
    assert [launch.causal for launch in driver.launches()] == [tuned, False, True]
    assert len(driver.compiled) == 2  # once per mask
    masks = {option for each in driver.compiled for option in each["options"] if option.startswith("-D")}
    assert masks == {"-DFLASHGEN_CAUSAL=0", "-DFLASHGEN_CAUSAL=1"}
    for each in driver.compiled:
        assert {"-std=c++17", "-O3", "-ftz=true"} <= {*each["options"]}
        assert (each["arch"], each["source"]) == ("sm_90", module.SOURCE)


@pytest.mark.parametrize("scale", [0.0, -2.5, 0.125, 3])
def test_any_finite_scale(module: Any, driver: Driver, torch: Any, scale: float) -> None:
    q, k, v = qkv(driver, (1, 2, 5, D), (1, 2, 5, D))
    close(
        module.attention(*(Tensor(x) for x in (q, k, v)), scale=scale).host, expected(q, k, v, scale=scale).o
    )


@pytest.mark.parametrize("shape", [(0, 2, 5, D), (2, 0, 5, D), (2, 2, 0, D)])
def test_without_rows_nothing_is_launched(module: Any, driver: Driver, torch: Any, shape: Any) -> None:
    kv_shape = (shape[0], shape[1], 3, D)
    q, k, v = (Tensor(np.empty(s, np.float32)) for s in (shape, kv_shape, kv_shape))
    o, lse = module.attention(q, k, v, return_lse=True)
    assert o.shape == shape and lse.shape == shape[:3] and not driver.launches()
    assert module.attention(*(x.host for x in (q, k, v))).shape == shape


def test_without_keys_the_output_is_zero(module: Any, driver: Driver, torch: Any) -> None:
    q = driver.own(host(1, 2, 5, D))
    none = np.empty((1, 2, 0, D), np.float32)
    o, lse = module.attention(Tensor(q), Tensor(none), Tensor(none), return_lse=True)
    assert np.all(o.host == 0) and np.all(np.isneginf(lse.host))
    o, lse = module.attention(q, none, none, return_lse=True)
    assert np.all(o == 0) and np.all(np.isneginf(lse))


# ---- launches, streams, contexts, threads ------------------------------------------------------------------


@pytest.mark.parametrize("step", ["4.2.3", "4.2.10"])
def test_blocks_follow_the_family(step: str, driver: Driver, tmp_path: Path, torch: Any) -> None:
    variant = steps(D)[step]
    module = load(tmp_path, variant)
    q, k, v = qkv(driver, (2, 3, 300, D), (2, 3, 40, D))
    module.attention(Tensor(q), Tensor(k), Tensor(v))
    launch = driver.launches()[0]
    tiles = 1 if step == "4.2.3" else -(-300 // variant.br)
    assert launch.blocks == 2 * 3 * tiles
    assert launch.threads == variant.threads()
    assert (
        launch.smem == launch_of(module).smem_bytes == variant.smem_bytes(Problem(head_dim=D), preset("h200"))
    )


def test_streams_of_every_library(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = qkv(driver, (1, 2, 5, D), (1, 2, 5, D))
    tensors = [Tensor(x) for x in (q, k, v)]
    protocol = type("Stream", (), {"__cuda_stream__": lambda self: (0, 0x64)})()
    streams = (
        (0x61, 0x61),
        (SimpleNamespace(cuda_stream=0x62), 0x62),
        (SimpleNamespace(ptr=0x63), 0x63),
        (SimpleNamespace(handle=0x65), 0x65),
        (protocol, 0x64),
        (1, 1),
    )
    for stream, handle in streams:
        module.attention(*tensors, stream=stream)
        assert driver.launches()[-1].stream == handle
        # torch's allocator must hand out memory in the order of the stream that writes it.
        assert torch.allocated_on == (0 if handle == 1 else handle)
    with pytest.raises(TypeError, match=r"stream is a builtins\.str"):
        module.attention(*tensors, stream="default")


def test_cupy_allocates_on_the_stream_of_the_launch(module: Any, driver: Driver, cupy: Any) -> None:
    q, k, v = qkv(driver, (1, 2, 5, D), (1, 2, 5, D))
    arrays = [cupy.ndarray(x, 1) for x in (q, k, v)]
    module.attention(*arrays)
    assert cupy.allocated_on is None
    module.attention(*arrays, stream=0x90)
    assert cupy.allocated_on == 0x90
    assert [launch.stream for launch in driver.launches()] == [1, 0x90]


@pytest.mark.parametrize(
    ("current", "owner", "used"),
    [
        (None, PRIMARY, PRIMARY),  # none current: that of the arrays
        (PRIMARY, PRIMARY, PRIMARY),
        (OTHER_DEVICE, PRIMARY, PRIMARY),  # another device's is current
        (PRIMARY, 0xC000, 0xC000),  # the arrays live in a context that PyCUDA made
        (0xC000, 0, 0xC000),  # memory of a pool: whichever of the device is current
        (None, 0, PRIMARY),
        (OTHER_DEVICE, 0, PRIMARY),
    ],
)
def test_runs_in_the_context_of_the_arrays_and_restores_the_callers(
    module: Any, driver: Driver, current: int | None, owner: int, used: int
) -> None:
    arrays = [driver.own(host(1, 2, 5, D, seed=i), 0, owner) for i in range(4)]
    if current is not None:
        driver.library.fake_push(current)
    module.attention(*(Array(x) for x in arrays[:3]), out=Array(arrays[3]))
    assert driver.launches()[0].context == used
    now = ctypes.c_int64()
    driver.library.cuCtxGetCurrent(ctypes.byref(now))
    assert now.value == (current or 0)
    assert driver.library.fake_context_depth() == (current is not None)


def test_the_primary_context_is_retained_once(module: Any, driver: Driver) -> None:
    for _ in range(3):
        module.attention(host(1, 2, 5, D), host(1, 2, 5, D), host(1, 2, 5, D))
    assert driver.library.fake_calls(b"cuDevicePrimaryCtxRetain") == 1


def test_threads_compile_once_and_do_not_disturb_each_other(module: Any, driver: Driver, torch: Any) -> None:
    results: list[tuple[np.ndarray, np.ndarray]] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        arrays = [driver.own(host(1, 2, 20 + seed, D, seed=10 * seed + i)) for i in range(3)]
        start.wait()
        for _ in range(20):
            o = module.attention(*(Tensor(x) for x in arrays), stream=0x100 + seed)
            results.append((o.host, expected(*arrays).o))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80 and len(driver.compiled) == 1
    for actual, wanted in results:
        close(actual, wanted)
    for launch in driver.launches():
        assert launch.stream == 0x100 + launch.args.seqlen_q - 20


@pytest.mark.parametrize("maps", [False, True])
def test_calls_at_once_write_arguments_of_their_own(
    maps: bool, driver: Driver, tmp_path: Path, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the same shapes on the same stream, begun and ended while another is about to launch."""
    half = mapped(driver, tmp_path) if maps else emitted(driver, tmp_path)
    module, cases = half.module, [half.arrays(), [driver.own(-x) for x in half.arrays()]]
    first, second = ([Tensor(x) for x in case] for case in cases)
    module.attention(*first)
    enter, between = module._push_context, []

    def interrupted(*arguments: Any) -> bool:
        if not between:
            between.append(None)
            between[0] = module.attention(*second, scale=0.7)
        return enter(*arguments)

    monkeypatch.setattr(module, "_push_context", interrupted)
    half.check(module.attention(*first, scale=0.2).host, *cases[0], scale=0.2)
    half.check(between[0].host, *cases[1], scale=0.7)
    addresses = [tensors[0].data_ptr() for tensors in (first, second, first)]
    assert [launch.args.q for launch in driver.launches()] == addresses


def test_a_scale_is_for_one_call(module: Any, driver: Driver, torch: Any) -> None:
    tensors = [Tensor(x) for x in qkv(driver, (1, 2, 5, D), (1, 2, 5, D))]
    scales = (None, 0.3, 0.3, None, -1, 0.3)
    for scale in scales:
        module.attention(*tensors, scale=scale)
    packed = [launch.args.scale for launch in driver.launches()]
    assert packed == pytest.approx([D**-0.5 if scale is None else scale for scale in scales])


def test_launches_are_kept_for_so_many_streams(module: Any, driver: Driver, torch: Any) -> None:
    tensors = [Tensor(x) for x in qkv(driver, (1, 2, 5, D), (1, 2, 5, D))]
    for stream in range(2, 3 * module._MOST_STREAMS):
        module.attention(*tensors, stream=stream)
    assert [launch.stream for launch in driver.launches()] == list(range(2, 3 * module._MOST_STREAMS))
    arrays = [part for x in tensors for part in (x.dtype, x.shape, None, x.device)]
    plans = module._bound._tensors.plan
    plan = plans(torch, False, "bhsd", None, *arrays)
    assert plans.cache_info().hits and 0 < len(plan.idle) <= module._MOST_STREAMS + 1


@pytest.mark.parametrize("current", [None, PRIMARY, OTHER_DEVICE, 0xC000])
def test_tensors_run_in_the_primary_context(
    module: Any, driver: Driver, torch: Any, current: int | None
) -> None:
    """Whichever is current, and was when it ran before; only elsewhere is a pointer asked for its own."""
    tensors = [Tensor(x) for x in qkv(driver, (1, 2, 5, D), (1, 2, 5, D))]
    module.attention(*tensors)
    for now in (current, PRIMARY):
        if now is not None:
            driver.library.fake_push(now)
        asked = driver.library.fake_calls(b"cuPointerGetAttribute")
        module.attention(*tensors)
        asked = driver.library.fake_calls(b"cuPointerGetAttribute") - asked
        assert (driver.launches()[-1].context, asked) == (PRIMARY, int(now != PRIMARY))
    assert driver.library.fake_context_depth() == 1 + (current is not None)


def test_a_call_costs_little_beyond_reading_the_arrays(module: Any, driver: Driver, torch: Any) -> None:
    """About 10 us on an idle core of these days; the bound leaves room for a slow and busy one."""
    driver.library.fake_reset(0, 9, 0, 232448)
    q, k, v = qkv(driver, (2, 4, 64, D), (2, 4, 64, D))
    tensors, out = [Tensor(x) for x in (q, k, v)], Tensor(driver.own(host(2, 4, 64, D)))
    best = math.inf
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(50):
            module.attention(*tensors, out=out)
        best = min(best, (time.perf_counter() - begin) / 50)
    assert best < 150e-6


@pytest.mark.parametrize("kind", ["attention", "out", "sdpa"])
def test_a_call_like_the_last_enters_few_functions(
    module: Any, driver: Driver, torch: Any, kind: str
) -> None:
    """What a call costs its caller is mostly how many functions it enters: these, on every machine."""
    torch.grad = False
    driver.library.fake_push(PRIMARY)  # as torch leaves it
    tensors = [Tensor(x) for x in qkv(driver, (1, 2, 5, D), (1, 2, 5, D))]
    out = {"out": Tensor(driver.own(host(1, 2, 5, D)))} if kind == "out" else {}
    offered = module.sdpa if kind == "sdpa" else module.attention
    offered(*tensors, **out)
    entered = functions_entered(lambda: offered(*tensors, **out), (module.__file__,))
    first = ["sdpa", "_torch_of", "serve"] if kind == "sdpa" else ["attention", "attend"]
    assert entered == [*first, "_run", "_current_handle", "_launch"]
    assert len(driver.launches()) == 2


# ---- the drop-in for torch's -------------------------------------------------------------------------------


def test_the_drop_in_serves_what_it_can(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = qkv(driver, (2, 4, 5, D), (2, 2, 9, D))
    torch.current = 0x5000
    o = module.sdpa(Tensor(q), Tensor(k), Tensor(v), None, 0.0, scale=0.3, enable_gqa=True)
    close(o.host, expected(q, k, v, scale=0.3).o)
    # torch aligns a causal mask top-left: the later keys are seen by no row.
    o = module.sdpa(Tensor(q), Tensor(k), Tensor(v), is_causal=True, enable_gqa=True)
    close(o.host, expected(q, k[:, :, :5], v[:, :, :5], causal=True).o)
    first, second = driver.launches()
    assert (first.causal, first.args.seqlen_k, first.stream) == (0, 9, 0x5000)
    assert (second.causal, second.args.seqlen_k, second.args.k) == (1, 5, k.ctypes.data)
    assert list(second.args.k_strides) == [2 * 9 * D, 9 * D, D]


def test_the_drop_in_passes_the_rest_to_torch(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = (Tensor(x) for x in qkv(driver, (2, 4, 6, D), (2, 4, 6, D)))
    short, few = (Tensor(driver.own(host(*shape))) for shape in ((2, 4, 5, D), (2, 2, 6, D)))
    wide = driver.own(host(2, 4, 6, D + 1))
    for arguments, named in (
        ((q, k, v, "mask"), {}),
        ((q, k, v, None, 0.1), {}),
        ((q, short, short), {"is_causal": True}),
        ((q, few, few), {}),
        ((q, Tensor(k.host[:, :3]), Tensor(v.host[:, :3])), {"enable_gqa": True}),
        ((q, k, Tensor(v.host[..., :16])), {}),
        ((Tensor(q.host[0]), Tensor(k.host[0]), Tensor(v.host[0])), {}),
        ((q, k, Tensor(v.host.astype(np.float16))), {}),
        ((Tensor(q.host, device=-1), k, v), {}),
        ((q, k, Tensor(v.host, requires_grad=True)), {}),
        ((q, Tensor(k.host.swapaxes(2, 3).copy().swapaxes(2, 3)), v), {}),
        ((q, k, Tensor(wide[..., 1:])), {}),
        ((Tensor(q.host[:, :, :0]), k, v), {}),
    ):
        who, passed, others = module.sdpa(*arguments, **named)
        mask, dropout = (*arguments[3:], None, 0.0)[:2] if len(arguments) != 4 else ("mask", 0.0)
        assert who == "torch" and passed[:4] == (*arguments[:3], mask)
        assert passed[4:] == (dropout if len(arguments) == 5 else 0.0, named.get("is_causal", False))
        assert others == {"scale": None, "enable_gqa": named.get("enable_gqa", False)}
    assert not driver.launches()
    with pytest.raises(TypeError, match=r"query is a numpy\.ndarray; pass torch tensors"):
        module.sdpa(q.host, k.host, v.host)


def test_the_drop_in_serves_autocast_of_its_type(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = (Tensor(x) for x in qkv(driver, (2, 4, 6, D), (2, 4, 6, D)))
    torch.autocast = torch.float16
    assert module.sdpa(q, k, v)[0] == "torch"
    torch.autocast = torch.float32
    close(module.sdpa(q, k, v).host, expected(q.host, k.host, v.host).o)


@pytest.fixture
def transformers(torch: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was registered with it: attentions and masks."""
    registered: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    named = {
        "AttentionInterface": SimpleNamespace(register=registered.__setitem__),
        "AttentionMaskInterface": SimpleNamespace(register=masks.__setitem__),
    }
    forward = {"sdpa_attention_forward": lambda *arguments, **named: ("torch", arguments[4], named)}
    for name, content in (
        ("transformers", named),
        ("transformers.integrations", {}),
        ("transformers.integrations.sdpa_attention", forward),
        ("transformers.masking_utils", {"sdpa_mask": lambda **asked: ("mask", asked)}),
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__dict__.update(content)
    return registered, masks


CAUSAL = {"attention_mask": None, "allow_is_causal_skip": True, "q_length": 5, "kv_length": 5}
BOTH_WAYS = {"attention_mask": None, "allow_is_bidirectional_skip": True, "q_length": 5, "kv_length": 9}


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (CAUSAL, False),
        (CAUSAL | {"q_length": 1, "kv_length": 9}, False),
        (CAUSAL | {"kv_length": 9}, True),
        (CAUSAL | {"attention_mask": 1}, True),
        (CAUSAL | {"allow_is_causal_skip": False}, True),
        (CAUSAL | {"local_size": 6}, False),
        (CAUSAL | {"local_size": 5}, True),
        (BOTH_WAYS, False),
        (BOTH_WAYS | {"attention_mask": 1}, True),
        (BOTH_WAYS | {"local_size": 9}, True),
        (BOTH_WAYS | {"allow_is_bidirectional_skip": False}, True),
    ],
)
def test_masks_that_say_nothing_are_not_made(
    module: Any, torch: Any, transformers: Any, asked: dict[str, Any], made: bool
) -> None:
    module.register_transformers()
    make = transformers[1]["tuned"]
    assert make(**asked) == (("mask", asked) if made else None)
    torch.exporting = True
    assert make(**asked) == ("mask", asked)


def test_transformers_calls_the_drop_in(module: Any, driver: Driver, torch: Any, transformers: Any) -> None:
    module.register_transformers()
    q, k, v = qkv(driver, (2, 4, 5, D), (2, 2, 5, D))
    tensors, layer = [Tensor(x) for x in (q, k, v)], SimpleNamespace(is_causal=True)
    attend = transformers[0]["tuned"]
    o, weights = attend(layer, *tensors, None, scaling=0.3, sliding_window=None)
    close(o.host, expected(q, k, v, causal=True, scale=0.3).o.swapaxes(1, 2))
    assert weights is None and o.host.flags.c_contiguous
    o, _ = attend(layer, *tensors, None, is_causal=False)
    close(o.host, expected(q, k, v).o.swapaxes(1, 2))
    latest = [Tensor(driver.own(np.ascontiguousarray(q[:, :, :1]))), *tensors[1:]]
    close(attend(layer, *latest, None)[0].host, expected(latest[0].host, k, v).o.swapaxes(1, 2))
    others = {"dropout": 0.0, "scaling": None, "is_causal": None, "position_bias": None}
    assert attend(layer, *tensors, "mask", **others) == ("torch", "mask", others)
    assert attend(layer, *tensors, None, 0.1, position_bias=None) == (
        "torch",
        None,
        {**others, "dropout": 0.1},
    )
    with pytest.raises(ValueError, match="attention sinks"):
        attend(layer, *tensors, None, s_aux=object())
    with pytest.raises(ValueError, match="choose a name without 'flash'"):
        module.register_transformers("flashgen")
    assert len(driver.launches()) == 3


# ---- what is refused ---------------------------------------------------------------------------------------


def good() -> list[np.ndarray]:
    return [host(2, 4, 6, D), host(2, 2, 5, D), host(2, 2, 5, D)]


def replaced(index: int, array: np.ndarray) -> list[np.ndarray]:
    arrays = good()
    arrays[index] = array
    return arrays


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        (replaced(0, host(4, 6, D)), ValueError, r"q has 3 dimensions, .*4 are needed.*q\[None\]"),
        (replaced(2, host(2, 2, 5, 1, D)), ValueError, r"v has 5 dimensions"),
        (
            replaced(0, host(2, 4, 6, 48)),
            ValueError,
            r"float32 of head dim 48; .*head dim 32\. Make another with flashgen tune --dtype f32 --d 48",
        ),
        (replaced(1, host(2, 2, 7, D)), ValueError, r"k and v differ.*\(2, 2, 7\) and \(2, 2, 5\)"),
        ([host(3, 4, 6, D), *good()[1:]], ValueError, r"q has the batch 3, k and v have 2"),
        ([host(2, 3, 6, D), *good()[1:]], ValueError, r"q has 3 heads, k and v have 2"),
        (
            replaced(0, host(2, 4, 6, 2 * D)[..., ::2]),
            ValueError,
            r"last dimension of q has the stride 2.*contig",
        ),
        (
            replaced(1, host(2, 2, 5, D + 1)[..., :D]),
            ValueError,
            r"k starts at.*multiple of 16.*multiples of 4",
        ),
        (
            replaced(2, host(2, 2, 5, D + 4)[..., 1 : D + 1]),
            ValueError,
            r"v starts at address 0x.*\.contiguous\(\)",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["torch", "interface"])
def test_bad_shapes_and_strides(
    module: Any, driver: Driver, torch: Any, kind: str, arrays: list[np.ndarray], error: Any, message: str
) -> None:
    wrapped = [(Tensor if kind == "torch" else Array)(driver.own(x)) for x in arrays]
    out = driver.own(np.empty(wrapped[0].host.shape, np.float32))
    given = Tensor(out) if kind == "torch" else Array(out)
    with pytest.raises(error, match=message):
        module.attention(*wrapped, out=given)
    assert not driver.launches()


def test_bad_types_and_devices_of_tensors(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = (driver.own(x) for x in good())
    with pytest.raises(TypeError, match=r"k is torch\.float64, not torch\.float32: pass k\.to\(torch"):
        module.attention(Tensor(q), Tensor(k.astype(np.float64)), Tensor(v))
    with pytest.raises(ValueError, match=r"v is on the device 'cpu'; move it with v\.cuda\(\)"):
        module.attention(Tensor(q), Tensor(k), Tensor(v, device=-1))
    with pytest.raises(ValueError, match="q is on device 0, k on device 1"):
        module.attention(Tensor(q), Tensor(k, device=1), Tensor(v))
    with pytest.raises(RuntimeError, match=r"requires a gradient.*forward only.*torch\.no_grad\(\)"):
        module.attention(Tensor(q, requires_grad=True), Tensor(k), Tensor(v))
    torch.grad = False
    close(module.attention(Tensor(q, requires_grad=True), Tensor(k), Tensor(v)).host, expected(q, k, v).o)
    with pytest.raises(
        TypeError, match=r"q is a .*Tensor, but v a numpy\.ndarray; pass arrays of one library"
    ):
        module.attention(Tensor(q), Tensor(k), v)
    with pytest.raises(TypeError, match="pass arrays of one library"):
        module.attention(Tensor(q), Array(k), Tensor(v))
    with pytest.raises(TypeError, match=r"q is a numpy array, but k a .*Tensor"):
        module.attention(q, Tensor(k), v)


def test_bad_types_and_devices_of_other_arrays(module: Any, driver: Driver) -> None:
    q, k, v = (driver.own(x) for x in good())
    out = Array(driver.own(host(2, 4, 6, D)))
    with pytest.raises(TypeError, match=r"v is float16, not float32: pass v\.astype\(np\.float32\)"):
        module.attention(Array(q), Array(k), Array(driver.own(v.astype(np.float16))), out=out)
    with pytest.raises(TypeError, match=r"q is a builtins\.list; pass torch tensors"):
        module.attention(q.tolist(), k.tolist(), v.tolist())
    far = Array(driver.own(host(2, 2, 5, D), device=1, context=OTHER_DEVICE))
    with pytest.raises(ValueError, match="q is on device 0, v on device 1"):
        module.attention(Array(q), Array(k), far, out=out)
    stray = host(2, 2, 50000, D)
    with pytest.raises(ValueError, match=r"k points to 0x.*not memory of a CUDA device"):
        module.attention(Array(q), Array(stray), Array(stray), out=out)
    with pytest.raises(TypeError, match=r"k is float64, not float32: pass k\.astype"):
        module.attention(q, k.astype(np.float64), v)
    records = driver.own(np.zeros((2, 4, 6, D), [("x", np.float32), ("y", np.int8)]))["x"]
    with pytest.raises(ValueError, match="multiples of 4"):
        module.attention(Array(records), Array(k), Array(v), out=out)


def test_bad_outputs(module: Any, driver: Driver, torch: Any) -> None:
    arrays = [driver.own(x) for x in good()]
    q, k, v = (Tensor(x) for x in arrays)
    with pytest.raises(ValueError, match=r"out has \(batch, heads, seqlen\) \(2, 4, 7\), q has \(2, 4, 6\)"):
        module.attention(q, k, v, out=Tensor(host(2, 4, 7, D)))
    with pytest.raises(TypeError, match=r"out is torch\.float16"):
        module.attention(q, k, v, out=Tensor(host(2, 4, 6, D).astype(np.float16)))
    with pytest.raises(ValueError, match="out overlaps itself"):
        module.attention(q, k, v, out=Tensor(np.broadcast_to(host(1, 4, 6, D), (2, 4, 6, D))))
    same = Tensor(driver.own(host(2, 4, 6, D)))
    with pytest.raises(ValueError, match="out is the memory of q, k or v"):
        module.attention(q, same, same, out=same)
    with pytest.raises(ValueError, match="out is the memory of q, k or v"):
        module.attention(q, k, v, out=q)
    others = [Array(x) for x in arrays]
    with pytest.raises(ValueError, match="out is read-only"):
        module.attention(*others, out=Array(host(2, 4, 6, D), read_only=True))
    with pytest.raises(ValueError, match=r"out has the shape \(2, 4, 7, 32\); .* must be \(2, 4, 6, 32\)"):
        module.attention(*arrays, out=np.empty((2, 4, 7, D), np.float32))
    frozen = np.empty((2, 4, 6, D), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        module.attention(*arrays, out=frozen)


@pytest.mark.parametrize("scale", [math.inf, math.nan, 1e39])
def test_bad_scales(module: Any, driver: Driver, scale: float) -> None:
    with pytest.raises(ValueError, match=r"scale is .*finite float32"):
        module.attention(*(Array(driver.own(x)) for x in good()), scale=scale)


def test_bad_layout_and_too_many_blocks(module: Any, driver: Driver, torch: Any) -> None:
    with pytest.raises(ValueError, match="layout is 'bhds'; choose 'bhsd' or 'bshd'"):
        module.attention(*good(), layout="bhds")
    tiny = driver.own(host(1, 1, 1, D))
    huge = Tensor(np.lib.stride_tricks.as_strided(tiny, (2**31, 1, 1, D), (0, 0, 0, 4)))
    other = driver.own(host(1, 1, 1, D))
    out = Tensor(np.lib.stride_tricks.as_strided(other, (2**31, 1, 1, D), (4 * D, 0, 0, 4)))
    with pytest.raises(ValueError, match="2147483648 blocks exceed"):
        module.attention(huge, huge, huge, out=out)


# ---- what may be missing -----------------------------------------------------------------------------------


def attempt(module: Any) -> None:
    module.attention(*good())


def test_no_driver(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(RuntimeError, match=r"NVIDIA GPU and its driver are needed: libcuda\.so\.1"):
        attempt(module)


def test_a_driver_too_old(module: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __getattr__(self, name: str) -> Any:
            if name == "cuLibraryLoadData":
                raise AttributeError(name)
            return getattr(library, name)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Old())
    with pytest.raises(RuntimeError, match=r"no cuLibrary.*CUDA 12\.0 or newer"):
        attempt(module)


def test_no_compiler(module: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(RuntimeError, match=r"neither nvcc nor NVRTC.*pip install nvidia-cuda-nvrtc"):
        attempt(module)


@pytest.mark.parametrize(
    ("capability", "needed"), [((6, 1), r"CUDA 12\.9 or older \(13 dropped"), ((13, 0), "a newer CUDA")]
)
def test_an_nvcc_that_does_not_serve_the_card(
    module: Any, driver: Driver, capability: tuple[int, int], needed: str
) -> None:
    driver.library.fake_reset(D, *capability, 232448)
    arch = 10 * capability[0] + capability[1]
    driver.refusal = f"nvcc fatal   : Unsupported gpu architecture 'compute_{arch}'"
    with pytest.raises(RuntimeError, match=rf"does not compile for sm_{arch}; install {needed}"):
        attempt(module)


def test_a_compiler_that_fails_says_why(module: Any, driver: Driver) -> None:
    driver.refusal = "kernel.cu(3): error: host compiler gone"
    with pytest.raises(RuntimeError, match="host compiler gone"):
        attempt(module)


def test_an_nvcc_that_cannot_be_run_says_why(module: Any, driver: Driver) -> None:
    driver.refusal = PermissionError("not executable")
    with pytest.raises(RuntimeError, match=r"nvcc could not be run: not executable"):
        attempt(module)


def test_another_process_finds_what_was_compiled(driver: Driver, tmp_path: Path, torch: Any) -> None:
    for _ in range(2):
        attempt(load(tmp_path))
    assert len(driver.compiled) == 1


def test_another_compiler_makes_another_binary(driver: Driver, tmp_path: Path, torch: Any) -> None:
    for said in ("", "another"):
        Path(os.environ["CUDA_HOME"], "bin", "nvcc").write_text(said)
        attempt(load(tmp_path))
    assert len(driver.compiled) == 2


def test_a_cache_that_fails_is_done_without(
    module: Any, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "a file"))
    attempt(module)
    assert len(driver.compiled) == 1


@pytest.mark.parametrize("damage", ["cubin", "json"])
def test_a_half_written_cubin_is_compiled_afresh(
    driver: Driver, tmp_path: Path, torch: Any, damage: str
) -> None:
    attempt(load(tmp_path))
    (kept,) = (tmp_path / "cache").glob(f"*/*.{damage}")
    kept.write_bytes(kept.read_bytes()[:-1])
    attempt(load(tmp_path))
    assert len(driver.compiled) == 2
    attempt(load(tmp_path))
    assert len(driver.compiled) == 2


def test_a_card_with_too_little_shared_memory(module: Any, driver: Driver) -> None:
    smem_bytes = launch_of(module).smem_bytes
    driver.library.fake_reset(D, 7, 5, smem_bytes - 1)
    needed = rf"{smem_bytes} bytes.*sm_75.* allows {smem_bytes - 1}; .*sm_90: run flashgen tune"
    with pytest.raises(RuntimeError, match=needed):
        attempt(module)


def test_a_launch_that_fails_is_told_and_the_context_restored(module: Any, driver: Driver) -> None:
    driver.library.fake_fail_launch(2)
    with pytest.raises(
        RuntimeError, match=r"launching on stream 0x0.*CUDA_ERROR_OUT_OF_MEMORY, out of memory"
    ):
        attempt(module)
    assert driver.library.fake_context_depth() == 0


# ---- 16-bit numbers, and values of another head dim --------------------------------------------------------

#: dtype, head dim of v, and how the stand-in driver calls the type.
HALVES = [("f16", D), ("bf16", D), ("f16", 16), ("bf16", 48), ("f32", 16)]


@dataclass
class Emitted:
    """A module for one problem, and arrays that suit it."""

    module: Any
    problem: Problem
    driver: Driver

    def arrays(self, batch: int = 2, heads: int = 4, kv_heads: int = 2, lengths: Any = (9, 7)) -> list[Any]:
        d, dv = self.problem.head_dim, self.problem.head_dim_v
        shapes = (
            (batch, heads, lengths[0], d),
            (batch, kv_heads, lengths[1], d),
            (batch, kv_heads, lengths[1], dv),
        )
        dtype = numpy_dtype(self.problem.dtype)
        return [self.driver.own(host(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]

    def check(self, found: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, **how: Any) -> None:
        wanted = expected(*(x.astype(np.float32) for x in (q, k, v)), **how).o
        assert found.dtype == q.dtype and found.shape == wanted.shape
        assert np.abs(found.astype(np.float64) - wanted).max() <= 2 * ROUNDING[self.problem.dtype]


def emitted(driver: Driver, tmp_path: Path, launch: GridOf | None = None, **problem: Any) -> Emitted:
    kernel = make_kernel(launch or GridOf(128, 4096, 64), **problem)
    driver.library.fake_kernel(kernel.problem.head_dim_v, DRIVER_TYPES[kernel.problem.dtype])
    return Emitted(load_kernel(tmp_path, kernel), kernel.problem, driver)


@pytest.fixture(params=HALVES, ids=lambda case: f"{case[0]}-{case[1]}", name="half")
def a_half(request: pytest.FixtureRequest, driver: Driver, tmp_path: Path) -> Emitted:
    dtype, head_dim_v = request.param
    return emitted(driver, tmp_path, dtype=dtype, head_dim_v=head_dim_v)


def test_tensors_of_every_type(half: Emitted, driver: Driver, torch: Any) -> None:
    q, k, v = half.arrays()
    o, lse = half.module.attention(Tensor(q), Tensor(k), Tensor(v), causal=True, return_lse=True)
    assert (o.dtype, lse.dtype) == (Tensor(q).dtype, "torch.float32")
    half.check(o.host, q, k, v, causal=True)
    seen = expected(*(x.astype(np.float32) for x in (q, k, v)), causal=True).lse
    np.testing.assert_allclose(lse.host[:, :, 2:], seen[:, :, 2:], rtol=1e-5, atol=1e-5)
    assert driver.library.fake_kernel_name().decode() == f"attention_{half.problem.stem}_kernel"
    args = driver.launches()[0].args
    assert list(args.v_strides) == [2 * 7 * v.shape[3], 7 * v.shape[3], v.shape[3]]
    assert list(args.o_strides) == [4 * 9 * v.shape[3], 9 * v.shape[3], v.shape[3]]


@pytest.mark.parametrize("kind", ["cupy", "pycuda"])
def test_arrays_of_every_type(half: Emitted, driver: Driver, cupy: Any, kind: str) -> None:
    arrays = half.arrays()
    kinds: dict[str, Any] = {"cupy": cupy.ndarray, "pycuda": sys.modules["pycuda.gpuarray"].GPUArray}  # type: ignore[attr-defined]
    wrapped = []
    for x in arrays:
        wrapped.append(
            kinds["cupy"](x) if kind == "cupy" else kinds[kind](x.shape, x.dtype, "pool", x.strides)
        )
        if kind == "pycuda":
            wrapped[-1].host[...] = x
    o, lse = half.module.attention(*wrapped, return_lse=True)
    assert type(o) is type(lse) is kinds[kind] and lse.host.dtype == np.float32
    half.check(o.host, *arrays)


def test_numpy_of_every_type(half: Emitted, driver: Driver) -> None:
    before = driver.library.fake_num_allocated()
    arrays = half.arrays()
    o, lse = half.module.attention(*arrays, causal=True, return_lse=True)
    half.check(o, *arrays, causal=True)
    assert lse.dtype == np.float32 and lse.shape == (2, 4, 9)
    swapped = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in arrays]
    o = half.module.attention(*swapped, layout="bshd")
    assert o.flags.c_contiguous
    half.check(o.transpose(0, 2, 1, 3), *arrays)
    # As a view of rows first, the result's rows come first too.
    o = half.module.attention(*(x.transpose(0, 2, 1, 3) for x in swapped))
    assert o.transpose(0, 2, 1, 3).flags.c_contiguous
    half.check(o, *arrays)
    out = np.empty((2, 4, 9, half.problem.head_dim_v), arrays[0].dtype)
    assert half.module.attention(*arrays, out=out) is out
    half.check(out, *arrays)
    with pytest.raises(ValueError, match=r"out has the shape \(2, 4, 9, 7\)"):
        half.module.attention(*arrays, out=np.empty((2, 4, 9, 7), out.dtype))
    assert driver.library.fake_num_allocated() == before


def test_layouts_of_every_type(half: Emitted, driver: Driver, torch: Any) -> None:
    arrays = half.arrays()
    rows_first = [driver.own(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in arrays]
    o = half.module.attention(*(Tensor(x.transpose(0, 2, 1, 3)) for x in rows_first))
    half.check(o.host, *arrays)
    assert o.host.transpose(0, 2, 1, 3).flags.c_contiguous
    o = half.module.attention(*(Tensor(x) for x in rows_first), layout="bshd")
    half.check(o.host.transpose(0, 2, 1, 3), *arrays)
    assert o.host.flags.c_contiguous


@pytest.mark.parametrize(
    ("dtype", "other", "torch_words", "numpy_words", "interface_words"),
    [
        (
            "f32",
            np.float16,
            r"not torch\.float32: pass k\.to\(torch\.float32\)",
            r"float16, not float32: pass k\.astype\(np\.float32\)",
            r"float16, not float32: pass k\.astype\(np\.float32\)",
        ),
        (
            "f16",
            np.float32,
            r"not torch\.float16: pass k\.to\(torch\.float16\)",
            r"float32, not float16: pass k\.astype\(np\.float16\)",
            r"float32, not float16: pass k\.astype\(np\.float16\)",
        ),
        (
            "bf16",
            np.float32,
            r"not torch\.bfloat16: pass k\.to\(torch\.bfloat16\)",
            r"float32, not bfloat16: pass k\.astype\(ml_dtypes\.bfloat16\)",
            r"float32, not bfloat16: pass k\.astype\(ml_dtypes\.bfloat16\) or torch tensors",
        ),
    ],
)
def test_another_type_is_named_with_the_way_out(
    driver: Driver,
    tmp_path: Path,
    torch: Any,
    dtype: str,
    other: Any,
    torch_words: str,
    numpy_words: str,
    interface_words: str,
) -> None:
    half = emitted(driver, tmp_path, dtype=dtype)
    q, k, v = half.arrays()
    wrong = driver.own(k.astype(other))
    with pytest.raises(TypeError, match=rf"k is torch\.{np.dtype(other).name}, {torch_words}"):
        half.module.attention(Tensor(q), Tensor(wrong), Tensor(v))
    with pytest.raises(TypeError, match=numpy_words):
        half.module.attention(q, wrong, v)
    arrays = [
        sys.modules["pycuda.gpuarray"].GPUArray(x.shape, x.dtype, None, x.strides) for x in (q, wrong, v)
    ]  # type: ignore[attr-defined]
    interfaces = [Array(x.host) for x in arrays]
    for x in (arrays[0], arrays[2]):
        interfaces[arrays.index(x)] = x  # with its dtype
    with pytest.raises(TypeError, match=interface_words):
        half.module.attention(*interfaces)


def test_two_nameless_bytes_are_no_bfloat16(driver: Driver, tmp_path: Path) -> None:
    """'<V2' may be anything: without a dtype that says so, it is refused."""
    half = emitted(driver, tmp_path, dtype="bf16")
    arrays = [Array(x) for x in half.arrays()]
    assert arrays[0].__cuda_array_interface__["typestr"] == "<V2"
    with pytest.raises(TypeError, match=r"q is <V2, not bfloat16: pass q\.astype\(ml_dtypes"):
        half.module.attention(*arrays)


@pytest.mark.parametrize("through", ["torch", "cupy"])
def test_dlpack_of_sixteen_bits(
    driver: Driver,
    tmp_path: Path,
    through: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = request.getfixturevalue(through)
    kind = Tensor if through == "torch" else library.ndarray
    monkeypatch.setattr(library, "from_dlpack", lambda array: kind(array.host), raising=False)
    half = emitted(driver, tmp_path, dtype="f16")
    arrays = half.arrays()
    half.check(half.module.attention(*(Jax(x) for x in arrays)).host, *arrays)
    half = emitted(driver, tmp_path, dtype="bf16")
    arrays = half.arrays()
    if through == "torch":
        half.check(half.module.attention(*(Jax(x) for x in arrays)).host, *arrays)
        return
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TypeError, match="Jax, which is read through torch: install it"):
        half.module.attention(*(Jax(x) for x in arrays))


@pytest.mark.parametrize(
    ("dtype", "index", "columns", "words"),
    [
        (
            "bf16",
            2,
            32,
            r"v has bfloat16 of head dim 32; .* of head dim 32/16\. .*--dtype bf16 --d 32 --dv 32",
        ),
        ("f32", 0, 48, r"q has float32 of head dim 48.*flashgen tune --dtype f32 --d 48 --dv 16"),
        ("f16", 3, 32, r"out has float16 of head dim 32.*flashgen tune --dtype f16 --d 32 --dv 32"),
    ],
)
def test_head_dims_of_keys_and_values(
    driver: Driver, tmp_path: Path, torch: Any, dtype: str, index: int, columns: int, words: str
) -> None:
    half = emitted(driver, tmp_path, dtype=dtype, head_dim_v=16)
    q, k, v = half.arrays()
    arrays = [q, k, v, np.empty((2, 4, 9, 16), q.dtype)]
    arrays[index] = host(*arrays[index].shape[:3], columns, dtype=q.dtype)
    with pytest.raises(ValueError, match=words):
        half.module.attention(*(Tensor(x) for x in arrays[:3]), out=Tensor(arrays[3]))


def test_values_of_another_head_dim_name_the_option(module: Any, driver: Driver, torch: Any) -> None:
    q, k, _ = (Tensor(x) for x in qkv(driver, (1, 2, 5, D), (1, 2, 5, D)))
    with pytest.raises(
        ValueError, match=r"v has float32 of head dim 16; .* dim 32\. .* --dtype f32 --d 32 --dv 16"
    ):
        module.attention(q, k, Tensor(host(1, 2, 5, 16)))


def test_accesses_count_in_bytes_of_the_type(driver: Driver, tmp_path: Path, torch: Any) -> None:
    half = emitted(driver, tmp_path, dtype="f16")
    q, k, v = half.arrays()
    odd = host(*q.shape[:3], D + 4, dtype=np.float16)[..., :D]
    words = r"q starts at .*8 elements at once.*multiple of 16 and strides that are multiples of 8"
    with pytest.raises(ValueError, match=words):
        half.module.attention(Tensor(driver.own(odd)), Tensor(k), Tensor(v), out=Tensor(driver.own(q.copy())))
    wide = host(*q.shape[:3], D + 8, dtype=np.float16)[..., :D]
    half.check(half.module.attention(Tensor(driver.own(wide)), Tensor(k), Tensor(v)).host, wide, k, v)


@pytest.mark.parametrize(("rows", "tiles"), [(4, 3), (None, 1)])
def test_blocks_that_serve_several_heads(
    driver: Driver, tmp_path: Path, torch: Any, rows: int | None, tiles: int
) -> None:
    half = emitted(driver, tmp_path, GridOf(128, 4096, rows, 4), dtype="bf16")
    q, k, v = half.arrays(batch=3, heads=6)
    half.check(half.module.attention(Tensor(q), Tensor(k), Tensor(v)).host, q, k, v)
    assert launch_of(half.module).heads_per_block == 4
    assert driver.launches()[0].blocks == 5 * tiles  # 18 heads of three batches, four at a time


@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(6, 2, 9), (4, 4, 70), (8, 1, 1)])
def test_heads_that_share_keys_fill_tiles_together(
    driver: Driver, tmp_path: Path, torch: Any, heads: int, kv_heads: int, rows: int
) -> None:
    problem = Problem(dtype="bf16", head_dim=D, num_q_heads=4, num_kv_heads=2)
    kernel = render(Mma(pack_heads=True, br=16, bc=16), problem, preset("h200"))
    driver.library.fake_kernel(D, DRIVER_TYPES["bf16"])
    half = Emitted(load_kernel(tmp_path, kernel), problem, driver)
    assert launch_of(half.module).pack_heads
    q, k, v = half.arrays(batch=3, heads=heads, kv_heads=kv_heads, lengths=(rows, 33))
    half.check(half.module.attention(Tensor(q), Tensor(k), Tensor(v)).host, q, k, v)
    asked = replace(problem, batch=3, num_q_heads=heads, num_kv_heads=kv_heads, seqlen_q=rows)
    assert driver.launches()[0].blocks == kernel.launch.grid(asked)


@pytest.mark.parametrize(("splits", "pack_heads"), [(2, False), (8, True), (16, True)])
def test_blocks_that_share_keys(
    driver: Driver, tmp_path: Path, torch: Any, splits: int, pack_heads: bool
) -> None:
    problem = Problem(dtype="bf16", head_dim=D)
    kernel = render(Mma(pack_heads=pack_heads, br=16, bc=16, splits=splits), problem, preset("h200"))
    driver.library.fake_kernel(D, DRIVER_TYPES["bf16"])
    half = Emitted(load_kernel(tmp_path, kernel), problem, driver)
    assert splits == launch_of(half.module).splits and half.module.KERNELS[0].oldest_arch == 90
    q, k, v = half.arrays(batch=2, heads=6, kv_heads=2, lengths=(9, 33))
    half.check(half.module.attention(Tensor(q), Tensor(k), Tensor(v)).host, q, k, v)
    asked = replace(problem, batch=2, num_q_heads=6, num_kv_heads=2, seqlen_q=9)
    assert driver.launches()[0].blocks == kernel.launch.grid(asked)
    # Larger ones than every card forms must be asked for.
    assert driver.library.fake_large_clusters() == (splits > 8)
    driver.library.fake_reset(D, 8, 0, 166912)
    other = load_kernel(tmp_path, kernel)
    with pytest.raises(RuntimeError, match="need the clusters of sm_90, device 0 is sm_80"):
        other.attention(Tensor(q), Tensor(k), Tensor(v))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_blocks_that_meet_in_a_workspace(driver: Driver, tmp_path: Path, torch: Any, kind: str) -> None:
    """Memory for it is made for the call, as large as the launcher would say, and freed behind it."""
    problem = Problem(dtype="f32", head_dim=D)
    variant = Simt(br=16, bc=16, threads_per_block=32, workspace_splits=8)
    kernel = render(variant, problem, preset("gtx-1080"))
    driver.library.fake_kernel(D, DRIVER_TYPES["f32"])
    single = Emitted(load_kernel(tmp_path, kernel), problem, driver)
    tuned = single.module.KERNELS[0]
    words = tuned.main.blocks(tuned.main.tiles(2, 6, 2, 9)) * variant.partial_floats(problem)
    assert (tuned.main.workspace_splits, [each(2, 6, 2, 9) for each in tuned.workspace]) == (8, [words])
    assert [name for name, _ in tuned.launches[1].arguments] == [
        each.name for each in kernel.arguments.fields
    ]
    q, k, v = single.arrays(batch=2, heads=6, kv_heads=2, lengths=(9, 33))
    given = (Tensor(q), Tensor(k), Tensor(v)) if kind == "torch" else (q, k, v)
    told = []
    callback = LAUNCHED(lambda at, _: told.append(kernel.arguments.unpack(ctypes.string_at(at, size))))
    size = kernel.arguments.num_bytes
    driver.library.fake_on_launch(callback)
    single.module.attention(*given)
    driver.library.fake_on_launch(None)
    assert len(told) == 2 and told[0]["workspace"] == told[1]["workspace"] != 0
    assert told[0]["workspace"] not in (told[0][name] for name in "qkvo")
    asked = replace(problem, batch=2, num_q_heads=6, num_kv_heads=2, seqlen_q=9)
    assert [launch.blocks for launch in driver.launches()] == [kernel.launch.grid(asked)] * 2
    plan_words = 4 * variant.partial_floats(problem) * kernel.launch.grid(asked)
    sizes = {name: getattr(asked, name) for name in kernel.launch.sizes_of_grid}
    assert kernel.workspace_bytes(sizes) == -(-plan_words // 256) * 256


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_blocks_that_share_a_last_turn(driver: Driver, tmp_path: Path, torch: Any, kind: str) -> None:
    """Where they leave what they hand on is cleared by a launch in front, of one block."""
    problem, limits = Problem(dtype="bf16", head_dim=D), replace(preset("h200"), num_sms=4)
    kernel = render(Wgmma(br=64, bc=16, last_turn="shared"), problem, limits)
    driver.library.fake_reset(D, 9, 0, 232448)
    driver.library.fake_kernel(D, DRIVER_TYPES["bf16"])
    half = Emitted(load_kernel(tmp_path, kernel), problem, driver)
    tuned = half.module.KERNELS[0]
    assert tuned.main.shares_turn and tuned.main.dependent
    words = [each(2, 6, 2, 70) for each in tuned.workspace]
    assert words == [4, 4 * Wgmma(br=64).handed_floats(problem)]
    q, k, v = half.arrays(batch=2, heads=6, kv_heads=2, lengths=(70, 33))
    half.module.attention(*((Tensor(q), Tensor(k), Tensor(v)) if kind == "torch" else (q, k, v)))
    assert [launch.blocks for launch in driver.launches()] == [1, 4]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_launches_in_front_are_counted_by_keys(driver: Driver, tmp_path: Path, torch: Any, kind: str) -> None:
    """As are the tiles that they leave in the workspace; without keys there is no launch for these."""
    problem = Problem(dtype="f32", head_dim=D)
    kernel = render(Wgmma(br=64, bc=16, split="in_front"), problem, preset("h200"))
    driver.library.fake_reset(D, 9, 0, 232448)
    driver.library.fake_kernel(D, DRIVER_TYPES["f32"])
    front = Emitted(load_kernel(tmp_path, kernel), problem, driver)
    tuned = front.module.KERNELS[0]
    assert tuned.counted == ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")
    for keys in (33, 0):
        sizes = dict(zip(tuned.counted, (2, 6, 2, 70, keys), strict=True))
        words = [each(*sizes.values()) for each in tuned.workspace]
        assert 4 * sum(-(-each // 64) * 64 for each in words) == kernel.workspace_bytes(sizes)
        q, k, v = front.arrays(batch=2, heads=6, kv_heads=2, lengths=(70, keys))
        given = (Tensor(q), Tensor(k), Tensor(v)) if kind == "torch" else (q, k, v)
        before = len(driver.launches())
        front.module.attention(*given)
        blocks = [launch.blocks for launch in driver.launches()[before:]]
        assert blocks == [each for launch in kernel.launches if (each := launch.grid_of(sizes))]
        assert len(blocks) == (3 if keys else 2)


def test_a_kernel_of_the_tensor_core_family(driver: Driver, tmp_path: Path, torch: Any) -> None:
    problem = Problem(dtype="bf16", head_dim=40, head_dim_v=72, seqlen_q=49, seqlen_k=49)
    variant = Mma(br=64, bc=56, heads=2, q_in_registers=False)
    kernel = render(variant, problem, preset("h200"))
    driver.library.fake_reset(40, 9, 0, 232448)
    driver.library.fake_kernel(72, DRIVER_TYPES["bf16"])
    half = Emitted(load_kernel(tmp_path, kernel), problem, driver)
    (tuned,) = half.module.KERNELS
    assert (tuned.vector, tuned.launches[0].heads_per_block, tuned.oldest_arch) == (8, 2, 80)
    q, k, v = half.arrays(batch=3, heads=5, kv_heads=1, lengths=(70, 33))
    half.check(half.module.attention(Tensor(q), Tensor(k), Tensor(v)).host, q, k, v, scale=40**-0.5)
    (launch,) = driver.launches()
    assert (
        launch.blocks
        == 8 * 2
        == kernel.launch.grid(replace(problem, batch=3, num_q_heads=5, num_kv_heads=1, seqlen_q=70))
    )
    assert (launch.threads, launch.smem) == (variant.threads(), variant.smem_bytes(problem, preset("h200")))


def test_a_card_without_the_tensor_cores(driver: Driver, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Cores(Wide):
        def oldest_arch(self, problem: Problem, arch: int) -> int:
            return 80 if arch >= 80 else 75

    kernel = make_kernel(GridOf(128, 4096, 64), dtype="f16", head_dim_v=16)
    module = load_kernel(tmp_path, replace(kernel, variant=Cores()))
    driver.library.fake_reset(D, 7, 5, 65536)
    words = r"tensor cores of sm_80, device 0 is sm_75; .*tune --dtype f16 --d 32 --dv 16 --device 0"
    with pytest.raises(RuntimeError, match=words):
        module.attention(*Emitted(module, kernel.problem, driver).arrays())
    assert not driver.compiled
    turing = load_kernel(tmp_path, replace(kernel, variant=Cores(), arch=75))
    assert turing.KERNELS[0].oldest_arch == 75
    assert load(tmp_path).KERNELS[0].oldest_arch is None


# ---- tensor maps -------------------------------------------------------------------------------------------


WARPGROUPS = Wgmma(br=128, bc=80)


def mapped(driver: Driver, tmp_path: Path, dtype: str = "bf16", variant: Wgmma = WARPGROUPS) -> Emitted:
    """A kernel whose arrays are moved by the copy engine, with values wider than keys."""
    problem = Problem(dtype=dtype, head_dim=D, head_dim_v=72)
    kernel = render(variant, problem, preset("h200"))
    driver.library.fake_kernel(72, DRIVER_TYPES[dtype])
    driver.library.fake_maps(len(kernel.launch.tensor_maps))
    return Emitted(load_kernel(tmp_path, kernel), problem, driver)


def encoded(driver: Driver) -> int:
    return driver.library.fake_calls(b"cuTensorMapEncodeTiled")


@pytest.mark.parametrize(("splits", "pack_heads"), [(3, False), (1, True), (16, True)])
def test_warpgroups_that_share_keys(
    driver: Driver, tmp_path: Path, torch: Any, splits: int, pack_heads: bool
) -> None:
    """Maps are of what the copy engine moves: packed rows, and outputs that are put together, it does not."""
    variant = Wgmma(pack_heads=pack_heads, br=64, bc=80, splits=splits, persistent=False)
    half = mapped(driver, tmp_path, variant=variant)
    launch = launch_of(half.module)
    assert [each.array for each in launch.maps] == (["k", "v"] if pack_heads else ["q", "k", "v"])
    assert (launch.splits, launch.pack_heads) == (splits, pack_heads)
    q, k, v = half.arrays(batch=2, heads=6, kv_heads=2, lengths=(70, 33))
    half.check(half.module.attention(Tensor(q), Tensor(k), Tensor(v)).host, q, k, v)
    # Two tiles of a head's 70 rows, or four of those of three.
    assert driver.launches()[0].blocks == 2 * (2 * 4 if pack_heads else 6 * 2) * splits
    assert driver.library.fake_large_clusters() == (splits > 8)


@pytest.mark.parametrize(("dtype", "data_type"), [("f16", 6), ("bf16", 9)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_maps_of_the_arrays(
    driver: Driver, tmp_path: Path, torch: Any, dtype: str, data_type: int, layout: str
) -> None:
    half = mapped(driver, tmp_path, dtype)
    q, k, v = half.arrays(batch=2, heads=4, kv_heads=2, lengths=(9, 7))
    arrays = [q, k, v]
    if layout == "bshd":
        arrays = [driver.own(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in arrays]
    o = half.module.attention(*(Tensor(x) for x in arrays), layout=layout)
    half.check(o.host.transpose(0, 2, 1, 3) if layout == "bshd" else o.host, q, k, v)
    (launch,) = driver.launches()
    assert [m.address for m in launch.maps] == [*(x.ctypes.data for x in arrays), o.data_ptr()]
    assert [list(m.sizes) for m in launch.maps] == [[D, 9, 4, 2], [D, 7, 2, 2], [72, 7, 2, 2], [72, 9, 4, 2]]
    for each, x in zip(launch.maps, (*arrays, o.host), strict=True):
        batch, *strides = x.strides[:3]
        rows, heads = strides if layout == "bshd" else strides[::-1]
        assert list(each.stride_bytes) == [rows, heads, batch]
    assert [list(m.box) for m in launch.maps] == [[64, 64], [64, 80], [64, 80], [64, 64]]
    assert {(m.type, m.swizzle, m.promotion) for m in launch.maps} == {(data_type, 3, 2)}
    wanted = launch_of(half.module)
    assert (launch.threads, launch.smem) == (wanted.threads, wanted.smem_bytes)
    assert (driver.compiled[0]["arch"], half.module.KERNELS[0].only_arch) == ("sm_90a", 90)


def test_maps_are_made_once_for_the_same_arrays(driver: Driver, tmp_path: Path, torch: Any) -> None:
    half = mapped(driver, tmp_path)
    tensors = [Tensor(x) for x in half.arrays()]
    out = Tensor(driver.own(host(2, 4, 9, 72, dtype=tensors[0].host.dtype)))
    for causal, scale, with_lse in ((True, None, False), (True, 0.5, False), (True, None, True)):
        half.module.attention(*tensors, causal, scale, out, return_lse=with_lse)
        assert encoded(driver) == 4
    query = Tensor(driver.own(host(2, 4, 9, D, seed=5, dtype=out.host.dtype)))
    half.module.attention(query, *tensors[1:], True, out=out)
    assert encoded(driver) == 5, "the others' maps are copied"
    before, after = ([bytes(each) for each in launch.maps] for launch in driver.launches()[-2:])
    assert after[1:4] == before[1:4] and after[0] != before[0]
    half.module.attention(*tensors, True, out=out)
    # The same memory seen as other heads.
    views = [x.host.reshape(4, -1, *x.host.shape[2:]) for x in (*tensors, out)]
    half.module.attention(*(Tensor(x) for x in views[:3]), out=Tensor(views[3]))
    assert encoded(driver) == 9
    assert list(driver.launches()[-1].maps[0].sizes) == [D, 9, 2, 4]
    # No more are kept than so many.
    half.module._MOST_MAPS = 2
    third = Tensor(driver.own(host(2, 4, 9, D, seed=6, dtype=out.host.dtype)))
    for q, encodes in ((third, 13), (query, 17), (third, 17)):
        half.module.attention(q, *tensors[1:], out=out)
        assert encoded(driver) == encodes


@pytest.mark.parametrize(("persistent", "most"), [(True, 132), (False, None)])
@pytest.mark.parametrize("cluster", [1, 2])
def test_blocks_that_stay_are_as_many_as_run_at_once(
    driver: Driver, tmp_path: Path, torch: Any, persistent: bool, most: int | None, cluster: int
) -> None:
    half = mapped(driver, tmp_path, variant=Wgmma(br=64, bc=16, persistent=persistent, cluster=cluster))
    assert launch_of(half.module).max_blocks == most
    for rows, heads in ((7, 3), (70, 2), (650, 16)):
        q, k, v = half.arrays(batch=1, heads=heads, kv_heads=heads, lengths=(rows, 3))
        half.module.attention(Tensor(q), Tensor(k), Tensor(v))
        blocks = -(-rows // (64 * cluster)) * cluster * heads
        assert driver.launches()[-1].blocks == (blocks if most is None else min(blocks, most))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 2), (3, 3)])
def test_clusters_over_heads_are_whole(
    driver: Driver, tmp_path: Path, torch: Any, heads: int, kv_heads: int
) -> None:
    variant = Wgmma(br=64, bc=16, persistent=False, cluster_over="heads", cluster=2)
    half = mapped(driver, tmp_path, variant=variant)
    assert launch_of(half.module).heads_per_cluster == 2
    q, k, v = half.arrays(batch=3, heads=heads, kv_heads=kv_heads, lengths=(70, 3))
    half.module.attention(Tensor(q), Tensor(k), Tensor(v))
    asked = replace(half.problem, batch=3, num_q_heads=heads, num_kv_heads=kv_heads, seqlen_q=70)
    launch = variant.launch(half.problem, preset("h200"))
    assert driver.launches()[-1].blocks == launch.grid(asked)


def test_strides_that_no_map_holds_are_refused(driver: Driver, tmp_path: Path, cupy: Any) -> None:
    half = mapped(driver, tmp_path)
    q, k, v = half.arrays()
    words = r"k starts at .* copies 8 elements at once .* positive strides that are multiples of 8: pass k"
    odd = driver.own(host(2, 2, 7, D + 4, dtype=k.dtype))[..., :D]
    for wrong in (k[:, :, ::-1], k[:, ::-1], odd):
        with pytest.raises(ValueError, match=words):
            half.module.attention(*(cupy.ndarray(x) for x in (q, wrong, v)))
    with pytest.raises(ValueError, match="q starts at address"):
        half.module.attention(
            *(cupy.ndarray(x) for x in (driver.own(host(2, 4, 9, D + 1, dtype=q.dtype))[..., 1:], k, v))
        )
    # One entry's stride is never used.
    one = [x[:1, :1, :1] for x in (q, k, v)]
    one[0] = np.lib.stride_tricks.as_strided(one[0], one[0].shape, (-2, 6, -10, 2))
    half.check(half.module.attention(*(cupy.ndarray(x) for x in one)).host, *one)
    assert [list(m.stride_bytes) for m in driver.launches()[-1].maps] == [[16] * 3] * 4


def test_a_broadcast_array_is_mapped_as_it_lies(driver: Driver, tmp_path: Path, torch: Any) -> None:
    half = mapped(driver, tmp_path)
    q, k, v = half.arrays(batch=3)
    shared = np.broadcast_to(k[:1], k.shape)
    half.check(half.module.attention(Tensor(q), Tensor(shared), Tensor(v)).host, q, shared, v)
    assert list(driver.launches()[0].maps[1].stride_bytes) == [2 * D, 2 * 7 * D, 0]


def test_what_the_driver_refuses_is_named(driver: Driver, tmp_path: Path, torch: Any) -> None:
    half = mapped(driver, tmp_path)
    tensors = [Tensor(x) for x in half.arrays()]
    driver.library.fake_fail_encode(1)
    words = (
        r"q has \(batch, heads, seqlen\) \(2, 4, 9\) by \[2304, 576, 64\] bytes, .* pass q\.contiguous\(\)"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            half.module.attention(*tensors)
    driver.library.fake_fail_encode(801)
    with pytest.raises(RuntimeError, match="making a map for the copy engine failed"):
        half.module.attention(*tensors)
    assert driver.library.fake_context_depth() == 0
    driver.library.fake_fail_encode(0)
    half.module.attention(*tensors)


def test_maps_without_keys_or_rows(driver: Driver, tmp_path: Path, torch: Any) -> None:
    half = mapped(driver, tmp_path)
    q, k, v = half.arrays()
    o = half.module.attention(Tensor(q), Tensor(k[:, :, :0]), Tensor(v[:, :, :0]))
    assert not o.host.any()
    maps = driver.launches()[0].maps
    assert [m.address for m in maps[1:3]] == [q.ctypes.data] * 2
    assert [list(m.sizes) for m in maps[1:3]] == [[D, 1, 1, 1], [72, 1, 1, 1]]
    half.module.attention(Tensor(q[:, :, :0]), Tensor(k), Tensor(v))
    assert len(driver.launches()) == 1


def test_threads_with_maps_of_their_own(driver: Driver, tmp_path: Path, torch: Any) -> None:
    half = mapped(driver, tmp_path)
    cases = [half.arrays(lengths=(9 + i, 7)) for i in range(6)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(30):
                half.module.attention(*(Tensor(x) for x in cases[index]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index % len(cases),)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for launch in driver.launches():
        args = launch.args
        assert [m.address for m in launch.maps] == [args.q, args.k, args.v, args.o]
        assert [m.sizes[1] for m in launch.maps] == [args.seqlen_q, 7, 7, args.seqlen_q]


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (10, 0)])
def test_a_card_of_another_architecture(driver: Driver, tmp_path: Path, major: int, minor: int) -> None:
    half = mapped(driver, tmp_path)
    driver.library.fake_reset(D, major, minor, 232448)
    words = rf"instructions of sm_90 alone, device 0 is sm_{major}{minor}; .* run flashgen tune --dtype bf16"
    with pytest.raises(RuntimeError, match=words):
        half.module.attention(*half.arrays())
    assert not driver.compiled


# ---- of every type, as a program ---------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_type_run_as_a_program(
    half: Emitted, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 1, "seqlen_q": 64, "seqlen_k": 64}
    half.module.PROBLEM.update(shape)
    assert run(half.module) == 0
    told = capsys.readouterr().out
    flops = 2 * 2 * 64 * 64 * (D + half.problem.head_dim_v)
    assert f"{half.problem.name}: 250.0 us, {flops / 250e-6 / 1e12:.1f} TFLOP/s" in told
    assert f"{half.problem.tolerance:.0e} allowed: correct" in told
    another = {"f32": "f16", "f16": "bf16", "bf16": "f16"}[half.problem.dtype]
    driver.library.fake_kernel(half.problem.head_dim_v, DRIVER_TYPES[another])
    assert run(half.module) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_result_that_is_no_number_is_wrong(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], driver: Driver
) -> None:
    bound = module._bound
    monkeypatch.setattr(bound, "_through_buffers", lambda *arguments: arguments[5].fill(np.nan))
    monkeypatch.setattr(module, "_time_us", lambda *_: 1.0)
    assert run(module) == 1
    assert "WRONG" in capsys.readouterr().out


def test_bits_of_bfloat16_are_rounded_as_ml_dtypes_does(driver: Driver, tmp_path: Path) -> None:
    module = emitted(driver, tmp_path, dtype="bf16").module
    x = np.random.default_rng(0).standard_normal(10000).astype(np.float32)
    x[:4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 0.0  # ties go to even
    np.testing.assert_array_equal(module._to_bits(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(
        module._from_bits(module._to_bits(x)), x.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


# ---- as a program ------------------------------------------------------------------------------------------


def test_run_as_a_program_it_checks_and_times_itself(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(tmp_path, batch=1, num_q_heads=2, num_kv_heads=1, seqlen_q=64, seqlen_k=64)
    assert run(module) == 0
    told = capsys.readouterr().out
    flops = 4 * 2 * 64 * 64 * D
    assert "head dim 32" in told and "Here, on Fake, with a warm cache:" in told
    assert f"f32_d32_b1_h2_kv1_n64: 250.0 us, {flops / 250e-6 / 1e12:.1f} TFLOP/s" in told
    assert "correct" in told
    driver.library.fake_fail_launch(2)
    assert run(module) == 1
    assert "failed: launching" in capsys.readouterr().out
    driver.library.fake_reset(D // 2, 9, 0, 232448)  # half of each row stays unwritten
    assert run(module) == 1
    assert "WRONG" in capsys.readouterr().out


def test_without_a_gpu_it_says_what_it_is(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert run(module) == 0
    told = capsys.readouterr().out
    assert "Flash attention" in told and "Not run here: an NVIDIA GPU" in told


@pytest.fixture(autouse=True)
def _no_bytecode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emitted files share a name across tests: a cached one must not stand in for another."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
