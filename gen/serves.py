"""What a family declares that it computes: operations, layouts, types, precisions, architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .layout import DENSE, PAGED, Layout
from .limits import DeviceLimits
from .operation import FORWARD, Operation
from .problem import Problem


@dataclass(frozen=True, kw_only=True)
class Serves:
    """Which problems a family computes on which cards, whatever its parameters.

    ``precisions`` are the classes served of each dtype, and ``float32`` says how float32 is multiplied, for
    messages. ``archs`` are the only architectures with the instructions, and ``units`` what they have that
    others lack; none: any card will do, as far as the family's rules allow. ``values_as_wide_as_keys``
    where v must have as many columns as k, unless it is the first of them. ``key_dtypes`` are other types
    that keys and values may have beside queries of each dtype. ``plain_scores`` where no mask but the
    causal one may be asked for, and no change of scores.
    """

    precisions: Mapping[str, tuple[str, ...]]
    float32: str
    operations: tuple[Operation, ...] = (FORWARD,)
    layouts: tuple[Layout, ...] = (DENSE,)
    archs: tuple[int, ...] = ()
    units: str = ""
    values_as_wide_as_keys: bool = False
    key_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    plain_scores: bool = False

    def why_not(self, family: str, problem: Problem, limits: DeviceLimits) -> str | None:
        """Says why the family called ``family`` cannot compute a problem on a card; None where it can."""
        if problem.operation not in self.operations:
            names = ", ".join(each.name for each in self.operations)
            return f"family {family} computes {names}, this problem is {problem.operation.name}"
        if problem.layout not in self.layouts:
            names = ", ".join(each.name for each in self.layouts)
            return f"family {family} takes {names} arrays, this problem has {problem.layout.name} ones"
        if problem.layout is PAGED and problem.scores.needs_lists:
            return (
                "a mask by expression lists tiles of sequences of one length; beside pages they need "
                "packed queries; give varlen"
            )
        if self.archs and limits.arch not in self.archs:
            only = " and ".join(f"sm_{arch}" for arch in self.archs)
            return f"{self.units} on {only} alone, this is {limits.sm}"
        if problem.dtype not in self.precisions:
            *others, last = self.precisions
            served = f"{', '.join(others)} and {last}" if others else last
            return f"family {family} computes {served}, this problem is {problem.dtype}"
        if problem.precision not in self.precisions[problem.dtype]:
            return f"family {family} {self.float32}, precision {problem.precision} is asked for"
        if problem.kv_dtype and problem.kv_dtype not in self.key_dtypes.get(problem.dtype, ()):
            return (
                f"family {family} does not take keys of {problem.kv_dtype} beside queries of {problem.dtype}"
            )
        if self.values_as_wide_as_keys and problem.head_dim_v != problem.head_dim and not problem.latent:
            dims = f"{problem.head_dim_v} beside {problem.head_dim}"
            return f"family {family} needs values as wide as keys, not {dims}"
        if self.plain_scores and not problem.scoring.is_plain:
            asked = ", ".join(problem.scoring.to_dict())
            return f"family {family} knows the causal mask alone, not {asked}; family simt serves all of them"
        return None


#: What families serve that compute float32 by multiply-adds.
IEEE_FLOAT32 = Serves(
    precisions={"f32": ("auto", "ieee")},
    float32="computes by IEEE multiply-adds",
)
