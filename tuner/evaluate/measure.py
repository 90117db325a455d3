"""How repeated timings become figures."""

from __future__ import annotations

import numpy as np

from ...gen.problem import Problem
from ..build.protocol import Build
from ..cards.device import Timing
from .outcome import Measurement


def median(times_us: tuple[float, ...]) -> float:
    return float(np.median(times_us))


def spread(times_us: tuple[float, ...]) -> float:
    """Returns the interquartile range over the median."""
    low, high = np.percentile(times_us, [25, 75])
    return float((high - low) / median(times_us))


def tflops(problem: Problem, time_us: float) -> float:
    return problem.flops / time_us * 1e-6


def summarize(
    timing: Timing, build: Build, problem: Problem, *, occupancy: float, error: float, predicted: bool
) -> Measurement:
    """Returns all figures of one kernel on one problem."""
    return Measurement(
        times_us=timing.times_us,
        median_us=median(timing.times_us),
        spread=spread(timing.times_us),
        tflops=tflops(problem, median(timing.times_us)),
        registers=build.registers,
        spill_bytes=build.spill_bytes,
        smem_bytes=build.kernel.launch.smem_bytes,
        occupancy=occupancy,
        error=error,
        predicted=predicted,
        busy=timing.busy,
    )
