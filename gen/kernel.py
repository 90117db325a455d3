"""A rendered kernel: the source and what it takes to build and launch it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from .arguments import ArgumentStruct, struct_of
from .handover.plan import Plan
from .handover.workspace import Workspace
from .launch import DEPENDENT_ARCH, LISTS_ROLE, MAIN_ROLE, Launch
from .problem import Problem
from .scored_tiles.lists import TileLists
from .variant import Variant

_NO_VALUES: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Kernel:
    """One variant's CUDA C++ for one problem.

    ``entry`` is the ``extern "C"`` host launcher, which makes all ``launches`` in their order. It and the
    ``extern "C"`` ``__global__`` functions that they name take an ``AttentionArgs`` (see
    `flashgen.gen.arguments`), the functions also a struct of their launch's tensor maps, if it has any.
    ``arch`` is the compute capability times ten (90 for sm_90).
    """

    problem: Problem
    variant: Variant
    arch: int
    source: str
    entry: str
    launches: tuple[Launch, ...]
    workspace: Workspace | None = None

    @property
    def launch(self) -> Launch:
        """The launch of the function that makes the products."""
        return next(each for each in self.launches if each.role == MAIN_ROLE)

    @property
    def arguments(self) -> ArgumentStruct:
        """The struct that its launcher and functions take."""
        return struct_of(self.problem, has_workspace=self.workspace is not None)

    @property
    def symbol(self) -> str:
        """The name of the function that makes the products."""
        return self.symbol_of(self.launch)

    @property
    def oldest_arch(self) -> int | None:
        """The first compute capability, times ten, that has all instructions of it; None where any has."""
        of_variant = self.variant.oldest_arch(self.problem, self.arch)
        if not any(each.dependent for each in self.launches):
            return of_variant
        return max(of_variant or 0, DEPENDENT_ARCH)

    @property
    def is_deterministic(self) -> bool:
        """Whether every run makes the same bits: no blocks add to the same memory as they come along."""
        return self.variant.repeats_bits(self.launches)

    @property
    def has_tile_lists(self) -> bool:
        """Whether a launch of its own lists the tiles of keys that the others walk."""
        return any(each.role == LISTS_ROLE for each in self.launches)

    @property
    def tile_lists(self) -> TileLists | None:
        """Those lists; None where there are none."""
        return self.variant.lists_of(self.problem, self.launch) if self.has_tile_lists else None

    def num_list_ints(self, sizes: Mapping[str, int], values: Mapping[str, object] = _NO_VALUES) -> int:
        """Returns how many 32-bit integers its lists of tiles of keys take, on arrays of those sizes.
        ``values``: the strides, by argument, of what masks read; of those not named heads are not alike."""
        lists = self.tile_lists
        return lists.num_ints(sizes, values) if lists is not None else 0

    def num_plan_ints(self, sizes: Mapping[str, int]) -> int:
        """Returns how many 32-bit integers its plan takes, on packed sequences of those sizes by name."""
        plan = Plan.of_launches(self.launches)
        return plan.ints.value(sizes) if plan is not None else 0

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of its workspace, on arrays of those sizes by name."""
        return 4 * self.workspace.floats.value(sizes) if self.workspace else 0

    def symbol_of(self, launch: Launch) -> str:
        """Returns the name of the function that ``launch`` runs."""
        return f"{self.entry}_{launch.role}"

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
