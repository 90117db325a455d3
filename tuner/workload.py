"""Problems by the names that tables and plots give them, and those that are shown together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..gen.problem import Problem
from ..gen.scoring.asked import Scoring

#: A table of biases for each head by the distance of a key.
RELATIVE_BIAS = "score + table[h, q - k]"


@dataclass(frozen=True)
class Workload:
    """A problem by the name that tables and plots give it."""

    name: str
    problem: Problem


@dataclass(frozen=True)
class Suite:
    """Workloads that are shown together; their names are unique over all suites."""

    name: str
    title: str
    workloads: tuple[Workload, ...]
    counts_keys: bool = False
    """Whether speed is told in bytes of keys and values, each read once, instead of operations."""

    @property
    def problems(self) -> dict[str, Problem]:
        """The problems by their workloads' names."""
        return {workload.name: workload.problem for workload in self.workloads}


def workload(
    name: str,
    dtype: str,
    batch: int,
    heads: int | tuple[int, int],
    seqlen: int | tuple[int, int],
    head_dim: int | tuple[int, int],
    causal: bool = False,
    *,
    varlen: str = "",
    page_size: int = 0,
    latent: bool = False,
    backward: bool = False,
    precision: str = "auto",
    **asked: Any,
) -> Workload:
    """Returns a workload. ``heads``: of queries, and of keys where fewer; ``seqlen``: of queries, and of keys
    where another; ``head_dim``: of keys, and of values where another; ``asked``: fields of `Scoring`."""
    num_q_heads, num_kv_heads = (heads, heads) if isinstance(heads, int) else heads
    seqlen_q, seqlen_k = (seqlen, seqlen) if isinstance(seqlen, int) else seqlen
    of_keys, of_values = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
    problem = Problem(
        dtype=dtype,
        precision=precision,
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=of_keys,
        head_dim_v=of_values,
        causal=causal,
        scoring=Scoring(**asked),
        varlen=varlen,
        page_size=page_size,
        latent=latent,
        backward=backward,
    )
    return Workload(name, problem)
