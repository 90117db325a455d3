"""A device that needs no GPU and no compiler: attention by numpy, with faults to order.

The fault is the kernel's entry name, so that one device serves every test: ``Fault.HANG`` and the like.
"""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import ml_dtypes
import numpy as np
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch
from flashgen.gen.limits import PRESETS, DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.tuner.cards.device import Build, Timing
from flashgen.tuner.cards.dtypes import require_inputs
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError


class Fault(StrEnum):
    """What a fake kernel does wrong."""

    NONE = "right"
    HANG = "hang"
    HANG_TIMING = "hang_timing"
    DAWDLE = "dawdle"
    EXIT = "exit"
    SEGFAULT = "segfault"
    ILLEGAL_ADDRESS = "illegal_address"
    REFUSED = "refused"
    BUG = "bug"
    STRAY_WRITE = "stray_write"
    NO_MEMORY = "no_memory"
    SLOW = "slow"
    # wrong results
    NO_MAXIMUM = "no_maximum"
    ZERO_MAXIMUM = "zero_maximum"
    IGNORES_LAST_KEY = "ignores_last_key"
    TOP_LEFT_MASK = "top_left_mask"
    WRONG_KV_HEAD = "wrong_kv_head"
    IGNORES_SCALE = "ignores_scale"
    HALF_PRECISION = "half_precision"
    HALF_OUTPUT = "half_output"
    TWO_TERMS = "two_terms"
    ONE_TERM = "one_term"
    EIGHT_BITS = "eight_bits"
    ONE_ELEMENT = "one_element"
    NAN_ROWS = "nan_rows"
    BASE_2_LSE = "base_2_lse"
    ZERO_FOR_NAN = "zero_for_nan"
    SPILLS = "spills"


def fake_build(fault: Fault = Fault.NONE, problem: Problem | None = None, *, spill_bytes: int = 0) -> Build:
    kernel = Kernel(
        problem or Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=100, seqlen_k=100, head_dim=32),
        Simt(br=16, bc=16),
        90,
        f"// {fault}",
        fault,
        (Launch(threads=128, smem_bytes=4096, rows_per_block=16),),
    )
    return Build(kernel, Path("/nonexistent"), registers=100, spill_bytes=spill_bytes, seconds=0.25)


def attend_f32(q, k, v, scale, causal, fault=Fault.NONE):
    """Attention in float32, with one of the classic mistakes on request. Shapes as in the reference."""
    return attend(q, k, v, scale, causal, "ieee", fault)


def attend(q, k, v, scale, causal, arithmetic, fault=Fault.NONE):
    """Attention by multiply-adds (``ieee``) or tensor cores (``3xtf32``, ``3xf16``, ``tf32``, ``f16``,
    ``bf16``)."""
    group = q.shape[1] // k.shape[1]
    dtype = np.dtype(np.float16) if q.dtype.itemsize == 1 else q.dtype  # of weights
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    if fault is Fault.WRONG_KV_HEAD:
        k, v = (np.tile(x, (1, group, 1, 1)) for x in (k, v))
    else:
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    if fault is Fault.IGNORES_SCALE:
        scale = 1 / math.sqrt(q.shape[-1])
    s = (multiply(q, k.swapaxes(-1, -2), arithmetic, fault) * scale).astype(np.float32)
    if fault is Fault.HALF_PRECISION:
        s = s.astype(np.float16 if dtype == np.float32 else dtype).astype(np.float32)
    n, m = s.shape[-2:]
    hidden = np.zeros((n, m), bool)
    if causal:
        offset = 0 if fault is Fault.TOP_LEFT_MASK else m - n
        hidden = np.arange(m) > np.arange(n)[:, None] + offset
        s[..., hidden] = -np.inf
    if fault is Fault.IGNORES_LAST_KEY:
        s, v, hidden = s[..., : m - 1], v[..., : m - 1, :], hidden[:, : m - 1]
    start = 0.0 if fault is Fault.ZERO_MAXIMUM else -np.inf
    top = s.max(axis=-1, keepdims=True, initial=start)
    # Only a row that sees no key is empty: of keys that all have a score of -inf, weights are NaN.
    empty = np.isneginf(top) & hidden.all(axis=-1, keepdims=True)
    shift = np.where(empty, 0.0, 0.0 if fault is Fault.NO_MAXIMUM else top).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        p = np.exp(s - shift)
        total = p.sum(axis=-1, keepdims=True)
        if dtype != np.float32:
            p = p.astype(dtype).astype(np.float32)
        finite = np.where(np.isfinite(v), v, np.float32(0))
        if arithmetic == "ieee":
            # Rounded once, too: the order of sums near the largest number, which overflow, is the BLAS's.
            o = multiply(p, finite, arithmetic).astype(np.float32)
        else:
            o = weigh(p, finite, arithmetic, fault, dtype)
        for key in np.flatnonzero(~np.isfinite(v).all(axis=(0, 1, 3))):
            odd = p[..., key, None] * np.where(np.isfinite(v), 0, v)[..., key : key + 1, :]
            o += np.where(hidden[:, key, None], 0, odd).astype(np.float32)
        o = o / (total if fault is Fault.NAN_ROWS else np.where(total > 0, total, 1))
        lse = (np.log(total) + shift)[..., 0]
    if fault is Fault.ONE_ELEMENT:
        o[-1, -1, -1, -1] += {"f16": 0.05, "bf16": 0.2, "tf32": 0.1}.get(arithmetic, 1e-3)
    if fault is Fault.ZERO_FOR_NAN:
        o = np.where(np.isnan(o), 0.0, o)
    if fault is Fault.BASE_2_LSE:
        lse = lse / np.float32(math.log(2))
    return o.astype(dtype), lse.astype(np.float32)


