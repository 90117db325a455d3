"""The emitted module on a real card, with the real array libraries."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.cuda import emit_cuda
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families import family_named
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.scores import scores_of
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.cuda import CudaDevice
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.prove.proof import prove
from flashgen.tuner.prove.sanitizers import find_compute_sanitizer

from tests.support.modules import import_path

D = 64
BOUND = 2e-6


def simt_kernel(device: CudaDevice, **problem: Any) -> Kernel:
    """The legal variant nearest to the default, with 16-byte accesses."""
    wanted = Problem(**{"head_dim": D, **problem})
    catalogue = build_catalogue(Simt, wanted, device.limits, {"vec": 4})
    row = catalogue.nearest(Simt())
    assert row is not None
    return render(catalogue.variant(row), wanted, device.limits)


def load(path: Path, kernel: Kernel) -> Any:
    path.write_text(emit_module(kernel, device="this card"))
    return import_path(path)


@pytest.fixture(scope="module")
def module(device: CudaDevice, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("module") / "best.py", simt_kernel(device))


@pytest.fixture(scope="module")
def cupy(device: CudaDevice) -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def pycuda_context(device: CudaDevice) -> Iterator[Any]:
    """A context of PyCUDA's own, not the primary one."""
    driver = pytest.importorskip("pycuda.driver")
    driver.init()
    context = driver.Device(0).make_context()
    try:
        yield driver
    finally:
        context.pop()
        context.detach()


def hosts(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-3, 3, shape).astype(np.float32) for shape in shapes]


QKV = ((2, 4, 197, D), (2, 2, 333, D), (2, 2, 333, D))


def check(
    o: Any,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    scale: float | None = None,
    lse: Any = None,
) -> None:
    """Per head within float32's bound of float64, all arrays (batch, heads, seqlen, head_dim) by numpy."""
    expected = reference.attention(
        q, k, v, scale=1 / math.sqrt(D) if scale is None else scale, scores=scores_of(causal=causal)
    )
    distance = np.linalg.norm(o - expected.o, axis=(2, 3))
    assert (distance <= BOUND * np.linalg.norm(expected.o, axis=(2, 3))).all(), distance.max()
    if lse is not None:
        np.testing.assert_allclose(lse, expected.lse, rtol=1e-5, atol=1e-5)


# ---- kinds of arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [None, False, True])
def test_torch(module: Any, torch: Any, causal: bool | None) -> None:
    arrays = hosts(*QKV)
    q, k, v = (torch.from_numpy(x).cuda() for x in arrays)
    o, lse = module.attention(q, k, v, causal=causal, scale=0.2, return_lse=True)
    assert o.device == q.device and o.dtype == torch.float32 and o.is_contiguous()
    check(o.cpu().numpy(), *arrays, causal=bool(causal), scale=0.2, lse=lse.cpu().numpy())


def test_cupy(module: Any, cupy: Any) -> None:
    arrays = hosts(*QKV)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        o, lse = module.attention(*(cupy.asarray(x) for x in arrays), return_lse=True)
        assert isinstance(o, cupy.ndarray) and isinstance(lse, cupy.ndarray)
        found = cupy.asnumpy(o, stream=stream), cupy.asnumpy(lse, stream=stream)
    check(found[0], *arrays, lse=found[1])


def test_pycuda_in_a_context_of_its_own(module: Any, pycuda_context: Any) -> None:
    from pycuda import gpuarray

    arrays = hosts(*QKV)
    q, k, v = (gpuarray.to_gpu(x) for x in arrays)
    o, lse = module.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(o, gpuarray.GPUArray)
    check(o.get(), *arrays, causal=True, lse=lse.get())
    stream = pycuda_context.Stream()
    out = gpuarray.empty(QKV[0], np.float32)
    assert module.attention(q, k, v, out=out, stream=stream) is out
    stream.synchronize()
    check(out.get(), *arrays)
    del q, k, v, o, lse, out, stream


