"""What a benchmark computes attention of: tensors on torch's current card, and what masks read beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ...gen.scoring_values import typical_values
from ..cards.score_values import values_as_read

#: torch's name of a dtype.
TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Inputs:
    """q, k and v on torch's current card, shaped (batch, heads, seqlen, head_dim); in ``values``, by name, is
    what the problem's masks and changes of scores read, as a kernel reads it."""

    torch: Any
    problem: Problem
    q: Any
    k: Any
    v: Any
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, torch: Any, problem: Problem, distribution: str = "normal") -> Inputs:
        """Draws the inputs of a problem, standard ``normal`` or ``uniform`` in ±3, as float32, and rounds
        them to its type."""

        def random(heads: int, length: int, columns: int) -> Any:
            shape = (problem.batch, heads, length, columns)
            if distribution == "uniform":
                drawn = 6 * torch.rand(*shape, device="cuda") - 3
            else:
                drawn = torch.randn(*shape, device="cuda")
            return drawn if problem.dtype == "f32" else drawn.to(getattr(torch, TORCH_DTYPES[problem.dtype]))

        p = problem
        return cls(
            torch,
            problem,
            random(p.num_q_heads, p.seqlen_q, p.head_dim),
            random(p.num_kv_heads, p.seqlen_k, p.head_dim),
            random(p.num_kv_heads, p.seqlen_k, p.head_dim_v),
            values_as_read(p, typical_values(p)),
        )

    @property
    def grouped(self) -> bool:
        return self.problem.num_kv_heads != self.problem.num_q_heads

    def first(self, length: int) -> Inputs:
        """Returns the inputs with their first ``length`` queries and keys alone, for problems that have as
        many of both and no masks but the causal one."""
        parts = (x[:, :, :length].contiguous() for x in (self.q, self.k, self.v))
        return Inputs(self.torch, self.problem, *parts)

    @cached_property
    def arrays(self) -> Mapping[str, Any]:
        """The arrays among the values as tensors, by name, repeated axes without copies."""
        return {
            each.name: _tensor(self.torch, each.dtype, self.values[each.name])
            for each in self.problem.scores.buffers
        }


def _tensor(torch: Any, dtype: str, array: np.ndarray) -> Any:
    once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    # numpy has no bfloat16 of torch's; float32 holds all of its values.
    held = np.ascontiguousarray(once, np.float32 if dtype == "bf16" else None)
    tensor = torch.from_numpy(held).to("cuda")
    return (tensor.to(torch.bfloat16) if dtype == "bf16" else tensor).expand(array.shape)
