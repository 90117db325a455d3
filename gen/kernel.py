"""A rendered kernel: the source and what it takes to build and launch it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

from .problem import Problem
from .variant import Launch, Variant


@dataclass(frozen=True)
class Kernel:
    """One variant's CUDA C++ for one problem.

    ``entry`` is the ``extern "C"`` host launcher, ``symbol`` the ``extern "C"`` ``__global__`` function; both
    take an ``AttentionArgs`` (see ``abi.py``), the function also a struct of the launch's tensor maps, if it
    has any. ``arch`` is the compute capability times ten (90 for sm_90).
    """

    problem: Problem
    variant: Variant
    arch: int
    source: str
    entry: str
    symbol: str
    launch: Launch

    @property
    def sm(self) -> str:
        """What compilers call the architecture: ``sm_90``, or ``sm_90a``."""
        return f"sm_{self.arch}{self.variant.arch_suffix}"

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of the source's SHA-256."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    def with_mask(self, causal: bool) -> Kernel:
        """Returns the kernel under that mask, chosen as the compiler's -DFLASHGEN_CAUSAL would."""
        if causal == self.problem.causal:
            return self
        source = f"#define FLASHGEN_CAUSAL {int(causal)}\n{self.source}"
        return replace(self, problem=replace(self.problem, causal=causal), source=source)
