"""Stand-ins for the CUDA driver, PyCUDA, torch, CuPy and JAX: emitted modules run on host memory.

`fake_driver.cpp` runs plain attention whatever kernel is launched.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families.ladder.family import Ladder, steps
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch as GridOf
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.scores import scores_of
from flashgen.tuner.evaluate import reference

from tests.support.modules import import_path

D = 32
PRIMARY, OTHER_DEVICE = 0xC001, 0xC011
FAKE = Path(__file__).with_name("fake_driver.cpp")
DRIVER_TYPES = {"f32": 0, "f16": 1, "bf16": 2}
#: Half the last place of a result near 1.
ROUNDING = {"f32": 1e-6, "f16": 2**-11, "bf16": 2**-8}


class Args(ctypes.Structure):
    """AttentionArgs as C lays it out."""

    _fields_ = (
        *[(name, ctypes.c_uint64) for name in ("q", "k", "v", "o", "lse")],
        *[(f"{name}_strides", ctypes.c_int64 * 3) for name in "qkvo"],
        *[(n, ctypes.c_int32) for n in ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")],
        ("scale", ctypes.c_float),
    )


class Map(ctypes.Structure):
    """What a tensor map was made of, the innermost dimension first."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 4),
        ("stride_bytes", ctypes.c_uint64 * 3),
        ("outer_size", ctypes.c_uint64),
        ("outer_stride_bytes", ctypes.c_uint64),
        ("box", ctypes.c_uint32 * 2),
        *[(name, ctypes.c_int32) for name in ("type", "swizzle", "promotion")],
    )


class Launch(ctypes.Structure):
    _fields_ = (
        *[
            (name, ctypes.c_int64)
            for name in ("blocks", "threads", "smem", "stream", "context", "causal", "dependent")
        ],
        ("args", Args),
        ("maps", Map * 4),
        ("met", Map),
    )


@dataclass
class Driver:
    """The stand-in driver, and what nvcc's stand-in was asked to compile and, if anything, refuses with."""

    library: ctypes.CDLL
    compiled: list[dict[str, Any]] = field(default_factory=list)
    refusal: str | OSError | None = None

    def run_nvcc(self, command: list[str], **_: Any) -> SimpleNamespace:
        """What `subprocess.run` does of nvcc, in no time."""
        *options, source = command[1:]
        target = Path(options[options.index("-o") + 1])
        arch = next(each.removeprefix("-arch=") for each in options if each.startswith("-arch="))
        self.compiled.append(
            {"nvcc": command[0], "options": options, "arch": arch, "source": Path(source).read_text()}
        )
        time.sleep(0.01)  # long enough for a second thread to arrive
        if isinstance(self.refusal, OSError):
            raise self.refusal
        if self.refusal is not None:
            return SimpleNamespace(returncode=1, stdout=self.refusal.encode())
        causal = next(each[-1] for each in options if each.startswith("-DFLASHGEN_CAUSAL="))
        target.write_bytes(f"causal={causal}".encode())
        return SimpleNamespace(returncode=0, stdout=b"")

    def launches(self) -> list[Launch]:
        found = []
        for index in range(self.library.fake_num_launches()):
            found.append(Launch())
            self.library.fake_launch(index, ctypes.byref(found[-1]))
        return found

    def own(self, array: np.ndarray, device: int = 0, context: int = PRIMARY) -> np.ndarray:
        """Makes host memory count as a device's."""
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        self.library.fake_allocation(base.ctypes.data, max(base.nbytes, 1), device, context)
        return array


def loaded(path: Path) -> ctypes.CDLL:
    """Returns the stand-in driver that was built there, with the types of its own functions."""
    library = ctypes.CDLL(str(path))
    library.fake_allocation.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64]
    library.fake_push.argtypes = library.fake_capture.argtypes = [ctypes.c_int64]
    library.fake_calls.restype = library.fake_waited.restype = ctypes.c_int64
    library.fake_kernel_name.restype = library.fake_launched_name.restype = ctypes.c_char_p
    return library


class Array:
    """An array of some library: strided memory with the CUDA array interface, without a dtype of its own."""

    def __init__(self, host: np.ndarray, stream: int | None = None, read_only: bool = False) -> None:
        self.host, self.stream, self.read_only = host, stream, read_only

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        host = self.host
        return {
            "shape": host.shape,
            "strides": None if host.flags.c_contiguous else host.strides,
            "typestr": host.dtype.str,
            "data": (host.ctypes.data, self.read_only),
            "stream": self.stream,
            "version": 3,
        }


