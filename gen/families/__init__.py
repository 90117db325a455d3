"""The kernel families, by name."""

from __future__ import annotations

import difflib

from ..variant import Variant
from .ladder.family import Ladder
from .mma.family import Mma
from .simt.family import Simt
from .wgmma.family import Wgmma

FAMILIES: dict[str, type[Variant]] = {family.family: family for family in (Ladder, Mma, Simt, Wgmma)}


def family_named(name: str) -> type[Variant]:
    """The family called ``name``; raises ValueError with the names there are."""
    if name not in FAMILIES:
        close = difflib.get_close_matches(name, FAMILIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(FAMILIES)}"
        raise ValueError(f"unknown family {name!r}; {hint}")
    return FAMILIES[name]
