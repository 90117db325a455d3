"""What a card's arithmetic can do at most of a problem, by its data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem

#: Products of parts that make one as accurate as float32.
PARTS_PRODUCTS = 3
#: The first cards whose tensor cores multiply f16, TF32 and eight bits, by compute capability times ten.
HAVE_F16, HAVE_TF32, HAVE_8_BITS = 75, 80, 89


@dataclass(frozen=True)
class Peak:
    """The most TFLOP/s that a card can do of a problem at the clock of its data sheet, and by which of its
    units."""

    tflops: float
    by: str
    clock_mhz: int

    def share(self, tflops: float) -> float:
        return tflops / self.tflops


def peak_of(problem: Problem, limits: DeviceLimits) -> Peak | None:
    """Returns the peak of the fastest arithmetic that is accurate enough for the problem, whichever a kernel
    uses; None where the card has none that is known."""
    tensor, clock_mhz = limits.tensor_tflops if limits.arch >= HAVE_F16 else 0.0, limits.tensor_clock_mhz
    if problem.dtype == "e4m3":
        has_them = limits.arch >= HAVE_8_BITS
        return Peak(2 * tensor, "tensor cores, 8 bits", clock_mhz) if has_them else None
    if problem.dtype != "f32":
        return Peak(tensor, "tensor cores, 16 bits", clock_mhz) if tensor else None
    by_tf32 = tensor / 2 if limits.arch >= HAVE_TF32 else 0.0
    known = {
        "ieee": Peak(limits.fp32_tflops, "float32 multiply-adds", limits.clock_mhz),
        "3xf16": Peak(tensor / PARTS_PRODUCTS, "tensor cores, three products of f16 for one", clock_mhz),
        "3xtf32": Peak(by_tf32 / PARTS_PRODUCTS, "tensor cores, three products of TF32 for one", clock_mhz),
        "tf32": Peak(by_tf32, "tensor cores, TF32", clock_mhz),
    }
    if problem.precision != "auto":
        peak = known[problem.precision]
        return peak if peak.tflops else None
    del known["tf32"]
    return max(known.values(), key=lambda peak: peak.tflops)