@dataclass(frozen=True)
class TorchDevice:
    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}" if self.index >= 0 else self.type


class Tensor:
    """A torch tensor."""

    def __init__(self, host: np.ndarray, device: int = 0, requires_grad: bool = False) -> None:
        self.host, self.index, self.requires_grad = host, device, requires_grad
        self.dtype = sys.intern(f"torch.{host.dtype}")  # dtypes are compared by identity
        self.is_cuda = device >= 0

    is_meta = False
    shape = property(lambda self: self.host.shape)
    device = property(lambda self: TorchDevice("cuda" if self.is_cuda else "cpu", self.index))

    def data_ptr(self) -> int:
        return self.host.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.host.itemsize for s in self.host.strides)

    def is_contiguous(self) -> bool:
        return self.host.flags.c_contiguous

    def is_floating_point(self) -> bool:
        return self.host.dtype.kind == "f"

    def to(self, dtype: str) -> Tensor:
        return (
            self
            if dtype == self.dtype
            else Tensor(self.host.astype(dtype.removeprefix("torch.")), self.index)
        )

    def transpose(self, i: int, j: int) -> Tensor:
        return Tensor(self.host.swapaxes(i, j), self.index)

    def narrow(self, axis: int, start: int, length: int) -> Tensor:
        return Tensor(
            np.moveaxis(np.moveaxis(self.host, axis, 0)[start : start + length], 0, axis), self.index
        )

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.host), self.index)

    def new_empty_strided(self, shape: Any, strides: Any, dtype: Any = None) -> Tensor:
        torch = sys.modules["torch"]
        torch.allocated_on = torch.streams[-1] if torch.streams else None  # type: ignore[attr-defined]
        host = dense(tuple(shape), tuple(strides), np.dtype((dtype or self.dtype).removeprefix("torch.")))
        return Tensor(torch.driver.own(host, self.index, PRIMARY), self.index)  # type: ignore[attr-defined]

    def new_empty(self, shape: Any, dtype: Any) -> Tensor:
        return self.new_empty_strided(shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))], dtype)


class TensorGuards:
    """PyTorch's test of whether tensors are as others were."""

    def __init__(self, *tensors: Tensor, dynamic_dims_sizes: None, dynamic_dims_strides: None) -> None:
        self.seen = list(map(self.described, tensors))

    def check(self, *tensors: Tensor) -> bool:
        one_each = len({*map(id, tensors)}) == len(self.seen)
        return one_each and list(map(self.described, tensors)) == self.seen

    @staticmethod
    def described(x: Tensor) -> tuple[Any, ...]:
        return type(x), x.dtype, x.shape, x.stride(), x.device, x.requires_grad


class Stack:
    """Entered with `with`, as a stream or device is."""

    def __init__(self, log: list[Any], entry: Any) -> None:
        self.log, self.entry = log, entry

    def __enter__(self) -> None:
        self.log.append(self.entry)

    def __exit__(self, *_: object) -> None:
        self.log.pop()


