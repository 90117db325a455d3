"""How near one problem is to another: what was tuned or tried for the one serves the other best."""

from __future__ import annotations

from math import log2

from ...gen.problem import Problem

#: Doublings of a length weigh this much, doublings of batch · heads half.
LENGTH_WEIGHT, HEADS_WEIGHT = 1.0, 0.5


def masks_differ(tuned: Problem, asked: Problem) -> bool:
    """Tells whether the kernel's mask makes another function of what is asked for: not of one row."""
    return asked.seqlen_q > 1 and tuned.causal != asked.causal


def shape_distance(tuned: Problem, asked: Problem) -> float:
    """Returns the doublings between two shapes, weighted; 0 for the same."""
    lengths = sum(abs(log2(getattr(tuned, name) / getattr(asked, name))) for name in ("seqlen_q", "seqlen_k"))
    heads = abs(log2(tuned.batch * tuned.num_q_heads / (asked.batch * asked.num_q_heads)))
    return LENGTH_WEIGHT * lengths + HEADS_WEIGHT * heads
