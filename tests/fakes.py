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

import numpy as np
from flashgen.gen.families.simt import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS, DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Launch
from flashgen.tuner.device import Build, CorruptedMemory, FlashgenError, LaunchError, Timing


class Fault(StrEnum):
    """What a fake kernel does wrong."""

    NONE = "right"
    HANG = "hang"
    HANG_TIMING = "hang_timing"
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
    ONE_ELEMENT = "one_element"
    NAN_ROWS = "nan_rows"
    BASE_2_LSE = "base_2_lse"
    SPILLS = "spills"


def fake_build(fault: Fault = Fault.NONE, problem: Problem | None = None, *, spill_bytes: int = 0) -> Build:
    kernel = Kernel(
        problem or Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=100, seqlen_k=100, head_dim=32),
        Simt(br=16, bc=16),
        90,
        f"// {fault}",
        fault,
        f"{fault}_kernel",
        Launch(threads=128, smem_bytes=4096, rows_per_block=16),
    )
    return Build(kernel, Path("/nonexistent"), registers=100, spill_bytes=spill_bytes, seconds=0.25)


def attend_f32(q, k, v, scale, causal, fault=Fault.NONE):
    """Attention in float32, with one of the classic mistakes on request. Shapes as in the reference."""
    group = q.shape[1] // k.shape[1]
    if fault is Fault.WRONG_KV_HEAD:
        k, v = (np.tile(x, (1, group, 1, 1)) for x in (k, v))
    else:
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    if fault is Fault.IGNORES_SCALE:
        scale = 1 / math.sqrt(q.shape[-1])
    # float64 dot products rounded once: as good as a kernel's, whatever the BLAS does.
    s = ((q.astype(np.float64) @ k.swapaxes(-1, -2).astype(np.float64)) * scale).astype(np.float32)
    if fault is Fault.HALF_PRECISION:
        s = s.astype(np.float16).astype(np.float32)
    n, m = s.shape[-2:]
    if causal:
        offset = 0 if fault is Fault.TOP_LEFT_MASK else m - n
        s[..., np.arange(m) > np.arange(n)[:, None] + offset] = -np.inf
    if fault is Fault.IGNORES_LAST_KEY:
        s, v = s[..., : m - 1], v[..., : m - 1, :]
    start = 0.0 if fault is Fault.ZERO_MAXIMUM else -np.inf
    top = s.max(axis=-1, keepdims=True, initial=start)
    shift = np.where(np.isneginf(top), 0.0, 0.0 if fault is Fault.NO_MAXIMUM else top).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        p = np.exp(s - shift)
        total = p.sum(axis=-1, keepdims=True)
        o = (p @ v) / (total if fault is Fault.NAN_ROWS else np.where(total > 0, total, 1))
        lse = (np.log(total) + shift)[..., 0]
    if fault is Fault.ONE_ELEMENT:
        o[-1, -1, -1, -1] += 1e-3
    if fault is Fault.BASE_2_LSE:
        lse = lse / np.float32(math.log(2))
    return o.astype(np.float32), lse.astype(np.float32)


class FakeRunner:
    """Counts its calls; does what the build's entry name says."""

    def __init__(self) -> None:
        self.alive = True
        self.cases: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def attend(self, build, q, k, v, *, scale, want_lse=False):
        self.cases.append((q.shape, k.shape))
        fault = Fault(build.kernel.entry)
        match fault:
            case Fault.HANG:
                time.sleep(3600)
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
        o, lse = attend_f32(q, k, v, scale, build.kernel.problem.causal, fault)
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