@pytest.mark.parametrize("causal", [False, True])
def test_numpy(module: Any, causal: bool) -> None:
    arrays = hosts(*QKV)
    o, lse = module.attention(*arrays, causal=causal, return_lse=True)
    check(o, *arrays, causal=causal, lse=lse)
    out = np.empty_like(o)
    assert module.attention(*arrays, causal=causal, out=out) is out
    np.testing.assert_array_equal(out, o)


def test_numpy_inside_and_outside_of_contexts(module: Any, torch: Any) -> None:
    """A thread of its own has no current context; torch's has the primary one."""
    arrays = hosts(*QKV)
    results: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: results.append(module.attention(*arrays)))
    thread.start()
    thread.join()
    torch.zeros(1, device="cuda")
    results.append(module.attention(*arrays))
    for o in results:
        check(o, *arrays)


def test_arrays_of_an_unknown_library_go_into_out(module: Any, cupy: Any) -> None:
    class Foreign:
        """An array of a library the module does not know."""

        def __init__(self, array: Any) -> None:
            self.array = array

        @property
        def __cuda_array_interface__(self) -> Any:
            return self.array.__cuda_array_interface__

    arrays = hosts(*QKV)
    q, k, v = (Foreign(cupy.asarray(x)) for x in arrays)
    out = cupy.empty(QKV[0], np.float32)
    assert module.attention(q, k, v, out=out) is out
    check(cupy.asnumpy(out), *arrays)
    with pytest.raises(TypeError, match="pass out="):
        module.attention(q, k, v)


# ---- layouts -----------------------------------------------------------------------------------------------


def test_torch_layouts_run_without_a_copy(module: Any, torch: Any) -> None:
    packed = torch.from_numpy(hosts((2, 150, 3, 4, D))[0]).cuda()
    rows_first = [packed[:, :, i] for i in range(3)]
    heads_first = [x.transpose(1, 2) for x in rows_first]
    arrays = [x.cpu().numpy() for x in heads_first]
    before = torch.cuda.memory_allocated()
    o = module.attention(*heads_first, causal=True)
    assert torch.cuda.memory_allocated() - before <= o.numel() * 4 + 512
    assert o.stride() == (150 * 4 * D, D, 4 * D, 1)
    check(o.cpu().numpy(), *arrays, causal=True)
    o = module.attention(*rows_first, causal=True, layout="bshd")
    assert o.is_contiguous() and o.shape == (2, 150, 4, D)
    check(o.transpose(1, 2).cpu().numpy(), *arrays, causal=True)
    out = torch.full((2, 150, 3, 4, D), 7.0, device="cuda")
    module.attention(*rows_first, causal=True, layout="bshd", out=out[:, :, 1])
    check(out[:, :, 1].transpose(1, 2).cpu().numpy(), *arrays, causal=True)
    assert (out[:, :, 0] == 7).all() and (out[:, :, 2] == 7).all()


def test_a_broadcast_batch(module: Any, torch: Any) -> None:
    q, k, v = (torch.from_numpy(x).cuda() for x in hosts((1, 4, 60, D), (1, 2, 70, D), (1, 2, 70, D)))
    many = [x.expand(3, -1, -1, -1) for x in (q, k, v)]
    wanted = [x.cpu().numpy() for x in many]
    check(module.attention(*many).cpu().numpy(), *wanted)


