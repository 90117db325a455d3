"""How far a contender's output is from attention in float64, on some rows of two heads."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ..evaluate import reference
from ..evaluate.gradients import gradients
from .inputs import Inputs

SEED = 0
#: Query rows of the first and the last head that are compared with float64.
SAMPLED_ROWS = 256


class Sample:
    """Some rows of the first and the last head, and what float64 says of them."""

    def __init__(self, inputs: Inputs, problem: Problem) -> None:
        rng = np.random.default_rng(SEED)
        self._inputs = inputs
        #: By batch and head: both may be of one batch.
        self._rows: dict[tuple[int, int], np.ndarray] = {}
        self._expected: dict[tuple[int, int], np.ndarray] = {}
        some = [i for i, (rows, keys) in enumerate(problem.lengths.pairs) if rows and keys]
        for batch, head in dict.fromkeys(((some[0], 0), (some[-1], problem.num_q_heads - 1))):
            rows = np.sort(rng.permutation(problem.lengths.q[batch])[:SAMPLED_ROWS])
            q = _host(inputs.queries_of(inputs.q, batch, head))[None, None]
            k, v = (
                _host(inputs.keys_of(x, batch, head // problem.group))[None, None]
                for x in (inputs.k, inputs.v)
            )
            found = reference.attention(
                *(q, k, v),
                scale=problem.head_dim**-0.5,
                scores=problem.scores,
                values=inputs.values,
                first=(batch, head),
                rows=rows,
            )
            self._rows[batch, head], self._expected[batch, head] = rows, found.o[0, 0]

    def error(self, o: Any) -> float:
        """Returns the largest ‖o - ref‖ / ‖ref‖ of the two heads; NaN where one has it."""
        found = []
        for (batch, head), expected in self._expected.items():
            rows = _host(self._inputs.queries_of(o, batch, head))[self._rows[batch, head]]
            found.append(_relative_error(rows, expected))
        return next(filter(isnan, found), max(found))


class GradientSample:
    """Some rows of the first and the last head, and what float64 says of their gradients."""

    def __init__(self, inputs: Inputs) -> None:
        p, rng = inputs.problem, np.random.default_rng(SEED)
        self._rows = np.sort(rng.permutation(p.seqlen_q)[:SAMPLED_ROWS])
        self._expected: dict[tuple[int, int], np.ndarray] = {}
        for batch, head in dict.fromkeys(((0, 0), (p.batch - 1, p.num_q_heads - 1))):
            q = _host(inputs.q[batch, head])[None, None]
            k, v = (_host(x[batch, head // p.group])[None, None] for x in (inputs.k, inputs.v))
            # Rows that are given nothing take no time.
            given = np.zeros((*q.shape[:3], p.head_dim_v))
            given[0, 0, self._rows] = _host(inputs.passed["dout"][batch, head])[self._rows]
            found = gradients(
                *(q, k, v, given),
                scale=p.head_dim**-0.5,
                scores=p.scores,
                values=inputs.values,
                first=(batch, head),
            )
            self._expected[batch, head] = found["dq"].value[0, 0, self._rows]

    def error(self, found: Any) -> float:
        """Returns the largest ‖dq - ref‖ / ‖ref‖ of the two heads; NaN where one has it."""
        errors = []
        for (batch, head), expected in self._expected.items():
            errors.append(_relative_error(_host(found[0][batch, head])[self._rows], expected))
        return next(filter(isnan, errors), max(errors))


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """‖found - expected‖ / ‖expected‖; of rows that all see nothing, and so are zeros, ‖found‖."""
    return float(np.linalg.norm(found - expected) / (np.linalg.norm(expected) or 1.0))


def _host(tensor: Any) -> np.ndarray:
    """(seqlen, head_dim) in float64."""
    return tensor.double().cpu().numpy()
