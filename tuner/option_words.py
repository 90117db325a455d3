"""The words of options that name families, their parameters and other things, as what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..gen.families import family_named
from ..gen.variant import Value, Variant
from .errors import UsageError, checked, suggestion

T = TypeVar("T")


def word(value: Value) -> str:
    """Writes a parameter's value as ``--set`` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_families(names: Sequence[str]) -> tuple[type[Variant], ...]:
    """Returns the families called ``names``, each once, of which one may be a list. Raises UsageError."""
    each = [name.strip() for text in names for name in text.split(",")]
    return tuple(dict.fromkeys(checked(lambda name=name: family_named(name)) for name in each))


def one_family(families: Sequence[type[Variant]]) -> type[Variant]:
    """Returns the only one of the families that ``--set`` may mean. Raises UsageError where there are
    several."""
    if len(families) > 1:
        names = " or ".join(f"--family {family.family}" for family in families)
        raise UsageError(f"--set holds parameters of one family; name just one, {names}")
    return families[0]


def parse_settings(family: type[Variant], settings: Sequence[str]) -> dict[str, Value]:
    """Returns the typed values of ``name=value`` texts. Raises UsageError for a name or value that is
    none."""
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip() or not text.strip():
            raise UsageError(f"--set {setting!r} is not of the form name=value, as in --set bc=64")
        texts[name.strip()] = text.strip()
    return checked(lambda: family.parse(texts))


def parse_names(text: str | None, known: Sequence[str], what: str) -> list[str]:
    """Returns the comma-separated names in ``text`` in the order of ``known``; all of them for None.

    Raises:
        UsageError: a name is unknown.
    """
    if text is None:
        return list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}; {suggestion(name, known)}")
    if not names:
        raise UsageError(f"no {what} was named; choose from {', '.join(known)}")
    return [name for name in known if name in names]