def test_offsets_beyond_32_bits(module: Any, torch: Any) -> None:
    """Two batches 2^32 elements apart."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free memory")
    rows = 100
    memory = torch.zeros(2**32 + 2 * rows * D, device="cuda")
    q, out = (memory.as_strided((2, 1, rows, D), (2**32, rows * D, D, 1), i * rows * D) for i in range(2))
    arrays = hosts((2, 1, rows, D), (2, 1, rows, D), (2, 1, rows, D))
    q.copy_(torch.from_numpy(arrays[0]))
    k, v = (torch.from_numpy(x).cuda() for x in arrays[1:])
    check(module.attention(q, k, v).cpu().numpy(), *arrays)
    module.attention(q, k, v, out=out)
    check(out.cpu().numpy(), *arrays)
    np.testing.assert_array_equal(q.cpu().numpy(), arrays[0])


def test_empty(module: Any, torch: Any) -> None:
    q, none = torch.randn(2, 4, 10, D, device="cuda"), torch.empty(2, 4, 0, D, device="cuda")
    o, lse = module.attention(q, none, none, return_lse=True)
    assert (o == 0).all() and torch.isneginf(lse).all()
    assert module.attention(none, q, q).shape == none.shape
    assert module.attention(q[:0], q[:0], q[:0]).shape == (0, 4, 10, D)


# ---- streams and threads -----------------------------------------------------------------------------------


def test_runs_on_the_current_stream_of_torch(module: Any, torch: Any) -> None:
    """The kernel must wait for what the stream does before it."""
    arrays = hosts(*QKV)
    q, k, v = (torch.from_numpy(x).cuda() for x in arrays)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        o = module.attention(late, k, v)
        late.zero_()
        found = o.cpu().numpy()
    check(found, *arrays)


@pytest.mark.parametrize("as_handle", [False, True])
def test_runs_on_the_stream_that_is_given(module: Any, torch: Any, as_handle: bool) -> None:
    arrays = hosts(*QKV)
    q, k, v = (torch.from_numpy(x).cuda() for x in arrays)
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
    o = module.attention(late, k, v, stream=stream.cuda_stream if as_handle else stream)
    stream.synchronize()
    check(o.cpu().numpy(), *arrays)


def test_two_streams_and_four_threads(module: Any, torch: Any) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            shapes = ((2, 4, 100 + seed, D), (2, 4, 200, D), (2, 4, 200, D))
            arrays = hosts(*shapes, seed=seed)
            with torch.cuda.stream(streams[seed % 2]):
                q, k, v = (torch.from_numpy(x).cuda() for x in arrays)
                for _ in range(20):
                    o = module.attention(q, k, v, causal=bool(seed % 2))
                check(o.cpu().numpy(), *arrays, causal=bool(seed % 2))
        except BaseException as error:
            failures.append(error)

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_captured_in_a_graph(module: Any, torch: Any) -> None:
    arrays = hosts(*QKV)
    q, k, v = (torch.from_numpy(x).cuda() for x in arrays)
    out = torch.empty_like(q)
    module.attention(q, k, v, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.attention(q, k, v, out=out)
    out.zero_()
    graph.replay()
    check(out.cpu().numpy(), *arrays)


def test_a_second_card(module: Any, torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    arrays = hosts(*QKV)
    q, k, v = (torch.from_numpy(x).to("cuda:1") for x in arrays)
    o = module.attention(q, k, v)
    assert o.device == q.device and torch.cuda.current_device() == 0
    check(o.cpu().numpy(), *arrays)
    with pytest.raises(ValueError, match="q is on device 0, k on device 1"):
        module.attention(q.to("cuda:0"), k, v)


def test_a_call_costs_the_host_little(module: Any, torch: Any) -> None:
    q, k, v = (torch.randn(1, 1, 16, D, device="cuda") for _ in range(3))
    out = torch.empty_like(q)
    best = math.inf
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            module.attention(q, k, v, out=out)
        best = min(best, (time.perf_counter() - begin) / 100)
    print(f"{best * 1e6:.1f} us per call")
    assert best < 60e-6


# ---- errors ------------------------------------------------------------------------------------------------


def test_errors(module: Any, torch: Any) -> None:
    q, k, v = (torch.from_numpy(x).cuda() for x in hosts(*QKV))
    for arguments, error, message in (
        ((q[0], k, v), ValueError, "q has 3 dimensions"),
        ((q.half(), k, v), TypeError, r"q is torch\.float16.*q\.to\(torch\.float32\)"),
        ((q, k.cpu(), v), ValueError, r"k is on the device 'cpu'; move it with k\.cuda\(\)"),
        ((q.transpose(2, 3).contiguous().transpose(2, 3), k, v), ValueError, "last dimension of q"),
        ((q[..., :32], k, v), ValueError, "head dim 32; there are kernels for float32 of head dim 64"),
        ((q[:, :3], k, v), ValueError, "q has 3 heads, k and v have 2"),
        ((q[:1], k, v), ValueError, "q has the batch 1, k and v have 2"),
        ((q, k[:, :, :5], v), ValueError, "k and v differ"),
        ((q.clone().requires_grad_(), k, v), RuntimeError, r"forward only.*torch\.no_grad"),
        ((q, k, v.cpu().numpy()), TypeError, "arrays of one library"),
    ):
        with pytest.raises(error, match=message):
            module.attention(*arguments)
    with pytest.raises(ValueError, match="out is the memory of q, k or v"):
        module.attention(k, k, v, out=k)
    # Copied, so that accesses suit; not where the outputs' place is the caller's.
    odd = torch.empty(q.numel() + 1, device="cuda")[1:].view(q.shape).copy_(q)
    torch.testing.assert_close(module.attention(odd, k, v), module.attention(q, k, v))
    with pytest.raises(ValueError, match=r"q starts at address .*multiple of 16.*\.contiguous\(\)"):
        module.attention(odd, k, v, out=torch.empty_like(q))
    module.attention(q, k, v)  # nothing of that has left a mark
    torch.cuda.synchronize()


# ---- 16-bit numbers, TF32, values of another head dim ------------------------------------------------------

CLASSES: list[dict[str, Any]] = [
    {"dtype": "f16"},
    {"dtype": "bf16", "causal": True},
    {"dtype": "bf16", "head_dim": 192, "head_dim_v": 128},
    {"dtype": "f16", "head_dim": 40, "head_dim_v": 72},
    {"precision": "3xtf32"},
    {"precision": "3xf16"},
    {"precision": "3xf16", "head_dim": 80, "head_dim_v": 96, "causal": True},
    {"precision": "tf32", "head_dim": 80, "head_dim_v": 96},
    {"family": "wgmma", "dtype": "bf16", "head_dim": 128},
    {"family": "wgmma", "dtype": "f16", "head_dim": 40, "head_dim_v": 72, "causal": True},
    {"family": "wgmma", "precision": "3xf16"},
    {"family": "wgmma", "precision": "3xf16", "head_dim": 96, "head_dim_v": 40, "causal": True},
]


def tensor_core_kernel(
    device: CudaDevice, held: dict[str, Any] | None = None, family: str = "mma", **problem: Any
) -> Kernel:
    """The legal variant of a tensor-core family nearest to its default. Skips where none is."""
    wanted, variants = Problem(**{"head_dim": D, **problem}), family_named(family)
    catalogue = build_catalogue(variants, wanted, device.limits, held or {})
    row = catalogue.nearest(variants())
    if row is None:
        pytest.skip(f"{device.limits.name} has no tensor cores for {wanted.stem} by family {family}")
    return render(catalogue.variant(row), wanted, device.limits)


def arrays_of(problem: Problem, seed: int = 0) -> list[np.ndarray]:
    """q, k and v of `QKV`'s lengths, in the problem's type."""
    columns = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    shapes = [(*shape[:3], n) for shape, n in zip(QKV, columns, strict=True)]
    return [x.astype(numpy_dtype(problem.dtype)) for x in hosts(*shapes, seed=seed)]


def to_torch(torch: Any, x: np.ndarray) -> Any:
    """torch reads no bfloat16 of numpy's, but it is exact in float32."""
    return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, x.dtype.name)).cuda()