def weigh(p, v, arithmetic, fault, dtype):
    """p v, summed afresh for each tile of keys as a kernel does."""
    tile = 16 if fault is Fault.HALF_OUTPUT else 64
    o = np.zeros((*p.shape[:-1], v.shape[-1]), np.float32)
    for first in range(0, p.shape[-1], tile):
        keys = slice(first, first + tile)
        o += multiply(p[..., keys], v[..., keys, :], arithmetic, fault, is_pv=True)
        if fault is Fault.HALF_OUTPUT:
            o = o.astype(dtype).astype(np.float32)
    return o


def multiply(a, b, arithmetic, fault=Fault.NONE, *, is_pv=False):
    """a b of float32 matrices. Sums of tensor cores are cut off after every few products."""
    if arithmetic == "ieee":
        # float64 dot products rounded once: as good as a kernel's, whatever the BLAS does.
        return a.astype(np.float64) @ b.astype(np.float64)
    if arithmetic in ("f16", "bf16"):
        return sum_products(a, b, 8)
    rounded, at_once = (rounded_in_units, 8) if arithmetic == "3xf16" else (rounded_to_tf32, 4)
    a_big, b_big = (rounded(x, x) for x in (a, b))
    if arithmetic == "tf32" or fault is Fault.ONE_TERM:
        if fault is Fault.EIGHT_BITS:
            a_big, b_big = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b))
        return sum_products(a_big, b_big, at_once)
    cross = sum_products(a_big, rounded(b - b_big, b), at_once)
    if not (is_pv and fault is Fault.TWO_TERMS):
        cross += sum_products(rounded(a - a_big, a), b_big, at_once)
    return sum_products(a_big, b_big, at_once) + cross


def sum_products(a, b, at_once):
    """a b, so many exact products at a time added to a float32 that drops what it cannot hold."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for first in range(0, a.shape[-1], at_once):
        part = slice(first, first + at_once)
        exact = total + a[..., part].astype(np.float64) @ b[..., part, :].astype(np.float64)
        total = exact.astype(np.float32)
        larger = (np.abs(total) > np.abs(exact)) & np.isfinite(total)
        total = np.where(larger, np.nextafter(total, np.float32(0)), total)
    return total


def rounded_in_units(x, whole):
    """To f16 in units of which the largest element of ``whole``, whose part ``x`` is, has 2^12."""
    _, exponent = np.frexp(np.abs(whole).max(initial=0.0))
    unit = np.float32(2.0) ** (exponent - 13)
    return (x / unit).astype(np.float16).astype(np.float32) * unit


def rounded_to_tf32(x, whole=None):
    """To eleven bits, ties away from zero, whatever it is part of."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def arithmetic_of(problem: Problem) -> str:
    """How a fake kernel computes that problem."""
    if problem.dtype != "f32":
        return "f16" if problem.has_scales else problem.dtype
    return "ieee" if problem.precision == "auto" else problem.precision


class FakeRunner:
    """Counts its calls; does what the build's entry name says."""

    def __init__(self) -> None:
        self.alive = True
        self.cases: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def attend(self, build, q, k, v, *, scale, want_lse=False, values=None):
        self.cases.append((q.shape, k.shape))
        fault = Fault(build.kernel.entry)
        match fault:
            case Fault.HANG:
                time.sleep(3600)
            case Fault.DAWDLE:
                time.sleep(0.3)
            case Fault.EXIT:
                print("terminate called: fake driver", flush=True)
                os._exit(7)
            case Fault.SEGFAULT:
                os.kill(os.getpid(), signal.SIGSEGV)
            case Fault.ILLEGAL_ADDRESS:
                self.alive = False
                raise LaunchError("an illegal memory access was encountered")
            case Fault.REFUSED:
                raise LaunchError("too many resources requested for launch")
            case Fault.BUG:
                raise ZeroDivisionError("a mistake of ours")
            case Fault.STRAY_WRITE:
                raise CorruptedMemory("3 elements outside the outputs were written")
        problem = build.kernel.problem
        require_inputs(problem, q, k, v)
        o, lse = attend(q, k, v, scale, problem.causal, arithmetic_of(problem), fault)
        return o, lse if want_lse else None

    def measure(self, build, problem, *, best_us=None, budget_ms=200.0):
        fault = Fault(build.kernel.entry)
        if fault is Fault.HANG_TIMING:
            time.sleep(3600)
        if fault is Fault.NO_MEMORY:
            raise FlashgenError("q, k, v and o take 300.00 GiB, device 0 has 140.00 GiB free")
        times = (10.0, 11.0, 12.0, 30.0) if fault is not Fault.SLOW else (1000.0, 1001.0, 1002.0)
        return Timing(times, stopped_early=best_us is not None and times[0] > 2 * best_us)

    def measure_interleaved(self, builds, problem, *, rounds):
        times = [self.measure(b, problem).times_us for b in builds]
        return [Timing((t[0],) * rounds) for t in times]

    def occupancy(self, build):
        return 0.5

    def close(self):
        pass


@dataclass(frozen=True)
class FakeDevice:
    opens: str = ""
    """An error to fail with when opened."""
    limits: DeviceLimits = PRESETS["h200"]
    spec: str = "fake"
    predicted: bool = False
    driver: str = "none"
    lock_key: str = ""

    def toolchain(self):
        raise NotImplementedError

    def open(self) -> FakeRunner:
        if self.opens == "bug":
            raise ZeroDivisionError("a mistake of ours")
        if self.opens == "abort":
            os.abort()
        if self.opens:
            raise FlashgenError(self.opens)
        return FakeRunner()
