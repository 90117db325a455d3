"""The kernel families, by name."""

from __future__ import annotations

import difflib

from ..variant import Variant
from .ladder.family import Ladder
from .ladder.work import ladder_work
from .latent.family import Latent
from .latent.work import latent_work
from .mma.family import Mma
from .mma.work import mma_work
from .simt.family import Simt
from .simt.work import simt_work
from .wgmma.family import Wgmma
from .wgmma.work import wgmma_work

#: Imported so that every family's count of work is registered where a family is.
COUNTS_OF_WORK = (ladder_work, latent_work, mma_work, simt_work, wgmma_work)
FAMILIES: dict[str, type[Variant]] = {family.family: family for family in (Ladder, Latent, Mma, Simt, Wgmma)}
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


def searched_families() -> list[type[Variant]]:
    """Returns the families that a search looks at where none is named, the first one first."""
    families = [family for name, family in FAMILIES.items() if name not in TEACHING]
    return sorted(families, key=lambda family: family.family != FIRST_FAMILY)