def check_class(problem: Problem, o: Any, arrays: list[np.ndarray], causal: bool, lse: Any = None) -> None:
    """Per head within the class's bound of float64."""
    o = o if isinstance(o, np.ndarray) else o.float().cpu().numpy()
    q, k, v = (x.astype(np.float64) for x in arrays)
    expected = reference.attention(q, k, v, scale=problem.head_dim**-0.5, scores=scores_of(causal=causal))
    assert o.shape == expected.o.shape
    distance = np.linalg.norm(o.astype(np.float64) - expected.o, axis=(2, 3))
    assert (distance <= problem.tolerance * np.linalg.norm(expected.o, axis=(2, 3))).all(), distance.max()
    if lse is not None:
        np.testing.assert_allclose(lse, expected.lse, rtol=1e-2, atol=1e-2)


@pytest.fixture(
    scope="module", params=CLASSES, ids=lambda case: "_".join(str(value) for value in case.values())
)
def of_class(
    request: pytest.FixtureRequest, device: CudaDevice, tmp_path_factory: Any
) -> tuple[Any, Problem]:
    kernel = tensor_core_kernel(device, **request.param)
    return load(tmp_path_factory.mktemp("module") / "best.py", kernel), kernel.problem


def test_tensors_of_every_class(of_class: tuple[Any, Problem], torch: Any) -> None:
    module, problem = of_class
    arrays = arrays_of(problem)
    q, k, v = (to_torch(torch, x) for x in arrays)
    for causal in (False, True):
        o, lse = module.attention(q, k, v, causal=causal, return_lse=True)
        assert o.dtype == q.dtype and lse.dtype == torch.float32 and o.device == q.device
        check_class(problem, o, arrays, causal, lse.cpu().numpy())
    assert torch.equal(module.attention(q, k, v), module.attention(q, k, v, causal=problem.causal))
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    o = module.attention(*rows_first, layout="bshd", causal=True)
    assert o.is_contiguous()
    check_class(problem, o.transpose(1, 2), arrays, True)
    wide = torch.full((*q.shape[:3], problem.head_dim_v + 16), 7.0, dtype=q.dtype, device="cuda")
    module.attention(q, k, v, causal=True, out=wide[..., : problem.head_dim_v])
    check_class(problem, wide[..., : problem.head_dim_v], arrays, True)
    assert (wide[..., problem.head_dim_v :] == 7).all()


