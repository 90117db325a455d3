"""What stands beside a kernel of eight bits: the same problem in sixteen."""

from __future__ import annotations

from dataclasses import replace

from ...gen.problem import Problem


def in_16_bits(problem: Problem) -> Problem:
    """Returns the problem as others compute it beside flashgen: of eight bits in bfloat16, any other as it
    is."""
    return replace(problem, dtype="bf16", precision="auto") if problem.has_scales else problem
