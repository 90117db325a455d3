"""The kernel families: every module beside this one that defines a `Variant` subclass."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from ..variant import Variant

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_module.name}", __name__)

FAMILIES: dict[str, type[Variant]] = {c.family: c for c in Variant.__subclasses__()}


def family_named(name: str) -> type[Variant]:
    """The family called ``name``; raises ValueError with the names there are."""
    if name not in FAMILIES:
        close = difflib.get_close_matches(name, FAMILIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(FAMILIES)}"
        raise ValueError(f"unknown family {name!r}; {hint}")
    return FAMILIES[name]