def test_numpy_of_every_class(of_class: tuple[Any, Problem], torch: Any) -> None:
    module, problem = of_class
    arrays = arrays_of(problem, seed=1)
    o, lse = module.attention(*arrays, causal=True, return_lse=True)
    assert o.dtype == arrays[0].dtype and lse.dtype == np.float32
    check_class(problem, o, arrays, True, lse)


def test_cupy_of_every_class(of_class: tuple[Any, Problem], cupy: Any) -> None:
    module, problem = of_class
    if problem.dtype == "bf16":
        pytest.skip("CuPy has no bfloat16")
    arrays = arrays_of(problem)
    o = module.attention(*(cupy.asarray(x) for x in arrays), causal=False)
    assert isinstance(o, cupy.ndarray) and o.dtype == arrays[0].dtype
    check_class(problem, cupy.asnumpy(o), arrays, False)


def test_pycuda_of_every_class(of_class: tuple[Any, Problem], pycuda_context: Any) -> None:
    from pycuda.gpuarray import GPUArray

    module, problem = of_class
    arrays = arrays_of(problem)
    on_card = [GPUArray(x.shape, x.dtype) for x in arrays]
    for target, x in zip(on_card, arrays, strict=True):
        pycuda_context.memcpy_htod(target.gpudata, x.view(f"u{x.itemsize}"))
    o = module.attention(*on_card, causal=True)
    assert isinstance(o, GPUArray) and o.dtype == arrays[0].dtype
    found = np.empty(o.shape, f"u{arrays[0].itemsize}")
    pycuda_context.memcpy_dtoh(found, o.gpudata)
    check_class(problem, found.view(arrays[0].dtype), arrays, True)
    del on_card, o


def test_a_class_refuses_other_types(of_class: tuple[Any, Problem], torch: Any) -> None:
    module, problem = of_class
    q, k, v = (to_torch(torch, x) for x in arrays_of(problem))
    other = q.half() if problem.dtype != "f16" else q.float()
    with pytest.raises(TypeError, match=rf"q is {other.dtype}.*pass q\.to\({q.dtype}\)"):
        module.attention(other, k, v)
    with pytest.raises(ValueError, match=rf"v has \w+ of head dim {problem.head_dim_v - 8};"):
        module.attention(q, k, v[..., : problem.head_dim_v - 8])


@pytest.mark.parametrize("heads", [2, 4])
def test_blocks_that_serve_several_heads(device: CudaDevice, tmp_path: Path, torch: Any, heads: int) -> None:
    kernel = tensor_core_kernel(device, {"heads": heads}, dtype="f16", seqlen_q=49, seqlen_k=49)
    module = load(tmp_path / "best.py", kernel)
    assert heads == module.KERNELS[0].launches[0].heads_per_block
    shapes = ((3, 5, 49, D),) * 3  # fifteen heads: the last block has one missing
    arrays = [x.astype(np.float16) for x in hosts(*shapes)]
    q, k, v = (to_torch(torch, x) for x in arrays)
    check_class(kernel.problem, module.attention(q, k, v), arrays, False)