def dense(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """NaN everywhere, so that what nobody wrote shows; strides in elements."""
    memory = np.full(math.prod(shape), np.nan if np.dtype(dtype).kind == "f" else -1, dtype)
    return np.lib.stride_tricks.as_strided(memory, shape, [memory.itemsize * s for s in strides])


def fake_torch(driver: Driver) -> ModuleType:
    torch = ModuleType("torch")
    torch.streams = []  # type: ignore[attr-defined]

    torch.__dict__.update(
        Tensor=Tensor,
        empty_like=lambda x: x.new_empty_strided(x.shape, x.stride()),
        **{
            name: sys.intern(f"torch.{name}")
            for name in ("float64", "float32", "float16", "bfloat16", "int32")
        },
        is_grad_enabled=lambda: torch.grad,
        grad=True,
        driver=driver,
        are_deterministic_algorithms_enabled=lambda: False,
        is_deterministic_algorithms_warn_only_enabled=lambda: False,
        is_autocast_enabled=lambda: torch.autocast is not None,
        get_autocast_dtype=lambda device: torch.autocast,
        autocast=None,
        nn=SimpleNamespace(
            Parameter=type("Parameter", (Tensor,), {}),
            functional=SimpleNamespace(scaled_dot_product_attention=lambda *a, **named: ("torch", a, named)),
        ),
        compiler=SimpleNamespace(
            is_compiling=lambda: False,
            is_dynamo_compiling=lambda: False,
            is_exporting=lambda: torch.exporting,
        ),
        exporting=False,
        _C=SimpleNamespace(
            _cuda_getCurrentRawStream=lambda device: torch.current,
            _dynamo=SimpleNamespace(guards=SimpleNamespace(TensorGuards=TensorGuards)),
        ),
        cuda=SimpleNamespace(
            current_stream=lambda device: SimpleNamespace(cuda_stream=torch.current),
            ExternalStream=lambda handle, device: handle,
            default_stream=lambda device: 0,
            stream=lambda handle: Stack(torch.streams, handle),
        ),
        current=0,
    )
    return torch


def fake_cupy(driver: Driver) -> ModuleType:
    cupy = ModuleType("cupy")
    log: list[Any] = []

    class ndarray(Array):
        device = property(lambda self: Stack([], 0))
        dtype = property(lambda self: self.host.dtype)

        def transpose(self, axes: list[int]) -> Any:
            return ndarray(self.host.transpose(axes), self.stream)

        def reshape(self, shape: tuple[int, ...]) -> Any:
            return ndarray(self.host.reshape(shape), self.stream)

    ndarray.__module__ = "cupy._core"

    def empty(shape: Any, dtype: Any) -> Any:
        cupy.allocated_on = log[-1] if log else None  # type: ignore[attr-defined]
        host = np.full(shape, np.nan if np.dtype(dtype).kind == "f" else -1, dtype)
        return ndarray(driver.own(host), cupy.current)

    streams = SimpleNamespace(null=Stack(log, 0))
    cupy.__dict__.update(
        ndarray=ndarray,
        empty=empty,
        float32=np.float32,
        current=1,
        cuda=SimpleNamespace(Stream=streams, ExternalStream=lambda handle: Stack(log, handle)),
    )
    return cupy


def fake_pycuda(driver: Driver) -> dict[str, ModuleType]:
    modules = {name: ModuleType(name) for name in ("pycuda", "pycuda.gpuarray")}

    class GPUArray(Array):
        def __init__(self, shape: Any, dtype: Any, allocator: Any = None, strides: Any = None) -> None:
            self.dtype, self.allocator = np.dtype(dtype), allocator
            steps = tuple(s // self.dtype.itemsize for s in strides)
            super().__init__(driver.own(dense(shape, steps, self.dtype)))

    GPUArray.__module__ = "pycuda.gpuarray"

    modules["pycuda.gpuarray"].__dict__.update(GPUArray=GPUArray)
    return modules


class Jax:
    """An array that offers DLPack alone."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("the stand-ins pass arrays as they are")

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: Jax(array.host))


# ---- modules and arrays


@dataclass(frozen=True)
class Wide(Ladder):
    """Stands for a kernel of tensor cores: the driver's stand-in runs any."""

    def access_width(self, problem: Problem) -> int:
        return 4 if problem.dtype == "f32" else 8


def make_kernel(launch: GridOf, source: str = "// by hand\n", arch: int = 90, **problem: Any) -> Kernel:
    wanted = Problem(**{"head_dim": D, **problem})
    entry = f"attention_{wanted.stem}"
    return Kernel(wanted, Wide(), arch, source, entry, (launch,))


def load(tmp_path: Path, variant: Ladder | None = None, **problem: Any) -> Any:
    return load_kernel(
        tmp_path, render(variant or steps(D)["4.2.10"], Problem(head_dim=D, **problem), preset("h200"))
    )


def load_kernel(tmp_path: Path, kernel: Kernel) -> Any:
    path = tmp_path / f"{kernel.problem.name}.py"
    path.write_text(emit_module(kernel, device="H200"))
    return import_path(path)


def launch_of(module: Any) -> Any:
    """How the module's only kernel is launched."""
    ((launch,),) = (tuned.launches for tuned in module.KERNELS)
    return launch


def run(module: Any) -> int:
    """Runs the module as a program; its exit code."""
    return module.run_module(module._bound, module.__doc__)


def host(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Random values at an address that suits every vector width."""
    size = math.prod(shape)
    memory = np.empty(size + 8, dtype)
    start = -memory.ctypes.data // memory.itemsize % (16 // memory.itemsize)
    memory[start : start + size] = np.random.default_rng(seed).standard_normal(size)
    return memory[start : start + size].reshape(shape)


def qkv(driver: Driver, q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> list[np.ndarray]:
    return [driver.own(host(*s, seed=i)) for i, s in enumerate((q_shape, kv_shape, kv_shape))]


def expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False, scale: float | None = None
) -> reference.Reference:
    return reference.attention(
        q, k, v, scale=1 / math.sqrt(D) if scale is None else scale, scores=scores_of(causal=causal)
    )


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
