"""The memory that a kernel's launches leave things for each other in, which nobody needs after a call.

It is one piece, taken from whatever allocator the caller has and told as ``workspace`` among the arguments;
where each region of it begins follows from the sizes of a call, in the host's language as on the card.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..expression import Constant, Expression, divided_up

#: Floats that regions are rounded up to, so that each is aligned to 256 bytes.
ALIGNMENT = 64
#: The name of the argument.
WORKSPACE = "workspace"


@dataclass(frozen=True)
class Region:
    """A part of a workspace: ``floats``, how many 32-bit words it has in the sizes of a problem, and what it
    is for."""

    name: str
    floats: Expression
    meaning: str

    @property
    def whole(self) -> Expression:
        """The words that it takes up, to where the next one begins."""
        return divided_up(self.floats, Constant(ALIGNMENT)) * ALIGNMENT


@dataclass(frozen=True)
class Workspace:
    """The regions of a kernel's workspace, in their order."""

    regions: tuple[Region, ...]

    @property
    def floats(self) -> Expression:
        """The 32-bit words of all regions, in the sizes of a problem."""
        return _sum(self.regions)

    def start(self, name: str) -> Expression:
        """Returns the word at which the region called ``name`` begins."""
        names = [each.name for each in self.regions]
        return _sum(self.regions[: names.index(name)])

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes of which all that is made, by name."""
        return tuple(sorted(self.floats.names()))


def _sum(regions: tuple[Region, ...]) -> Expression:
    total: Expression = Constant(0)
    for each in regions:
        total = total + each.whole if each is not regions[0] else each.whole
    return total
