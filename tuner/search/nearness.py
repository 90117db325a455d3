"""How near one problem is to another: what was tuned or tried for the one serves the other best.

A kernel serves problems of its own masks and changes of scores alone, whatever their numbers; to begin a
search with, those of others will do.
"""

from __future__ import annotations

from math import log2

from ...gen.problem import Problem
from ...gen.scoring.asked import MAX_REACH

#: Doublings of a length weigh this much, doublings of batch · heads half.
LENGTH_WEIGHT, HEADS_WEIGHT = 1.0, 0.5


def masks_differ(tuned: Problem, asked: Problem) -> bool:
    """Tells whether the kernel's mask makes another function of what is asked for: not of one row."""
    return asked.seqlen_q > 1 and tuned.causal != asked.causal


def scores_differ(tuned: Problem, asked: Problem) -> bool:
    """Tells whether kernels of the two have other masks or changes of scores, a causal mask apart."""
    return tuned.scoring.stem != asked.scoring.stem


def shape_distance(tuned: Problem, asked: Problem) -> float:
    """Returns the doublings between two shapes, weighted: of rows, of the keys that each sees and of heads; 0
    for the same."""
    rows = abs(log2(_rows(tuned) / _rows(asked)))
    keys = abs(log2(_reach(tuned) / _reach(asked)))
    heads = abs(log2(tuned.batch * tuned.num_q_heads / (asked.batch * asked.num_q_heads)))
    return LENGTH_WEIGHT * (rows + keys) + HEADS_WEIGHT * heads


def numbers_distance(tuned: Problem, asked: Problem) -> float:
    """Returns the doublings between the numbers of two problems' windows, chunks and the like, whatever their
    lengths; 0 where neither has any."""
    pairs = zip(_numbers(tuned), _numbers(asked), strict=True)
    return sum(abs(log2((a + 1) / (b + 1))) for a, b in pairs)


def _numbers(problem: Problem) -> list[int]:
    asked = problem.scoring
    sides = [MAX_REACH if side < 0 else side for side in asked.window or (-1, -1)]
    return [*sides, asked.always, asked.chunk, asked.prefix, asked.documents, asked.dilation]


def _rows(problem: Problem) -> float:
    """The query rows of a sequence: of packed ones the mean."""
    return max(1.0, problem.total_q / problem.batch)


def _reach(problem: Problem) -> float:
    """About how many keys a row may see: all there are, unless windows, chunks or documents are asked for."""
    asked, keys = problem.scoring, max(1.0, problem.total_k / problem.batch)
    reach = float(keys)
    if asked.window is not None:
        left, right = (keys if side < 0 else side for side in asked.window)
        reach = min(reach, left + (0 if problem.causal else right) + 1 + asked.always)
    if asked.chunk:
        reach = min(reach, asked.chunk)
    if asked.documents:
        reach = min(reach, keys / asked.documents)
    return max(1.0, reach / max(1, asked.dilation))