@pytest.mark.parametrize(("splits", "key_warps"), [(1, 4), (16, 2)])
def test_decoding_by_shared_keys(
    device: CudaDevice, tmp_path: Path, torch: Any, splits: int, key_warps: int
) -> None:
    """Packed heads whose group no tile of 16 rows is a multiple of; the same to the bit, and in a graph."""
    if splits > device.limits.max_cluster:
        pytest.skip(f"{device.limits.sm} forms clusters of {device.limits.max_cluster} blocks at most")
    problem = Problem(dtype="f16", head_dim=D, num_q_heads=18, num_kv_heads=3, seqlen_q=1, seqlen_k=8192)
    variant = Mma(pack_heads=True, br=16, bc=16, key_warps=key_warps, splits=splits, stages=3)
    try:
        kernel = render(variant, problem, device.limits)
    except Illegal as error:
        pytest.skip(str(error))
    module = load(tmp_path / "best.py", kernel)
    # One row; rows that the mask ends within a tile, more than one tile; fewer keys than shares have tiles.
    for rows, keys in ((1, 8191), (5, 300), (2, 20)):
        arrays = [x.astype(np.float16) for x in hosts((2, 18, rows, D), (2, 3, keys, D), (2, 3, keys, D))]
        q, k, v = (to_torch(torch, x) for x in arrays)
        for causal in (False, True):
            o, lse = module.attention(q, k, v, causal=causal, return_lse=True)
            check_class(problem, o, arrays, causal, lse.cpu().numpy())
            for _ in range(3):
                again = module.attention(q, k, v, causal=causal, return_lse=True)
                assert torch.equal(again[0], o) and torch.equal(again[1], lse)
            out = torch.empty_like(q)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                module.attention(q, k, v, causal=causal, out=out)
            for _ in range(2):
                out.zero_()
                graph.replay()
                assert torch.equal(out, o)


@pytest.mark.parametrize(("cluster", "persistent"), [(2, False), (4, True)])
def test_heads_that_share_copies_of_keys(
    device: CudaDevice, tmp_path: Path, torch: Any, cluster: int, persistent: bool
) -> None:
    """The same to the bit as blocks alone, whether heads fill their clusters or not."""
    problem = Problem(dtype="bf16", head_dim=D, num_q_heads=8, num_kv_heads=2)
    alone = Wgmma(br=128, bc=64, persistent=persistent)
    try:
        kernels = [
            render(replace(alone, cluster_over=over, cluster=size), problem, device.limits)
            for over, size in (("rows", 1), ("heads", cluster))
        ]
    except Illegal as error:
        pytest.skip(str(error))
    by_itself, shared = (load(tmp_path / f"best{i}.py", kernel) for i, kernel in enumerate(kernels))
    for heads, kv_heads, rows, keys in ((8, 2, 3000, 3000), (6, 2, 129, 1000), (3, 3, 70, 65)):
        shapes = ((3, heads, rows, D), (3, kv_heads, keys, D), (3, kv_heads, keys, D))
        arrays = [x.astype(numpy_dtype(problem.dtype)) for x in hosts(*shapes)]
        q, k, v = (to_torch(torch, x) for x in arrays)
        for causal in (False, True):
            wanted = by_itself.attention(q, k, v, causal=causal, return_lse=True)
            for _ in range(5):
                o, lse = shared.attention(q, k, v, causal=causal, return_lse=True)
                assert torch.equal(o, wanted[0]) and torch.equal(lse, wanted[1])
            if rows < 1000:
                check_class(problem, o, arrays, causal, lse.cpu().numpy())


