"""What the cost model says at least of a whole family, none of whose variants has to be looked at for it."""

from __future__ import annotations

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from .block_model import COEFFICIENTS


def least_us(family: type[Variant], problem: Problem, limits: DeviceLimits) -> float:
    """Returns what no variant of a family is predicted to fall below: where CUDA cores multiply, the time of
    the multiply-adds; 0 where tensor cores do."""
    if problem.dtype != "f32" or family().float32_products(problem):
        return 0.0
    return 1e-6 * problem.flops / (limits.fp32_tflops * COEFFICIENTS.ffma_efficiency)
