"""How far a contender's output is from attention in float64, on some rows of two heads."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ..evaluate import reference
from .inputs import Inputs

SEED = 0
#: Query rows of the first and the last head that are compared with float64.
SAMPLED_ROWS = 256


class Sample:
    """Some rows of the first and the last head, and what float64 says of them."""

    def __init__(self, inputs: Inputs, problem: Problem) -> None:
        rng = np.random.default_rng(SEED)
        self._inputs = inputs
        self._rows: dict[int, np.ndarray] = {}
        self._expected: dict[tuple[int, int], np.ndarray] = {}
        some = [i for i, (rows, keys) in enumerate(problem.lengths.pairs) if rows and keys]
        for batch, head in ((some[0], 0), (some[-1], problem.num_q_heads - 1)):
            self._rows[batch] = np.sort(rng.permutation(problem.lengths.q[batch])[:SAMPLED_ROWS])
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
                rows=self._rows[batch],
            )
            self._expected[batch, head] = found.o[0, 0]

    def error(self, o: Any) -> float:
        """Returns the largest ‖o - ref‖ / ‖ref‖ of the two heads; NaN where one has it."""
        found = []
        for (batch, head), expected in self._expected.items():
            rows = _host(self._inputs.queries_of(o, batch, head))[self._rows[batch]]
            difference = rows - expected
            found.append(float(np.linalg.norm(difference) / np.linalg.norm(expected)))
        return next(filter(isnan, found), max(found))


def _host(tensor: Any) -> np.ndarray:
    """(seqlen, head_dim) in float64."""
    return tensor.double().cpu().numpy()