@pytest.mark.parametrize("suffix", [".py", ".cu"])
def test_classes_are_proved_again(
    of_class: tuple[Any, Problem], device: CudaDevice, tmp_path: Path, suffix: str
) -> None:
    module, problem = of_class
    emit = emit_module if suffix == ".py" else emit_cuda
    path = tmp_path / f"best{suffix}"
    shape = {name: value for name, value in problem.to_dict().items() if name in CLASS_FIELDS}
    kernel = tensor_core_kernel(device, family=module.VARIANT["family"], **shape)
    path.write_text(emit(kernel, device="this card"))
    proof = prove(path, device="0")
    assert 0 < proof.worst <= proof.bound == problem.tolerance


CLASS_FIELDS = ("dtype", "precision", "head_dim", "head_dim_v", "causal")


def test_classes_run_as_programs(of_class: tuple[Any, Problem]) -> None:
    module, _ = of_class
    done = subprocess.run([sys.executable, module.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "correct" in done.stdout and "TFLOP/s" in done.stdout


# ---- tensor maps -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mapped(device: CudaDevice, tmp_path_factory: Any) -> tuple[Any, Problem]:
    kernel = tensor_core_kernel(device, family="wgmma", dtype="bf16")
    return load(tmp_path_factory.mktemp("module") / "best.py", kernel), kernel.problem


def test_maps_of_arrays_that_are_packed_broadcast_or_empty(mapped: tuple[Any, Problem], torch: Any) -> None:
    module, problem = mapped
    arrays = [x[:1] for x in arrays_of(problem)]
    q, k, v = (to_torch(torch, x).expand(3, -1, -1, -1) for x in arrays)
    check_class(problem, module.attention(q, k, v), [np.repeat(x, 3, axis=0) for x in arrays], False)
    packed = torch.randn(2, 150, 3, 4, D, device="cuda").to(torch.bfloat16)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    check_class(problem, module.attention(*views), [x.float().cpu().numpy() for x in views], False)
    o, lse = module.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (o == 0).all() and torch.isneginf(lse).all()
    misfit = torch.randn(3, 2, k.shape[2], D + 4, device="cuda").to(q.dtype)[..., :D]
    copied = [np.repeat(arrays[0], 3, axis=0), misfit.float().cpu().numpy(), np.repeat(arrays[2], 3, axis=0)]
    check_class(problem, module.attention(q, misfit, v), copied, False)
    with pytest.raises(ValueError, match=r"pass k\.contiguous\(\)"):
        module.attention(q, misfit, v, out=torch.empty_like(q.contiguous()))


def test_maps_in_a_graph(mapped: tuple[Any, Problem], torch: Any) -> None:
    """Captured once for new arrays, whose maps are made meanwhile."""
    module, problem = mapped
    arrays = arrays_of(problem)
    warm = [to_torch(torch, x) for x in arrays]
    module.attention(*warm)
    q, k, v = (to_torch(torch, x) for x in arrays)
    out = torch.empty_like(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.attention(q, k, v, out=out)
    for seed in (0, 1):
        arrays = arrays_of(problem, seed)
        for x, new in zip((q, k, v), arrays, strict=True):
            x.copy_(to_torch(torch, new))
        out.zero_()
        graph.replay()
        check_class(problem, out, arrays, False)


def test_maps_on_two_streams_and_four_threads(mapped: tuple[Any, Problem], torch: Any) -> None:
    module, problem = mapped
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            arrays = arrays_of(problem, seed)
            with torch.cuda.stream(streams[seed % 2]):
                q, k, v = (to_torch(torch, x) for x in arrays)
                for _ in range(50):
                    o = module.attention(q, k, v, causal=bool(seed % 2))
                check_class(problem, o, arrays, bool(seed % 2))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_a_call_with_maps_costs_the_host_little(mapped: tuple[Any, Problem], torch: Any) -> None:
    module, _ = mapped
    q, k, v = (torch.randn(1, 1, 16, D, device="cuda").to(torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    best = math.inf
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            module.attention(q, k, v, out=out)
        best = min(best, (time.perf_counter() - begin) / 100)
    print(f"{best * 1e6:.1f} us per call")
    assert best < 60e-6


# ---- the other family, the file as a program, proofs -------------------------------------------------------


@pytest.mark.parametrize("step", ["4.2.2", "4.2.10"])
def test_the_ladder(device: CudaDevice, tmp_path: Path, step: str) -> None:
    kernel = render(steps(D)[step], Problem(head_dim=D, causal=True), device.limits)
    arrays = hosts(*QKV)
    o, lse = load(tmp_path / "ladder.py", kernel).attention(*arrays, return_lse=True)
    check(o, *arrays, causal=True, lse=lse)


def test_run_as_a_program(device: CudaDevice, tmp_path: Path) -> None:
    path = tmp_path / "best.py"
    path.write_text(emit_module(simt_kernel(device, batch=1), device="this card"))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "correct" in done.stdout and "TFLOP/s" in done.stdout


@pytest.mark.parametrize("suffix", [".py", ".cu"])
def test_proved_again(device: CudaDevice, tmp_path: Path, suffix: str) -> None:
    emit = emit_module if suffix == ".py" else emit_cuda
    path = tmp_path / f"best{suffix}"
    path.write_text(emit(simt_kernel(device), device="this card"))
    proof = prove(path, device="0")
    assert 0 < proof.worst <= proof.bound and set(proof.errors) == {"full", "causal"}
    assert proof.how == ("through its attention()" if suffix == ".py" else "compiled from its source")


def test_proved_under_compute_sanitizer(device: CudaDevice, tmp_path: Path) -> None:
    try:
        find_compute_sanitizer()
    except FlashgenError as error:
        pytest.skip(str(error))
    path = tmp_path / "best.py"
    path.write_text(emit_module(simt_kernel(device), device="this card"))
    try:
        assert prove(path, device="0", sanitize=True).sanitized
    except FlashgenError as error:
        if "Device not supported" not in str(error):
            raise
        pytest.skip("compute-sanitizer does not support this machine")


@pytest.mark.parametrize("family", ["simt", "wgmma"])
def test_the_c_launcher(device: CudaDevice, tmp_path: Path, torch: Any, family: str) -> None:
    """best.cu as a shared library of its own, built as its header says, called as a C program would."""
    import ctypes

    from flashgen.gen.arguments import make_arguments
    from flashgen.tuner.build.toolchain import find_nvcc

    mapped = family == "wgmma"
    kernel = tensor_core_kernel(device, family=family, dtype="bf16") if mapped else simt_kernel(device)
    (tmp_path / "best.cu").write_text(emit_cuda(kernel, device="this card"))
    build = re.search(r"^//     nvcc (.*) -c ", (tmp_path / "best.cu").read_text(), re.MULTILINE)
    assert build is not None
    command = [str(find_nvcc(device.limits.arch).path), *build[1].split(), "-shared", "-Xcompiler=-fPIC"]
    subprocess.run([*command, "best.cu", "-o", "best.so"], cwd=tmp_path, check=True)
    launch = ctypes.CDLL(str(tmp_path / "best.so"))[kernel.entry]
    launch.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    arrays = arrays_of(kernel.problem)
    q, k, v = (to_torch(torch, x) for x in arrays)
    o, stream = torch.full_like(q, math.nan), torch.cuda.Stream()
    torch.cuda.synchronize()

    def args(q: Any, k_row: int = 1) -> bytes:
        arrays = {"q": q, "k": k, "v": v, "o": o}
        strides = {name: list(x.stride()[:3]) for name, x in arrays.items()}
        strides["k"][2] *= k_row
        problem = replace(kernel.problem, batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=197, seqlen_k=333)
        addresses = {name: x.data_ptr() for name, x in arrays.items()}
        return make_arguments(problem, addresses, strides, scale=1 / math.sqrt(D)).pack()

    assert launch(args(q), stream.cuda_stream) == 0
    stream.synchronize()
    check_class(kernel.problem, o, arrays, kernel.problem.causal)
    misaligned = torch.randn(q.numel() + 1, device="cuda").to(q.dtype)[1:].view(q.shape)
    assert launch(args(misaligned), stream.cuda_stream) == 716  # cudaErrorMisalignedAddress
    if mapped:
        assert launch(args(q, k_row=-1), stream.cuda_stream) == 1  # cudaErrorInvalidValue
