"""What a call reads beside the arrays of its operation, all of which a runner must place: by the names of the
kernels' arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gen.append import ROTATED
from ...gen.arguments import LISTS_MADE, PLAN, TILE_LISTS, WORKSPACE, Arguments, make_arguments
from ...gen.problem import Problem
from .appended import append_numbers, new_arrays
from .key_scales import key_scales, scale_strides
from .score_values import ScoreValues, gradient_arrays, gradient_strides, score_values
from .sequences import index_arrays, index_strides, sizes_of_call


@dataclass(frozen=True)
class Beside:
    """The arrays that a call reads beside those of its operation, and the ``sizes`` that it is told: what
    masks and changes of scores read, what tells of sequences, new rows for caches, and scales of keys."""

    problem: Problem
    sizes: Mapping[str, int]
    scoring: ScoreValues
    indices: Mapping[str, np.ndarray]
    new: Mapping[str, np.ndarray]
    scales: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]
    """Of the backward pass, arrays like those of which it makes gradients, by the names of these; they are
    no inputs."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All of them, but those without an element."""
        new = {name: array for name, array in self.new.items() if array.size}
        return {**self.scoring.arrays, **self.indices, **new, **self.scales}

    def arguments(
        self, addresses: Mapping[str, int], strides: Mapping[str, Sequence[int]], scale: float
    ) -> Arguments:
        """Returns a kernel's arguments, of the addresses of all arrays by name, these and the operation's,
        and of memory that its launches fill if it is there: a plan, lists of tiles, rotated queries, a
        workspace. ``strides`` are those of the operation's arrays, in elements."""

        def of(*names: str) -> dict[str, int]:
            return {name: addresses[name] for name in names if name in addresses}

        scores, made = self.problem.scores, self.gradients
        lists = {**of(TILE_LISTS), LISTS_MADE: 0} if TILE_LISTS in addresses else {}
        gradients = {**of(*made), **gradient_strides(scores, made)} if made else {}
        return make_arguments(
            self.problem,
            addresses,
            strides,
            scale=scale,
            sizes=self.sizes,
            scoring={
                **self.scoring.arguments(of(*self.scoring.arrays)),
                **lists,
                **gradients,
            },
            sequences={**of(*self.indices, PLAN), **index_strides(self.indices)},
            append={**append_numbers(self.problem, self.new), **of(*self.new, ROTATED)},
            key_scales={**of(*self.scales), **scale_strides(self.scales)},
            workspace=addresses.get(WORKSPACE),
        )


def read_beside(problem: Problem, q: np.ndarray, k: np.ndarray, values: Mapping[str, Any] | None) -> Beside:
    """Returns what a call on such queries and keys reads of ``values``. Raises ValueError for what is
    missing, or of another type or shape than kernels read."""
    sizes = sizes_of_call(problem, q, k, values)
    scoring = score_values(problem.scores, values, sizes)
    return Beside(
        problem,
        sizes,
        scoring,
        index_arrays(problem, values),
        new_arrays(problem, values),
        key_scales(problem, values, sizes["batch"], sizes["num_kv_heads"]),
        gradient_arrays(problem.scores, scoring, sizes) if problem.backward else {},
    )
