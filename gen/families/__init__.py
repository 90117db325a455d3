"""The kernel families, by name."""

from __future__ import annotations

import difflib

from ..operation import BACKWARD, Operation
from ..variant import Variant
from .ladder.family import Ladder
from .ladder.work import ladder_work
from .latent.family import Latent
from .latent.work import latent_work
from .mma.family import Mma
from .mma.work import mma_work
from .mma_backward.family import MmaBackward
from .mma_backward.work import mma_backward_work
from .simt.family import Simt
from .simt.work import simt_work
from .simt_backward.family import SimtBackward
from .simt_backward.work import simt_backward_work
from .wgmma.family import Wgmma
from .wgmma.work import wgmma_work
from .wgmma_backward.family import WgmmaBackward
from .wgmma_backward.work import wgmma_backward_work

#: Imported so that every family's count of work is registered where a family is.
COUNTS_OF_WORK = (
    ladder_work,
    latent_work,
    mma_work,
    mma_backward_work,
    simt_work,
    simt_backward_work,
    wgmma_work,
    wgmma_backward_work,
)
FAMILIES: dict[str, type[Variant]] = {
    family.family: family
    for family in (Ladder, Latent, Mma, MmaBackward, Simt, SimtBackward, Wgmma, WgmmaBackward)
}
#: The family that comes first where several serve.
FIRST_FAMILY = "simt"
#: Families that teach, which no search looks at unless they are named.
TEACHING = frozenset({"ladder"})


def family_named(name: str) -> type[Variant]:
    """Returns the family called ``name``; raises ValueError with the names there are."""
    if name not in FAMILIES:
        close = difflib.get_close_matches(name, FAMILIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(FAMILIES)}"
        raise ValueError(f"unknown family {name!r}; {hint}")
    return FAMILIES[name]


def searched_families(operation: Operation) -> list[type[Variant]]:
    """Returns the families that a search for an operation looks at where none is named, the first one first:
    for gradients those that make some, for all others the others."""
    families = [
        family
        for name, family in FAMILIES.items()
        if name not in TEACHING and (BACKWARD in family.serves.operations) == (operation is BACKWARD)
    ]
    return sorted(families, key=lambda family: family.family != FIRST_FAMILY)
