"""What a benchmark computes attention of: tensors on torch's current card, and what masks read beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...gen.operation import Array
from ...gen.problem import Problem
from ...gen.scoring.values import typical_values
from ..cards.score_values import values_as_read
from ..cards.sequences import typical_indices
from ..front.quantize import Quantized, quantize
from .passed import forward_pass
from .sixteen_bits import in_16_bits

#: torch's name of the dtype that values are drawn in.
TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Inputs:
    """q, k and v on torch's current card as the problem's layout has them: (batch, heads, seqlen, head_dim);
    of packed sequences (total, heads, head_dim); keys and values in caches (pages, page_size, heads,
    head_dim). Of problems of eight bits they are bfloat16, as they were before they were rounded to these. In
    ``values``, by name, is what the problem's masks and changes of scores read, as a kernel reads it, and in
    ``indices`` what tells of sequences and pages, of 32-bit integers."""

    torch: Any
    problem: Problem
    q: Any
    k: Any
    v: Any
    values: Mapping[str, Any] = field(default_factory=dict)
    indices: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, torch: Any, problem: Problem, distribution: str = "normal") -> Inputs:
        """Draws the inputs of a problem, standard ``normal`` or ``uniform`` in ±3, as float32, and rounds
        them to its type, of eight bits to bfloat16."""
        dtype = in_16_bits(problem).dtype

        def random(shape: tuple[int, ...]) -> Any:
            if distribution == "uniform":
                drawn = 6 * torch.rand(*shape, device="cuda") - 3
            else:
                drawn = torch.randn(*shape, device="cuda")
            return drawn if dtype == "f32" else drawn.to(getattr(torch, TORCH_DTYPES[dtype]))

        arrays = {
            each.name: random(_shape(each, problem))
            for each in problem.operation.strided
            if each.name in ("q", "k", "v")
        }
        q, k = arrays["q"], arrays["k"]
        # Latent values are the keys' first columns.
        v = k[..., : problem.head_dim_v] if problem.latent else arrays["v"]
        indices = typical_indices(problem)
        return cls(
            torch,
            problem,
            q,
            k,
            v,
            values_as_read(problem, typical_values(problem)),
            {name: torch.from_numpy(array).to("cuda") for name, array in indices.items()},
        )

    def output(self, value: float) -> Any:
        """Returns an array for outputs, full of a value."""
        shape = (*self.q.shape[:-1], self.problem.head_dim_v)
        return self.torch.full(shape, value, dtype=self.q.dtype, device="cuda")

    def queries_of(self, array: Any, batch: int, head: int) -> Any:
        """Returns the rows of one sequence and head, (rows, columns), of q or of what is computed from it."""
        if not self.problem.layout.is_packed:
            return array[batch, head]
        first = sum(self.problem.lengths.q[:batch])
        return array[first : first + self.problem.lengths.q[batch], head]

    def keys_of(self, array: Any, batch: int, head: int) -> Any:
        """Returns the rows of one sequence and head, (rows, columns), of k or v."""
        p, length = self.problem, self.problem.lengths.k[batch]
        if p.layout.is_paged:
            pages = self.indices["page_table"][batch, : -(-length // p.page_size)]
            return array[pages][:, :, head].reshape(-1, array.shape[3])[:length]
        if not p.layout.is_packed:
            return array[batch, head]
        first = sum(p.lengths.k[:batch])
        return array[first : first + length, head]

    @property
    def grouped(self) -> bool:
        return self.problem.num_kv_heads != self.problem.num_q_heads

    def first(self, length: int) -> Inputs:
        """Returns the inputs with their first ``length`` queries and keys alone, for problems that have as
        many of both and no masks but the causal one."""
        parts = (x[:, :, :length].contiguous() for x in (self.q, self.k, self.v))
        return Inputs(self.torch, self.problem, *parts)

    @cached_property
    def beside(self) -> Inputs:
        """What others than flashgen take: just these, or of eight bits the same arrays as a problem of
        sixteen."""
        # What a forward pass has left is drawn once.
        return replace(self, problem=in_16_bits(self.problem)) if self.problem.has_scales else self

    @cached_property
    def eight(self) -> Quantized:
        """q, k and v rounded to eight bits, and a scale of each."""
        return quantize(self.q, self.k, self.v)

    @cached_property
    def passed(self) -> Mapping[str, Any]:
        """What gradients are computed of beside q, k and v: ``o``, ``lse`` and ``dout``."""
        return forward_pass(self.torch, self.problem, (self.q, self.k, self.v), self.arrays)

    @cached_property
    def arrays(self) -> Mapping[str, Any]:
        """The arrays among the values as tensors, by name, repeated axes without copies."""
        return {
            each.name: _tensor(self.torch, each.dtype, self.values[each.name])
            for each in self.problem.scores.buffers
        }


def _shape(array: Array, problem: Problem) -> tuple[int, ...]:
    """An array's shape in memory: sequences one behind the other have no batches, and a page's rows stand
    before its heads."""
    batch, heads, rows, columns = array.stored_shape(problem)
    if problem.layout.in_pages(array.rows):
        return batch, rows, heads, columns
    return (rows, heads, columns) if problem.layout.is_packed else (batch, heads, rows, columns)


def _tensor(torch: Any, dtype: str, array: np.ndarray) -> Any:
    once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    # numpy has no bfloat16 of torch's; float32 holds all of its values.
    held = np.ascontiguousarray(once, np.float32 if dtype == "bf16" else None)
    tensor = torch.from_numpy(held).to("cuda")
    return (tensor.to(torch.bfloat16) if dtype == "bf16" else tensor).expand(array.shape)
