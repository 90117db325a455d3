"""What a card can do at most, measured beside the kernels that are held against it: products by instruction
alone and by the library, multiply-adds, exponentials, and copies.

Instructions alone run a few milliseconds on operands that cost little power, so that they show the clock that
the card would like to keep; a large library product shows what its power allows. The larger is the ceiling.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...gen.limits import DeviceLimits
from ...gen.problem import EIGHT, Problem
from ...gen.render import environment
from ..build.cache import cached
from ..build.compile import FLAGS, run_compiler
from ..build.object_file import check_object_file
from ..build.toolchain import find_nvcc

#: Shapes of the kernels: threads of a block, repeats of each instruction in one step of its loop.
THREADS, REPEATS = 256, 16
#: About what one launch lasts, and of how many the fastest counts.
LAUNCH_MS, LAUNCHES = 2.0, 8
#: Rows and columns of the library's products.
GEMM_SIZE, GEMM_SIZE_F32 = 8192, 4096
COPY_BYTES = 2**30
#: The sm_90 instructions that a plain sm_90 does not have, and (depth, type) of the products by warpgroups.
WARPGROUP_ARCH = 90
WARPGROUP_SHAPES = ((16, "bf16"), (32, "e4m3"))


@dataclass(frozen=True)
class Rate:
    """A kernel that measures a ceiling: its operations per warp and step of its loop, and how its blocks are
    shaped."""

    symbol: str
    name: str
    per_warp: int
    threads: int = THREADS
    blocks_per_sm: int = 4


@dataclass(frozen=True)
class Ceilings:
    """Rates by name, per second: ``ffma``, ``mma_bf16``, ``wgmma_e4m3``, ``gemm_f32`` ... in FLOPs,
    ``ex2`` in exponentials, ``copy`` in bytes, read plus written. ``reasons`` says why one is not there."""

    rates: dict[str, float]
    reasons: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "reasons": self.reasons}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ceilings:
        return cls(dict(data["rates"]), dict(data["reasons"]))

    def flops(self, problem: Problem) -> float | None:
        """Returns the FLOP/s of the fastest arithmetic that is accurate enough for the problem; None if none
        is known."""
        if problem.dtype == "e4m3":
            return self._most("wgmma_e4m3")
        if problem.dtype != "f32":
            return self._of_16_bits(problem.dtype)
        by_tf32 = self._most("gemm_tf32", "mma_tf32")
        if problem.precision == "tf32":
            return by_tf32
        # Three products of parts make one as accurate as float32.
        known = {
            "ieee": self._most("gemm_f32", "ffma"),
            "3xtf32": None if by_tf32 is None else by_tf32 / 3,
            "3xf16": None if (by_f16 := self._of_16_bits("f16")) is None else by_f16 / 3,
        }
        served = known.values() if problem.precision == "auto" else [known[problem.precision]]
        return max((rate for rate in served if rate is not None), default=None)

    def _of_16_bits(self, dtype: str) -> float | None:
        # wgmma takes both types at one rate, and so does mma.
        return self._most(f"gemm_{dtype}", "mma_bf16", "mma_f16", "wgmma_bf16")

    def _most(self, *names: str) -> float | None:
        return max((self.rates[name] for name in names if name in self.rates), default=None)


@dataclass(frozen=True)
class Bound:
    """The least time of a problem by each resource alone, in milliseconds: ``flops``, ``exponentials``,
    ``bytes``."""

    ms_by_resource: dict[str, float]

    @property
    def ms(self) -> float:
        return max(self.ms_by_resource.values())

    @property
    def resource(self) -> str:
        """The resource that takes longest."""
        return max(self.ms_by_resource, key=self.ms_by_resource.__getitem__)


def bound_of(problem: Problem, ceilings: Ceilings) -> Bound | None:
    """Returns the least time of a problem by each resource whose ceiling is known, where masked pairs cost
    nothing; None where none is known. Of eight bits none is told while that of products is unknown, for the
    others alone would be far from a bound; exponentials bound none whose weights are of eight bits, where
    straight lines may stand for them."""
    parts: dict[str, float] = {}
    pairs = problem.num_attended
    flops = ceilings.flops(problem)
    if problem.has_scales and flops is None:
        return None
    if flops:
        parts["flops"] = 2e3 * pairs * (problem.head_dim + problem.head_dim_v) / flops
    if ceilings.rates.get("ex2") and problem.precision != EIGHT:
        parts["exponentials"] = 1e3 * pairs / ceilings.rates["ex2"]
    if ceilings.rates.get("copy"):
        parts["bytes"] = 1e3 * problem.min_bytes / ceilings.rates["copy"]
    return Bound(parts) if parts else None


# -- the kernels ---------------------------------------------------------------------------------------------


def rates_of(arch: int) -> tuple[Rate, ...]:
    """Returns the measuring kernels that a card of that compute capability (times ten) can run."""
    found = [
        Rate("ffma_rate", "ffma", 32 * 16 * REPEATS * 2),
        Rate("ex2_rate", "ex2", 32 * 16 * REPEATS),
    ]
    found += [Rate(f"mma_{t}_rate", f"mma_{t}", 8 * REPEATS * 2 * 16 * 8 * k) for k, t in _mma_shapes(arch)]
    if arch == WARPGROUP_ARCH:
        for depth, name in WARPGROUP_SHAPES:
            # A product is a warpgroup's, a quarter of it a warp's.
            work = REPEATS * 2 * 64 * 256 * depth // 4
            found.append(Rate(f"wgmma_{name}_rate", f"wgmma_{name}", work, threads=128, blocks_per_sm=2))
    return tuple(found)


def _mma_shapes(arch: int) -> list[tuple[int, str]]:
    """(depth, type) of the products by single warps."""
    if arch >= 80:
        return [(16, "bf16"), (8, "tf32")]
    return [(8, "f16")] if arch >= 75 else []


def source(arch: int) -> str:
    """Returns the source of the measuring kernels for one compute capability, times ten."""
    return (
        environment()
        .get_template("bench/ceilings.cu.jinja")
        .render(
            threads=THREADS,
            repeats=REPEATS,
            mma_shapes=_mma_shapes(arch),
            warpgroup_shapes=WARPGROUP_SHAPES if arch == WARPGROUP_ARCH else (),
        )
    )


def build(arch: int) -> Path:
    """Compiles the measuring kernels to a cubin, or takes it from the cache where it is there.

    Raises:
        FlashgenError: there is no nvcc for that card, or it failed.
    """
    nvcc = find_nvcc(arch)
    text = source(arch)
    flags = (*FLAGS, f"-arch=sm_{arch}{'a' if arch == WARPGROUP_ARCH else ''}")

    def produce(cubin: Path) -> Mapping[str, Any]:
        code = cubin.with_suffix(".cu")
        code.write_text(text, encoding="utf-8")
        run_compiler(
            [str(nvcc.path), *flags, "-cubin", "-o", str(cubin), str(code)], cubin.parent, makes=cubin
        )
        check_object_file(cubin, nvcc.path.name)
        return {}

    return cached([text, nvcc.version, *flags], ".cubin", produce).path


# -- measuring -----------------------------------------------------------------------------------------------


def measure(torch: Any, limits: DeviceLimits, cubin: Path | None) -> Ceilings:
    """Measures all ceilings of the card that is torch's current one; what fails is left out with its
    reason."""
    rates: dict[str, float] = {}
    reasons: dict[str, str] = {}

    def attempt(name: str, take: Callable[[], float]) -> None:
        try:
            rates[name] = take()
        except Exception as error:  # a ceiling less is no reason to end a run
            reasons[name] = str(error).strip().splitlines()[0] if str(error) else type(error).__name__

    if cubin is not None:
        image = cubin.read_bytes()
        for rate in rates_of(limits.arch):
            attempt(rate.name, lambda rate=rate: _rate(torch, limits, image, rate))
    for name in ("f32", "tf32", "f16", "bf16"):
        attempt(f"gemm_{name}", lambda name=name: _gemm(torch, name))
    attempt("copy", lambda: _copy(torch))
    torch.cuda.empty_cache()
    return Ceilings(rates, reasons)


def _fastest_s(torch: Any, call: Callable[[], Any], launches: int = LAUNCHES) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(launches):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _rate(torch: Any, limits: DeviceLimits, image: bytes, rate: Rate) -> float:
    """Operations per second of one kernel."""
    from ..cards.driver import Function, Parameters

    function = Function(image, rate.symbol)
    out = torch.zeros(1024, device="cuda")
    blocks = limits.num_sms * rate.blocks_per_sm
    stream = torch.cuda.current_stream().cuda_stream

    def seconds(steps: int, launches: int) -> float:
        packed = [struct.pack("P", out.data_ptr()), struct.pack("f", 0.0), struct.pack("i", steps)]
        arguments = Parameters(packed)
        return _fastest_s(
            torch, lambda: function.launch(blocks, rate.threads, arguments, 0, stream), launches
        )

    probe = 64
    steps = max(probe, round(probe * LAUNCH_MS / 1e3 / max(seconds(probe, 3), 1e-6)))
    return blocks * rate.threads / 32 * rate.per_warp * steps / seconds(steps, LAUNCHES)


def _gemm(torch: Any, name: str) -> float:
    """FLOP/s of a large square product by the library."""
    size = GEMM_SIZE_F32 if name == "f32" else GEMM_SIZE
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        return 2 * size**3 / _fastest_s(torch, lambda: a @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _copy(torch: Any) -> float:
    """Bytes per second of a copy on the device, read plus written."""
    a, b = (torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / _fastest_s(torch, lambda: b.copy_(a))
